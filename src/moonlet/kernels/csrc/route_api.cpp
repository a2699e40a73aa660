// The C interface of the router: argument checks, choice of the level, threads, and the selection.
//
// Compiled with baseline flags only. Selection is integer-like work on a few hundred numbers a row.
#include "route.h"

#include <math.h>
#include <stdint.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// rows and experts of one piece of the product: x rows of a piece stay in the second cache level
constexpr int64_t kPieceRows = 32;
constexpr int64_t kPieceExperts = 16;
// multiplications of one grab, at least: about 10 us of work
constexpr int64_t kMinWork = 1 << 16;
// rows of one grab of the selection, about 1 us each
constexpr int64_t kSelectRows = 16;

struct Selection {
  int64_t num_experts, top_k;
  bool renormalizes;
  float scale;
};

// Descending, and NaN before any number, as torch sorts.
bool precedes(float a, float b) { return a > b || (a != a && b == b); }

void select(const float* scores, const float* bias, int64_t* ids, float* weights, float* cut,
            const Selection& s) {
  float best[kMaxTopK + 1];
  int64_t best_ids[kMaxTopK + 1];
  // the first one left out is wanted too
  const int64_t keep = s.top_k < s.num_experts ? s.top_k + 1 : s.top_k;
  int64_t held = 0;
  for (int64_t e = 0; e < s.num_experts; ++e) {
    const float biased = scores[e] + bias[e];
    // an equal one that came earlier stays in front: ties go to the lowest expert
    if (held == keep && !precedes(biased, best[keep - 1])) continue;
    int64_t at = held < keep ? held++ : keep - 1;
    for (; at > 0 && precedes(biased, best[at - 1]); --at) {
      best[at] = best[at - 1];
      best_ids[at] = best_ids[at - 1];
    }
    best[at] = biased;
    best_ids[at] = e;
  }
  *cut = keep > s.top_k ? best[s.top_k] : -INFINITY;
  float sum = 0.0f;
  for (int64_t a = 0; a < s.top_k; ++a) {
    ids[a] = best_ids[a];
    weights[a] = scores[best_ids[a]];
    sum += weights[a];
  }
  if (s.renormalizes && s.top_k > 1) {
    for (int64_t a = 0; a < s.top_k; ++a) weights[a] /= sum + 1e-20f;
  }
  for (int64_t a = 0; a < s.top_k; ++a) weights[a] *= s.scale;
}

template <typename Scores>
void score_all(const RouteShape& shape, int32_t num_threads, const Scores& scores) {
  const int64_t columns = (shape.num_experts + kPieceExperts - 1) / kPieceExperts;
  const int64_t bands = (shape.num_rows + kPieceRows - 1) / kPieceRows;
  const int64_t rows = shape.num_rows < kPieceRows ? shape.num_rows : kPieceRows;
  const int64_t grain = kMinWork / (rows * kPieceExperts * shape.size) + 1;
  parallel(bands * columns, grain, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      RoutePart part;
      part.first_row = p / columns * kPieceRows;
      part.last_row = part.first_row + kPieceRows;
      if (part.last_row > shape.num_rows) part.last_row = shape.num_rows;
      part.first_expert = p % columns * kPieceExperts;
      part.last_expert = part.first_expert + kPieceExperts;
      if (part.last_expert > shape.num_experts) part.last_expert = shape.num_experts;
      scores(part);
    }
  });
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_route_topk(const float* x, const void* weight, int32_t is_bf16, const float* bias,
                           float* scores, int64_t* ids, float* weights, float* cut,
                           int64_t num_rows, int64_t size, int64_t num_experts, int64_t top_k,
                           int32_t renormalizes, float scale, int32_t isa_level,
                           int32_t num_threads) {
  const moonlet::RouteTable* table = MOONLET_PICK(route_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_rows < 0 || size < 1 || num_experts < 1 || num_experts > moonlet::kMaxExperts ||
      top_k < 1 || top_k > moonlet::kMaxTopK || top_k > num_experts || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0) return MOONLET_OK;
  if (!x || !weight || !bias || !scores || !ids || !weights || !cut) return MOONLET_BAD_ARGUMENT;
  const moonlet::RouteShape shape = {num_rows, size, num_experts};
  moonlet::score_all(shape, num_threads, [&](const moonlet::RoutePart& part) {
    if (is_bf16) {
      table->scores_bf16(x, static_cast<const uint16_t*>(weight), scores, shape, part);
    } else {
      table->scores_f32(x, static_cast<const float*>(weight), scores, shape, part);
    }
  });
  const moonlet::Selection selection = {num_experts, top_k, renormalizes != 0, scale};
  moonlet::parallel(num_rows, moonlet::kSelectRows, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      moonlet::select(scores + t * num_experts, bias, ids + t * top_k, weights + t * top_k,
                      cut + t, selection);
    }
  });
  return MOONLET_OK;
}

// Router scores: sigmoid(x W^T) in float32, the weight read as it is stored.
//
// Every score has its own sixteen lanes of sums over the hidden size, in order: tiles change how
// often an operand is read, never a result. A row therefore routes alike alone and in a batch.
#include "route.h"

#include "lanes.h"
#include "sums.h"
#include "tails.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// rows x experts whose sums fit the registers of the level; one row takes more experts
#if defined(MOONLET_ISA_avx512) || defined(MOONLET_ISA_vnni)
constexpr int kRows = 4, kExperts = 4, kExpertsOfOne = 8;
#elif defined(MOONLET_ISA_avx2)
constexpr int kRows = 2, kExperts = 2, kExpertsOfOne = 4;
#else
constexpr int kRows = 1, kExperts = 2, kExpertsOfOne = 2;
#endif

// The logits of R rows and E experts.
template <int R, int E, typename Weight>
MOONLET_INLINE void tile(const float* x, const Weight* weight, float* logits,
                         const RouteShape& s) {
  const float* rows[R];
  const Weight* experts[E];
  for (int r = 0; r < R; ++r) rows[r] = x + r * s.size;
  for (int e = 0; e < E; ++e) experts[e] = weight + e * s.size;
  float sums[R][E];
  dot_products<R, E>(rows, experts, s.size, sums, nullptr);
  for (int r = 0; r < R; ++r) {
    for (int e = 0; e < E; ++e) logits[r * s.num_experts + e] = sums[r][e];
  }
}

template <int R, int E, typename Weight>
MOONLET_INLINE void rows_by_tiles(const float* x, const Weight* weight, float* logits,
                                  int64_t num_experts, const RouteShape& s) {
  int64_t e = 0;
  for (; e + E <= num_experts; e += E) tile<R, E>(x, weight + e * s.size, logits + e, s);
  for (; e < num_experts; ++e) tile<R, 1>(x, weight + e * s.size, logits + e, s);
}

template <typename Weight>
MOONLET_INLINE void scores(const float* x, const Weight* weight, float* out, const RouteShape& s,
                           const RoutePart& part) {
  const int64_t count = part.last_expert - part.first_expert;
  const Weight* w = weight + part.first_expert * s.size;
  float* o = out + part.first_row * s.num_experts + part.first_expert;
  const float* v = x + part.first_row * s.size;
  int64_t left = part.last_row - part.first_row;
  for (; left >= kRows; left -= kRows) {
    rows_by_tiles<kRows, kExperts>(v, w, o, count, s);
    v += kRows * s.size;
    o += kRows * s.num_experts;
  }
  for (; left > 0; --left) {
    rows_by_tiles<1, kExpertsOfOne>(v, w, o, count, s);
    v += s.size;
    o += s.num_experts;
  }
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    float* p = out + row * s.num_experts;
    for (int64_t e = part.first_expert; e < part.last_expert; e += kLanes) {
      const int64_t n = part.last_expert - e < kLanes ? part.last_expert - e : kLanes;
      store_first(p + e, logistic(load_first(p + e, n, Lanes{})), n);
    }
  }
}

void scores_f32(const float* x, const float* weight, float* out, const RouteShape& shape,
                const RoutePart& part) {
  scores(x, weight, out, shape, part);
}

void scores_bf16(const float* x, const uint16_t* weight, float* out, const RouteShape& shape,
                 const RoutePart& part) {
  scores(x, weight, out, shape, part);
}

}  // namespace

extern const RouteTable route_table;
const RouteTable route_table = {scores_f32, scores_bf16};

}  // namespace MOONLET_ISA
}  // namespace moonlet

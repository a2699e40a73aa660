// The C interface of AttnRes for inference: argument checks, choice of the level, threads.
//
// Compiled with baseline flags only.
#include <stdint.h>

#include "attn_res.h"
#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// multiplications of one piece, at least: about 10 us of work, more than waking a thread costs
constexpr int64_t kMinWork = 1 << 16;

int64_t grain_of(int64_t work) { return work < kMinWork ? kMinWork / work + 1 : 1; }

bool are_bad_sizes(int64_t num_sources, int64_t num_rows, int64_t size, int32_t num_threads) {
  return num_sources < 1 || num_sources > kMaxDepthSources || num_rows < 0 || size < 1 ||
         num_threads < 1;
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_attn_res_mix(const float* const* sources, int64_t num_sources, const float* weight,
                             float* out, int64_t num_rows, int64_t size, float eps,
                             int32_t isa_level, int32_t num_threads) {
  const moonlet::AttnResTable* table = MOONLET_PICK(attn_res_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::are_bad_sizes(num_sources, num_rows, size, num_threads)) return MOONLET_BAD_ARGUMENT;
  if (num_rows == 0) return MOONLET_OK;
  if (!sources || !weight || !out) return MOONLET_BAD_ARGUMENT;
  const int64_t grain = moonlet::grain_of(3 * num_sources * size);
  moonlet::parallel(num_rows, grain, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      table->mix(sources, num_sources, t * size, weight, out + t * size, size, eps);
    }
  });
  return MOONLET_OK;
}

int32_t moonlet_attn_res_fold(const float* const* blocks, int64_t num_blocks, const float* weight,
                              float* m, float* l, float* acc, int64_t num_sublayers,
                              int64_t num_rows, int64_t size, float eps, int32_t isa_level,
                              int32_t num_threads) {
  const moonlet::AttnResTable* table = MOONLET_PICK(attn_res_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::are_bad_sizes(num_blocks, num_rows, size, num_threads) || num_sublayers < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0) return MOONLET_OK;
  if (!blocks || !weight || !m || !l || !acc) return MOONLET_BAD_ARGUMENT;
  const moonlet::FoldShape shape = {num_blocks, num_rows, size, num_sublayers, eps};
  constexpr int64_t kTile = moonlet::kFoldTile;
  const int64_t tiles = (num_sublayers + kTile - 1) / kTile;
  const int64_t grain = moonlet::grain_of(2 * kTile * num_blocks * size);
  moonlet::parallel(num_rows * tiles, grain, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t begin = p % tiles * kTile;
      const int64_t end = begin + kTile < num_sublayers ? begin + kTile : num_sublayers;
      table->fold(blocks, weight, m, l, acc, p / tiles, begin, end, shape);
    }
  });
  return MOONLET_OK;
}

int32_t moonlet_attn_res_join(const float* m, const float* l, const float* acc, const float* prefix,
                              const float* weight, float* out, int64_t num_rows, int64_t size,
                              float eps, int32_t isa_level, int32_t num_threads) {
  const moonlet::AttnResTable* table = MOONLET_PICK(attn_res_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::are_bad_sizes(1, num_rows, size, num_threads)) return MOONLET_BAD_ARGUMENT;
  if (num_rows == 0) return MOONLET_OK;
  if (!m || !l || !acc || !prefix || !weight || !out) return MOONLET_BAD_ARGUMENT;
  const int64_t grain = moonlet::grain_of(4 * size);
  moonlet::parallel(num_rows, grain, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      table->join(m[t], l[t], acc + t * size, prefix + t * size, weight, out + t * size, size, eps);
    }
  });
  return MOONLET_OK;
}

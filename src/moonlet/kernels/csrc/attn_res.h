// What one instruction-set level offers for the AttnRes mix of inference, whole and in two phases.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

constexpr int64_t kMaxDepthSources = 64;

// Finished blocks [num_rows, size] and the weights [num_sublayers, size] of those that share them.
struct FoldShape {
  int64_t num_blocks, num_rows, size, num_sublayers;
  float eps;
};

struct AttnResTable {
  // One row: source n begins at sources[n] + offset.
  void (*mix)(const float* const* sources, int64_t num_sources, int64_t offset, const float* weight,
              float* out, int64_t size, float eps);
  // Row `row` of sublayers [first, last); at most kFoldTile of them are fastest.
  void (*fold)(const float* const* blocks, const float* weight, float* m, float* l, float* acc,
               int64_t row, int64_t first, int64_t last, const FoldShape& shape);
  void (*join)(float m, float l, const float* acc, const float* prefix, const float* weight,
               float* out, int64_t size, float eps);
};

// Sublayers that are folded together: each read of a block then serves all of them.
constexpr int64_t kFoldTile = 4;

MOONLET_TABLE(AttnResTable, attn_res_table)

}  // namespace moonlet

// Steps that both forms of Gated MLA share: rows of pages and of kv_b, and the running softmax.
//
// Include inside a file that is compiled once per level.
#pragma once

#include "mla.h"
#include "tiles.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// Queries in lanes: [groups][depth][kLanes], scaled, zero lanes beyond `count`.
struct Queries {
  const float* data;
  int64_t depth, count;
};

// Softmax of each query so far: largest score, sum of weights, weighted values [count][stride].
struct Running {
  float* max;
  float* sum;
  float* out;
  int64_t stride, value_groups;
};

struct ContextBlock {
  const float* keys;
  const float* values;
  int64_t stride, rows;
};

MOONLET_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

MOONLET_INLINE const float* row_of(const MlaContext& context, int64_t n) {
  const int64_t page = context.pages[n / context.page_size];
  return context.rows + (page * context.page_size + n % context.page_size) * context.row_size;
}

struct Rows {
  const float* data;
  int64_t stride;
};

// Context rows [first, first + count), in place where they lie side by side, else copied to
// `copies` with the stride `padded`. Columns beyond a copied row stay as they are.
Rows rows_of(const MlaContext& context, int64_t first, int64_t count, bool may_stay, float* copies,
             int64_t padded) {
  const float* start = row_of(context, first);
  const int64_t size = context.row_size;
  int64_t n = context.page_size - first % context.page_size;  // the first row of another page
  while (may_stay && n < count && row_of(context, first + n) == start + n * size) {
    n += context.page_size;
  }
  if (may_stay && n >= count) return {start, size};
  for (int64_t i = 0; i < count; ++i) {
    memcpy(copies + i * padded, row_of(context, first + i),
           static_cast<size_t>(size) * sizeof(float));
  }
  return {copies, padded};
}

// Elements [first, first + count) of kv_b in float32.
void widen(const MlaWeights& weights, int64_t first, int64_t count, float* out) {
  if (!weights.is_bfloat16) {
    const float* in = static_cast<const float*>(weights.data) + first;
    memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  typedef uint32_t __attribute__((may_alias)) Bits;
  const uint16_t* in = static_cast<const uint16_t*>(weights.data) + first;
  Bits* bits = reinterpret_cast<Bits*>(out);
  for (int64_t i = 0; i < count; ++i) bits[i] = static_cast<uint32_t>(in[i]) << 16;
}

// Turns the scores of one group of queries into weights; `limit` is the last row each lane sees.
template <bool Hides>
MOONLET_INLINE void soften(float* scores, int64_t rows, IntLanes limit, bool is_first, float* max,
                           float* sum, float* keep) {
  const Lanes lowest = fill(-__builtin_inff());
  const Lanes before = is_first ? lowest : load(max);
  Lanes top = before;
  for (int64_t n = 0; n < rows; ++n) {
    Lanes s = load(scores + n * kMlaQueries);
    if (Hides) s = limit >= static_cast<int32_t>(n) ? s : lowest;
    top = larger(s, top);
  }
  Lanes add = {};
  for (int64_t n = 0; n < rows; ++n) {
    Lanes weight = exponential(load(scores + n * kMlaQueries) - top);
    if (Hides) weight = limit >= static_cast<int32_t>(n) ? weight : Lanes{};
    store(scores + n * kMlaQueries, weight);
    add += weight;
  }
  const Lanes kept = is_first ? Lanes{} : exponential(before - top);
  store(keep, kept);
  store(max, top);
  store(sum, is_first ? add : kept * load(sum) + add);
}

// Lets queries see a block of context rows; query j sees rows 0 .. limit + j of it, and each has
// seen a row before or sees one now. At most kMlaQueries queries and kMlaBlock rows.
void attend_block(const Queries& q, const ContextBlock& block, int64_t limit, bool is_first,
                  const Running& running, float* scores, float* keep, Ahead* ahead) {
  const int64_t groups = (q.count + kLanes - 1) / kLanes;
  deep_product(scores, kMlaQueries, {block.keys, block.stride, 1},
               {q.data, kLanes, q.depth * kLanes}, block.rows, q.depth, groups, ahead);
  IntLanes lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const bool hides = limit < block.rows - 1;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t j = g * kLanes;
    if (hides) {
      soften<true>(scores + j, block.rows, lane + static_cast<int32_t>(limit + j), is_first,
                   running.max + j, running.sum + j, keep + j);
    } else {
      soften<false>(scores + j, block.rows, lane, is_first, running.max + j, running.sum + j,
                    keep + j);
    }
  }
  const Left weights = {scores, 1, kMlaQueries};
  const Right values = {block.values, block.stride, kLanes};
  if (is_first) {
    product<Old::kDropped>(running.out, running.stride, weights, values, q.count, block.rows,
                           running.value_groups, nullptr, ahead);
  } else {
    product<Old::kScaled>(running.out, running.stride, weights, values, q.count, block.rows,
                          running.value_groups, keep, ahead);
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

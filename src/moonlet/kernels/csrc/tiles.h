// Products of matrices in cache, over vectors of the level's own width.
//
// The left operand is read one element at a time, the right one in vectors; a tile of sums stays in
// registers. Every sum runs over the depth in order, so a result depends neither on the tile it
// fell into nor on its neighbours. Include inside a file that is compiled once per level.
#pragma once

#include "transpose.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// Element (i, k) at data[i * row + k * column].
struct Left {
  const float* data;
  int64_t row, column;
};

// Vector (k, g) at data[k * row + g * group]; one vector per k and group of kLanes columns.
struct Right {
  const float* data;
  int64_t row, group;
};

// Rows that the caller reads next, brought into the second cache, `lines` lines per kAheadSteps
// steps of a product: the memory's latency hides behind arithmetic (decode of 96 heads over 256k
// rows: 132 against 118 GFLOP/s), and the loads of the product itself find room between.
constexpr int64_t kAheadSteps = 8;

struct Ahead {
  const float* const* rows;
  int64_t bytes, lines, offset, next, count;
};

MOONLET_INLINE void bring(Ahead* ahead) {
  if (!ahead) return;
  for (int64_t i = 0; i < ahead->lines && ahead->next < ahead->count; ++i) {
    const char* row = reinterpret_cast<const char*>(ahead->rows[ahead->next]);
    __builtin_prefetch(row + ahead->offset, 0, 2);
    ahead->offset += 64;
    if (ahead->offset >= ahead->bytes) {
      ahead->offset = 0;
      ++ahead->next;
    }
  }
}

// What becomes of the old value of the output.
enum class Old { kDropped, kAdded, kScaled };

// tiles of this height fill the registers with sums: 24 of 32 with AVX-512, else 12 of 16
constexpr int kTileRows = kLanes == 16 ? 8 : 4;
constexpr int kTileGroups = 3;

template <int R, int P, Old kOld>
MOONLET_INLINE void tile(float* out, int64_t ldo, Left left, Right right, int64_t depth,
                         const float* scale, Ahead* ahead) {
  Lanes sum[R][P] = {};
  const auto add = [&](int64_t k) __attribute__((always_inline)) {
    Lanes r[P];
    for (int p = 0; p < P; ++p) r[p] = load(right.data + k * right.row + p * right.group);
    for (int i = 0; i < R; ++i) {
      const float l = left.data[i * left.row + k * left.column];
      for (int p = 0; p < P; ++p) sum[i][p] += l * r[p];
    }
  };
  int64_t k = 0;
  // without a branch between steps: 325 against 305 GFLOP/s in decode of 48 heads over 256k rows
  for (; k + kAheadSteps <= depth; k += kAheadSteps) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kAheadSteps; ++j) add(k + j);
    bring(ahead);
  }
  for (; k < depth; ++k) add(k);
  for (int i = 0; i < R; ++i) {
    for (int p = 0; p < P; ++p) {
      float* o = out + i * ldo + p * kLanes;
      if (kOld == Old::kAdded) sum[i][p] += load(o);
      if (kOld == Old::kScaled) sum[i][p] += scale[i] * load(o);
      store(o, sum[i][p]);
    }
  }
}

// Rows in tiles of R, the rest in smaller ones.
template <int R, int P, Old kOld>
MOONLET_INLINE void panel(float* out, int64_t ldo, Left left, Right right, int64_t rows,
                          int64_t depth, const float* scale, Ahead* ahead) {
  int64_t i = 0;
  for (; i + R <= rows; i += R) {
    const Left part = {left.data + i * left.row, left.row, left.column};
    tile<R, P, kOld>(out + i * ldo, ldo, part, right, depth, scale, ahead);
    if (kOld == Old::kScaled) scale += R;
  }
  if constexpr (R > 1) {
    const Left part = {left.data + i * left.row, left.row, left.column};
    panel<R / 2, P, kOld>(out + i * ldo, ldo, part, right, rows - i, depth, scale, ahead);
  }
}

// out[rows][groups of kLanes] = left right, plus what kOld says: nothing, the old value, or its
// rows times scale[row]; only kScaled reads `scale`. `ahead` may be null.
template <Old kOld>
__attribute__((noinline)) void product(float* out, int64_t ldo, Left left, Right right,
                                       int64_t rows, int64_t depth, int64_t groups,
                                       const float* scale, Ahead* ahead) {
  int64_t g = 0;
  for (; g + kTileGroups <= groups; g += kTileGroups) {
    const Right part = {right.data + g * right.group, right.row, right.group};
    panel<kTileRows, kTileGroups, kOld>(out + g * kLanes, ldo, left, part, rows, depth, scale,
                                        ahead);
  }
  const Right part = {right.data + g * right.group, right.row, right.group};
  if (groups - g == 2) {
    panel<kTileRows, 2, kOld>(out + g * kLanes, ldo, left, part, rows, depth, scale, ahead);
  } else if (groups - g == 1) {
    panel<kTileRows, 1, kOld>(out + g * kLanes, ldo, left, part, rows, depth, scale, ahead);
  }
}

// out = left right for a depth whose part of the right operand would not stay in the first cache.
void deep_product(float* out, int64_t ldo, Left left, Right right, int64_t rows, int64_t depth,
                  int64_t groups, Ahead* ahead) {
  constexpr int64_t kDepth = 144;
  product<Old::kDropped>(out, ldo, left, right, rows, depth < kDepth ? depth : kDepth, groups,
                         nullptr, ahead);
  for (int64_t k = kDepth; k < depth; k += kDepth) {
    const Left part = {left.data + k * left.column, left.row, left.column};
    const Right below = {right.data + k * right.row, right.row, right.group};
    product<Old::kAdded>(out, ldo, part, below, rows, depth - k < kDepth ? depth - k : kDepth,
                         groups, nullptr, ahead);
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

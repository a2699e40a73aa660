// Small matrix products over float lanes, for operands that fit the first cache levels.
//
// Like lanes.h: every level gets its private copy (anonymous namespace). Include after lanes.h,
// inside a file that is compiled once per level.
#pragma once

#include <stdint.h>

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// Left operand of a product: element (i, k) at data[i * row + k * column].
struct Left {
  const float* data;
  int64_t row, column;
};

// out[R][P lanes] (+)= left[R][depth] right[depth][P lanes]; the sums stay in registers.
template <int R, int P>
MOONLET_INLINE void tile(float* out, int64_t ldo, Left left, const float* right, int64_t ldr,
                         int64_t depth, float scale, bool adds) {
  Lanes sum[R][P] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Lanes r[P];
    for (int p = 0; p < P; ++p) r[p] = load(right + k * ldr + p * kLanes);
    for (int i = 0; i < R; ++i) {
      const float l = left.data[i * left.row + k * left.column];
      for (int p = 0; p < P; ++p) sum[i][p] += l * r[p];
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int p = 0; p < P; ++p) {
      float* o = out + i * ldo + p * kLanes;
      store(o, adds ? load(o) + scale * sum[i][p] : scale * sum[i][p]);
    }
  }
}

template <int P>
MOONLET_INLINE void panel(float* out, int64_t ldo, Left left, const float* right, int64_t ldr,
                          int64_t rows, int64_t depth, float scale, bool adds) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6) {
    const Left part = {left.data + i * left.row, left.row, left.column};
    tile<6, P>(out + i * ldo, ldo, part, right, ldr, depth, scale, adds);
  }
  for (; i + 2 <= rows; i += 2) {
    const Left part = {left.data + i * left.row, left.row, left.column};
    tile<2, P>(out + i * ldo, ldo, part, right, ldr, depth, scale, adds);
  }
  if (i < rows) {
    const Left part = {left.data + i * left.row, left.row, left.column};
    tile<1, P>(out + i * ldo, ldo, part, right, ldr, depth, scale, adds);
  }
}

// out (+)= scale * left right; columns is a multiple of 16.
__attribute__((noinline)) void multiply(float* out, int64_t ldo, Left left, const float* right,
                                        int64_t ldr, int64_t rows, int64_t depth, int64_t columns,
                                        float scale, bool adds) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= columns; j += 2 * kLanes) {
    panel<2>(out + j, ldo, left, right + j, ldr, rows, depth, scale, adds);
  }
  if (j < columns) panel<1>(out + j, ldo, left, right + j, ldr, rows, depth, scale, adds);
}

// out[columns][rows rounded up to ldo] = in[rows][columns] transposed, zeros beyond rows.
void transpose(float* out, int64_t ldo, const float* in, int64_t ldi, int64_t rows,
               int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) out[j * ldo + i] = in[i * ldi + j];
    for (int64_t i = rows; i < ldo; ++i) out[j * ldo + i] = 0.0f;
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

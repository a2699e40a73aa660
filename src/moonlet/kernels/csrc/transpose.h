// Transposition of squares of lanes, for operands whose rows become lanes.
//
// Like lanes.h: every level gets its private copy (anonymous namespace).
#pragma once

#include <stdint.h>

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// Where a is not a number, the result is b.
MOONLET_INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

#if defined(__AVX512F__)
constexpr IntLanes kLowPairs = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
constexpr IntLanes kHighPairs = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#elif defined(__AVX2__)
constexpr IntLanes kLowPairs = {0, 8, 1, 9, 2, 10, 3, 11};
constexpr IntLanes kHighPairs = {4, 12, 5, 13, 6, 14, 7, 15};
#else
constexpr IntLanes kLowPairs = {0, 4, 1, 5};
constexpr IntLanes kHighPairs = {2, 6, 3, 7};
#endif

// One of the log2(width) steps of a transposition: lane pairs of the two halves of `in`.
MOONLET_INLINE void interleave(Lanes* out, const Lanes* in) {
  for (int64_t i = 0; i < kLanes / 2; ++i) {
    out[2 * i] = __builtin_shuffle(in[i], in[i + kLanes / 2], kLowPairs);
    out[2 * i + 1] = __builtin_shuffle(in[i], in[i + kLanes / 2], kHighPairs);
  }
}

MOONLET_INLINE void transpose_square(Lanes* v) {
  Lanes w[kLanes];
  interleave(w, v);
  interleave(v, w);
  if (kLanes == 4) return;
  interleave(w, v);
  if (kLanes == 8) {
    for (int64_t i = 0; i < kLanes; ++i) v[i] = w[i];
    return;
  }
  interleave(v, w);
}

// Rows to lanes: out[j * kLanes + i] = scale * in[i * ldi + j] for i < rows, zeros in lanes beyond.
void transpose_rows(float* out, const float* in, int64_t ldi, int64_t rows, int64_t columns,
                    float scale) {
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    Lanes v[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) v[i] = i < rows ? scale * load(in + i * ldi + j) : Lanes{};
    transpose_square(v);
    for (int64_t i = 0; i < kLanes; ++i) store(out + (j + i) * kLanes, v[i]);
  }
  for (; j < columns; ++j) {
    for (int64_t i = 0; i < kLanes; ++i) {
      out[j * kLanes + i] = i < rows ? scale * in[i * ldi + j] : 0.0f;
    }
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

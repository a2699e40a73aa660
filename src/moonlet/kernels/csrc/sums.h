// Sums of products over the lanes of a level's registers, with weights read as they are stored.
//
// Like lanes.h: every level gets its private copy (anonymous namespace).
#pragma once

#include <stdint.h>
#include <string.h>

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// Sums run over sixteen lanes at every level: fewer would round twice to four times as much.
constexpr int64_t kSumLanes = 16;
constexpr int64_t kVectors = kSumLanes / kLanes;

// Folds the vectors of one sum, lane i to lane i + half, until one vector is left.
MOONLET_INLINE Lanes in_halves(Lanes* v) {
  for (int64_t n = kVectors / 2; n > 0; n /= 2) {
    for (int64_t i = 0; i < n; ++i) v[i] += v[i + n];
  }
  return v[0];
}

MOONLET_INLINE Lanes load_part(const float* p) { return load(p); }

// Values stored as bfloat16: the upper halves of float32.
MOONLET_INLINE Lanes load_part(const uint16_t* p) {
#if defined(MOONLET_ISA_scalar) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  // the general form below takes four times as long where no instruction widens integers
  typedef uint16_t Halves __attribute__((vector_size(16)));
  typedef uint64_t Words __attribute__((vector_size(16)));
  uint64_t word;
  memcpy(&word, p, sizeof(word));
  const Halves bits = reinterpret_cast<Halves>(Words{word, 0});
  const Halves pairs = {0, 8, 1, 9, 2, 10, 3, 11};
  return reinterpret_cast<Lanes>(__builtin_shuffle(Halves{}, bits, pairs));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
  Halves bits;
  memcpy(&bits, p, sizeof(bits));
  return reinterpret_cast<Lanes>(__builtin_convertvector(bits, Words) << 16);
#endif
}

// sums[r][c] = <x[r], y[c]> over `size` values, and <x[r], x[r]> if `squares` is not null.
template <int R, int C, typename Value>
MOONLET_INLINE void dot_products(const float* const* x, const Value* const* y, int64_t size,
                                 float (*sums)[C], float* squares) {
  Lanes sum[R][C][kVectors] = {}, square[R][kVectors] = {};
  const auto add = [&](const float* const* a, const Value* const* b, int64_t at) {
    for (int64_t p = 0; p < kVectors; ++p) {
      const int64_t from = at + p * kLanes;
      Lanes v[R];
      for (int r = 0; r < R; ++r) v[r] = load_part(a[r] + from);
      for (int r = 0; squares && r < R; ++r) square[r][p] += v[r] * v[r];
      for (int c = 0; c < C; ++c) {
        const Lanes w = load_part(b[c] + from);
        for (int r = 0; r < R; ++r) sum[r][c][p] += v[r] * w;
      }
    }
  };
  int64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) add(x, y, i);
  if (i < size) {
    // the rest of the rows, filled up with zeros
    float x_end[R][kSumLanes] = {};
    Value y_end[C][kSumLanes] = {};
    const float* a[R];
    const Value* b[C];
    for (int r = 0; r < R; ++r) {
      memcpy(x_end[r], x[r] + i, static_cast<size_t>(size - i) * sizeof(float));
      a[r] = x_end[r];
    }
    for (int c = 0; c < C; ++c) {
      memcpy(y_end[c], y[c] + i, static_cast<size_t>(size - i) * sizeof(Value));
      b[c] = y_end[c];
    }
    add(a, b, 0);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r][c] = total(in_halves(sum[r][c]));
    if (squares) squares[r] = total(in_halves(square[r]));
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

// Float vectors of the level's own width: 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere.
//
// For loops that keep many vectors in registers. The compiler's generic types do the work, so one
// source serves every level; but a type wider than the level's registers lives in memory: sums of
// products on 16 lanes measured 12 GFLOP/s at the AVX2 level, on 8 lanes 112 (peak 121). Every
// level gets its private copy (anonymous namespace, always inlined). Include inside a file that is
// compiled once per level; not together with lanes.h, whose functions have the same names.
#pragma once

#include <stdint.h>
#include <string.h>

#define MOONLET_INLINE static inline __attribute__((always_inline))

namespace moonlet {
namespace MOONLET_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
#elif defined(__AVX2__)
constexpr int64_t kWidth = 8;
#else
constexpr int64_t kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef float UnalignedVec __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));

MOONLET_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
MOONLET_INLINE void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
MOONLET_INLINE Vec fill(float x) { return Vec{} + x; }

// Where a is not a number, the result is b.
MOONLET_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Sum of the lanes, in halves.
MOONLET_INLINE float total(Vec v) {
  float x[kWidth];
  memcpy(x, &v, sizeof v);
  for (int64_t n = kWidth / 2; n > 0; n /= 2) {
    for (int64_t i = 0; i < n; ++i) x[i] += x[i + n];
  }
  return x[0];
}

// e^x, relative error about 1e-7; saturates at e^-87.3 and e^88.3.
MOONLET_INLINE Vec exponential(Vec x) {
  const Vec low = fill(-87.33f), high = fill(88.3f);
  x = low > x ? low : x;
  x = high < x ? high : x;
  const Vec magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Vec p = fill(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // the low bits of the shifted sum hold n; its own bits drop out of the left shift
  const IntVec exponent = (reinterpret_cast<IntVec>(shifted) + 127) << 23;
  return p * reinterpret_cast<Vec>(exponent);
}

#if defined(__AVX512F__)
constexpr IntVec kLowPairs = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
constexpr IntVec kHighPairs = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#elif defined(__AVX2__)
constexpr IntVec kLowPairs = {0, 8, 1, 9, 2, 10, 3, 11};
constexpr IntVec kHighPairs = {4, 12, 5, 13, 6, 14, 7, 15};
#else
constexpr IntVec kLowPairs = {0, 4, 1, 5};
constexpr IntVec kHighPairs = {2, 6, 3, 7};
#endif

// One of the log2(width) steps of a transposition: lane pairs of the two halves of `in`.
MOONLET_INLINE void interleave(Vec* out, const Vec* in) {
  for (int64_t i = 0; i < kWidth / 2; ++i) {
    out[2 * i] = __builtin_shuffle(in[i], in[i + kWidth / 2], kLowPairs);
    out[2 * i + 1] = __builtin_shuffle(in[i], in[i + kWidth / 2], kHighPairs);
  }
}

MOONLET_INLINE void transpose_square(Vec* v) {
  Vec w[kWidth];
  interleave(w, v);
  interleave(v, w);
  if (kWidth == 4) return;
  interleave(w, v);
  if (kWidth == 8) {
    for (int64_t i = 0; i < kWidth; ++i) v[i] = w[i];
    return;
  }
  interleave(v, w);
}

// Rows to lanes: out[j * kWidth + i] = scale * in[i * ldi + j] for i < rows, zeros in lanes beyond.
void transpose_rows(float* out, const float* in, int64_t ldi, int64_t rows, int64_t columns,
                    float scale) {
  int64_t j = 0;
  for (; j + kWidth <= columns; j += kWidth) {
    Vec v[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) v[i] = i < rows ? scale * load(in + i * ldi + j) : Vec{};
    transpose_square(v);
    for (int64_t i = 0; i < kWidth; ++i) store(out + (j + i) * kWidth, v[i]);
  }
  for (; j < columns; ++j) {
    for (int64_t i = 0; i < kWidth; ++i) {
      out[j * kWidth + i] = i < rows ? scale * in[i * ldi + j] : 0.0f;
    }
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

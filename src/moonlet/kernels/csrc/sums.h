// Vectors of the level's own register width, for sums that must stay in registers.
//
// The compiler keeps arrays of the 64-byte vectors of lanes.h in memory where registers are
// narrower: measured on AVX2, tiles of products then run at a fifth of the speed of this form.
// The order of the sums is that of sixteen lanes. Like lanes.h: every level gets its private copy.
#pragma once

#include <stdint.h>
#include <string.h>

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

#if defined(MOONLET_ISA_avx512) || defined(MOONLET_ISA_vnni)
constexpr int kPartBytes = 64;
#elif defined(MOONLET_ISA_avx2)
constexpr int kPartBytes = 32;
#else
constexpr int kPartBytes = 16;
#endif
constexpr int kParts = 64 / kPartBytes;
constexpr int kPartLanes = 16 / kParts;

typedef float Part __attribute__((vector_size(kPartBytes)));
typedef float UnalignedPart __attribute__((vector_size(kPartBytes), aligned(4), may_alias));

MOONLET_INLINE Part load_part(const float* p) { return *reinterpret_cast<const UnalignedPart*>(p); }

MOONLET_INLINE void store_part(float* p, Part v) { *reinterpret_cast<UnalignedPart*>(p) = v; }

// Values stored as bfloat16: the upper halves of float32.
MOONLET_INLINE Part load_part(const uint16_t* p) {
#if defined(MOONLET_ISA_scalar) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  // the general form below takes four times as long where no instruction widens integers
  typedef uint16_t Halves __attribute__((vector_size(16)));
  typedef uint64_t Words __attribute__((vector_size(16)));
  uint64_t word;
  memcpy(&word, p, sizeof(word));
  const Halves bits = reinterpret_cast<Halves>(Words{word, 0});
  const Halves pairs = {0, 8, 1, 9, 2, 10, 3, 11};
  return reinterpret_cast<Part>(__builtin_shuffle(Halves{}, bits, pairs));
#else
  typedef uint16_t Halves __attribute__((vector_size(kPartBytes / 2)));
  typedef uint32_t Words __attribute__((vector_size(kPartBytes)));
  Halves bits;
  memcpy(&bits, p, sizeof(bits));
  return reinterpret_cast<Part>(__builtin_convertvector(bits, Words) << 16);
#endif
}

// sums[r][c] = <x[r], y[c]> over `size` values, and <x[r], x[r]> if `squares` is not null.
template <int R, int C, typename Value>
MOONLET_INLINE void dot_products(const float* const* x, const Value* const* y, int64_t size,
                                 float (*sums)[C], float* squares) {
  Part sum[R][C][kParts] = {}, square[R][kParts] = {};
  const auto add = [&](const float* const* a, const Value* const* b, int64_t at) {
    for (int p = 0; p < kParts; ++p) {
      Part v[R];
      for (int r = 0; r < R; ++r) v[r] = load_part(a[r] + at + p * kPartLanes);
      for (int r = 0; squares && r < R; ++r) square[r][p] += v[r] * v[r];
      for (int c = 0; c < C; ++c) {
        const Part w = load_part(b[c] + at + p * kPartLanes);
        for (int r = 0; r < R; ++r) sum[r][c][p] += v[r] * w;
      }
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) add(x, y, i);
  if (i < size) {
    // the rest of the rows, filled up with zeros
    float x_end[R][kLanes] = {};
    Value y_end[C][kLanes] = {};
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
  Lanes all;
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      memcpy(&all, sum[r][c], sizeof(all));
      sums[r][c] = total(all);
    }
    memcpy(&all, square[r], sizeof(all));
    if (squares) squares[r] = total(all);
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

// Float lanes as wide as the level's registers (16 with AVX-512, 8 with AVX2, else 4), and
// functions on them.
//
// The vector types are the compiler's own, so one source serves every instruction-set level; each
// level gets its private copy (anonymous namespace, always inlined). Include inside a file that is
// compiled once per level. A type wider than the registers would work too, but gcc 12 keeps it in
// memory and takes it apart: chunked KDA was 35 times slower at the AVX2 level with 16 lanes than
// with 8. Row sizes are multiples of 16 where a source says so, at every level.
#pragma once

#include <stdint.h>
#include <string.h>

#define MOONLET_INLINE static inline __attribute__((always_inline))

namespace moonlet {
namespace MOONLET_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedLanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

MOONLET_INLINE Lanes load(const float* p) { return *reinterpret_cast<const UnalignedLanes*>(p); }
MOONLET_INLINE void store(float* p, Lanes v) { *reinterpret_cast<UnalignedLanes*>(p) = v; }
MOONLET_INLINE void add_to(float* p, Lanes v) { store(p, load(p) + v); }
MOONLET_INLINE Lanes fill(float x) { return Lanes{} + x; }

MOONLET_INLINE Lanes choose(IntLanes mask, Lanes yes, Lanes no) {
  return reinterpret_cast<Lanes>((reinterpret_cast<IntLanes>(yes) & mask) |
                                 (reinterpret_cast<IntLanes>(no) & ~mask));
}

MOONLET_INLINE Lanes magnitude(Lanes x) {
  return reinterpret_cast<Lanes>(reinterpret_cast<IntLanes>(x) & 0x7FFFFFFF);
}

MOONLET_INLINE float total(Lanes v) {
#if defined(__AVX512F__)
  const IntLanes by8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
  const IntLanes by4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
  const IntLanes by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
  v += __builtin_shuffle(v, by8);
  v += __builtin_shuffle(v, by4);
#elif defined(__AVX2__)
  const IntLanes by4 = {4, 5, 6, 7, 0, 1, 2, 3};
  const IntLanes by2 = {2, 3, 0, 1, 6, 7, 4, 5};
  v += __builtin_shuffle(v, by4);
#else
  const IntLanes by2 = {2, 3, 0, 1};
#endif
  v += __builtin_shuffle(v, by2);
  return v[0] + v[1];
}

// e^x, relative error about 1e-7; saturates at e^-87.3 and e^88.3.
MOONLET_INLINE Lanes exponential(Lanes x) {
  const Lanes low = fill(-87.33f), high = fill(88.3f);
  x = choose(x < low, low, x);
  x = choose(x > high, high, x);
  const Lanes magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes shifted = x * 1.44269504088896341f + magic;
  const Lanes n = shifted - magic;
  const Lanes r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Lanes p = fill(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // the low bits of the shifted sum hold n; its own bits drop out of the left shift
  const IntLanes exponent = (reinterpret_cast<IntLanes>(shifted) + 127) << 23;
  return p * reinterpret_cast<Lanes>(exponent);
}

MOONLET_INLINE Lanes logistic(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

MOONLET_INLINE Lanes hyperbolic_tangent(Lanes x) {
  const Lanes size = magnitude(x);
  const Lanes z = x * x;
  Lanes p = fill(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Lanes near = p * z * x + x;
  const Lanes far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  const IntLanes sign = reinterpret_cast<IntLanes>(x) & INT32_MIN;
  const Lanes signed_far = reinterpret_cast<Lanes>(reinterpret_cast<IntLanes>(far) | sign);
  return choose(size < fill(0.625f), near, signed_far);
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

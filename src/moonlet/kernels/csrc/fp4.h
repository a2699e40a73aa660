// Four MXFP4 groups in registers, and rounding of activations in the same order of elements.
//
// Like lanes.h: every level gets its private copy (anonymous namespace). A block is 128 elements of
// a row, in eight parts of sixteen. Part j holds the elements 8 i + j at its places i: taking nibble
// j of sixteen 32-bit words needs one shift and one lookup, and places 4 g .. 4 g + 3 belong to
// group g. Rows that are multiplied with such weights are permuted once into the same order.
#pragma once

#include <stdint.h>
#include <string.h>

#include "lanes.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kBlock = 128;
constexpr int kParts = 8;
constexpr int64_t kPartSize = 16;
constexpr int64_t kGroupsPerBlock = 4;
constexpr int64_t kGroupBytes = 16;
// bits of 2^-127, which the scale byte 0 stands for
constexpr uint32_t kSmallestScale = 0x00400000u;
// groups of int8 with a smaller step become zeros: its inverse may leave float32
constexpr float kSmallestStep = 0x1p-126f;

// Place of element k in a permuted row.
MOONLET_INLINE int64_t permuted(int64_t k) {
  const int64_t in_block = k % kBlock;
  return k - in_block + in_block % kParts * kPartSize + in_block / kParts;
}

#if defined(__AVX512F__)

typedef __m512i RawBlock;

MOONLET_INLINE Lanes code_values() {
  return Lanes{0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
}

// The codes of up to four groups; absent groups are zeros.
MOONLET_INLINE RawBlock load_block(const uint8_t* packed, int64_t groups) {
  if (groups >= kGroupsPerBlock) return _mm512_loadu_si512(packed);
  const __mmask16 mask = static_cast<__mmask16>((1u << (4 * groups)) - 1);
  return _mm512_maskz_loadu_epi32(mask, packed);
}

MOONLET_INLINE Lanes load_scales(const uint8_t* scale, int64_t groups) {
  uint32_t four = 0;
  if (groups >= kGroupsPerBlock) {
    memcpy(&four, scale, sizeof(four));
  } else {
    for (int64_t g = 0; g < groups; ++g) four |= static_cast<uint32_t>(scale[g]) << (8 * g);
  }
  // byte g to the top of each 32-bit word of 128-bit lane g, then down to the exponent
  const __m512i place = _mm512_set_epi32(
      0x03808080, 0x03808080, 0x03808080, 0x03808080, 0x02808080, 0x02808080, 0x02808080,
      0x02808080, 0x01808080, 0x01808080, 0x01808080, 0x01808080, 0x00808080, 0x00808080,
      0x00808080, 0x00808080);
  const __m512i top = _mm512_shuffle_epi8(_mm512_set1_epi32(static_cast<int>(four)), place);
  const __m512i bits = _mm512_srli_epi32(top, 1);
  return reinterpret_cast<Lanes>(
      _mm512_max_epu32(bits, _mm512_set1_epi32(static_cast<int>(kSmallestScale))));
}

template <int J>
MOONLET_INLINE Lanes block_part(RawBlock raw, Lanes values) {
  // the lookup reads the low four bits of each word
  return reinterpret_cast<Lanes>(_mm512_permutexvar_ps(
      J == 0 ? raw : _mm512_srli_epi32(raw, 4 * J), reinterpret_cast<__m512>(values)));
}

MOONLET_INLINE Lanes as_floats(IntLanes bits) { return reinterpret_cast<Lanes>(bits); }
MOONLET_INLINE IntLanes as_bits(Lanes x) { return reinterpret_cast<IntLanes>(x); }

// The largest magnitude of each group of a permuted block, in the four lanes of the group.
MOONLET_INLINE Lanes group_maxima(const Lanes (&part)[kParts]) {
  // as integers, so that a NaN is larger than everything
  IntLanes most = as_bits(magnitude(part[0]));
  for (int j = 1; j < kParts; ++j) {
    const IntLanes m = as_bits(magnitude(part[j]));
    most = m > most ? m : most;
  }
  const IntLanes by1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
  const IntLanes by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
  IntLanes other = __builtin_shuffle(most, by1);
  most = other > most ? other : most;
  other = __builtin_shuffle(most, by2);
  return as_floats(other > most ? other : most);
}

MOONLET_INLINE Lanes clamped(Lanes x, float limit) {
  x = choose(x > fill(limit), fill(limit), x);
  return choose(x < fill(-limit), fill(-limit), x);
}

// Rounds a block to what MXFP8 (E4M3) can hold (kernels/mxfp8.py). A group that is not finite
// becomes NaN.
MOONLET_INLINE void round_mxfp8(Lanes (&part)[kParts], bool is_floor) {
  const Lanes most = group_maxima(part);
  const IntLanes is_finite = as_bits(most) < 0x7F800000;
  IntLanes biased;
  if (is_floor) {
    biased = (as_bits(most) >> 23) - 8;
  } else {
    const IntLanes bits = as_bits(most / 448.0f) & is_finite;
    biased = ((bits + 0x7FFFFF) >> 23) & (bits > static_cast<int32_t>(kSmallestScale));
  }
  biased &= biased > 0;
  // 2^(biased - 127) and its inverse, by bit pattern; biased is at most 246 here
  const IntLanes is_subnormal = biased == 0;
  const IntLanes smallest = is_subnormal & static_cast<int32_t>(kSmallestScale);
  const Lanes scale = as_floats((biased << 23) | smallest);
  const Lanes inverse = as_floats((254 - biased) << 23);
  for (int j = 0; j < kParts; ++j) {
    const Lanes y = clamped(part[j] * inverse, 448.0f);
    // quantum: three bits below the leading one, and 2^-9 for subnormals
    const Lanes power = as_floats(as_bits(y) & 0x7F800000);
    const Lanes quantum = choose(power < fill(0.015625f), fill(0.015625f), power) * 0.125f;
    const Lanes magic = quantum * 12582912.0f;
    const Lanes rounded = (y + magic) - magic;
    part[j] = choose(is_finite, rounded * scale, fill(__builtin_nanf("")));
  }
}

// Rounds a block to int8 with one float32 scale a group: the largest magnitude is 127 steps.
MOONLET_INLINE void round_int8(Lanes (&part)[kParts]) {
  const Lanes most = group_maxima(part);
  const Lanes step = most * (1.0f / 127.0f);
  const Lanes inverse = choose(step >= fill(kSmallestStep), 1.0f / step, fill(0.0f));
  const IntLanes is_finite = as_bits(most) < 0x7F800000;
  for (int j = 0; j < kParts; ++j) {
    const Lanes y = clamped(part[j] * inverse, 127.0f);
    const Lanes rounded = ((y + 12582912.0f) - 12582912.0f) * step;
    part[j] = choose(is_finite, rounded, fill(__builtin_nanf("")));
  }
}

MOONLET_INLINE void round_block(float* block, int32_t mode) {
  Lanes part[kParts];
  for (int j = 0; j < kParts; ++j) part[j] = load(block + j * kPartSize);
  if (mode == 3) {
    round_int8(part);
  } else {
    round_mxfp8(part, mode == 2);
  }
  for (int j = 0; j < kParts; ++j) store(block + j * kPartSize, part[j]);
}

#else

// Values of up to four groups in permuted order, scaled; absent groups are zeros.
MOONLET_INLINE void decode_block(const uint8_t* packed, const uint8_t* scale, int64_t groups,
                                 float* block) {
  static const float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int64_t i = 0; i < kPartSize; ++i) {
    if (i / 4 >= groups) {
      for (int j = 0; j < kParts; ++j) block[j * kPartSize + i] = 0.0f;
      continue;
    }
    const uint32_t byte = scale[i / 4];
    const uint32_t bits = byte ? byte << 23 : kSmallestScale;
    float factor;
    memcpy(&factor, &bits, sizeof(factor));
    for (int j = 0; j < kParts; j += 2) {
      const uint8_t two = packed[4 * i + j / 2];
      block[j * kPartSize + i] = kValues[two & 15] * factor;
      block[(j + 1) * kPartSize + i] = kValues[two >> 4] * factor;
    }
  }
}

MOONLET_INLINE float with_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

MOONLET_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Rounds x to E4M3 at a scale of one: three bits below the leading one, and 2^-9 for subnormals.
MOONLET_INLINE float round_e4m3(float x) {
  x = x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
  const float power = with_bits(bits_of(x) & 0x7F800000u);
  const float quantum = (power < 0.015625f ? 0.015625f : power) * 0.125f;
  const float magic = quantum * 12582912.0f;
  return (x + magic) - magic;
}

// Rounds a permuted block to MXFP8 (mode 1 ceil, 2 floor; kernels/mxfp8.py) or int8 groups (3). A
// group that is not finite becomes NaN.
MOONLET_INLINE void round_block(float* block, int32_t mode) {
  for (int64_t g = 0; g < kGroupsPerBlock; ++g) {
    float most = 0.0f;
    bool is_finite = true;
    for (int64_t k = 0; k < 32; ++k) {
      const float size = with_bits(bits_of(block[k / 4 * kPartSize + 4 * g + k % 4]) & 0x7FFFFFFFu);
      is_finite = is_finite && bits_of(size) < 0x7F800000u;
      most = size > most ? size : most;
    }
    float scale, inverse;
    if (mode == 3) {
      scale = most * (1.0f / 127.0f);
      inverse = scale >= kSmallestStep ? 1.0f / scale : 0.0f;
    } else {
      int32_t biased;
      if (mode == 2) {
        biased = static_cast<int32_t>(bits_of(most) >> 23) - 8;
      } else {
        const uint32_t bits = bits_of(most / 448.0f);
        biased = bits > kSmallestScale ? static_cast<int32_t>((bits + 0x7FFFFFu) >> 23) : 0;
      }
      biased = biased > 0 ? biased : 0;
      scale = with_bits(biased ? static_cast<uint32_t>(biased) << 23 : kSmallestScale);
      inverse = with_bits(static_cast<uint32_t>(254 - biased) << 23);
    }
    for (int64_t k = 0; k < 32; ++k) {
      float* x = block + k / 4 * kPartSize + 4 * g + k % 4;
      if (!is_finite) {
        *x = __builtin_nanf("");
      } else if (mode == 3) {
        const float y = *x * inverse;
        const float limited = y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y;
        *x = ((limited + 12582912.0f) - 12582912.0f) * scale;
      } else {
        *x = round_e4m3(*x * inverse) * scale;
      }
    }
  }
}

#endif

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

// MXFP4 rows to float32 and bfloat16, one source for every instruction-set level.
//
// value = +-magnitude * 2^(scale - 127). The eight magnitudes of a scale come as finished float32
// bit patterns from a table, so the work is a 16-entry lookup per element: exact for subnormals and
// NaN whatever the floating-point mode of the calling thread, and bound by memory bandwidth.
// bfloat16 is the upper half of the float32 pattern, which loses nothing (two significant bits).
#include "isa.h"

#include <string.h>

#if defined(MOONLET_ISA_vnni)
#define MOONLET_ISA_avx512 1
#endif
#if defined(MOONLET_ISA_avx2) || defined(MOONLET_ISA_avx512)
#include <immintrin.h>
#endif

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kGroupBytes = 16;
constexpr int64_t kGroupSize = 32;

#if defined(MOONLET_ISA_avx512)

// 16 float32 patterns: the magnitudes, then the same with the sign bit.
static __m512i signed_entries(const uint32_t* magnitudes) {
  const __m512i both =
      _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(magnitudes)));
  return _mm512_mask_or_epi32(both, 0xFF00, both, _mm512_set1_epi32(INT32_MIN));
}

// The 32 nibbles of a group, one per byte, in element order.
static __m256i nibbles_of(const uint8_t* packed) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
  const __m128i mask = _mm_set1_epi8(0x0F);
  const __m128i low = _mm_and_si128(bytes, mask);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(low, high)),
                                 _mm_unpackhi_epi8(low, high), 1);
}

static void group_f32(const uint32_t* magnitudes, const uint8_t* packed, float* out) {
  const __m512i entries = signed_entries(magnitudes);
  const __m256i nibbles = nibbles_of(packed);
  const __m512i first = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(nibbles));
  const __m512i second = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(nibbles, 1));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(first, entries));
  _mm512_storeu_si512(out + 16, _mm512_permutexvar_epi32(second, entries));
}

static void group_bf16(const uint32_t* magnitudes, const uint8_t* packed, uint16_t* out) {
  const __m512i entries = signed_entries(magnitudes);
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(entries, 16));
  const __m512i indices = _mm512_cvtepu8_epi16(nibbles_of(packed));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(indices, _mm512_castsi256_si512(halves)));
}

#elif defined(MOONLET_ISA_avx2)

// Eight elements (four packed bytes) as float32 patterns.
static __m256i eight(const __m256i magnitudes, const uint8_t* packed) {
  int32_t word;
  memcpy(&word, packed, sizeof(word));
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
  const __m256i sign =
      _mm256_slli_epi32(_mm256_and_si256(nibbles, _mm256_set1_epi32(8)), 28);
  // the permutation looks at the low three bits of each index only
  return _mm256_or_si256(_mm256_permutevar8x32_epi32(magnitudes, nibbles), sign);
}

static void group_f32(const uint32_t* magnitudes, const uint8_t* packed, float* out) {
  const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(magnitudes));
  for (int64_t i = 0; i < 4; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * i), eight(entries, packed + 4 * i));
  }
}

static void group_bf16(const uint32_t* magnitudes, const uint8_t* packed, uint16_t* out) {
  const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(magnitudes));
  for (int64_t i = 0; i < 2; ++i) {
    const __m256i first = _mm256_srli_epi32(eight(entries, packed + 8 * i), 16);
    const __m256i second = _mm256_srli_epi32(eight(entries, packed + 8 * i + 4), 16);
    // packing works within each 128-bit half; the permutation restores element order
    const __m256i mixed = _mm256_packus_epi32(first, second);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i),
                        _mm256_permute4x64_epi64(mixed, 0xD8));
  }
}

#else

static uint32_t pattern(const uint32_t* magnitudes, uint32_t nibble) {
  return magnitudes[nibble & 7] | (nibble & 8) << 28;
}

static void group_f32(const uint32_t* magnitudes, const uint8_t* packed, float* out) {
  for (int64_t i = 0; i < kGroupBytes; ++i) {
    const uint32_t pair[2] = {pattern(magnitudes, packed[i] & 0x0F),
                              pattern(magnitudes, packed[i] >> 4)};
    memcpy(out + 2 * i, pair, sizeof(pair));
  }
}

static void group_bf16(const uint32_t* magnitudes, const uint8_t* packed, uint16_t* out) {
  for (int64_t i = 0; i < kGroupBytes; ++i) {
    out[2 * i] = static_cast<uint16_t>(pattern(magnitudes, packed[i] & 0x0F) >> 16);
    out[2 * i + 1] = static_cast<uint16_t>(pattern(magnitudes, packed[i] >> 4) >> 16);
  }
}

#endif

static void row_f32(const MagnitudeTable& table, const uint8_t* packed, const uint8_t* scale,
                    float* out, int64_t num_groups) {
  for (int64_t g = 0; g < num_groups; ++g) {
    group_f32(table[scale[g]], packed + g * kGroupBytes, out + g * kGroupSize);
  }
}

static void row_bf16(const MagnitudeTable& table, const uint8_t* packed, const uint8_t* scale,
                     uint16_t* out, int64_t num_groups) {
  for (int64_t g = 0; g < num_groups; ++g) {
    group_bf16(table[scale[g]], packed + g * kGroupBytes, out + g * kGroupSize);
  }
}

}  // namespace

extern const IsaTable isa_table;
const IsaTable isa_table = {row_f32, row_bf16};

}  // namespace MOONLET_ISA
}  // namespace moonlet

// Products of int8 groups with rows of MXFP4 in integers (AVX512-VNNI).
//
// Like lanes.h: every level gets its private copy (anonymous namespace). Twice an MXFP4 value is an
// integer from -12 to 12. The instruction multiplies unsigned bytes by signed ones and adds four
// products to a 32-bit lane: its unsigned operand is twice the weight plus 12, and a sum starts at
// -12 times the sum of the group's codes. The sum of a group is exact; it is scaled to float32 by
// the step of the activations and half the scale of the weights, and added in the order of groups.
// Within a group, even elements come before odd ones, as low nibbles are taken before high ones.
#pragma once

#include <stdint.h>
#include <string.h>

#include "fp4_rows.h"
#include "gemm.h"
#include "lanes.h"
#include "moe.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

#if defined(__AVX512VNNI__)

// Depth of a panel in groups: the panels of all outputs of a piece stay in the first cache.
constexpr int64_t kCodedDepth = 16;
// with two vectors of outputs: twelve integer sums, twelve float sums, and their operands
constexpr int kCodedRows = 6;
// four inputs are multiplied at once
constexpr int kQuads = 8;

// Thirty-two outputs at one group of inputs.
struct PanelGroup {
  alignas(64) uint8_t codes[kQuads][2][4 * kLanes];
  alignas(64) float scale[2][kLanes];
};

MOONLET_INLINE __m512i rounded_codes(Lanes x, float inverse) {
  const Lanes y = clamped(x * inverse, 127.0f);
  return _mm512_cvt_roundps_epi32(reinterpret_cast<__m512>(y),
                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Codes a group of 32 elements in natural order, with the bits of kernels/int8_groups.py.
MOONLET_INLINE void code_group(Lanes first, Lanes second, CodedGroup* out) {
  const IntLanes evens = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  // as integers, so that a NaN is larger than everything
  const IntLanes a = as_bits(magnitude(first)), b = as_bits(magnitude(second));
  const int32_t bits = _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(a > b ? a : b));
  if (bits >= 0x7F800000) {
    memset(out, 0, sizeof(*out));
    out->step = __builtin_nanf("");
    return;
  }
  float most;
  memcpy(&most, &bits, sizeof(most));
  const float step = most * (1.0f / 127.0f);
  const float inverse = step >= kSmallestStep ? 1.0f / step : 0.0f;
  const __m512i even = rounded_codes(__builtin_shuffle(first, second, evens), inverse);
  const __m512i odd = rounded_codes(__builtin_shuffle(first, second, evens + 1), inverse);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes), _mm512_cvtepi32_epi8(even));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes + 16), _mm512_cvtepi32_epi8(odd));
  out->step = step;
  out->start = -12 * _mm512_reduce_add_epi32(_mm512_add_epi32(even, odd));
}

// The low or high nibbles of sixteen rows, transposed into half the panels of four groups.
template <bool kIsHigh>
MOONLET_INLINE void pack_nibbles(const Rows& rows, int64_t first, int64_t g, int half,
                                 PanelGroup* panel) {
  const __m512i values = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  Lanes v[16];
  for (int i = 0; i < 16; ++i) {
    RawBlock raw = load_block(rows.codes(first + i) + g * kGroupBytes, rows.groups - g);
    if (kIsHigh) raw = _mm512_srli_epi16(raw, 4);
    v[i] = reinterpret_cast<Lanes>(
        _mm512_shuffle_epi8(values, _mm512_and_si512(raw, _mm512_set1_epi8(15))));
  }
  transpose_16(v);
  for (int i = 0; i < 16; ++i) {
    uint8_t* place = panel[i / 4].codes[(kIsHigh ? kQuads / 2 : 0) + i % 4][half];
    store(reinterpret_cast<float*>(place), v[i]);
  }
}

MOONLET_INLINE void pack_scales(const Rows& rows, int64_t first, int64_t g, int half,
                                PanelGroup* panel) {
  const int64_t count = smaller(rows.groups - g, kGroupsPerBlock);
  uint32_t four[16] = {};
  for (int64_t i = 0; i < 16; ++i) {
    const uint8_t* scale = rows.scales(first + i) + g;
    if (count == kGroupsPerBlock) {
      memcpy(four + i, scale, sizeof(four[i]));
    } else {
      for (int64_t j = 0; j < count; ++j) four[i] |= static_cast<uint32_t>(scale[j]) << (8 * j);
    }
  }
  const __m512i smallest = _mm512_set1_epi32(static_cast<int>(kSmallestScale));
  const __m512i bytes = _mm512_loadu_si512(four);
  for (int j = 0; j < kGroupsPerBlock; ++j) {
    const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * j), _mm512_set1_epi32(255));
    const __m512i scale = _mm512_max_epu32(_mm512_slli_epi32(byte, 23), smallest);
    store(panel[j].scale[half], 0.5f * reinterpret_cast<Lanes>(scale));
  }
}

// Panels of rows [first, first + 32) at groups [g, g + depth); whole blocks are written.
void pack_codes(const Rows& rows, int64_t first, int64_t g, int64_t depth, PanelGroup* panel) {
  for (int64_t b = 0; b < depth; b += kGroupsPerBlock) {
    for (int half = 0; half < 2; ++half) {
      pack_nibbles<false>(rows, first + half * kLanes, g + b, half, panel + b);
      pack_nibbles<true>(rows, first + half * kLanes, g + b, half, panel + b);
      pack_scales(rows, first + half * kLanes, g + b, half, panel + b);
    }
  }
}

// y[i][0 .. 31] (+)= products of M coded rows at groups [g, g + depth) with a panel.
template <int M>
MOONLET_INLINE void coded_tile(const CodedGroup* const* x, int64_t g, const PanelGroup* panel,
                               int64_t depth, float* y, bool adds) {
  Lanes sum[M][2];
  for (int i = 0; i < M; ++i) {
    sum[i][0] = adds ? load(y + i * kExpertOutputs) : Lanes{};
    sum[i][1] = adds ? load(y + i * kExpertOutputs + kLanes) : Lanes{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512i part[M][2];
    for (int i = 0; i < M; ++i) {
      part[i][0] = part[i][1] = _mm512_set1_epi32(x[i][g + k].start);
    }
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      const __m512i w0 = _mm512_load_si512(panel[k].codes[q][0]);
      const __m512i w1 = _mm512_load_si512(panel[k].codes[q][1]);
      for (int i = 0; i < M; ++i) {
        int32_t quad;
        memcpy(&quad, x[i][g + k].codes + 4 * q, sizeof(quad));
        const __m512i v = _mm512_set1_epi32(quad);
        part[i][0] = _mm512_dpbusd_epi32(part[i][0], w0, v);
        part[i][1] = _mm512_dpbusd_epi32(part[i][1], w1, v);
      }
    }
    const Lanes s0 = load(panel[k].scale[0]), s1 = load(panel[k].scale[1]);
    for (int i = 0; i < M; ++i) {
      const float step = x[i][g + k].step;
      sum[i][0] += reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(part[i][0])) * step * s0;
      sum[i][1] += reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(part[i][1])) * step * s1;
    }
  }
  for (int i = 0; i < M; ++i) {
    store(y + i * kExpertOutputs, sum[i][0]);
    store(y + i * kExpertOutputs + kLanes, sum[i][1]);
  }
}

// The same for `count` rows, one to M.
template <int M>
MOONLET_INLINE void coded_rows(const CodedGroup* const* x, int64_t count, int64_t g,
                               const PanelGroup* panel, int64_t depth, float* y, bool adds) {
  if (count == M) {
    coded_tile<M>(x, g, panel, depth, y, adds);
  } else if constexpr (M > 1) {
    coded_rows<M - 1>(x, count, g, panel, depth, y, adds);
  }
}

// Four groups of one row of inputs as the decoded codes meet them: lane 4 g + i of a sum belongs to
// group g. Absent groups are zeros.
struct CodedBlock {
  alignas(64) int8_t codes[2][4 * kLanes];  // even elements, odd elements
  alignas(64) float step[kLanes];
  alignas(64) int32_t start[kLanes];
};

// Blocks that are kept at a time: 8192 inputs.
constexpr int64_t kCodedBlocks = 64;

MOONLET_INLINE void gather_block(const CodedGroup* x, int64_t groups, CodedBlock* block) {
  memset(block, 0, sizeof(*block));
  for (int64_t g = 0; g < smaller(groups, kGroupsPerBlock); ++g) {
    for (int half = 0; half < 2; ++half) {
      memcpy(block->codes[half] + 16 * g, x[g].codes + 16 * half, 16);
    }
    for (int i = 0; i < 4; ++i) block->step[4 * g + i] = x[g].step;
    block->start[4 * g] = x[g].start;
  }
}

// sums[n] += <row first + n, x> over `count` blocks from group g on, times two.
template <int N>
MOONLET_INLINE void coded_dot(const Rows& rows, int64_t first, int64_t g, const CodedBlock* x,
                              int64_t count, const Distance& distance, float* sums) {
  const __m512i values = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int n = 0; n < N; ++n) {
    __builtin_prefetch(rows.scales(first + n) + g + distance.scales, 0, 2);
  }
  Lanes sum[N] = {};
  for (int64_t b = 0; b < count; ++b, g += kGroupsPerBlock) {
    const __m512i even = _mm512_load_si512(x[b].codes[0]);
    const __m512i odd = _mm512_load_si512(x[b].codes[1]);
    const Lanes step = load(x[b].step);
    for (int n = 0; n < N; ++n) {
      const uint8_t* codes = rows.codes(first + n) + g * kGroupBytes;
      __builtin_prefetch(codes + distance.codes, 0, 2);
      const RawBlock raw = load_block(codes, rows.groups - g);
      const __m512i low = _mm512_shuffle_epi8(values, _mm512_and_si512(raw, nibble));
      const __m512i high = _mm512_shuffle_epi8(
          values, _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble));
      __m512i part = _mm512_dpbusd_epi32(_mm512_load_si512(x[b].start), low, even);
      part = _mm512_dpbusd_epi32(part, high, odd);
      const Lanes scale = load_scales(rows.scales(first + n) + g, rows.groups - g) * step;
      sum[n] += reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(part)) * scale;
    }
  }
  for (int n = 0; n < N; ++n) sums[n] += total(sum[n]);
}

// result[o - first] = <row o, x> for outputs [first, last) and one coded row; `then` may be null.
__attribute__((noinline)) void dot_coded(const Rows& rows, int64_t first, int64_t last,
                                         const CodedGroup* x, float* result, const Then* then) {
  CodedBlock blocks[kCodedBlocks];
  memset(result, 0, (last - first) * sizeof(float));
  for (int64_t g = 0; g < rows.groups; g += kCodedBlocks * kGroupsPerBlock) {
    const int64_t groups = smaller(rows.groups - g, kCodedBlocks * kGroupsPerBlock);
    const int64_t count = (groups + kGroupsPerBlock - 1) / kGroupsPerBlock;
    for (int64_t b = 0; b < count; ++b) {
      gather_block(x + g + b * kGroupsPerBlock, groups - b * kGroupsPerBlock, blocks + b);
    }
    // pieces are whole groups of 32 outputs
    for (int64_t o = first; o < last; o += 4) {
      coded_dot<4>(rows, o, g, blocks, count, distance_of(rows, o, last, then),
                   result + o - first);
    }
  }
  // codes stand for twice the weights
  for (int64_t o = 0; o < last - first; ++o) result[o] *= 0.5f;
}

// The same for a few coded rows, with results as multiply_coded has them.
MOONLET_INLINE void dot_coded_rows(const Rows& rows, int64_t first, int64_t last,
                                   const CodedGroup* const* x, int64_t count, float* result,
                                   const Then* then) {
  for (int64_t i = 0; i < count; ++i) {
    // the rows that follow find the weights in the second cache
    dot_coded(rows, first, last, x[i], result + i * kExpertOutputs, i ? nullptr : then);
  }
}

// Brings rows [first, last) of the weights, a panel's depth from group g on, to the second cache.
MOONLET_INLINE void fetch(const Rows& rows, int64_t first, int64_t last, int64_t g) {
  const int64_t bytes = smaller(rows.groups - g, kCodedDepth) * kGroupBytes;
  for (int64_t r = first; r < last; ++r) {
    const uint8_t* codes = rows.codes(r) + g * kGroupBytes;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(codes + b, 0, 2);
    __builtin_prefetch(rows.scales(r) + g, 0, 2);
  }
}

// result[i][o - first] = <row o, x[i]> for outputs [first, last), 32 or 64, and many coded rows.
// `next` is the matrix that is read after this one at the same outputs, or null.
__attribute__((noinline)) void multiply_coded(const Rows& rows, int64_t first, int64_t last,
                                              const CodedGroup* const* x, int64_t count,
                                              float* result, const Rows* next) {
  PanelGroup panel[kExpertOutputs / kPanelWidth][kCodedDepth];
  for (int64_t g = 0; g < rows.groups; g += kCodedDepth) {
    const int64_t depth = smaller(rows.groups - g, kCodedDepth);
    const bool is_last = g + kCodedDepth >= rows.groups;
    for (int64_t o = first; o < last; o += kPanelWidth) {
      pack_codes(rows, o, g, depth, panel[(o - first) / kPanelWidth]);
    }
    for (int64_t i = 0, n; i < count; i += n) {
      n = next_tile(count - i, kCodedRows);
      // the memory's latency hides behind the products, a share of the rows with each tile
      const int64_t from = first + i * (last - first) / count;
      const int64_t to = first + (i + n) * (last - first) / count;
      if (!is_last) {
        fetch(rows, from, to, g + kCodedDepth);
      } else if (next) {
        fetch(*next, from, to, 0);
      }
      for (int64_t o = first; o < last; o += kPanelWidth) {
        coded_rows<kCodedRows>(x + i, n, g, panel[(o - first) / kPanelWidth], depth,
                               result + i * kExpertOutputs + o - first, g > 0);
      }
    }
  }
}

#endif

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

// Products of float rows with rows of MXFP4: straight from the registers, or through panels.
//
// Like lanes.h: every level gets its private copy (anonymous namespace). Inputs are permuted as
// fp4.h says and padded to whole blocks.
#pragma once

#include <stdint.h>
#include <string.h>

#include "fp4.h"
#include "gemm.h"
#include "lanes.h"
#include "moe.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kPanelDepth = 2 * kBlock;
// what is read so much later is fetched
constexpr int64_t kPrefetchBytes = 8192;
constexpr int kMaxGroup = 8;

MOONLET_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MOONLET_INLINE int64_t padded(int64_t size) { return (size + kBlock - 1) / kBlock * kBlock; }

// The order of elements that the products read, zeros up to whole blocks.
MOONLET_INLINE void permute_row(const float* x, int64_t size, float* row) {
  const int64_t whole = size / kBlock * kBlock;
  for (int64_t b = 0; b < whole; b += kBlock) {
    for (int64_t i = 0; i < kPartSize; ++i) {
      for (int64_t j = 0; j < kParts; ++j) row[b + j * kPartSize + i] = x[b + i * kParts + j];
    }
  }
  memset(row + whole, 0, (padded(size) - whole) * sizeof(float));
  for (int64_t k = whole; k < size; ++k) row[permuted(k)] = x[k];
}

// Rows of one matrix.
struct Rows {
  const uint8_t* packed;
  const uint8_t* scale;
  int64_t groups;

  const uint8_t* codes(int64_t row) const { return packed + row * groups * kGroupBytes; }
  const uint8_t* scales(int64_t row) const { return scale + row * groups; }
};

// Where reading goes on after the last row of a range.
struct Then {
  Rows rows;
  int64_t row;
};

// How far from the rows of a tile those lie that are read so much later.
struct Distance {
  int64_t codes, scales;
};

// Rows [row, last) are read, then what `then` says, or what another thread may take where it is null:
// that is not fetched here.
MOONLET_INLINE Distance distance_of(const Rows& rows, int64_t row, int64_t last, const Then* then) {
  const int64_t there = row + kPrefetchBytes / (rows.groups * kGroupBytes) + 1;
  if (there < last) {
    return {(there - row) * rows.groups * kGroupBytes, (there - row) * rows.groups};
  }
  if (!then) return {0, 0};
  const int64_t at = then->row + there - last;
  return {then->rows.codes(at) - rows.codes(row), then->rows.scales(at) - rows.scales(row)};
}

MOONLET_INLINE Rows rows_of(const ExpertMatrix& matrix, int64_t expert, int64_t outputs,
                            int64_t size) {
  const int64_t groups = size / 32;
  return {matrix.packed + expert * outputs * groups * kGroupBytes,
          matrix.scale + expert * outputs * groups, groups};
}

#if defined(__AVX512F__)

// One part of a block for N weight rows and M input rows.
template <int J, int N, int M>
MOONLET_INLINE void add_part(const RawBlock (&raw)[N], const Lanes (&scale)[N], Lanes values,
                             const float* const* x, int64_t at, Lanes (&sum)[N][M]) {
  Lanes w[N];
  for (int n = 0; n < N; ++n) w[n] = block_part<J>(raw[n], values) * scale[n];
  for (int m = 0; m < M; ++m) {
    const Lanes v = load(x[m] + at + J * kLanes);
    for (int n = 0; n < N; ++n) sum[n][m] += w[n] * v;
  }
}

// The same for one input row: the scale is applied to the sum of the block.
template <int J, int N>
MOONLET_INLINE void add_single(const RawBlock (&raw)[N], Lanes values, const float* x,
                               Lanes (&sum)[N]) {
  const Lanes v = load(x + J * kLanes);
  for (int n = 0; n < N; ++n) sum[n] += block_part<J>(raw[n], values) * v;
}

// Adds one block of N weight rows; kGroups is four, or zero where `groups` says how many.
template <int N, int M, int kGroups>
MOONLET_INLINE void add_block(const uint8_t* const* codes, const uint8_t* const* scales, int64_t g,
                              int64_t groups, const float* const* x, Lanes values,
                              int64_t distance, Lanes (&sum)[N][M]) {
  const int64_t count = kGroups ? kGroups : groups, at = g * 32;
  RawBlock raw[N];
  Lanes scale[N];
  for (int n = 0; n < N; ++n) {
    __builtin_prefetch(codes[n] + g * kGroupBytes + distance, 0, 2);
    raw[n] = load_block(codes[n] + g * kGroupBytes, count);
    scale[n] = load_scales(scales[n] + g, count);
  }
  if constexpr (M == 1) {
    Lanes part[N] = {};
    add_single<0>(raw, values, x[0] + at, part);
    add_single<1>(raw, values, x[0] + at, part);
    add_single<2>(raw, values, x[0] + at, part);
    add_single<3>(raw, values, x[0] + at, part);
    add_single<4>(raw, values, x[0] + at, part);
    add_single<5>(raw, values, x[0] + at, part);
    add_single<6>(raw, values, x[0] + at, part);
    add_single<7>(raw, values, x[0] + at, part);
    for (int n = 0; n < N; ++n) sum[n][0] += part[n] * scale[n];
  } else {
    add_part<0>(raw, scale, values, x, at, sum);
    add_part<1>(raw, scale, values, x, at, sum);
    add_part<2>(raw, scale, values, x, at, sum);
    add_part<3>(raw, scale, values, x, at, sum);
    add_part<4>(raw, scale, values, x, at, sum);
    add_part<5>(raw, scale, values, x, at, sum);
    add_part<6>(raw, scale, values, x, at, sum);
    add_part<7>(raw, scale, values, x, at, sum);
  }
}

// result[n * stride + m] = <row first + n, x[m]>.
template <int N, int M>
MOONLET_INLINE void dot_tile(const Rows& rows, int64_t first, const float* const* x, float* result,
                             int64_t stride, const Distance& distance) {
  const Lanes values = code_values();
  const uint8_t *codes[N], *scales[N];
  for (int n = 0; n < N; ++n) {
    codes[n] = rows.codes(first + n);
    scales[n] = rows.scales(first + n);
    // a row of scales is a line or two, which no pattern of addresses announces in time
    __builtin_prefetch(scales[n] + distance.scales, 0, 2);
  }
  Lanes sum[N][M] = {};
  int64_t g = 0;
  for (; g + kGroupsPerBlock <= rows.groups; g += kGroupsPerBlock) {
    add_block<N, M, kGroupsPerBlock>(codes, scales, g, 0, x, values, distance.codes, sum);
  }
  if (g < rows.groups) {
    add_block<N, M, 0>(codes, scales, g, rows.groups - g, x, values, distance.codes, sum);
  }
  for (int n = 0; n < N; ++n) {
    for (int m = 0; m < M; ++m) result[n * stride + m] = total(sum[n][m]);
  }
}

#else

// result[n * stride + m] = <row first + n, x[m]>.
template <int N, int M>
MOONLET_INLINE void dot_tile(const Rows& rows, int64_t first, const float* const* x, float* result,
                             int64_t stride, const Distance&) {
  float block[kBlock];
  for (int n = 0; n < N; ++n) {
    Lanes sum[M] = {};
    for (int64_t g = 0; g < rows.groups; g += kGroupsPerBlock) {
      decode_block(rows.codes(first + n) + g * kGroupBytes, rows.scales(first + n) + g,
                   rows.groups - g, block);
      for (int64_t k = 0; k < kBlock; k += kLanes) {
        const Lanes w = load(block + k);
        for (int m = 0; m < M; ++m) sum[m] += w * load(x[m] + g * 32 + k);
      }
    }
    for (int m = 0; m < M; ++m) result[n * stride + m] = total(sum[m]);
  }
}

#endif

template <int N, int M>
void dot_rows(const Rows& rows, int64_t first, int64_t last, const float* const* x, float* result,
              int64_t stride, const Then* then) {
  int64_t r = first;
  for (; r + N <= last; r += N) {
    dot_tile<N, M>(rows, r, x, result + (r - first) * stride, stride,
                   distance_of(rows, r, last, then));
  }
  for (; r < last; ++r) {
    dot_tile<1, M>(rows, r, x, result + (r - first) * stride, stride,
                   distance_of(rows, r, last, then));
  }
}

// result[(row - first) * stride + m] for up to eight input rows; `then` may be null.
void dot_group(const Rows& rows, int64_t first, int64_t last, const float* const* x, int64_t count,
               float* result, int64_t stride, const Then* then) {
  int64_t m = 0;
  if (count == kMaxGroup) {
    dot_rows<2, 8>(rows, first, last, x, result, stride, then);
    m = kMaxGroup;
  }
  for (; m + 4 <= count; m += 4) dot_rows<4, 4>(rows, first, last, x + m, result + m, stride, then);
  for (; m + 2 <= count; m += 2) dot_rows<4, 2>(rows, first, last, x + m, result + m, stride, then);
  if (m < count) dot_rows<4, 1>(rows, first, last, x + m, result + m, stride, then);
}

#if defined(__AVX512F__)

// Part J of sixteen rows, transposed into half a panel.
template <int J>
MOONLET_INLINE void pack_part(const RawBlock (&raw)[16], const Lanes (&scale)[16], Lanes values,
                              float* panel) {
  Lanes v[16];
  for (int i = 0; i < 16; ++i) v[i] = block_part<J>(raw[i], values) * scale[i];
  transpose_16(v);
  for (int i = 0; i < 16; ++i) store(panel + (J * kLanes + i) * kPanelWidth, v[i]);
}

// panel[k][0..31] of rows [first, last) at one block, k in permuted order, zeros for absent rows.
MOONLET_INLINE void pack_block(const Rows& rows, int64_t first, int64_t last, int64_t g,
                               float* panel) {
  const Lanes values = code_values();
  const int64_t groups = rows.groups - g;
  for (int64_t half = 0; half < kPanelWidth; half += kLanes) {
    RawBlock raw[16];
    Lanes scale[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t row = smaller(first + half + i, last - 1);
      raw[i] = load_block(rows.codes(row) + g * kGroupBytes, groups);
      scale[i] = first + half + i < last ? load_scales(rows.scales(row) + g, groups) : Lanes{};
    }
    pack_part<0>(raw, scale, values, panel + half);
    pack_part<1>(raw, scale, values, panel + half);
    pack_part<2>(raw, scale, values, panel + half);
    pack_part<3>(raw, scale, values, panel + half);
    pack_part<4>(raw, scale, values, panel + half);
    pack_part<5>(raw, scale, values, panel + half);
    pack_part<6>(raw, scale, values, panel + half);
    pack_part<7>(raw, scale, values, panel + half);
  }
}

#else

// panel[k][o] of rows [first, last) at one block, k in permuted order, zeros for absent rows.
MOONLET_INLINE void pack_block(const Rows& rows, int64_t first, int64_t last, int64_t g,
                               float* panel) {
  float block[kBlock] = {};
  for (int64_t o = 0; o < kPanelWidth; ++o) {
    if (first + o < last) {
      decode_block(rows.codes(first + o) + g * kGroupBytes, rows.scales(first + o) + g,
                   rows.groups - g, block);
    } else {
      memset(block, 0, sizeof(block));
    }
    for (int64_t k = 0; k < kBlock; ++k) panel[k * kPanelWidth + o] = block[k];
  }
}

#endif

// result[i * stride + (0 .. 63)] = <row first + o, x[i]> for many input rows; outputs beyond `last`
// are zeros.
__attribute__((noinline)) void multiply_many(const Rows& rows, int64_t first, int64_t last,
                                             const float* const* x, int64_t count, float* result,
                                             int64_t stride) {
  alignas(64) float panel[kPanelDepth * kExpertOutputs];
  alignas(64) float tile[kTileRows * kPanelDepth];
  const int64_t depth = padded(rows.groups * 32);
  for (int64_t k = 0; k < depth; k += kPanelDepth) {
    const int64_t part = smaller(depth - k, kPanelDepth);
    for (int64_t o = 0; o < kExpertOutputs; o += kPanelWidth) {
      for (int64_t b = 0; b < part; b += kBlock) {
        pack_block(rows, first + o, last, (k + b) / 32,
                   panel + o * kPanelDepth + b * kPanelWidth);
      }
    }
    for (int64_t i = 0, n; i < count; i += n) {
      n = next_tile(count - i, kTileRows);
      for (int64_t r = 0; r < n; ++r) memcpy(tile + r * kPanelDepth, x[i + r] + k, part * 4);
      for (int64_t o = 0; o < kExpertOutputs; o += kPanelWidth) {
        panel_rows(tile, kPanelDepth, panel + o * kPanelDepth, part, result + i * stride + o, stride,
                   n, k > 0);
      }
    }
  }
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

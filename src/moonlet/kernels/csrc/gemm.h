// A register-tiled product of float rows with a packed panel of weights, and the packing's transpose.
//
// Like lanes.h: every level gets its private copy (anonymous namespace). Include after lanes.h,
// inside a file that is compiled once per level.
//
//   y[rows][W] (+)= x[rows][depth] panel[depth][W]
//
// A panel holds W output columns, two vectors, depth-major, so that a step of the depth is two vector loads
// shared by all rows of the tile; the x values are broadcast from memory.
#pragma once

#include <stdint.h>
#include <string.h>

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kPanelWidth = 2 * kLanes;

// Rows of the largest tile: with its two panel vectors it fills the registers of the level.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// Rows of the next tile where `left` are left: all that fit, but the last two tiles share evenly,
// since the sums of a small tile wait for each other.
MOONLET_INLINE int64_t next_tile(int64_t left, int64_t most) {
  return left >= 2 * most ? most : left > most ? (left + 1) / 2 : left;
}

template <int M>
MOONLET_INLINE void panel_tile(const float* x, int64_t ldx, const float* panel, int64_t depth,
                               float* y, int64_t ldy, bool adds) {
  Lanes sum[M][2];
  for (int i = 0; i < M; ++i) {
    sum[i][0] = adds ? load(y + i * ldy) : Lanes{};
    sum[i][1] = adds ? load(y + i * ldy + kLanes) : Lanes{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Lanes w0 = load(panel + k * kPanelWidth), w1 = load(panel + k * kPanelWidth + kLanes);
    for (int i = 0; i < M; ++i) {
      const float v = x[i * ldx + k];
      sum[i][0] += v * w0;
      sum[i][1] += v * w1;
    }
  }
  for (int i = 0; i < M; ++i) {
    store(y + i * ldy, sum[i][0]);
    store(y + i * ldy + kLanes, sum[i][1]);
  }
}

template <int M>
MOONLET_INLINE void panel_rows_up_to(const float* x, int64_t ldx, const float* panel, int64_t depth,
                                     float* y, int64_t ldy, int64_t rows, bool adds) {
  if (rows == M) {
    panel_tile<M>(x, ldx, panel, depth, y, ldy, adds);
  } else if constexpr (M > 1) {
    panel_rows_up_to<M - 1>(x, ldx, panel, depth, y, ldy, rows, adds);
  }
}

// y[rows][W] (+)= x panel for one to kTileRows rows.
__attribute__((noinline)) void panel_rows(const float* x, int64_t ldx, const float* panel,
                                          int64_t depth, float* y, int64_t ldy, int64_t rows,
                                          bool adds) {
  panel_rows_up_to<kTileRows>(x, ldx, panel, depth, y, ldy, rows, adds);
}

#if defined(__AVX512F__)

// Exchanges rows i, i + S at the lanes that differ in bit S.
template <int S>
MOONLET_INLINE void exchange(Lanes (&v)[16]) {
  IntLanes low, high;
  for (int lane = 0; lane < 16; ++lane) {
    low[lane] = (lane & S) ? 16 + lane - S : lane;
    high[lane] = (lane & S) ? 16 + lane : lane + S;
  }
  for (int i = 0; i < 16; ++i) {
    if (i & S) continue;
    const Lanes a = v[i], b = v[i + S];
    v[i] = __builtin_shuffle(a, b, low);
    v[i + S] = __builtin_shuffle(a, b, high);
  }
}

// v[i][j] becomes v[j][i].
MOONLET_INLINE void transpose_16(Lanes (&v)[16]) {
  exchange<8>(v);
  exchange<4>(v);
  exchange<2>(v);
  exchange<1>(v);
}

#endif

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

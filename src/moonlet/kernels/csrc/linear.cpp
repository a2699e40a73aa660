// y = x W^T for weights as they are stored: float32, bfloat16 or int8 with a scale per output.
//
// Few rows: every weight is read once from memory and widened in registers; the sum runs over
// the lanes of a vector along the input axis. Many rows: blocks of the weight are widened and transposed once
// into panels (gemm.h). In both, an output depends on its own row and weights only, summed in one
// order, whatever the pieces that threads take.
#include "linear.h"

#include "gemm.h"
#include "lanes.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kPanelDepth = 256;
// outputs that four rows share: an input vector is loaded once for all of them
constexpr int kStreamedTile = 6;

MOONLET_INLINE Lanes widen(const float* p) { return load(p); }

#if defined(__AVX512F__)

MOONLET_INLINE Lanes widen(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<Lanes>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

MOONLET_INLINE Lanes widen(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}

#else  // the compiler splits these well for narrower registers

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint32_t WordLanes __attribute__((vector_size(4 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

MOONLET_INLINE Lanes widen(const uint16_t* p) {
  Halves halves;
  memcpy(&halves, p, sizeof(halves));
  return reinterpret_cast<Lanes>(__builtin_convertvector(halves, WordLanes) << 16);
}

MOONLET_INLINE Lanes widen(const int8_t* p) {
  Bytes bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, Lanes);
}

#endif

// The first `count` < kLanes values, zeros beyond.
template <typename T>
MOONLET_INLINE Lanes widen_part(const T* p, int64_t count) {
  T values[kLanes] = {};
  memcpy(values, p, count * sizeof(T));
  return widen(values);
}

// Which rows of the tile after next a pass over the tile fetches: every `step`-th from `first`, so
// that all passes load the memory evenly.
struct Ahead {
  int first, step;
};

// N outputs of R rows.
template <typename T, int N, int R>
MOONLET_INLINE void stream_tile(const float* x, int64_t ldx, const T* w, int64_t depth,
                                const float* scale, float* y, int64_t ldy, Ahead ahead) {
  constexpr int64_t kStep = kCacheLine / sizeof(T);
  Lanes sum[N][R] = {};
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
    for (int n = ahead.first; n < N; n += ahead.step) {
      __builtin_prefetch(w + (n + 2 * N) * depth + k, 0, 2);
    }
    for (int64_t u = 0; u < kStep; u += kLanes) {
      Lanes xs[R];
      for (int r = 0; r < R; ++r) xs[r] = load(x + r * ldx + k + u);
      for (int n = 0; n < N; ++n) {
        const Lanes wide = widen(w + n * depth + k + u);
        for (int r = 0; r < R; ++r) sum[n][r] += wide * xs[r];
      }
    }
  }
  for (; k < depth; k += kLanes) {
    const int64_t count = depth - k < kLanes ? depth - k : kLanes;
    for (int n = 0; n < N; ++n) {
      const Lanes wide = widen_part(w + n * depth + k, count);
      for (int r = 0; r < R; ++r) sum[n][r] += wide * widen_part(x + r * ldx + k, count);
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int r = 0; r < R; ++r) {
      const float value = total(sum[n][r]);
      y[r * ldy + n] = scale ? value * scale[n] : value;
    }
  }
}

template <typename T, int N, int R>
void stream_outputs(const float* x, const T* weight, const float* scale, float* y,
                    const LinearShape& shape, int64_t first, int64_t last, Ahead ahead) {
  int64_t o = first;
  for (; o + N <= last; o += N) {
    stream_tile<T, N, R>(x, shape.x_stride, weight + o * shape.size_in, shape.size_in,
                         scale ? scale + o : nullptr, y + o, shape.y_stride, ahead);
  }
  for (; o < last; ++o) {
    stream_tile<T, 1, R>(x, shape.x_stride, weight + o * shape.size_in, shape.size_in,
                         scale ? scale + o : nullptr, y + o, shape.y_stride, ahead);
  }
}

// Outputs [first, last), all rows: groups of up to four rows over a few outputs at a time, so that
// the next group finds the weights in the cache.
template <typename T>
void streamed(const float* x, const void* weight, const void* scales, float* y,
              const LinearShape& shape, int64_t first, int64_t last) {
  const T* w = static_cast<const T*>(weight);
  const float* scale = static_cast<const float*>(scales);
  const int64_t step = shape.num_rows > 4 ? kStreamedTile : last - first;
  const int passes = static_cast<int>((shape.num_rows + 3) / 4);
  for (int64_t o = first; o < last; o += step) {
    const int64_t end = o + step < last ? o + step : last;
    int64_t r = 0;
    while (r < shape.num_rows) {
      const float* xr = x + r * shape.x_stride;
      float* yr = y + r * shape.y_stride;
      const int64_t left = shape.num_rows - r;
      const Ahead ahead = {static_cast<int>(r / 4), passes};
      if (left >= 4) {
        stream_outputs<T, kStreamedTile, 4>(xr, w, scale, yr, shape, o, end, ahead);
        r += 4;
      } else if (left >= 2) {
        stream_outputs<T, 4, 2>(xr, w, scale, yr, shape, o, end, ahead);
        r += 2;
      } else {
        stream_outputs<T, 4, 1>(xr, w, scale, yr, shape, o, end, ahead);
        r += 1;
      }
    }
  }
}

// panel[k][o] = w[o][k] for k in [0, depth), zeros for outputs that do not exist.
template <typename T>
void pack_panel(const T* w, int64_t ldw, int64_t outputs, int64_t depth, float* panel) {
  for (int64_t half = 0; half < kPanelWidth; half += kLanes) {
    const int64_t count = outputs - half < kLanes ? outputs - half : kLanes;
    int64_t k = 0;
#if defined(__AVX512F__)
    for (; count == kLanes && k + kLanes <= depth; k += kLanes) {
      Lanes v[16];
      for (int i = 0; i < 16; ++i) v[i] = widen(w + (half + i) * ldw + k);
      transpose_16(v);
      for (int i = 0; i < 16; ++i) store(panel + (k + i) * kPanelWidth + half, v[i]);
    }
#endif
    for (; k < depth; k += kLanes) {
      const int64_t part = depth - k < kLanes ? depth - k : kLanes;
      for (int64_t i = 0; i < kLanes; ++i) {
        const Lanes v = i < count ? widen_part(w + (half + i) * ldw + k, part) : Lanes{};
        for (int64_t j = 0; j < part; ++j) panel[(k + j) * kPanelWidth + half + i] = v[j];
      }
    }
  }
}

// The same where only `columns` < W outputs exist in y: the tile goes through a buffer.
void panel_rows_partial(const float* x, int64_t ldx, const float* panel, int64_t depth, float* y,
                        int64_t ldy, int64_t rows, int64_t columns, bool adds) {
  float buffer[kTileRows * kPanelWidth];
  for (int64_t i = 0; i < rows; i += kTileRows) {
    const int64_t count = rows - i < kTileRows ? rows - i : kTileRows;
    memset(buffer, 0, sizeof(buffer));
    for (int64_t r = 0; adds && r < count; ++r) {
      memcpy(buffer + r * kPanelWidth, y + (i + r) * ldy, columns * sizeof(float));
    }
    panel_rows(x + i * ldx, ldx, panel, depth, buffer, kPanelWidth, count, adds);
    for (int64_t r = 0; r < count; ++r) {
      memcpy(y + (i + r) * ldy, buffer + r * kPanelWidth, columns * sizeof(float));
    }
  }
}

template <typename T>
void packed(const float* x, const void* weight, const void* scales, float* y,
            const LinearShape& shape, int64_t first, int64_t last) {
  const T* w = static_cast<const T*>(weight);
  const float* scale = static_cast<const float*>(scales);
  alignas(64) float panel[kPanelDepth * kPackedOutputs];
  for (int64_t k = 0; k < shape.size_in; k += kPanelDepth) {
    const int64_t depth = shape.size_in - k < kPanelDepth ? shape.size_in - k : kPanelDepth;
    for (int64_t o = first; o < last; o += kPanelWidth) {
      float* place = panel + (o - first) * kPanelDepth;
      pack_panel(w + o * shape.size_in + k, shape.size_in, last - o, depth, place);
    }
    for (int64_t t = 0, rows; t < shape.num_rows; t += rows) {
      rows = next_tile(shape.num_rows - t, kTileRows);
      const float* xt = x + t * shape.x_stride + k;
      for (int64_t o = first; o < last; o += kPanelWidth) {
        const float* place = panel + (o - first) * kPanelDepth;
        float* yt = y + t * shape.y_stride + o;
        if (last - o >= kPanelWidth) {
          panel_rows(xt, shape.x_stride, place, depth, yt, shape.y_stride, rows, k > 0);
        } else {
          panel_rows_partial(xt, shape.x_stride, place, depth, yt, shape.y_stride, rows, last - o,
                             k > 0);
        }
      }
    }
  }
  for (int64_t t = 0; scale && t < shape.num_rows; ++t) {
    for (int64_t o = first; o < last; ++o) y[t * shape.y_stride + o] *= scale[o];
  }
}

}  // namespace

extern const LinearTable linear_table;
const LinearTable linear_table = {
    {streamed<float>, streamed<uint16_t>, streamed<int8_t>},
    {packed<float>, packed<uint16_t>, packed<int8_t>},
};

}  // namespace MOONLET_ISA
}  // namespace moonlet

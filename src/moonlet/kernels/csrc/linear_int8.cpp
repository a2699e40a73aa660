// y = x W^T in integers: int8 weights with a scale per output, inputs in int8 groups of 32.
//
// Weights lie in panels of sixteen outputs, four inputs of each side by side, as unsigned bytes 128
// above their value: what the VNNI instruction reads, whatever the number of rows, with nothing to
// repack. The sum of a group is an exact integer; it becomes float32, is multiplied by the step of
// the group and added in the order of groups. Every row takes that one order, alone or among
// others, so its result does not depend on them.
#include "lanes.h"
#include "linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int kQuads = 8;  // of inputs in a group
constexpr int64_t kPanelBytes = kQuads * 4 * kInt8Outputs;
// groups of smaller steps become zeros: the inverse may leave float32
constexpr float kSmallestStep = 0x1p-126f;

MOONLET_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MOONLET_INLINE int64_t int8_groups(int64_t size) { return (size + kInt8Group - 1) / kInt8Group; }

// Codes a group with the bits of kernels/int8_groups.py.
void code_group(const float* x, Int8Group* out) {
  // as integers, so that a NaN is larger than everything
  IntLanes most = {};
  for (int64_t k = 0; k < kInt8Group; k += kLanes) {
    const IntLanes bits = reinterpret_cast<IntLanes>(magnitude(load(x + k)));
    most = bits > most ? bits : most;
  }
  int32_t bits = 0;
  for (int64_t i = 0; i < kLanes; ++i) bits = most[i] > bits ? most[i] : bits;
  if (bits >= 0x7F800000) {
    memset(out, 0, sizeof(*out));
    out->step = __builtin_nanf("");
    return;
  }
  float largest;
  memcpy(&largest, &bits, sizeof(largest));
  const float step = largest * (1.0f / 127.0f);
  const float inverse = step >= kSmallestStep ? 1.0f / step : 0.0f;
  const Lanes limit = fill(127.0f);
  int32_t codes[kInt8Group], sum = 0;
  for (int64_t k = 0; k < kInt8Group; k += kLanes) {
    Lanes y = load(x + k) * inverse;
    y = choose(y > limit, limit, y);
    y = choose(y < -limit, -limit, y);
    // adding 1.5 * 2^23 rounds to an integer, which the low bits then hold
    const IntLanes shifted = reinterpret_cast<IntLanes>(y + 12582912.0f) - 0x4B400000;
    memcpy(codes + k, &shifted, sizeof(shifted));
  }
  for (int64_t k = 0; k < kInt8Group; ++k) {
    out->codes[k] = static_cast<int8_t>(codes[k]);
    sum += codes[k];
  }
  out->step = step;
  out->start = -128 * sum;
}

void prepare(const float* x, Int8Group* codes, const LinearShape& shape, int64_t first,
             int64_t last) {
  const int64_t groups = int8_groups(shape.size_in), whole = shape.size_in / kInt8Group;
  for (int64_t r = first; r < last; ++r) {
    const float* row = x + r * shape.x_stride;
    for (int64_t g = 0; g < whole; ++g) code_group(row + g * kInt8Group, codes + r * groups + g);
    if (whole == groups) continue;
    float part[kInt8Group] = {};
    memcpy(part, row + whole * kInt8Group, (shape.size_in - whole * kInt8Group) * sizeof(float));
    code_group(part, codes + r * groups + whole);
  }
}

// Rows [first, first + count) of the codes, groups [first_group, first_group + depth) of panels.
struct Block {
  const Int8Group* x;
  const uint8_t* panels;
  int64_t groups, depth;  // from row to row and from panel to panel; to be added
};

// What happens to the sums: whether they continue, and the scales when they are complete.
struct Sums {
  float* y;
  int64_t stride;
  const float* scale;  // null while groups are left
  bool adds;
};

#if defined(__AVX512VNNI__)

// with two panels: twelve integer sums, twelve float sums, and their operands
constexpr int kRows = 6;
constexpr int64_t kPrefetchBytes = 4096;

MOONLET_INLINE __mmask16 mask_of(int64_t outputs) {
  return outputs >= kInt8Outputs ? 0xFFFF : static_cast<__mmask16>((1u << outputs) - 1);
}

// M rows by P panels, of which `outputs` outputs exist.
template <int M, int P>
MOONLET_INLINE void tile(const Block& block, const Sums& sums, int64_t outputs) {
  __m512 sum[M][P];
  for (int i = 0; i < M; ++i) {
    for (int p = 0; p < P; ++p) {
      const float* y = sums.y + i * sums.stride + p * kInt8Outputs;
      sum[i][p] = sums.adds ? _mm512_maskz_loadu_ps(mask_of(outputs - p * kInt8Outputs), y)
                            : _mm512_setzero_ps();
    }
  }
  for (int64_t g = 0; g < block.depth; ++g) {
    __m512i part[M][P];
    for (int i = 0; i < M; ++i) {
      const __m512i start = _mm512_set1_epi32(block.x[i * block.groups + g].start);
      for (int p = 0; p < P; ++p) part[i][p] = start;
    }
    const uint8_t* w = block.panels + g * kPanelBytes;
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      __m512i weight[P];
      for (int p = 0; p < P; ++p) {
        const uint8_t* place = w + p * block.groups * kPanelBytes + q * 64;
        weight[p] = _mm512_loadu_si512(place);
        __builtin_prefetch(place + kPrefetchBytes, 0, 2);
      }
      for (int i = 0; i < M; ++i) {
        int32_t quad;
        memcpy(&quad, block.x[i * block.groups + g].codes + 4 * q, sizeof(quad));
        const __m512i v = _mm512_set1_epi32(quad);
        for (int p = 0; p < P; ++p) part[i][p] = _mm512_dpbusd_epi32(part[i][p], weight[p], v);
      }
    }
    for (int i = 0; i < M; ++i) {
      const __m512 step = _mm512_set1_ps(block.x[i * block.groups + g].step);
      for (int p = 0; p < P; ++p) {
        sum[i][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[i][p]), step, sum[i][p]);
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    const __mmask16 mask = mask_of(outputs - p * kInt8Outputs);
    for (int i = 0; i < M; ++i) {
      if (sums.scale) {
        sum[i][p] *= _mm512_maskz_loadu_ps(mask, sums.scale + p * kInt8Outputs);
      }
      _mm512_mask_storeu_ps(sums.y + i * sums.stride + p * kInt8Outputs, mask, sum[i][p]);
    }
  }
}

// The same for one to M rows.
template <int M>
MOONLET_INLINE void rows_of_tile(const Block& block, const Sums& sums, int64_t rows,
                                 int64_t outputs) {
  if (rows == M) {
    if (M == 1 || outputs <= kInt8Outputs) {
      tile<M, 1>(block, sums, outputs);
    } else {
      tile<M, 2>(block, sums, outputs);
    }
  } else if constexpr (M > 1) {
    rows_of_tile<M - 1>(block, sums, rows, outputs);
  }
}

// A row alone takes its panels one after the other, which is the order of the memory.
MOONLET_INLINE int64_t outputs_of_tile(int64_t rows) {
  return rows == 1 ? kInt8Outputs : 2 * kInt8Outputs;
}

#else

constexpr int kRows = 6;

// Exact sums of a group for sixteen outputs.
MOONLET_INLINE void add_group(const Int8Group& x, const uint8_t* w, int32_t* part) {
#if defined(__AVX2__)
  // four outputs a vector, two halves of each
  __m256i sum[4] = {};
  for (int q = 0; q < kQuads; ++q) {
    int32_t quad;
    memcpy(&quad, x.codes + 4 * q, sizeof(quad));
    const __m256i v = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(quad)));
    for (int n = 0; n < 4; ++n) {
      const __m128i bytes =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + q * 64 + n * 16));
      sum[n] = _mm256_add_epi32(sum[n], _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes), v));
    }
  }
  for (int n = 0; n < 4; ++n) {
    int32_t halves[8];
    memcpy(halves, &sum[n], sizeof(halves));
    for (int i = 0; i < 4; ++i) part[4 * n + i] = x.start + halves[2 * i] + halves[2 * i + 1];
  }
#else
  for (int o = 0; o < kInt8Outputs; ++o) part[o] = x.start;
  for (int q = 0; q < kQuads; ++q) {
    for (int o = 0; o < kInt8Outputs; ++o) {
      const uint8_t* four = w + q * 64 + 4 * o;
      for (int j = 0; j < 4; ++j) part[o] += four[j] * x.codes[4 * q + j];
    }
  }
#endif
}

void rows_of_panel(const Block& block, const Sums& sums, int64_t rows, int64_t outputs) {
  const int64_t count = smaller(outputs, kInt8Outputs);
  for (int64_t i = 0; i < rows; ++i) {
    float sum[kInt8Outputs] = {};
    float* y = sums.y + i * sums.stride;
    for (int64_t o = 0; sums.adds && o < count; ++o) sum[o] = y[o];
    for (int64_t g = 0; g < block.depth; ++g) {
      const Int8Group& group = block.x[i * block.groups + g];
      int32_t part[kInt8Outputs];
      add_group(group, block.panels + g * kPanelBytes, part);
      for (int o = 0; o < kInt8Outputs; ++o) sum[o] += static_cast<float>(part[o]) * group.step;
    }
    for (int64_t o = 0; o < count; ++o) y[o] = sums.scale ? sum[o] * sums.scale[o] : sum[o];
  }
}

template <int M>
MOONLET_INLINE void rows_of_tile(const Block& block, const Sums& sums, int64_t rows,
                                 int64_t outputs) {
  rows_of_panel(block, sums, rows, outputs);
}

MOONLET_INLINE int64_t outputs_of_tile(int64_t) { return kInt8Outputs; }

#endif

// Depth of a block in groups where several tiles of rows share it: two panels of it take a third of
// the first cache. Rows whose codes of a block stay in the second cache.
constexpr int64_t kDepth = 16;
constexpr int64_t kBlockRows = 512;

void products(const Int8Group* codes, const uint8_t* panels, const float* scale, float* y,
              const LinearShape& shape, int64_t first, int64_t last) {
  const int64_t groups = int8_groups(shape.size_in);
  const int64_t step = outputs_of_tile(shape.num_rows);
  const int64_t most = shape.num_rows > kRows ? kDepth : groups;
  for (int64_t r = 0; r < shape.num_rows; r += kBlockRows) {
    const int64_t end = smaller(r + kBlockRows, shape.num_rows);
    for (int64_t g = 0; g < groups; g += most) {
      const int64_t depth = smaller(most, groups - g);
      const float* scales = g + depth == groups ? scale : nullptr;
      for (int64_t o = first; o < last; o += step) {
        const uint8_t* place = panels + (o / kInt8Outputs * groups + g) * kPanelBytes;
        for (int64_t t = r, count; t < end; t += count) {
          count = smaller(kRows, end - t);
          // the last two tiles share evenly, since the sums of a small one wait for each other
          if (end - t > kRows && end - t < 2 * kRows) count = (end - t + 1) / 2;
          const Block block = {codes + t * groups + g, place, groups, depth};
          const Sums sums = {y + t * shape.y_stride + o, shape.y_stride,
                             scales ? scales + o : nullptr, g > 0};
          rows_of_tile<kRows>(block, sums, count, smaller(step, last - o));
        }
      }
    }
  }
}

}  // namespace

extern const Int8LinearTable int8_linear_table;
const Int8LinearTable int8_linear_table = {prepare, products};

}  // namespace MOONLET_ISA
}  // namespace moonlet

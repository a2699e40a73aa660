// RMSNorm and the gated RMSNorm of rows of any size, one row after the other.
#include "norms.h"

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

MOONLET_INLINE Lanes load_some(const float* p, int64_t count) {
  Lanes v = {};
  memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
  return v;
}

// Four sums hide the latency of the additions.
MOONLET_INLINE float sum_of_squares(const float* x, int64_t size) {
  Lanes sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    for (int p = 0; p < 4; ++p) sum[p] += load(x + i + p * kLanes) * load(x + i + p * kLanes);
  }
  for (; i + kLanes <= size; i += kLanes) sum[0] += load(x + i) * load(x + i);
  if (i < size) {
    const Lanes last = load_some(x + i, size - i);
    sum[1] += last * last;
  }
  return total((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <bool gated>
MOONLET_INLINE void norm(const float* x, const float* weight, const float* gate, float* out,
                         int64_t rows, int64_t size, int64_t x_stride, float eps) {
  for (int64_t t = 0; t < rows; ++t, x += x_stride, out += size) {
    const float mean = sum_of_squares(x, size) / static_cast<float>(size);
    const float scale = 1.0f / __builtin_sqrtf(mean + eps);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const Lanes y = load(x + i) * scale * load(weight + i);
      store(out + i, gated ? y * logistic(load(gate + i)) : y);
    }
    if (i < size) {
      const int64_t left = size - i;
      Lanes y = load_some(x + i, left) * scale * load_some(weight + i, left);
      if (gated) y = y * logistic(load_some(gate + i, left));
      memcpy(out + i, &y, static_cast<size_t>(left) * sizeof(float));
    }
    if (gated) gate += size;
  }
}

void plain(const float* x, const float* weight, float* out, int64_t rows, int64_t size,
           int64_t x_stride, float eps) {
  norm<false>(x, weight, nullptr, out, rows, size, x_stride, eps);
}

void gated(const float* x, const float* weight, const float* gate, float* out, int64_t rows,
           int64_t size, float eps) {
  norm<true>(x, weight, gate, out, rows, size, size, eps);
}

}  // namespace

extern const NormTable norm_table;
const NormTable norm_table = {plain, gated};

}  // namespace MOONLET_ISA
}  // namespace moonlet

// y = x W^T for a matrix of packed MXFP4, with the products of the routed experts (fp4_rows.h).
//
// Few rows: codes are decoded in registers and multiplied at once. Many rows: blocks are decoded once
// into panels that all rows share. An output depends on its own row and weights only, whatever the
// pieces that threads take; a row alone sums in another order than one among several.
#include "fp4_rows.h"
#include "linear.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// rows that share one packing
constexpr int64_t kRowBatch = 512;
// outputs that several groups of rows take one after the other, so that the later ones find the codes
// in the first cache
constexpr int64_t kSharedOutputs = 8;

Rows rows_of(const void* weight, const void* scale, const LinearShape& shape) {
  return {static_cast<const uint8_t*>(weight), static_cast<const uint8_t*>(scale),
          shape.size_in / 32};
}

// Addresses of `count` prepared rows from `first` on.
MOONLET_INLINE void find_rows(const float* inputs, const LinearShape& shape, int64_t first,
                              int64_t count, const float** x) {
  for (int64_t m = 0; m < count; ++m) x[m] = inputs + (first + m) * padded(shape.size_in);
}

void prepare(const float* x, float* inputs, const LinearShape& shape, int64_t first,
             int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    permute_row(x + r * shape.x_stride, shape.size_in, inputs + r * padded(shape.size_in));
  }
}

void streamed(const float* inputs, const void* weight, const void* scale, float* y,
              const LinearShape& shape, int64_t first, int64_t last) {
  const Rows rows = rows_of(weight, scale, shape);
  const int64_t step = shape.num_rows > kMaxGroup ? kSharedOutputs : kExpertOutputs;
  float sums[kExpertOutputs * kMaxGroup];
  const float* x[kMaxGroup];
  for (int64_t o = first; o < last; o += step) {
    const int64_t end = smaller(o + step, last);
    const Then then = {rows, end};
    for (int64_t r = 0; r < shape.num_rows; r += kMaxGroup) {
      const int64_t count = smaller(shape.num_rows - r, kMaxGroup);
      find_rows(inputs, shape, r, count, x);
      dot_group(rows, o, end, x, count, sums, kMaxGroup, &then);
      for (int64_t m = 0; m < count; ++m) {
        float* row = y + (r + m) * shape.y_stride;
        for (int64_t i = o; i < end; ++i) row[i] = sums[(i - o) * kMaxGroup + m];
      }
    }
  }
}

void packed(const float* inputs, const void* weight, const void* scale, float* y,
            const LinearShape& shape, int64_t first, int64_t last) {
  const Rows rows = rows_of(weight, scale, shape);
  // for outputs that are no whole piece: the products write all of it
  float piece[kRowBatch * kExpertOutputs];
  const float* x[kRowBatch];
  for (int64_t o = first; o < last; o += kExpertOutputs) {
    const int64_t end = smaller(o + kExpertOutputs, last);
    for (int64_t r = 0; r < shape.num_rows; r += kRowBatch) {
      const int64_t count = smaller(shape.num_rows - r, kRowBatch);
      find_rows(inputs, shape, r, count, x);
      float* place = y + r * shape.y_stride + o;
      if (end - o == kExpertOutputs) {
        multiply_many(rows, o, end, x, count, place, shape.y_stride);
        continue;
      }
      multiply_many(rows, o, end, x, count, piece, kExpertOutputs);
      for (int64_t m = 0; m < count; ++m) {
        memcpy(place + m * shape.y_stride, piece + m * kExpertOutputs, (end - o) * sizeof(float));
      }
    }
  }
}

}  // namespace

extern const Fp4LinearTable fp4_linear_table;
const Fp4LinearTable fp4_linear_table = {prepare, streamed, packed};

}  // namespace MOONLET_ISA
}  // namespace moonlet

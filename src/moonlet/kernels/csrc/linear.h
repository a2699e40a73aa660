// What one instruction-set level offers for products with weight matrices.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// The stored forms of a weight; values as in moonlet.h.
enum WeightType { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kMxfp4 = 3 };

// Row counts up to this are streamed (every weight read once per few rows), above it weights are
// packed into panels. The products of the routed experts take the same number of rows for MXFP4.
constexpr int64_t kMaxStreamedRows = 16;
constexpr int64_t kMaxStreamedFp4Rows = 24;
// Outputs that one packed product computes: one piece of work of a thread.
constexpr int64_t kPackedOutputs = 128;

struct LinearShape {
  int64_t num_rows, size_in, size_out, x_stride, y_stride;
};

// Both compute outputs [first, last) of y = x W^T. scale is float32, where given, and multiplies each
// output; of MXFP4 it is the bytes of the groups.
typedef void (*LinearRange)(const float* x, const void* weight, const void* scale, float* y,
                            const LinearShape& shape, int64_t first, int64_t last);

struct LinearTable {
  LinearRange streamed[3];
  LinearRange packed[3];
};

// MXFP4 reads rows of `inputs` [num_rows, size_in in whole blocks of 128] in place of x.
struct Fp4LinearTable {
  // Writes rows [first, last) of x to `inputs`, in the order of elements that the products read.
  void (*prepare)(const float* x, float* inputs, const LinearShape& shape, int64_t first,
                  int64_t last);
  LinearRange streamed, packed;
};

MOONLET_TABLE(LinearTable, linear_table)
MOONLET_TABLE(Fp4LinearTable, fp4_linear_table)

}  // namespace moonlet

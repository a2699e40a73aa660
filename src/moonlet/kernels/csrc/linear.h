// What one instruction-set level offers for products with weight matrices.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// The stored forms of a weight; values as in moonlet.h.
enum WeightType { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Row counts up to this are streamed (every weight read once per few rows), above it weights are
// packed into panels.
constexpr int64_t kMaxStreamedRows = 16;
// Outputs that one packed product computes: one piece of work of a thread.
constexpr int64_t kPackedOutputs = 128;

struct LinearShape {
  int64_t num_rows, size_in, size_out, x_stride, y_stride;
};

// Both compute outputs [first, last) of y = x W^T; scale, where given, multiplies each output.
typedef void (*LinearRange)(const float* x, const void* weight, const float* scale, float* y,
                            const LinearShape& shape, int64_t first, int64_t last);

struct LinearTable {
  LinearRange streamed[3];
  LinearRange packed[3];
};

MOONLET_TABLE(LinearTable, linear_table)

}  // namespace moonlet

// What one instruction-set level offers for products with weight matrices.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// The stored forms of a weight; values as in moonlet.h.
enum WeightType { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kMxfp4 = 3, kInt8Panels = 4 };

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

// Outputs of a panel of int8 weights, and inputs that share a step.
constexpr int64_t kInt8Outputs = 16;
constexpr int64_t kInt8Group = 32;

// A group of inputs in int8 (kernels/int8_groups.py).
struct Int8Group {
  int8_t codes[kInt8Group];
  float step;     // NaN where the group is not finite, with codes of zero
  int32_t start;  // -128 times the sum of the codes: panels hold weights 128 above their value
};

// Products of int8 weights in panels [outputs / 16][groups of inputs][8][16][4] with rows in groups;
// scales multiply each output.
struct Int8LinearTable {
  // Codes rows [first, last) of x; what is missing in the last group of a row counts as zero.
  void (*prepare)(const float* x, Int8Group* codes, const LinearShape& shape, int64_t first,
                  int64_t last);
  // Outputs [first, last) of all rows; `first` is a multiple of kInt8Outputs.
  void (*products)(const Int8Group* codes, const uint8_t* panels, const float* scale, float* y,
                   const LinearShape& shape, int64_t first, int64_t last);
};

MOONLET_TABLE(LinearTable, linear_table)
MOONLET_TABLE(Fp4LinearTable, fp4_linear_table)
MOONLET_TABLE(Int8LinearTable, int8_linear_table)

}  // namespace moonlet

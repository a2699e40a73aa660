// What one instruction-set level offers for the routed experts.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// Outputs of one matrix that a piece of work computes.
constexpr int64_t kExpertOutputs = 64;
// Inputs are padded to blocks of four MXFP4 groups.
constexpr int64_t kInputBlock = 128;

// A group of 32 activations in int8 (kernels/int8_groups.py), even elements before odd ones.
struct CodedGroup {
  int8_t codes[32];
  float step;     // NaN where the group is not finite, with codes of zero
  int32_t start;  // -12 times the sum of the codes: fp4_int8.h
};

struct ExpertMatrix {
  const uint8_t* packed;
  const uint8_t* scale;
};

struct MoeProblem {
  int64_t num_rows, top_k, num_experts, size_in, width;
  ExpertMatrix w1, w3, w2;
  const float* weights;   // [num_rows, top_k]
  const int64_t* starts;  // [num_experts + 1], places of each expert's slots
  const int64_t* slots;   // [num_rows * top_k], row * top_k + rank, sorted by expert
  float* inputs;          // [num_rows, padded size_in], permuted
  float* hidden;          // [num_rows * top_k, padded width], permuted, in the order of `slots`
  // The same in natural order as coded groups, where mode is 3 and the level multiplies integers;
  // null asks for products in float32. They are used in place of `inputs` and `hidden`.
  CodedGroup* coded_inputs;  // [num_rows, size_in / 32]
  CodedGroup* coded_hidden;  // [num_rows * top_k, width / 32]
  int64_t most_slots;        // of any expert
  int32_t activation;     // 0 SiTU, 1 SwiGLU
  float beta, linear_beta;
  int32_t mode;  // rounding of the inputs of the products; values as in moonlet.h
};

struct MoeTable {
  // Permutes and rounds rows [first, last) of z into `inputs`.
  void (*prepare)(const MoeProblem& problem, const float* z, int64_t first, int64_t last);
  // Rounds `count` contiguous values, whole groups, in natural order; mode as below.
  void (*round_groups)(const float* x, float* out, int64_t count, int32_t mode);
  // Hidden values [first, last) of all slots of an expert.
  void (*up)(const MoeProblem& problem, int64_t expert, int64_t first, int64_t last);
  // Rounds the hidden rows of slots [first, last).
  void (*round_hidden)(const MoeProblem& problem, int64_t first, int64_t last);
  // Outputs [first, last) of all rows, summed over experts in ascending order.
  void (*down)(const MoeProblem& problem, float* out, int64_t first, int64_t last);
};

MOONLET_TABLE(MoeTable, moe_table)

}  // namespace moonlet

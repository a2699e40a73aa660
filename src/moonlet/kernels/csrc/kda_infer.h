// What one instruction-set level offers for the inference of Kimi Delta Attention.
//
// Both operators work on one head at a time, so that their callers can share out the heads.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// Limit that the checks of the C interface and the buffers of the operators share.
constexpr int64_t kMaxKdaSize = 256;

// Raw inputs of packed rows: q, k, z [rows, heads, key_size], v [rows, heads, value_size] with rows
// `*_stride` apart, beta [rows, heads], a_log [heads], dt_bias [heads, key_size]. A lower_bound of
// zero stands for the softplus gate.
struct KdaInputs {
  const float *q, *k, *v, *z, *beta, *a_log, *dt_bias;
  float lower_bound;
  int64_t q_stride, k_stride, v_stride, z_stride;
  int64_t num_heads, key_size, value_size;
};

// Packed rows after which the state is wanted, ascending, and where in `states` each one goes.
struct KdaEmits {
  const int64_t *rows, *places;
  float* states;
  int64_t count;
};

struct KdaStepTable {
  // One row of one head: updates `state` [key_size, value_size] and writes `out` [value_size].
  void (*step)(const KdaInputs& in, int64_t row, int64_t head, float* state, float* out);
};

struct KdaChunkTable {
  // Rows first..last - 1 of one head: updates `state`, writes its part of `out` [rows, heads,
  // value_size] and its part of the emitted states of these rows.
  void (*sequence)(const KdaInputs& in, int64_t head, int64_t first, int64_t last, float* state,
                   float* out, const KdaEmits& emits);
};

MOONLET_TABLE(KdaStepTable, kda_step_table)
MOONLET_TABLE(KdaChunkTable, kda_chunk_table)

}  // namespace moonlet

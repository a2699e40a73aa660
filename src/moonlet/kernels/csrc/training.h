// What one instruction-set level offers for training: forward and backward of float32 operators.
//
// The functions have the arguments of their namesakes in moonlet.h, without the level.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// Limits that the checks of the C interface and the buffers of the operators share.
constexpr int64_t kMaxSources = 64;
constexpr int64_t kMaxHeadSize = 128;

struct KdaShape {
  int64_t num_seqs, num_heads, key_size, value_size;
};

struct RowTable {
  void (*situ_forward)(const float* gate, const float* up, float* out, int64_t count, float beta,
                       float linear_beta);
  void (*situ_backward)(const float* gate, const float* up, const float* dout, float* dgate,
                        float* dup, int64_t count, float beta, float linear_beta);
  void (*rms_norm_forward)(const float* x, const float* weight, float* out, float* rstd,
                           int64_t num_rows, int64_t size, float eps);
  void (*rms_norm_backward)(const float* x, const float* weight, const float* rstd,
                            const float* dout, float* dx, float* dweight, int64_t num_rows,
                            int64_t size);
  void (*gated_norm_forward)(const float* x, const float* weight, const float* gate, float* out,
                             float* rstd, int64_t num_rows, int64_t size, float eps);
  void (*gated_norm_backward)(const float* x, const float* weight, const float* gate,
                              const float* rstd, const float* dout, float* dx, float* dgate,
                              float* dweight, int64_t num_rows, int64_t size);
  void (*attn_res_forward)(const float* const* sources, int64_t num_sources, const float* weight,
                           float* out, float* alpha, float* rstd, int64_t num_rows, int64_t size,
                           float eps);
  void (*attn_res_backward)(const float* const* sources, int64_t num_sources, const float* weight,
                            const float* alpha, const float* rstd, const float* dout,
                            float* const* dsources, float* dweight, int64_t num_rows,
                            int64_t size);
  void (*short_conv_forward)(const float* x, const float* weight, const float* carry,
                             const int64_t* starts, float* out, int64_t num_seqs, int64_t channels,
                             int64_t taps);
  void (*short_conv_backward)(const float* x, const float* weight, const float* carry,
                              const int64_t* starts, const float* dout, float* dx, float* dweight,
                              float* scratch, int64_t num_seqs, int64_t channels, int64_t taps);
};

struct KdaTable {
  void (*forward)(const float* q, const float* k, const float* v, const float* z,
                  const float* beta, const float* a_log, const float* dt_bias, float lower_bound,
                  const float* state, const int64_t* starts, float* out, float* final_state,
                  float* entering, const KdaShape& shape);
  void (*backward)(const float* q, const float* k, const float* v, const float* z,
                   const float* beta, const float* a_log, const float* dt_bias, float lower_bound,
                   const int64_t* starts, const float* entering, const float* dout,
                   const float* dfinal, float* dq, float* dk, float* dv, float* dz, float* dbeta,
                   float* da_log, float* ddt_bias, float* dstate, const KdaShape& shape);
};

MOONLET_TABLE(RowTable, row_table)
MOONLET_TABLE(KdaTable, kda_table)

}  // namespace moonlet

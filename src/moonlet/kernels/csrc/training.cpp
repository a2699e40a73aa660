// The C interface of the training operators: argument checks and choice of the level.
//
// Compiled with baseline flags only. The work runs on the caller's thread: training gives each
// process one core.
#include "training.h"

#include <stdint.h>

#include "moonlet.h"

namespace moonlet {
namespace {

constexpr int64_t kLanes = 16;

bool bad_rows(int64_t num_rows, int64_t size) {
  return num_rows < 0 || size < kLanes || size % kLanes != 0;
}

bool bad_head_size(int64_t size) { return bad_rows(0, size) || size > kMaxHeadSize; }

}  // namespace
}  // namespace moonlet

int32_t moonlet_situ_forward(const float* gate, const float* up, float* out, int64_t count,
                             float beta, float linear_beta, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (count < 0) return MOONLET_BAD_ARGUMENT;
  table->situ_forward(gate, up, out, count, beta, linear_beta);
  return MOONLET_OK;
}

int32_t moonlet_situ_backward(const float* gate, const float* up, const float* dout, float* dgate,
                              float* dup, int64_t count, float beta, float linear_beta,
                              int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (count < 0) return MOONLET_BAD_ARGUMENT;
  table->situ_backward(gate, up, dout, dgate, dup, count, beta, linear_beta);
  return MOONLET_OK;
}

int32_t moonlet_rms_norm_forward(const float* x, const float* weight, float* out, float* rstd,
                                 int64_t num_rows, int64_t size, float eps, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size)) return MOONLET_BAD_ARGUMENT;
  table->rms_norm_forward(x, weight, out, rstd, num_rows, size, eps);
  return MOONLET_OK;
}

int32_t moonlet_rms_norm_backward(const float* x, const float* weight, const float* rstd,
                                  const float* dout, float* dx, float* dweight, int64_t num_rows,
                                  int64_t size, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size)) return MOONLET_BAD_ARGUMENT;
  table->rms_norm_backward(x, weight, rstd, dout, dx, dweight, num_rows, size);
  return MOONLET_OK;
}

int32_t moonlet_gated_norm_forward(const float* x, const float* weight, const float* gate,
                                   float* out, float* rstd, int64_t num_rows, int64_t size,
                                   float eps, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size)) return MOONLET_BAD_ARGUMENT;
  table->gated_norm_forward(x, weight, gate, out, rstd, num_rows, size, eps);
  return MOONLET_OK;
}

int32_t moonlet_gated_norm_backward(const float* x, const float* weight, const float* gate,
                                    const float* rstd, const float* dout, float* dx, float* dgate,
                                    float* dweight, int64_t num_rows, int64_t size,
                                    int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size)) return MOONLET_BAD_ARGUMENT;
  table->gated_norm_backward(x, weight, gate, rstd, dout, dx, dgate, dweight, num_rows, size);
  return MOONLET_OK;
}

int32_t moonlet_attn_res_forward(const float* const* sources, int64_t num_sources,
                                 const float* weight, float* out, float* alpha, float* rstd,
                                 int64_t num_rows, int64_t size, float eps, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size)) return MOONLET_BAD_ARGUMENT;
  if (num_sources < 1 || num_sources > moonlet::kMaxSources) return MOONLET_BAD_ARGUMENT;
  table->attn_res_forward(sources, num_sources, weight, out, alpha, rstd, num_rows, size, eps);
  return MOONLET_OK;
}

int32_t moonlet_attn_res_backward(const float* const* sources, int64_t num_sources,
                                  const float* weight, const float* alpha, const float* rstd,
                                  const float* dout, float* const* dsources, float* dweight,
                                  int64_t num_rows, int64_t size, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size)) return MOONLET_BAD_ARGUMENT;
  if (num_sources < 1 || num_sources > moonlet::kMaxSources) return MOONLET_BAD_ARGUMENT;
  table->attn_res_backward(sources, num_sources, weight, alpha, rstd, dout, dsources, dweight,
                           num_rows, size);
  return MOONLET_OK;
}

int32_t moonlet_short_conv_forward(const float* x, const float* weight, const float* carry,
                                   const int64_t* starts, float* out, int64_t num_seqs,
                                   int64_t channels, int64_t taps, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_seqs, channels) || taps < 1) return MOONLET_BAD_ARGUMENT;
  table->short_conv_forward(x, weight, carry, starts, out, num_seqs, channels, taps);
  return MOONLET_OK;
}

int32_t moonlet_short_conv_backward(const float* x, const float* weight, const float* carry,
                                    const int64_t* starts, const float* dout, float* dx,
                                    float* dweight, float* scratch, int64_t num_seqs,
                                    int64_t channels, int64_t taps, int32_t isa_level) {
  const moonlet::RowTable* table = MOONLET_PICK(row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_seqs, channels) || taps < 1) return MOONLET_BAD_ARGUMENT;
  table->short_conv_backward(x, weight, carry, starts, dout, dx, dweight, scratch, num_seqs,
                             channels, taps);
  return MOONLET_OK;
}

int32_t moonlet_kda_forward(const float* q, const float* k, const float* v, const float* z,
                            const float* beta, const float* a_log, const float* dt_bias,
                            float lower_bound, const float* state, const int64_t* starts,
                            float* out, float* final_state, float* entering, int64_t num_seqs,
                            int64_t num_heads, int64_t key_size, int64_t value_size,
                            int32_t isa_level) {
  const moonlet::KdaTable* table = MOONLET_PICK(kda_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_seqs < 0 || num_heads < 1 || moonlet::bad_head_size(key_size) ||
      moonlet::bad_head_size(value_size)) {
    return MOONLET_BAD_ARGUMENT;
  }
  const moonlet::KdaShape shape = {num_seqs, num_heads, key_size, value_size};
  table->forward(q, k, v, z, beta, a_log, dt_bias, lower_bound, state, starts, out, final_state,
                 entering, shape);
  return MOONLET_OK;
}

int32_t moonlet_kda_backward(const float* q, const float* k, const float* v, const float* z,
                             const float* beta, const float* a_log, const float* dt_bias,
                             float lower_bound, const int64_t* starts, const float* entering,
                             const float* dout, const float* dfinal, float* dq, float* dk,
                             float* dv, float* dz, float* dbeta, float* da_log, float* ddt_bias,
                             float* dstate, int64_t num_seqs, int64_t num_heads, int64_t key_size,
                             int64_t value_size, int32_t isa_level) {
  const moonlet::KdaTable* table = MOONLET_PICK(kda_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_seqs < 0 || num_heads < 1 || moonlet::bad_head_size(key_size) ||
      moonlet::bad_head_size(value_size)) {
    return MOONLET_BAD_ARGUMENT;
  }
  const moonlet::KdaShape shape = {num_seqs, num_heads, key_size, value_size};
  table->backward(q, k, v, z, beta, a_log, dt_bias, lower_bound, starts, entering, dout, dfinal,
                  dq, dk, dv, dz, dbeta, da_log, ddt_bias, dstate, shape);
  return MOONLET_OK;
}

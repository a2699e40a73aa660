// The C interface of Kimi Delta Attention for inference: argument checks, level, threads.
//
// Compiled with baseline flags only. One piece of work is one head of one sequence.
#include "kda_api.h"

#include <stdint.h>
#include <string.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// fewer state elements than this over all rows are not worth a second thread
constexpr int64_t kMinRowElements = 1 << 18;

bool bad_inputs(const KdaInputs& in, int64_t num_seqs) {
  const int64_t keys = in.num_heads * in.key_size, values = in.num_heads * in.value_size;
  return bad_gates(in, num_seqs) || !in.q || !in.k || !in.v || in.q_stride < keys ||
         in.k_stride < keys || in.v_stride < values;
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_kda_step_f32(const float* q, const float* k, const float* v, const float* z,
                             const float* beta, const float* a_log, const float* dt_bias,
                             float lower_bound, float* state, const int64_t* slots, float* out,
                             int64_t q_stride, int64_t k_stride, int64_t v_stride,
                             int64_t z_stride, int64_t num_slots, int64_t num_seqs,
                             int64_t num_heads, int64_t key_size, int64_t value_size,
                             int32_t isa_level, int32_t num_threads) {
  const moonlet::KdaStepTable* table = MOONLET_PICK(kda_step_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  const moonlet::KdaInputs in = {q,        k,        v,           z,        beta,
                                 a_log,    dt_bias,  lower_bound, q_stride, k_stride,
                                 v_stride, z_stride, num_heads,   key_size, value_size};
  if (moonlet::bad_inputs(in, num_seqs) || !state || !slots || !out || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  for (int64_t s = 0; s < num_seqs; ++s) {
    if (slots[s] < 0 || slots[s] >= num_slots) return MOONLET_BAD_ARGUMENT;
  }
  const int64_t size = key_size * value_size;
  const int64_t grain = 1 + moonlet::kMinStepElements / size;
  moonlet::parallel(num_seqs * num_heads, grain, num_threads, [=](int64_t first, int64_t last) {
    const moonlet::WithoutSubnormals mode;
    for (int64_t i = first; i < last; ++i) {
      const int64_t s = i / num_heads, head = i % num_heads;
      table->step(in, s, head, state + (slots[s] * num_heads + head) * size, out + i * value_size);
    }
  });
  return MOONLET_OK;
}

int32_t moonlet_kda_chunk_f32(const float* q, const float* k, const float* v, const float* z,
                              const float* beta, const float* a_log, const float* dt_bias,
                              float lower_bound, const float* state, const int64_t* starts,
                              float* out, float* final_state, const int64_t* emit_rows,
                              const int64_t* emit_places, float* emitted, int64_t q_stride,
                              int64_t k_stride, int64_t v_stride, int64_t z_stride,
                              int64_t num_emits, int64_t num_seqs, int64_t num_heads,
                              int64_t key_size, int64_t value_size, int32_t isa_level,
                              int32_t num_threads) {
  const moonlet::KdaChunkTable* table = MOONLET_PICK(kda_chunk_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  const moonlet::KdaInputs in = {q,        k,        v,           z,        beta,
                                 a_log,    dt_bias,  lower_bound, q_stride, k_stride,
                                 v_stride, z_stride, num_heads,   key_size, value_size};
  if (moonlet::bad_inputs(in, num_seqs) || !state || !starts || !out || !final_state ||
      num_threads < 1 || num_emits < 0 || (num_emits && !(emit_rows && emit_places && emitted))) {
    return MOONLET_BAD_ARGUMENT;
  }
  const moonlet::KdaEmits emits = {emit_rows, emit_places, emitted, num_emits};
  const int64_t size = key_size * value_size;
  const int64_t rows = num_seqs > 0 ? starts[num_seqs] / num_seqs : 0;
  const int64_t grain = 1 + moonlet::kMinRowElements / (1 + rows * size);
  moonlet::parallel(num_seqs * num_heads, grain, num_threads, [=](int64_t first, int64_t last) {
    const moonlet::WithoutSubnormals mode;
    for (int64_t i = first; i < last; ++i) {
      const int64_t s = i / num_heads, head = i % num_heads;
      float* final_of_head = final_state + i * size;
      memcpy(final_of_head, state + i * size, static_cast<size_t>(size) * sizeof(float));
      table->sequence(in, head, starts[s], starts[s + 1], final_of_head, out, emits);
    }
  });
  return MOONLET_OK;
}

/* The C interface of the native kernels: the only way into the library.
 *
 * Every function takes raw pointers, explicit sizes and strides (in elements of the pointed-to
 * type) and a thread count, returns a status, keeps no memory, and throws nothing. The Python side
 * is kernels/_native.py; a test compares its table with the prototypes below.
 */
#ifndef MOONLET_H
#define MOONLET_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOONLET_API __attribute__((visibility("default")))

/* Raised by one with every change of a prototype or of its meaning. */
#define MOONLET_ABI_VERSION 7

/* Status values. */
#define MOONLET_OK 0
#define MOONLET_BAD_ARGUMENT 1
#define MOONLET_BAD_ISA 2

/* Instruction-set levels, each including the ones before it. */
#define MOONLET_ISA_LEVEL_SCALAR 0
#define MOONLET_ISA_LEVEL_AVX2 1
#define MOONLET_ISA_LEVEL_AVX512 2
#define MOONLET_ISA_LEVEL_VNNI 3

MOONLET_API int32_t moonlet_abi_version(void);

/* The highest level that both this build and this processor have. */
MOONLET_API int32_t moonlet_isa_level(void);

/* MXFP4 to float32. A row of `packed` holds num_groups * 16 bytes (element 2j in the low nibble of
 * byte j), a row of `scale` holds num_groups E8M0 bytes, a row of `out` num_groups * 32 values. */
MOONLET_API int32_t moonlet_mxfp4_dequantize_f32(const uint8_t* packed, const uint8_t* scale,
                                                 float* out, int64_t num_rows, int64_t num_groups,
                                                 int64_t packed_row_stride,
                                                 int64_t scale_row_stride, int64_t out_row_stride,
                                                 int32_t isa_level, int32_t num_threads);

/* The same to bfloat16, given as its 16-bit pattern; every MXFP4 value is exact in it. */
MOONLET_API int32_t moonlet_mxfp4_dequantize_bf16(const uint8_t* packed, const uint8_t* scale,
                                                  uint16_t* out, int64_t num_rows,
                                                  int64_t num_groups, int64_t packed_row_stride,
                                                  int64_t scale_row_stride, int64_t out_row_stride,
                                                  int32_t isa_level, int32_t num_threads);

/* Training operators. All tensors are contiguous float32; row sizes are multiples of 16; weight
 * gradients are added to, other outputs overwritten. The work runs on the calling thread.
 *
 * SiTU-GLU over `count` elements; linear_beta <= 0 leaves the up branch uncapped. */
MOONLET_API int32_t moonlet_situ_forward(const float* gate, const float* up, float* out,
                                         int64_t count, float beta, float linear_beta,
                                         int32_t isa_level);

MOONLET_API int32_t moonlet_situ_backward(const float* gate, const float* up, const float* dout,
                                          float* dgate, float* dup, int64_t count, float beta,
                                          float linear_beta, int32_t isa_level);

/* RMSNorm of num_rows rows; rstd receives one factor per row for the backward. */
MOONLET_API int32_t moonlet_rms_norm_forward(const float* x, const float* weight, float* out,
                                             float* rstd, int64_t num_rows, int64_t size, float eps,
                                             int32_t isa_level);

MOONLET_API int32_t moonlet_rms_norm_backward(const float* x, const float* weight,
                                              const float* rstd, const float* dout, float* dx,
                                              float* dweight, int64_t num_rows, int64_t size,
                                              int32_t isa_level);

/* RMSNorm * weight * sigmoid(gate). */
MOONLET_API int32_t moonlet_gated_norm_forward(const float* x, const float* weight,
                                               const float* gate, float* out, float* rstd,
                                               int64_t num_rows, int64_t size, float eps,
                                               int32_t isa_level);

MOONLET_API int32_t moonlet_gated_norm_backward(const float* x, const float* weight,
                                                const float* gate, const float* rstd,
                                                const float* dout, float* dx, float* dgate,
                                                float* dweight, int64_t num_rows, int64_t size,
                                                int32_t isa_level);

/* Softmax over depth of up to 64 sources [num_rows, size]; the pseudo-query is folded into
 * `weight`. alpha and rstd [num_rows, num_sources] are kept for the backward. */
MOONLET_API int32_t moonlet_attn_res_forward(const float* const* sources, int64_t num_sources,
                                             const float* weight, float* out, float* alpha,
                                             float* rstd, int64_t num_rows, int64_t size, float eps,
                                             int32_t isa_level);

MOONLET_API int32_t moonlet_attn_res_backward(const float* const* sources, int64_t num_sources,
                                              const float* weight, const float* alpha,
                                              const float* rstd, const float* dout,
                                              float* const* dsources, float* dweight,
                                              int64_t num_rows, int64_t size, int32_t isa_level);

/* Depthwise causal convolution and SiLU over packed sequences. weight is [taps, channels], carry
 * [num_seqs, channels, taps - 1], starts [num_seqs + 1] row numbers; scratch holds one gradient of
 * the longest sequence. */
MOONLET_API int32_t moonlet_short_conv_forward(const float* x, const float* weight,
                                               const float* carry, const int64_t* starts,
                                               float* out, int64_t num_seqs, int64_t channels,
                                               int64_t taps, int32_t isa_level);

MOONLET_API int32_t moonlet_short_conv_backward(const float* x, const float* weight,
                                                const float* carry, const int64_t* starts,
                                                const float* dout, float* dx, float* dweight,
                                                float* scratch, int64_t num_seqs, int64_t channels,
                                                int64_t taps, int32_t isa_level);

/* Kimi Delta Attention with the lower-bound gate, 32 rows a chunk. q, k, z are [rows, heads,
 * key_size], v and out [rows, heads, value_size], beta [rows, heads], states [num_seqs, heads,
 * key_size, value_size]; head sizes are at most 128. entering, when given, receives the state
 * before every chunk [chunks, heads, ...] in the order of sequences; the backward needs it. */
MOONLET_API int32_t moonlet_kda_forward(const float* q, const float* k, const float* v,
                                        const float* z, const float* beta, const float* a_log,
                                        const float* dt_bias, float lower_bound, const float* state,
                                        const int64_t* starts, float* out, float* final_state,
                                        float* entering, int64_t num_seqs, int64_t num_heads,
                                        int64_t key_size, int64_t value_size, int32_t isa_level);

MOONLET_API int32_t moonlet_kda_backward(const float* q, const float* k, const float* v,
                                         const float* z, const float* beta, const float* a_log,
                                         const float* dt_bias, float lower_bound,
                                         const int64_t* starts, const float* entering,
                                         const float* dout, const float* dfinal, float* dq,
                                         float* dk, float* dv, float* dz, float* dbeta,
                                         float* da_log, float* ddt_bias, float* dstate,
                                         int64_t num_seqs, int64_t num_heads, int64_t key_size,
                                         int64_t value_size, int32_t isa_level);

/* Inference operators. Activations are float32; the work is divided over num_threads threads and its
 * result does not depend on their number.
 *
 * y [num_rows, size_out] = x [num_rows, size_in] weight [size_out, size_in]^T, times scale [size_out]
 * where given. weight is contiguous: float32 (weight_type 0), bfloat16 (1), int8 (2), MXFP4 (3) or
 * int8 in panels (4); strides are those of rows. MXFP4 is [size_out, size_in / 2] codes with scale
 * bytes [size_out, size_in / 32], size_in a multiple of 32, and needs `inputs`: num_rows times
 * size_in, rounded up to 128, floats of scratch. Panels are bytes [size_out / 16][size_in / 32][8]
 * [16][4], each 128 above the weight of one output and four inputs side by side, both sizes rounded
 * up, with zeros (128) where nothing is; x is rounded to int8 groups of 32, products are sums of
 * integers, and `inputs` takes 10 floats for each group of num_rows rows of x. Other types do not
 * touch it. */
MOONLET_API int32_t moonlet_linear(const float* x, const void* weight, const void* scale, float* y,
                                   float* inputs, int64_t num_rows, int64_t size_in,
                                   int64_t size_out, int64_t x_stride, int64_t y_stride,
                                   int32_t weight_type, int32_t isa_level, int32_t num_threads);

/* Rounds activations in groups of 32: out = x rounded to what the group format of `mode` holds (1
 * MXFP8 with ceil scales, 2 MXFP8 with floor scales, 3 int8 with a float32 scale). */
MOONLET_API int32_t moonlet_round_groups(const float* x, float* out, int64_t count, int32_t mode,
                                         int32_t isa_level, int32_t num_threads);

/* Routed experts with MXFP4 weights: out [num_rows, size_in] = sum over a row's top_k experts of
 * weight * w2(act(w1 z, w3 z)). ids and weights are [num_rows, top_k]; w1 and w3 are [num_experts,
 * width, size_in], w2 [num_experts, size_in, width], packed and scale contiguous as above; no scale
 * byte is 255. activation: 0 SiTU (linear_beta <= 0: no cap), 1 SwiGLU. mode rounds the inputs of
 * all products: 0 not at all, 1 MXFP8 with ceil scales, 2 MXFP8 with floor scales, 3 int8 groups.
 * Scratch: inputs [num_rows, size_in up to 128], hidden [num_rows * top_k, width up to 128], places
 * [num_experts + 1 + num_rows * top_k], codes: 40 bytes, aligned to 4, for each group of 32 of z
 * [num_rows, size_in] and of the hidden values [num_rows * top_k, width]. Mode 3 uses codes for
 * integer products at the level that has them; null asks for float32 products of the same rounded
 * values. */
MOONLET_API int32_t moonlet_moe_mxfp4(const float* z, const int64_t* ids, const float* weights,
                                      const uint8_t* w1, const uint8_t* w1_scale, const uint8_t* w3,
                                      const uint8_t* w3_scale, const uint8_t* w2,
                                      const uint8_t* w2_scale, float* out, float* inputs,
                                      float* hidden, int64_t* places, void* codes, int64_t num_rows,
                                      int64_t top_k, int64_t num_experts, int64_t size_in,
                                      int64_t width, int32_t activation, float beta,
                                      float linear_beta, int32_t mode, int32_t isa_level,
                                      int32_t num_threads);
/* Probes of the hardware's bounds. The caller times them and does the arithmetic.
 *
 * Reads data [count] with vector loads in pieces of `piece` values and writes each piece's sum to
 * sums [(count + piece - 1) / piece]. */
MOONLET_API int32_t moonlet_probe_read(const float* data, float* sums, int64_t count,
                                       int64_t piece, int32_t isa_level, int32_t num_threads);

/* Does `count` multiply-adds of 16 float32 lanes, a multiple of 12, in each of num_blocks blocks.
 * The chains are independent and touch no memory; out [num_blocks] receives their mean, which tends
 * to 1. */
MOONLET_API int32_t moonlet_probe_fma(float* out, int64_t num_blocks, int64_t count,
                                      int32_t isa_level, int32_t num_threads);

/* Inference operators. All values are float32 unless said otherwise, row sizes are any.
 *
 * SiTU-GLU of num_rows rows; gate and up are read with their row strides, out is contiguous;
 * linear_beta <= 0 leaves the up branch uncapped. */
MOONLET_API int32_t moonlet_situ_glu(const float* gate, const float* up, float* out,
                                     int64_t num_rows, int64_t size, int64_t gate_row_stride,
                                     int64_t up_row_stride, float beta, float linear_beta,
                                     int32_t isa_level, int32_t num_threads);

/* silu(gate) * up, memory as above. */
MOONLET_API int32_t moonlet_swiglu(const float* gate, const float* up, float* out,
                                   int64_t num_rows, int64_t size, int64_t gate_row_stride,
                                   int64_t up_row_stride, int32_t isa_level, int32_t num_threads);

/* Softmax over depth of 1 to 64 sources [num_rows, size]; the pseudo-query is folded into
 * `weight` [size]. */
MOONLET_API int32_t moonlet_attn_res_mix(const float* const* sources, int64_t num_sources,
                                         const float* weight, float* out, int64_t num_rows,
                                         int64_t size, float eps, int32_t isa_level,
                                         int32_t num_threads);

/* First phase of the same: the blocks alone, for every row of weight [num_sublayers, size]. m and
 * l [num_sublayers, num_rows] receive the largest score and the sum of e^(score - m), acc
 * [num_sublayers, num_rows, size] the sum of e^(score - m) * block. */
MOONLET_API int32_t moonlet_attn_res_fold(const float* const* blocks, int64_t num_blocks,
                                          const float* weight, float* m, float* l, float* acc,
                                          int64_t num_sublayers, int64_t num_rows, int64_t size,
                                          float eps, int32_t isa_level, int32_t num_threads);

/* Second phase: one sublayer's part of the fold and one more source, `prefix`. */
MOONLET_API int32_t moonlet_attn_res_join(const float* m, const float* l, const float* acc,
                                          const float* prefix, const float* weight, float* out,
                                          int64_t num_rows, int64_t size, float eps,
                                          int32_t isa_level, int32_t num_threads);

/* Router: scores = sigmoid(x weight^T) [num_rows, num_experts]; the top_k largest scores + bias of
 * each row, ties to the lowest expert, give ids and weights [num_rows, top_k] (weights are scores,
 * divided by their sum if renormalizes is not 0, times scale) and cut [num_rows], the largest one
 * left out or minus infinity. The weight is float32, or bfloat16 patterns if is_bf16 is not 0. At
 * most 32 of 1024 experts. */
MOONLET_API int32_t moonlet_route_topk(const float* x, const void* weight, int32_t is_bf16,
                                       const float* bias, float* scores, int64_t* ids,
                                       float* weights, float* cut, int64_t num_rows, int64_t size,
                                       int64_t num_experts, int64_t top_k, int32_t renormalizes,
                                       float scale, int32_t isa_level, int32_t num_threads);

/* Draws an id of each row of logits [num_rows, size]: softmax at a temperature, then min-p, top-k
 * and top-p, each on what the one before left over, ties at a cut to the lower id, then the inverse
 * of the cumulative distribution at uniform in [0, 1). A null pointer leaves a filter out; top_k
 * holds whole numbers of at least 1. A row needs a finite largest logit and no NaN. Sums are
 * float64. scratch holds num_groups * (3 * size + 64) values; rows are dealt to the groups, which
 * run side by side; with one group the threads share each row. */
MOONLET_API int32_t moonlet_sample(const float* logits, const double* temperature,
                                   const double* min_p, const double* top_k, const double* top_p,
                                   const double* uniform, int64_t* ids, double* scratch,
                                   int64_t num_groups, int64_t num_rows, int64_t size,
                                   int32_t isa_level, int32_t num_threads);
/* Inference operators. Tensors are float32 and contiguous unless strides are given; outputs do not
 * overlap inputs unless an argument is said to be modified.
 *
 * One decode step of Kimi Delta Attention. q, k, z are [num_seqs, num_heads, key_size] and v
 * [num_seqs, num_heads, value_size] with rows `*_stride` apart, beta [num_seqs, num_heads], out
 * [num_seqs, num_heads, value_size]; a lower_bound of zero stands for the softplus gate. The state
 * of sequence s is slots[s] of state [num_slots, num_heads, key_size, value_size]: it is modified,
 * other slots are not touched. Slots are distinct; head sizes are multiples of 16 up to 256. */
MOONLET_API int32_t moonlet_kda_step_f32(const float* q, const float* k, const float* v,
                                         const float* z, const float* beta, const float* a_log,
                                         const float* dt_bias, float lower_bound, float* state,
                                         const int64_t* slots, float* out, int64_t q_stride,
                                         int64_t k_stride, int64_t v_stride, int64_t z_stride,
                                         int64_t num_slots, int64_t num_seqs, int64_t num_heads,
                                         int64_t key_size, int64_t value_size, int32_t isa_level,
                                         int32_t num_threads);

/* Kimi Delta Attention over packed sequences, sequence s being rows starts[s]..starts[s + 1] - 1 of
 * the inputs; sizes, strides and gate as in the step. state and final_state are [num_seqs,
 * num_heads, key_size, value_size]. The state after row emit_rows[e] (ascending) is written to
 * emitted[emit_places[e]], laid out like a sequence's state. */
MOONLET_API int32_t moonlet_kda_chunk_f32(const float* q, const float* k, const float* v,
                                          const float* z, const float* beta, const float* a_log,
                                          const float* dt_bias, float lower_bound,
                                          const float* state, const int64_t* starts, float* out,
                                          float* final_state, const int64_t* emit_rows,
                                          const int64_t* emit_places, float* emitted,
                                          int64_t q_stride, int64_t k_stride, int64_t v_stride,
                                          int64_t z_stride, int64_t num_emits, int64_t num_seqs,
                                          int64_t num_heads, int64_t key_size, int64_t value_size,
                                          int32_t isa_level, int32_t num_threads);

/* Short depthwise causal convolution and SiLU over packed sequences, sequence s being rows
 * starts[s]..starts[s + 1] - 1. x and out are [rows, channels], weight [channels, taps], carry and
 * new_carry [num_seqs, channels, taps - 1], oldest input first. The carry after row emit_rows[e]
 * (ascending) is written to emitted[emit_places[e]]. At most 16 taps; any number of channels. */
MOONLET_API int32_t moonlet_short_conv_f32(const float* x, const float* weight, const float* carry,
                                           const int64_t* starts, float* out, float* new_carry,
                                           const int64_t* emit_rows, const int64_t* emit_places,
                                           float* emitted, int64_t num_emits, int64_t num_seqs,
                                           int64_t channels, int64_t taps, int32_t isa_level,
                                           int32_t num_threads);

/* RMSNorm of num_rows rows of any size, which lie x_stride apart; out is contiguous. */
MOONLET_API int32_t moonlet_rms_norm_f32(const float* x, const float* weight, float* out,
                                         int64_t num_rows, int64_t size, int64_t x_stride,
                                         float eps, int32_t isa_level, int32_t num_threads);

/* RMSNorm * weight * sigmoid(gate), of rows of any size. */
MOONLET_API int32_t moonlet_gated_rms_norm_f32(const float* x, const float* weight,
                                               const float* gate, float* out, int64_t num_rows,
                                               int64_t size, float eps, int32_t isa_level,
                                               int32_t num_threads);
/* Gated MLA inference (model.md section 3.4) over pages of float32 rows [latent | shared key]: row
 * n of sequence s is row n % page_size of page table[s * pages_per_seq + n / page_size]. Only the
 * first lengths[.] rows of a sequence are read. kv_b is [num_heads, nope_size + value_size,
 * latent_size], float32 or bfloat16 as is_bfloat16 says. Queries are [rows, num_heads, nope_size +
 * shared_size], outputs [rows, num_heads, value_size]; max_score [rows, num_heads] receives the
 * largest scaled score of each query, or is null. scratch has scratch_size floats, at least what
 * the function's namesake says for the same sizes and threads. Results do not depend on threads.
 *
 * Absorbed: query row t sees the first lengths[t] rows of sequence seqs[t]. Scratch, enough for any
 * lengths up to max_length: num_heads * latent_size floats (padded to 16) for each of at most 128
 * rows and of at most 128 parts of their contexts, and per thread as many again with a few blocks.
 */
MOONLET_API int32_t moonlet_mla_absorbed_scratch(int64_t max_length, int64_t* num_floats,
                                                 int64_t num_rows, int64_t num_heads,
                                                 int64_t nope_size, int64_t shared_size,
                                                 int64_t value_size, int64_t latent_size,
                                                 int32_t isa_level, int32_t num_threads);

MOONLET_API int32_t moonlet_mla_absorbed(
    const float* q, const float* rows, const int64_t* table, const int64_t* seqs,
    const int64_t* lengths, const void* kv_b, int32_t is_bfloat16, float* out, float* max_score,
    float* scratch, int64_t scratch_size, int64_t num_rows, int64_t num_seqs, int64_t num_pages,
    int64_t page_size, int64_t pages_per_seq, int64_t num_heads, int64_t nope_size,
    int64_t shared_size, int64_t value_size, int64_t latent_size, int32_t isa_level,
    int32_t num_threads);

/* Expanded: query rows [starts[s], starts[s + 1]) are the last rows of sequence s and causal among
 * themselves. Scratch: per thread one head's weights, at most 2048 queries with their outputs, and
 * a few blocks. */
MOONLET_API int32_t moonlet_mla_expanded_scratch(const int64_t* starts, const int64_t* lengths,
                                                 int64_t* num_floats, int64_t num_seqs,
                                                 int64_t num_heads, int64_t nope_size,
                                                 int64_t shared_size, int64_t value_size,
                                                 int64_t latent_size, int32_t isa_level,
                                                 int32_t num_threads);

MOONLET_API int32_t moonlet_mla_expanded(
    const float* q, const float* rows, const int64_t* table, const int64_t* starts,
    const int64_t* lengths, const void* kv_b, int32_t is_bfloat16, float* out, float* max_score,
    float* scratch, int64_t scratch_size, int64_t num_seqs, int64_t num_pages, int64_t page_size,
    int64_t pages_per_seq, int64_t num_heads, int64_t nope_size, int64_t shared_size,
    int64_t value_size, int64_t latent_size, int32_t isa_level, int32_t num_threads);

/* Several matrices that share their input, as moonlet_linear has them one by one. Six words describe
 * a matrix: address of the weight, address of the scale or 0, address of y, size_out, y_stride,
 * weight_type. `inputs` serves all of them: what MXFP4 takes, where there is any, then what panels
 * take. */
MOONLET_API int32_t moonlet_linear_many(const float* x, const int64_t* matrices, float* inputs,
                                        int64_t num_matrices, int64_t num_rows, int64_t size_in,
                                        int64_t x_stride, int32_t isa_level, int32_t num_threads);

/* One decode step of the short convolution. x and out are [num_seqs, channels]; weights holds the
 * addresses of num_weights matrices [channels / num_weights, taps], one after the other. The carry
 * of sequence s is slots[s] of state [num_slots, channels, taps - 1], oldest input first: it is
 * modified, other slots are not touched. Slots are distinct. */
MOONLET_API int32_t moonlet_short_conv_step_f32(const float* x, const int64_t* weights,
                                                int64_t num_weights, float* state,
                                                const int64_t* slots, float* out,
                                                int64_t num_slots, int64_t num_seqs,
                                                int64_t channels, int64_t taps, int32_t isa_level,
                                                int32_t num_threads);

/* Rows of verification windows, sequence s being rows starts[s]..starts[s + 1] - 1: each row takes
 * one step of the short convolution and one of Kimi Delta Attention. x is [rows, num_heads *
 * (2 key_size + value_size)], raw q, k and v side by side; weights holds the addresses of their
 * three matrices of taps; z is [rows, num_heads, key_size] and beta [rows, num_heads]. Sequence s
 * goes on from slot slots[s] of state and conv, laid out as in the two steps, and leaves it as it
 * is; out is [rows, num_heads, value_size]. Slots are distinct. */
MOONLET_API int32_t moonlet_kda_window_f32(const float* x, const int64_t* weights, const float* z,
                                           const float* beta, const float* a_log,
                                           const float* dt_bias, float lower_bound,
                                           const float* state, const float* conv,
                                           const int64_t* slots, const int64_t* starts, float* out,
                                           int64_t num_slots, int64_t num_seqs, int64_t num_heads,
                                           int64_t key_size, int64_t value_size, int64_t taps,
                                           int32_t isa_level, int32_t num_threads);

/* The same inputs again: the slots of state and conv are moved on over the first counts[s] rows of
 * every window, 0 to all of them; other slots are not touched. */
MOONLET_API int32_t moonlet_kda_replay_f32(const float* x, const int64_t* weights, const float* z,
                                           const float* beta, const float* a_log,
                                           const float* dt_bias, float lower_bound, float* state,
                                           float* conv, const int64_t* slots,
                                           const int64_t* starts, const int64_t* counts,
                                           int64_t num_slots, int64_t num_seqs, int64_t num_heads,
                                           int64_t key_size, int64_t value_size, int64_t taps,
                                           int32_t isa_level, int32_t num_threads);

/* out = a + b, and out = x * sigmoid(gate), of `count` values; out may be an input. */
MOONLET_API int32_t moonlet_add_f32(const float* a, const float* b, float* out, int64_t count,
                                    int32_t isa_level, int32_t num_threads);

MOONLET_API int32_t moonlet_sigmoid_gate_f32(const float* x, const float* gate, float* out,
                                             int64_t count, int32_t isa_level,
                                             int32_t num_threads);

/* out [num_rows, size] = rows ids[.] of table [num_entries, size], float32 or bfloat16 as
 * is_bfloat16 says. */
MOONLET_API int32_t moonlet_embed(const int64_t* ids, const void* table, int32_t is_bfloat16,
                                  float* out, int64_t num_rows, int64_t num_entries, int64_t size,
                                  int32_t isa_level, int32_t num_threads);

/* Writes [latent | shared] to rows[.] of pages [num_page_rows, latent_size + shared_size]; rows are
 * distinct, inputs lie their strides apart. */
MOONLET_API int32_t moonlet_mla_append(const float* latent, const float* shared,
                                       const int64_t* rows, float* pages, int64_t num_rows,
                                       int64_t num_page_rows, int64_t latent_size,
                                       int64_t shared_size, int64_t latent_stride,
                                       int64_t shared_stride, int32_t isa_level,
                                       int32_t num_threads);

/* The number by which moonlet_replay knows a function of this interface, or -1. */
MOONLET_API int32_t moonlet_call_number(const char* name);

/* Runs recorded calls in order until one fails, whose status is returned and whose place in the
 * order is written to failed. A call in `words` is the function's number, then one word per
 * argument: addresses and integers as they are, a float as its bit pattern. */
MOONLET_API int32_t moonlet_replay(const int64_t* words, int64_t num_words, int64_t* failed);

#ifdef __cplusplus
}
#endif

#endif

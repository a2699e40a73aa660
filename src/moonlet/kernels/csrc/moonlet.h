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
#define MOONLET_ABI_VERSION 3

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

/* Gated MLA inference (model.md section 3.4) over pages of float32 rows [latent | shared key]: row
 * n of sequence s is row n % page_size of page table[s * pages_per_seq + n / page_size]. Only the
 * first lengths[.] rows of a sequence are read. kv_b is [num_heads, nope_size + value_size,
 * latent_size], float32 or bfloat16 as is_bfloat16 says. Queries are [rows, num_heads, nope_size +
 * shared_size], outputs [rows, num_heads, value_size]; max_score [rows, num_heads] receives the
 * largest scaled score of each query, or is null. scratch has scratch_size floats, at least what
 * the function's namesake says for the same sizes and threads. Results do not depend on threads.
 *
 * Absorbed: query row t sees the first lengths[t] rows of sequence seqs[t]. Scratch: num_heads *
 * latent_size floats (padded to 16) for each of at most 128 rows and of at most 128 parts of their
 * contexts, and per thread as many again with a few blocks. */
MOONLET_API int32_t moonlet_mla_absorbed_scratch(const int64_t* lengths, int64_t* num_floats,
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

#ifdef __cplusplus
}
#endif

#endif

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
#define MOONLET_ABI_VERSION 1

/* Status values. */
#define MOONLET_OK 0
#define MOONLET_BAD_ARGUMENT 1
#define MOONLET_BAD_ISA 2

/* Instruction-set levels, each including the ones before it. */
#define MOONLET_ISA_LEVEL_SCALAR 0
#define MOONLET_ISA_LEVEL_AVX2 1
#define MOONLET_ISA_LEVEL_AVX512 2

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

#ifdef __cplusplus
}
#endif

#endif

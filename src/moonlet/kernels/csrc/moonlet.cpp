// The C interface: argument checks, choice of the instruction-set level, threads.
//
// Compiled with baseline flags only; the per-level code is reached through its IsaTable.
#include "moonlet.h"

#include <stdint.h>

#include "isa.h"
#include "pool.h"

namespace moonlet {
namespace {

constexpr int64_t kGroupBytes = 16;
constexpr int64_t kGroupSize = 32;
// fewer elements than this are not worth a second thread
constexpr int64_t kMinElements = 1 << 16;

// float32 pattern of magnitude * 2^(scale - 127), by integer arithmetic alone.
constexpr uint32_t magnitude_bits(int scale, int code) {
  if (scale == 255) return 0x7FC00000u;
  if (code == 0) return 0;
  // magnitude = mantissa * 2^exponent with mantissa 2 or 3
  const int exponent = (code < 2 ? 1 : code >> 1) - 2;
  const uint32_t mantissa = code < 2 ? 1u : 2u | (code & 1u);
  int top = exponent + scale - 127;
  uint32_t significant = mantissa;
  if (significant == 1) {
    significant = 2;
    --top;
  }
  // the value is significant / 2 * 2^(top + 1)
  const int biased = top + 1 + 127;
  if (biased >= 255) return 0x7F800000u;
  const uint32_t fraction = (significant & 1u) << 22;
  if (biased >= 1) return static_cast<uint32_t>(biased) << 23 | fraction;
  return (0x00800000u | fraction) >> (1 - biased);
}

struct Magnitudes {
  MagnitudeTable bits;
  constexpr Magnitudes() : bits() {
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 8; ++code) bits[scale][code] = magnitude_bits(scale, code);
    }
  }
};

constexpr Magnitudes kMagnitudes;

template <typename Value>
using RowFunction = void (*)(const MagnitudeTable&, const uint8_t*, const uint8_t*, Value*,
                             int64_t);

template <typename Value>
int32_t dequantize(RowFunction<Value> row, const uint8_t* packed, const uint8_t* scale, Value* out,
                   int64_t num_rows, int64_t num_groups, int64_t packed_row_stride,
                   int64_t scale_row_stride, int64_t out_row_stride, int32_t num_threads) {
  if (num_rows < 0 || num_groups < 0 || num_threads < 1) return MOONLET_BAD_ARGUMENT;
  if (num_rows == 0 || num_groups == 0) return MOONLET_OK;
  if (!packed || !scale || !out || packed_row_stride < num_groups * kGroupBytes ||
      scale_row_stride < num_groups || out_row_stride < num_groups * kGroupSize) {
    return MOONLET_BAD_ARGUMENT;
  }
  const int64_t grain = 1 + kMinElements / (num_groups * kGroupSize);
  parallel(num_rows, grain, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      row(kMagnitudes.bits, packed + r * packed_row_stride, scale + r * scale_row_stride,
          out + r * out_row_stride, num_groups);
    }
  });
  return MOONLET_OK;
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_abi_version(void) { return MOONLET_ABI_VERSION; }

int32_t moonlet_isa_level(void) {
#ifdef MOONLET_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512vnni")) return MOONLET_ISA_LEVEL_VNNI;
    return MOONLET_ISA_LEVEL_AVX512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return MOONLET_ISA_LEVEL_AVX2;
  }
#endif
  return MOONLET_ISA_LEVEL_SCALAR;
}

int32_t moonlet_mxfp4_dequantize_f32(const uint8_t* packed, const uint8_t* scale, float* out,
                                     int64_t num_rows, int64_t num_groups,
                                     int64_t packed_row_stride, int64_t scale_row_stride,
                                     int64_t out_row_stride, int32_t isa_level,
                                     int32_t num_threads) {
  const moonlet::IsaTable* table = MOONLET_PICK(isa_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  return moonlet::dequantize<float>(table->mxfp4_row_f32, packed, scale, out, num_rows, num_groups,
                                    packed_row_stride, scale_row_stride, out_row_stride,
                                    num_threads);
}

int32_t moonlet_mxfp4_dequantize_bf16(const uint8_t* packed, const uint8_t* scale, uint16_t* out,
                                      int64_t num_rows, int64_t num_groups,
                                      int64_t packed_row_stride, int64_t scale_row_stride,
                                      int64_t out_row_stride, int32_t isa_level,
                                      int32_t num_threads) {
  const moonlet::IsaTable* table = MOONLET_PICK(isa_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  return moonlet::dequantize<uint16_t>(table->mxfp4_row_bf16, packed, scale, out, num_rows,
                                       num_groups, packed_row_stride, scale_row_stride,
                                       out_row_stride, num_threads);
}

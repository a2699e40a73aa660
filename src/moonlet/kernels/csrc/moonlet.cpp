// The C interface: argument checks, choice of the instruction-set level, threads.
//
// Compiled with baseline flags only; the per-level code is reached through its IsaTable.
#include "moonlet.h"

#include <stdint.h>

#include <exception>
#include <thread>

#include "isa.h"

namespace moonlet {
namespace {

constexpr int64_t kGroupBytes = 16;
constexpr int64_t kGroupSize = 32;
constexpr int kMaxThreads = 64;
// below this many elements per thread, starting a thread costs more than it saves
constexpr int64_t kMinElementsPerThread = 1 << 18;

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

const IsaTable* table_of(int32_t level) {
  if (level < 0 || level > moonlet_isa_level()) return nullptr;
#ifdef MOONLET_X86
  if (level == MOONLET_ISA_LEVEL_AVX512) return &avx512::isa_table;
  if (level == MOONLET_ISA_LEVEL_AVX2) return &avx2::isa_table;
#endif
  return &scalar::isa_table;
}

// Runs work(first, last) over [0, count) on at most num_threads threads; joins by blocking.
template <typename Work>
void split(int64_t count, int64_t elements, int32_t num_threads, const Work& work) {
  int64_t wanted = elements / kMinElementsPerThread;
  if (wanted > num_threads) wanted = num_threads;
  if (wanted > count) wanted = count;
  if (wanted > kMaxThreads) wanted = kMaxThreads;
  if (wanted <= 1) {
    work(0, count);
    return;
  }
  std::thread threads[kMaxThreads];
  int64_t first = 0;
  for (int64_t i = 0; i < wanted - 1; ++i) {
    const int64_t last = count * (i + 1) / wanted;
    try {
      threads[i] = std::thread(work, first, last);
    } catch (const std::exception&) {
      break;  // no thread or no memory for one: the caller's thread does the rest
    }
    first = last;
  }
  work(first, count);
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
}

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
  split(num_rows, num_rows * num_groups * kGroupSize, num_threads,
        [=](int64_t first, int64_t last) {
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
  const moonlet::IsaTable* table = moonlet::table_of(isa_level);
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
  const moonlet::IsaTable* table = moonlet::table_of(isa_level);
  if (!table) return MOONLET_BAD_ISA;
  return moonlet::dequantize<uint16_t>(table->mxfp4_row_bf16, packed, scale, out, num_rows,
                                       num_groups, packed_row_stride, scale_row_stride,
                                       out_row_stride, num_threads);
}

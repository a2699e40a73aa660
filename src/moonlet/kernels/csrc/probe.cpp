// The loops that measure the hardware: vector loads with next to no arithmetic, and multiply-adds
// without memory.
//
// They use the level's own register width instead of sixteen lanes: compilers split wider vectors
// through the stack, and a bound must be what the hardware can do, not what a compiler makes of it.
#include "probe.h"

#include <stdint.h>

namespace moonlet {
namespace MOONLET_ISA {
namespace {

#if defined(MOONLET_ISA_scalar)
#define MOONLET_PROBE_BYTES 16
#elif defined(MOONLET_ISA_avx2)
#define MOONLET_PROBE_BYTES 32
#else
#define MOONLET_PROBE_BYTES 64
#endif

typedef float Register __attribute__((vector_size(MOONLET_PROBE_BYTES)));
typedef float Unaligned __attribute__((vector_size(MOONLET_PROBE_BYTES), aligned(4), may_alias));

constexpr int64_t kWidth = MOONLET_PROBE_BYTES / 4;
constexpr int64_t kPerSixteen = 16 / kWidth;
// more than latency times throughput of a multiply-add, and with two operands beside them within
// the sixteen registers of the lower levels
constexpr int kChains = 12;
constexpr int64_t kAhead = 2048;  // values between what is fetched and what is read
static_assert(kProbeUnit * kPerSixteen % kChains == 0, "a block holds whole rounds of the chains");

float read(const float* data, int64_t count) {
  constexpr int64_t kStep = kChains * kWidth;
  Register sum[kChains] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (int c = 0; c < kChains; ++c) {
      // the hardware's own fetching ends at every small page
      if (c % kPerSixteen == 0) __builtin_prefetch(data + i + kAhead + c * kWidth, 0, 2);
      sum[c] += *reinterpret_cast<const Unaligned*>(data + i + c * kWidth);
    }
  }
  float all = 0.0f;
  for (; i < count; ++i) all += data[i];
  for (int c = 1; c < kChains; ++c) sum[0] += sum[c];
  for (int64_t j = 0; j < kWidth; ++j) all += sum[0][j];
  return all;
}

float fma(int64_t count) {
  // the fixed point of the recurrence is 1: no chain becomes subnormal or infinite
  const Register factor = Register{} + 0.75f, term = Register{} + 0.25f;
  Register sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = Register{} + static_cast<float>(c + 2);
  const int64_t rounds = count * kPerSixteen / kChains;
  for (int64_t i = 0; i < rounds; ++i) {
    for (int c = 0; c < kChains; ++c) sum[c] = sum[c] * factor + term;
  }
  for (int c = 1; c < kChains; ++c) sum[0] += sum[c];
  float all = 0.0f;
  for (int64_t j = 0; j < kWidth; ++j) all += sum[0][j];
  return all / (kChains * kWidth);
}

}  // namespace

extern const ProbeTable probe_table;
const ProbeTable probe_table = {read, fma};

}  // namespace MOONLET_ISA
}  // namespace moonlet

// What the C interfaces of Kimi Delta Attention for inference share: checks of their arguments, and
// how subnormal numbers are counted while a kernel runs.
//
// Included by files with baseline flags only (see levels.h); every file gets its private copy.
#pragma once

#include <stdint.h>

#include "kda_infer.h"

#ifdef MOONLET_X86
#include <xmmintrin.h>
#endif

namespace moonlet {
namespace {

// fewer state elements than this in one step are not worth a second thread
constexpr int64_t kMinStepElements = 1 << 15;

bool bad_head_size(int64_t size) { return size < 16 || size % 16 != 0 || size > kMaxKdaSize; }

// Whether sizes, the bound or an input that every operator reads are out of range.
bool bad_gates(const KdaInputs& in, int64_t num_seqs) {
  return num_seqs < 0 || in.num_heads < 1 || bad_head_size(in.key_size) ||
         bad_head_size(in.value_size) || in.lower_bound > 0.0f || !in.z || !in.beta ||
         !in.a_log || !in.dt_bias || in.z_stride < in.num_heads * in.key_size;
}

// Decays multiply numbers down to nothing, and subnormal numbers on the way are slow on x86: with
// gates at their bound a chunk took 14 times as long. While this lives, the thread counts them as
// zero, whatever it did before; that also makes results independent of the thread.
class WithoutSubnormals {
 public:
#ifdef MOONLET_X86
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~WithoutSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned int before_;
#endif
};

}  // namespace
}  // namespace moonlet

// Sums and gates of whole rows: what lies between the operators of a decode step.
#include "step_rows.h"

#include "lanes.h"
#include "tails.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

void add(const float* a, const float* b, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load(a + i) + load(b + i));
  for (; i < count; ++i) out[i] = a[i] + b[i];
}

void sigmoid_gate(const float* x, const float* gate, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load(x + i) * logistic(load(gate + i)));
  if (i < count) {
    const int64_t left = count - i;
    const Lanes g = logistic(load_first(gate + i, left, Lanes{}));
    store_first(out + i, load_first(x + i, left, Lanes{}) * g, left);
  }
}

void widen(const uint16_t* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
    memcpy(out + i, &bits, sizeof(bits));
  }
}

}  // namespace

extern const StepRowTable step_row_table;
const StepRowTable step_row_table = {add, sigmoid_gate, widen};

}  // namespace MOONLET_ISA
}  // namespace moonlet

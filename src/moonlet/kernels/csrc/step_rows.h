// What one instruction-set level offers for sums and gates of whole rows.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

struct StepRowTable {
  // out = a + b, and out = x * sigmoid(gate).
  void (*add)(const float* a, const float* b, float* out, int64_t count);
  void (*sigmoid_gate)(const float* x, const float* gate, float* out, int64_t count);
  // out = the values of bfloat16 patterns.
  void (*widen)(const uint16_t* in, float* out, int64_t count);
};

MOONLET_TABLE(StepRowTable, step_row_table)

}  // namespace moonlet

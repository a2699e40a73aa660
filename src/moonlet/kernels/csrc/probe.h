// What one instruction-set level offers to measure the bounds of the hardware.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// The multiply-adds of a block are a multiple of this, so that every level runs whole rounds.
constexpr int64_t kProbeUnit = 12;

struct ProbeTable {
  // The sum of `count` values.
  float (*read)(const float* data, int64_t count);
  // `count` multiply-adds of 16 lanes in independent chains; the result only keeps them alive.
  float (*fma)(int64_t count);
};

MOONLET_TABLE(ProbeTable, probe_table)

}  // namespace moonlet

// What one instruction-set level offers for the gated activations of inference.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

struct GatedTable {
  // `count` elements; linear_beta <= 0 leaves the up branch uncapped.
  void (*situ_glu)(const float* gate, const float* up, float* out, int64_t count, float beta,
                   float linear_beta);
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t count);
};

MOONLET_TABLE(GatedTable, gated_table)

}  // namespace moonlet

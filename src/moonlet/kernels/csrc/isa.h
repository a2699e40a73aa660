// What one instruction-set level offers to the dispatcher in moonlet.cpp.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// Bit patterns of the eight E2M1 magnitudes at each scale byte: [256][8], float32.
typedef uint32_t MagnitudeTable[256][8];

struct IsaTable {
  void (*mxfp4_row_f32)(const MagnitudeTable& table, const uint8_t* packed, const uint8_t* scale,
                        float* out, int64_t num_groups);
  void (*mxfp4_row_bf16)(const MagnitudeTable& table, const uint8_t* packed, const uint8_t* scale,
                         uint16_t* out, int64_t num_groups);
};

MOONLET_TABLE(IsaTable, isa_table)

}  // namespace moonlet

// What one instruction-set level offers to the dispatcher in moonlet.cpp.
//
// mxfp4.cpp is compiled once per level, with that level's flags and into that level's namespace.
// Nothing here is an inline function: a shared inline compiled with AVX-512 flags could be the copy
// the linker keeps for every level.
#pragma once

#include <stdint.h>

namespace moonlet {

// Bit patterns of the eight E2M1 magnitudes at each scale byte: [256][8], float32.
typedef uint32_t MagnitudeTable[256][8];

struct IsaTable {
  void (*mxfp4_row_f32)(const MagnitudeTable& table, const uint8_t* packed, const uint8_t* scale,
                        float* out, int64_t num_groups);
  void (*mxfp4_row_bf16)(const MagnitudeTable& table, const uint8_t* packed, const uint8_t* scale,
                         uint16_t* out, int64_t num_groups);
};

namespace scalar {
extern const IsaTable isa_table;
}
namespace avx2 {
extern const IsaTable isa_table;
}
namespace avx512 {
extern const IsaTable isa_table;
}

}  // namespace moonlet

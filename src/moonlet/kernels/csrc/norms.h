// What one instruction-set level offers for the norms in inference.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

struct NormTable {
  // Rows of `size` values, in x the stride apart where there is one: x * rsqrt(mean(x^2) + eps) * weight, the second one times sigmoid(gate).
  void (*plain)(const float* x, const float* weight, float* out, int64_t rows, int64_t size,
                int64_t x_stride, float eps);
  void (*gated)(const float* x, const float* weight, const float* gate, float* out, int64_t rows,
                int64_t size, float eps);
};

MOONLET_TABLE(NormTable, norm_table)

}  // namespace moonlet

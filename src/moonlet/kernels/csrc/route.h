// What one instruction-set level offers for the router: sigmoid scores of rows and experts.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 32;

// Scores [num_rows, num_experts] of x [num_rows, size] and a weight [num_experts, size].
struct RouteShape {
  int64_t num_rows, size, num_experts;
};

// A rectangle of the scores.
struct RoutePart {
  int64_t first_row, last_row, first_expert, last_expert;
};

struct RouteTable {
  void (*scores_f32)(const float* x, const float* weight, float* scores, const RouteShape& shape,
                     const RoutePart& part);
  // The weight as 16-bit patterns of bfloat16.
  void (*scores_bf16)(const float* x, const uint16_t* weight, float* scores,
                      const RouteShape& shape, const RoutePart& part);
};

MOONLET_TABLE(RouteTable, route_table)

}  // namespace moonlet

// What one instruction-set level offers for sampling: passes over runs of float32 logits.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// The largest logits of a run are kept one per lane.
constexpr int64_t kMaxima = 16;

struct SampleTable {
  // maxima[lane] = the largest of logits lane, lane + 16, ...; minus infinity for an empty lane.
  void (*find_maxima)(const float* logits, int64_t count, float* maxima);
  // Returns the sum of e^((logit - top) * rate) in float64; out receives them if it is not null.
  double (*weigh)(const float* logits, int64_t count, double top, double rate, double* out);
  // Collects the logits of at least `floor` and their positions; returns how many there are.
  int64_t (*gather)(const float* logits, int64_t count, float floor, int32_t* positions,
                    float* kept);
};

MOONLET_TABLE(SampleTable, sample_table)

}  // namespace moonlet

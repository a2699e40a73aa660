// What one instruction-set level offers for the short convolution in inference.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// Limits that the checks of the C interface and the buffers of the operator share.
constexpr int64_t kMaxTaps = 16;
constexpr int64_t kConvChannels = 512;  // channels of one piece of work

// x [rows, channels], weight [channels, taps], carry [num_seqs, channels, taps - 1] oldest first,
// rows starts[s]..starts[s + 1] - 1 being sequence s; rows of x and out lie `*_stride` apart. The
// carry after a sequence's last row goes to new_carry, which may be the old one, and that after row
// emit_rows[e] (ascending) to emitted[emit_places[e]].
struct ShortConv {
  const float *x, *weight, *carry;
  const int64_t* starts;
  float *out, *new_carry;
  const int64_t *emit_rows, *emit_places;
  float* emitted;
  int64_t num_emits, num_seqs, channels, taps, x_stride, out_stride;
};

// One row of every sequence: x and out [num_seqs, channels], the carry of sequence s in slot
// slots[s] of state, weights [num_weights] matrices of equal size.
struct ShortConvStep {
  const float* x;
  const int64_t* weights;
  float* state;
  const int64_t* slots;
  float* out;
  int64_t num_weights, channels, taps;
};

struct ShortConvTable {
  // Rows first..last - 1 of `count` channels from `channel` on; count is at most kConvChannels.
  void (*piece)(const ShortConv& conv, int64_t first, int64_t last, int64_t channel,
                int64_t count);
  // `count` channels of one matrix, from `channel` of all on, for one sequence.
  void (*step)(const ShortConvStep& conv, int64_t seq, int64_t channel, int64_t count);
};

MOONLET_TABLE(ShortConvTable, short_conv_table)

}  // namespace moonlet

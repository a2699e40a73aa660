// Short depthwise causal convolution with SiLU: y_t = silu(sum_j w_j u_{t - W + j}), W = taps - 1.
//
// A piece is some packed rows of some neighbouring channels, so its rows are read along memory and
// the W rows before the current one come out of the first cache level. Inputs before a sequence's
// first row come from its carry.
#include "short_conv.h"

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

typedef float TapsByChannels[kMaxTaps * kConvChannels];

MOONLET_INLINE Lanes load_some(const float* p, int64_t count) {
  Lanes v = {};
  memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
  return v;
}

// out[j][kConvChannels] = in[count][J], taps and carries being stored channel by channel.
template <int64_t J>
MOONLET_INLINE void gather(float* out, const float* in, int64_t width, int64_t count) {
  const int64_t n = J ? J : width;
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t j = 0; j < n; ++j) out[j * kConvChannels + c] = in[c * n + j];
  }
}

template <int64_t J>
MOONLET_INLINE void scatter(float* out, const float* const* rows, int64_t width, int64_t count) {
  const int64_t n = J ? J : width;
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t j = 0; j < n; ++j) out[c * n + j] = rows[j][c];
  }
}

// One row; rows[j] is the input that tap j multiplies.
template <int64_t J>
MOONLET_INLINE void convolve(const float* weight, const float* const* rows, int64_t taps,
                             float* out, int64_t count) {
  const int64_t n = J ? J : taps;
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    Lanes y = {};
    for (int64_t j = 0; j < n; ++j) y += load(weight + j * kConvChannels + c) * load(rows[j] + c);
    store(out + c, y * logistic(y));
  }
  if (c < count) {
    Lanes y = {};
    for (int64_t j = 0; j < n; ++j) {
      y += load_some(weight + j * kConvChannels + c, count - c) * load_some(rows[j] + c, count - c);
    }
    y = y * logistic(y);
    memcpy(out + c, &y, static_cast<size_t>(count - c) * sizeof(float));
  }
}

// J taps, or conv.taps where J is 0.
template <int64_t J>
void run(const ShortConv& conv, int64_t first, int64_t last, int64_t channel, int64_t count) {
  constexpr int64_t kCarried = J ? J - 1 : 0;
  const int64_t channels = conv.channels, taps = J ? J : conv.taps, width = taps - 1;
  TapsByChannels weight, before;
  gather<J>(weight, conv.weight + channel * taps, taps, count);
  int64_t s = 0, e = 0;
  for (int64_t step = conv.num_seqs; step > 0; step /= 2) {
    while (s + step < conv.num_seqs && conv.starts[s + step] <= first) s += step;
  }
  for (int64_t step = conv.num_emits; step > 0; step /= 2) {
    while (e + step <= conv.num_emits && conv.emit_rows[e + step - 1] < first) e += step;
  }
  for (int64_t row = first; row < last; ++s) {
    const int64_t start = conv.starts[s], end = conv.starts[s + 1];
    const int64_t stop = end < last ? end : last;
    const float* carry = conv.carry + (s * channels + channel) * width;
    if (row - start < width) gather<kCarried>(before, carry, width, count);
    for (; row < stop; ++row) {
      const float* rows[kMaxTaps];
      for (int64_t j = 0; j < taps; ++j) {
        const int64_t at = row - width + j;
        rows[j] = at < start ? before + (at - start + width) * kConvChannels
                             : conv.x + at * conv.x_stride + channel;
      }
      convolve<J>(weight, rows, taps, conv.out + row * conv.out_stride + channel, count);
      for (; e < conv.num_emits && conv.emit_rows[e] == row; ++e) {
        float* emitted = conv.emitted + (conv.emit_places[e] * channels + channel) * width;
        scatter<kCarried>(emitted, rows + 1, width, count);
      }
      if (row == end - 1) {
        float* carried = conv.new_carry + (s * channels + channel) * width;
        scatter<kCarried>(carried, rows + 1, width, count);
      }
    }
  }
}

void piece(const ShortConv& conv, int64_t first, int64_t last, int64_t channel, int64_t count) {
  if (conv.taps == 4) {
    run<4>(conv, first, last, channel, count);
  } else {
    run<0>(conv, first, last, channel, count);
  }
}

// J taps, or conv.taps where J is 0.
template <int64_t J>
void run_step(const ShortConvStep& conv, int64_t seq, int64_t channel, int64_t count) {
  const int64_t channels = conv.channels, taps = J ? J : conv.taps, width = taps - 1;
  const int64_t per_weight = channels / conv.num_weights, at = channel % per_weight;
  const float* weight = reinterpret_cast<const float*>(conv.weights[channel / per_weight]);
  TapsByChannels by_channel, before;
  gather<J>(by_channel, weight + at * taps, taps, count);
  float* carry = conv.state + (conv.slots[seq] * channels + channel) * width;
  gather<J ? J - 1 : 0>(before, carry, width, count);
  const float* rows[kMaxTaps];
  for (int64_t j = 0; j < width; ++j) rows[j] = before + j * kConvChannels;
  rows[width] = conv.x + seq * channels + channel;
  convolve<J>(by_channel, rows, taps, conv.out + seq * channels + channel, count);
  scatter<J ? J - 1 : 0>(carry, rows + 1, width, count);
}

void step(const ShortConvStep& conv, int64_t seq, int64_t channel, int64_t count) {
  if (conv.taps == 4) {
    run_step<4>(conv, seq, channel, count);
  } else {
    run_step<0>(conv, seq, channel, count);
  }
}

}  // namespace

extern const ShortConvTable short_conv_table;
const ShortConvTable short_conv_table = {piece, step};

}  // namespace MOONLET_ISA
}  // namespace moonlet

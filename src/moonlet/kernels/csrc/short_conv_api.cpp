// The C interface of the short convolution in inference: argument checks, level, threads.
//
// Compiled with baseline flags only.
#include "short_conv.h"

#include <stdint.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

constexpr int64_t kPieceRows = 64;
// fewer elements than this are not worth a second thread
constexpr int64_t kMinElements = 1 << 15;

}  // namespace
}  // namespace moonlet

int32_t moonlet_short_conv_f32(const float* x, const float* weight, const float* carry,
                               const int64_t* starts, float* out, float* new_carry,
                               const int64_t* emit_rows, const int64_t* emit_places,
                               float* emitted, int64_t num_emits, int64_t num_seqs,
                               int64_t channels, int64_t taps, int32_t isa_level,
                               int32_t num_threads) {
  using moonlet::kConvChannels;
  using moonlet::kPieceRows;
  const moonlet::ShortConvTable* table = MOONLET_PICK(short_conv_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_seqs < 0 || channels < 1 || taps < 1 || taps > moonlet::kMaxTaps || num_threads < 1 ||
      num_emits < 0 || !x || !weight || !starts || !out ||
      (taps > 1 && (!carry || !new_carry)) ||
      (num_emits && !(emit_rows && emit_places && (taps == 1 || emitted)))) {
    return MOONLET_BAD_ARGUMENT;
  }
  const moonlet::ShortConv conv = {x,         weight,    carry,       starts,  out,
                                   new_carry, emit_rows, emit_places, emitted, num_emits,
                                   num_seqs,  channels,  taps,        channels, channels};
  const int64_t num_rows = starts[num_seqs];
  const int64_t blocks = (channels + kConvChannels - 1) / kConvChannels;
  const int64_t pieces = (num_rows + kPieceRows - 1) / kPieceRows;
  const int64_t rows = num_rows < kPieceRows ? num_rows : kPieceRows;
  const int64_t width = channels < kConvChannels ? channels : kConvChannels;
  const int64_t grain = 1 + moonlet::kMinElements / (1 + rows * width);
  moonlet::parallel(pieces * blocks, grain, num_threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / blocks * kPieceRows, channel = i % blocks * kConvChannels;
      const int64_t last = first + kPieceRows < num_rows ? first + kPieceRows : num_rows;
      const int64_t left = channels - channel;
      table->piece(conv, first, last, channel, left < kConvChannels ? left : kConvChannels);
    }
  });
  return MOONLET_OK;
}

int32_t moonlet_short_conv_step_f32(const float* x, const int64_t* weights, int64_t num_weights,
                                    float* state, const int64_t* slots, float* out,
                                    int64_t num_slots, int64_t num_seqs, int64_t channels,
                                    int64_t taps, int32_t isa_level, int32_t num_threads) {
  using moonlet::kConvChannels;
  const moonlet::ShortConvTable* table = MOONLET_PICK(short_conv_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_seqs < 0 || num_weights < 1 || channels < num_weights || channels % num_weights ||
      taps < 1 || taps > moonlet::kMaxTaps || num_threads < 1 || !x || !weights || !slots ||
      !out || (taps > 1 && !state)) {
    return MOONLET_BAD_ARGUMENT;
  }
  for (int64_t s = 0; s < num_seqs; ++s) {
    if (slots[s] < 0 || slots[s] >= num_slots) return MOONLET_BAD_ARGUMENT;
  }
  const moonlet::ShortConvStep conv = {x, weights, state, slots, out, num_weights, channels, taps};
  const int64_t size = channels / num_weights;
  const int64_t blocks = (size + kConvChannels - 1) / kConvChannels;
  const int64_t grain = 1 + moonlet::kMinElements / (size < kConvChannels ? size : kConvChannels);
  const int64_t per_seq = num_weights * blocks;
  moonlet::parallel(num_seqs * per_seq, grain, num_threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i % per_seq / blocks, at = i % blocks * kConvChannels;
      const int64_t left = size - at;
      table->step(conv, i / per_seq, matrix * size + at,
                  left < kConvChannels ? left : kConvChannels);
    }
  });
  return MOONLET_OK;
}

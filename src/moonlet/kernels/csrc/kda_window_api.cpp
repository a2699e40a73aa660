// Rows of verification windows from their projected inputs: the short convolution and the decode
// step of Kimi Delta Attention, head by head (speculative.md section 6).
//
// Compiled with baseline flags only: everything that computes comes from the tables of
// short_conv.cpp and kda_step.cpp. A row takes the functions of a plain decode step, so a verified
// row and a committed state have the bits of plain decode. One piece of work is one head of one
// sequence: its state fits the second cache level, so memory sees it once for all rows.
#include <stdint.h>
#include <string.h>

#include "kda_api.h"
#include "moonlet.h"
#include "pool.h"
#include "short_conv.h"

namespace moonlet {
namespace {

// rows convolved at a time; the rows that the convolution looks back fit into the block before
constexpr int64_t kBlockRows = 16;
static_assert(kBlockRows >= kMaxTaps - 1, "a block's first row looks back into one block only");

// x [rows, channels] holds the raw q, k, v of all heads side by side; `in` their gates, with q, k
// and v yet to come. Sequence s runs count_of(s) rows from starts[s] on, and its memory is
// slots[s] of the arenas conv [slots, channels, taps - 1] and state [slots, heads, key, value].
struct Window {
  const float* x;
  const int64_t* weights;
  KdaInputs in;
  const float *state, *conv;
  const int64_t *slots, *starts, *counts;
  int64_t num_slots, num_seqs, taps;
  const ShortConvTable* short_conv;
  const KdaStepTable* step;

  int64_t channels() const { return in.num_heads * (2 * in.key_size + in.value_size); }
  int64_t count_of(int64_t s) const { return counts ? counts[s] : starts[s + 1] - starts[s]; }
};

// Where one head's part of q, k or v begins, in channels of all and of its own matrix.
struct Part {
  int64_t channel, in_matrix, size;
};

Part part_of(const KdaInputs& in, int64_t matrix, int64_t head) {
  const int64_t size = matrix == 2 ? in.value_size : in.key_size;
  return {matrix * in.num_heads * in.key_size + head * size, head * size, size};
}

typedef float BlockRows[(kBlockRows + kMaxTaps) * kMaxKdaSize];

// Convolves rows first..last - 1 of a sequence that begins at x and has `count` rows, one part of
// them; row `first` goes to where the result points. With new_carry, the carry after the last row
// of the sequence is written to it; it may be the carry.
const float* convolve(const Window& w, const float* x, const Part& part, const float* weight,
                      const float* carry, float* new_carry, int64_t first, int64_t last,
                      int64_t count, float* out) {
  const int64_t width = w.taps - 1;
  // a later block is a sequence that begins with the rows it looks back to, so `out` needs to hold
  // no more than one block and no carry is read
  const int64_t back = first ? width : 0, rows = back + last - first;
  // a piece that ends before its sequence does writes no carry
  const int64_t starts[2] = {0, new_carry && last == count ? rows : rows + 1};
  const ShortConv conv = {x + (first - back) * w.channels() + part.channel,
                          weight + part.in_matrix * w.taps,
                          carry,
                          starts,
                          out,
                          new_carry,
                          nullptr,
                          nullptr,
                          nullptr,
                          0,
                          1,
                          part.size,
                          w.taps,
                          w.channels(),
                          part.size};
  w.short_conv->piece(conv, back, rows, 0, part.size);
  return out + back * part.size;
}

// Runs the sequence's rows of one head on `state`. Without new_conv the carry stays as it is; rows
// of `out` are [heads, value_size], a null pointer drops them.
void run_head(const Window& w, int64_t s, int64_t head, float* state, float* new_conv, float* out) {
  const int64_t H = w.in.num_heads, V = w.in.value_size, width = w.taps - 1;
  const int64_t start = w.starts[s], count = w.count_of(s);
  const int64_t conv_of_slot = w.slots[s] * w.channels() * width;
  BlockRows rows[3];
  float dropped[kMaxKdaSize];
  for (int64_t first = 0; first < count; first += kBlockRows) {
    const int64_t last = first + kBlockRows < count ? first + kBlockRows : count;
    const float* qkv[3];
    for (int64_t matrix = 0; matrix < 3; ++matrix) {
      const Part part = part_of(w.in, matrix, head);
      const int64_t at = conv_of_slot + part.channel * width;
      qkv[matrix] = convolve(w, w.x + start * w.channels(), part,
                             reinterpret_cast<const float*>(w.weights[matrix]), w.conv + at,
                             new_conv ? new_conv + at : nullptr, first, last, count, rows[matrix]);
    }
    KdaInputs in = w.in;
    in.q = qkv[0], in.k = qkv[1], in.v = qkv[2];
    in.q_stride = in.k_stride = in.key_size, in.v_stride = V;
    // one head, whose rows of beta are all heads apart
    in.z += (start + first) * in.z_stride + head * in.key_size;
    in.beta += (start + first) * H + head;
    in.a_log += head, in.dt_bias += head * in.key_size;
    // the convolution of a decode step keeps subnormal numbers
    const WithoutSubnormals mode;
    for (int64_t row = first; row < last; ++row) {
      w.step->step(in, row - first, 0, state, out ? out + ((start + row) * H + head) * V : dropped);
    }
  }
}

int32_t check(const Window& w, int32_t num_threads) {
  if (!w.short_conv || !w.step) return MOONLET_BAD_ISA;
  if (bad_gates(w.in, w.num_seqs) || !w.x || !w.weights || !w.state || !w.slots || !w.starts ||
      w.taps < 1 || w.taps > kMaxTaps || (w.taps > 1 && !w.conv) || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  for (int64_t s = 0; s < w.num_seqs; ++s) {
    if (w.slots[s] < 0 || w.slots[s] >= w.num_slots || w.count_of(s) < 0 ||
        w.count_of(s) > w.starts[s + 1] - w.starts[s]) {
      return MOONLET_BAD_ARGUMENT;
    }
  }
  return MOONLET_OK;
}

// Calls function(sequence, head) for all of them, on several threads where that pays.
template <typename Function>
void for_each_head(const Window& w, int32_t num_threads, const Function& function) {
  const int64_t heads = w.in.num_heads;
  const int64_t elements = w.in.key_size * w.in.value_size;
  int64_t rows = 0;
  for (int64_t s = 0; s < w.num_seqs; ++s) rows += w.count_of(s);
  const int64_t per_head = elements * (1 + rows / (1 + w.num_seqs));
  parallel(w.num_seqs * heads, 1 + kMinStepElements / per_head, num_threads,
           [&](int64_t first, int64_t last) {
             for (int64_t i = first; i < last; ++i) function(i / heads, i % heads);
           });
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_kda_window_f32(const float* x, const int64_t* weights, const float* z,
                               const float* beta, const float* a_log, const float* dt_bias,
                               float lower_bound, const float* state, const float* conv,
                               const int64_t* slots, const int64_t* starts, float* out,
                               int64_t num_slots, int64_t num_seqs, int64_t num_heads,
                               int64_t key_size, int64_t value_size, int64_t taps,
                               int32_t isa_level, int32_t num_threads) {
  const moonlet::KdaInputs in = {nullptr, nullptr, nullptr,   z,        beta,
                                 a_log,   dt_bias, lower_bound, 0,      0,
                                 0,       num_heads * key_size, num_heads, key_size, value_size};
  const moonlet::Window w = {x,         weights,  in,   state, conv, slots, starts, nullptr,
                             num_slots, num_seqs, taps, MOONLET_PICK(short_conv_table, isa_level),
                             MOONLET_PICK(kda_step_table, isa_level)};
  const int32_t status = out ? moonlet::check(w, num_threads) : MOONLET_BAD_ARGUMENT;
  if (status != MOONLET_OK) return status;
  const int64_t size = key_size * value_size;
  moonlet::for_each_head(w, num_threads, [&](int64_t s, int64_t head) {
    // as large as the copy of a whole head: the stored state stays what it was before the window
    float copy[moonlet::kMaxKdaSize * moonlet::kMaxKdaSize];
    memcpy(copy, state + (slots[s] * num_heads + head) * size,
           static_cast<size_t>(size) * sizeof(float));
    moonlet::run_head(w, s, head, copy, nullptr, out);
  });
  return MOONLET_OK;
}

int32_t moonlet_kda_replay_f32(const float* x, const int64_t* weights, const float* z,
                               const float* beta, const float* a_log, const float* dt_bias,
                               float lower_bound, float* state, float* conv, const int64_t* slots,
                               const int64_t* starts, const int64_t* counts, int64_t num_slots,
                               int64_t num_seqs, int64_t num_heads, int64_t key_size,
                               int64_t value_size, int64_t taps, int32_t isa_level,
                               int32_t num_threads) {
  const moonlet::KdaInputs in = {nullptr, nullptr, nullptr,   z,        beta,
                                 a_log,   dt_bias, lower_bound, 0,      0,
                                 0,       num_heads * key_size, num_heads, key_size, value_size};
  const moonlet::Window w = {x,         weights,  in,   state, conv, slots, starts, counts,
                             num_slots, num_seqs, taps, MOONLET_PICK(short_conv_table, isa_level),
                             MOONLET_PICK(kda_step_table, isa_level)};
  const int32_t status = counts ? moonlet::check(w, num_threads) : MOONLET_BAD_ARGUMENT;
  if (status != MOONLET_OK) return status;
  const int64_t size = key_size * value_size;
  moonlet::for_each_head(w, num_threads, [&](int64_t s, int64_t head) {
    moonlet::run_head(w, s, head, state + (slots[s] * num_heads + head) * size, conv, nullptr);
  });
  return MOONLET_OK;
}

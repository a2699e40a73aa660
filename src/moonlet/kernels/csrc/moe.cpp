// Routed experts from packed MXFP4 weights: both projections, the gated activation, the weighted sum.
//
// The slots of an expert (the rows that chose it) are computed together. Few slots: weights are
// decoded in registers and multiplied at once. Many: blocks are decoded once into panels (gemm.h),
// in integers for mode 3 where the level can (fp4_int8.h).
// The order of every sum is fixed by the shapes alone.
#include "moe.h"

#include "fp4_int8.h"
#include "fp4_rows.h"
#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kMaxStreamedSlots = 24;
// in integers packing costs less: above four slots it pays
constexpr int64_t kMaxStreamedCoded = 4;
// rows that share one packing; more than an expert usually gets from a chunk of 512
constexpr int64_t kRowBatch = 256;

void round_row(float* row, int64_t size, int32_t mode) {
  for (int64_t b = 0; b < size; b += kBlock) round_block(row + b, mode);
}

void prepare(const MoeProblem& p, const float* z, int64_t first, int64_t last) {
#if defined(__AVX512VNNI__)
  if (p.coded_inputs) {
    for (int64_t k = first * p.size_in; k < last * p.size_in; k += 32) {
      code_group(load(z + k), load(z + k + kLanes), p.coded_inputs + k / 32);
    }
    return;
  }
#endif
  const int64_t stride = padded(p.size_in);
  for (int64_t t = first; t < last; ++t) {
    permute_row(z + t * p.size_in, p.size_in, p.inputs + t * stride);
    if (p.mode != 0) round_row(p.inputs + t * stride, stride, p.mode);
  }
}

void round_groups(const float* x, float* out, int64_t count, int32_t mode) {
  float block[kBlock];
  for (int64_t b = 0; b < count; b += kBlock) {
    const int64_t size = smaller(count - b, kBlock);
    memset(block, 0, sizeof(block));
    for (int64_t k = 0; k < size; ++k) block[permuted(k)] = x[b + k];
    round_row(block, kBlock, mode);
    for (int64_t k = 0; k < size; ++k) out[b + k] = block[permuted(k)];
  }
}

void round_hidden(const MoeProblem& p, int64_t first, int64_t last) {
  const int64_t stride = padded(p.width);
  for (int64_t s = first; s < last; ++s) round_row(p.hidden + s * stride, stride, p.mode);
}

MOONLET_INLINE Lanes gated(const MoeProblem& p, Lanes gate, Lanes up) {
  if (p.activation == 1) {
    // the logistic saturates above zero, which a large gate would make visible
    return choose(gate < fill(-87.0f), Lanes{}, gate * logistic(gate)) * up;
  }
  const Lanes a = p.beta * hyperbolic_tangent(gate * (1.0f / p.beta)) * logistic(gate);
  if (p.linear_beta <= 0.0f) return a * up;
  return a * p.linear_beta * hyperbolic_tangent(up * (1.0f / p.linear_beta));
}

// Writes act(gate, up) of outputs [first, first + count) to a permuted hidden row.
void activate(const MoeProblem& p, const float* gate, const float* up, int64_t first, int64_t count,
              float* row) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes h = gated(p, load(gate + i), load(up + i));
    const int64_t n = smaller(count - i, kLanes);
    for (int64_t j = 0; j < n; ++j) row[permuted(first + i + j)] = h[j];
  }
}

// The inputs of `count` slots from `first` on.
void find_inputs(const MoeProblem& p, int64_t first, int64_t count, const float** x) {
  for (int64_t m = 0; m < count; ++m) {
    x[m] = p.inputs + p.slots[first + m] / p.top_k * padded(p.size_in);
  }
}

void up_few(const MoeProblem& p, const Rows& w1, const Rows& w3, int64_t begin, int64_t slots,
            int64_t first, int64_t last) {
  float gate[kExpertOutputs * kMaxGroup], up[kExpertOutputs * kMaxGroup];
  float gate_row[kExpertOutputs], up_row[kExpertOutputs];
  const Then then_w3 = {w3, first}, then_w1 = {w1, last};
  const float* x[kMaxGroup];
  for (int64_t s = 0; s < slots; s += kMaxGroup) {
    const int64_t count = smaller(slots - s, kMaxGroup);
    find_inputs(p, begin + s, count, x);
    dot_group(w1, first, last, x, count, gate, kMaxGroup, &then_w3);
    dot_group(w3, first, last, x, count, up, kMaxGroup, last < p.width ? &then_w1 : nullptr);
    for (int64_t m = 0; m < count; ++m) {
      memset(gate_row, 0, sizeof(gate_row));
      memset(up_row, 0, sizeof(up_row));
      for (int64_t o = 0; o < last - first; ++o) {
        gate_row[o] = gate[o * kMaxGroup + m];
        up_row[o] = up[o * kMaxGroup + m];
      }
      activate(p, gate_row, up_row, first, last - first,
               p.hidden + (begin + s + m) * padded(p.width));
    }
  }
}

void up_many(const MoeProblem& p, const Rows& w1, const Rows& w3, int64_t begin, int64_t slots,
             int64_t first, int64_t last) {
  float gate[kRowBatch * kExpertOutputs], up[kRowBatch * kExpertOutputs];
  const float* x[kRowBatch];
  for (int64_t s = 0; s < slots; s += kRowBatch) {
    const int64_t count = smaller(slots - s, kRowBatch);
    find_inputs(p, begin + s, count, x);
    multiply_many(w1, first, last, x, count, gate, kExpertOutputs);
    multiply_many(w3, first, last, x, count, up, kExpertOutputs);
    for (int64_t m = 0; m < count; ++m) {
      activate(p, gate + m * kExpertOutputs, up + m * kExpertOutputs, first, last - first,
               p.hidden + (begin + s + m) * padded(p.width));
    }
  }
}

#if defined(__AVX512VNNI__)

void up_coded(const MoeProblem& p, const Rows& w1, const Rows& w3, int64_t begin, int64_t slots,
              int64_t first, int64_t last) {
  float gate[kRowBatch * kExpertOutputs], up[kRowBatch * kExpertOutputs];
  const CodedGroup* x[kRowBatch];
  for (int64_t s = 0; s < slots; s += kRowBatch) {
    const int64_t count = smaller(slots - s, kRowBatch);
    for (int64_t m = 0; m < count; ++m) {
      x[m] = p.coded_inputs + p.slots[begin + s + m] / p.top_k * w1.groups;
    }
    if (slots > kMaxStreamedCoded) {
      multiply_coded(w1, first, last, x, count, gate, &w3);
      multiply_coded(w3, first, last, x, count, up, nullptr);
    } else {
      const Then then_w3 = {w3, first}, then_w1 = {w1, last};
      dot_coded_rows(w1, first, last, x, count, gate, &then_w3);
      dot_coded_rows(w3, first, last, x, count, up, last < p.width ? &then_w1 : nullptr);
    }
    for (int64_t m = 0; m < count; ++m) {
      const float *g = gate + m * kExpertOutputs, *u = up + m * kExpertOutputs;
      CodedGroup* out = p.coded_hidden + ((begin + s + m) * p.width + first) / 32;
      for (int64_t o = 0; o < last - first; o += 32) {
        const Lanes low = gated(p, load(g + o), load(u + o));
        code_group(low, gated(p, load(g + o + kLanes), load(u + o + kLanes)), out + o / 32);
      }
    }
  }
}

#endif

void up(const MoeProblem& p, int64_t expert, int64_t first, int64_t last) {
  const int64_t begin = p.starts[expert], slots = p.starts[expert + 1] - begin;
  const Rows w1 = rows_of(p.w1, expert, p.width, p.size_in);
  const Rows w3 = rows_of(p.w3, expert, p.width, p.size_in);
#if defined(__AVX512VNNI__)
  if (p.coded_inputs) return up_coded(p, w1, w3, begin, slots, first, last);
#endif
  if (slots > kMaxStreamedSlots) {
    up_many(p, w1, w3, begin, slots, first, last);
  } else {
    up_few(p, w1, w3, begin, slots, first, last);
  }
  if (last != p.width) return;
  // whoever computes the last outputs clears the padding
  for (int64_t s = begin; s < begin + slots; ++s) {
    for (int64_t k = p.width; k < padded(p.width); ++k) {
      p.hidden[s * padded(p.width) + permuted(k)] = 0.0f;
    }
  }
}

// The first expert from `expert` on that has slots, or num_experts.
MOONLET_INLINE int64_t next_used(const MoeProblem& p, int64_t expert) {
  while (expert < p.num_experts && p.starts[expert] == p.starts[expert + 1]) ++expert;
  return expert;
}

// What is read after outputs [first, last) of an expert: the same of the next one, or at the end the
// outputs that follow, from the first one on.
Then after(const MoeProblem& p, int64_t expert, int64_t first, int64_t last) {
  const int64_t next = next_used(p, expert + 1);
  if (next < p.num_experts) return {rows_of(p.w2, next, p.size_in, p.width), first};
  return {rows_of(p.w2, next_used(p, 0), p.size_in, p.width), last};
}

void down_few(const MoeProblem& p, const Rows& w2, int64_t begin, int64_t slots, int64_t first,
              int64_t last, float* out, const Then& then) {
  float y[kExpertOutputs * kMaxGroup];
  const float* x[kMaxGroup];
  for (int64_t s = 0; s < slots; s += kMaxGroup) {
    const int64_t count = smaller(slots - s, kMaxGroup);
    for (int64_t m = 0; m < count; ++m) x[m] = p.hidden + (begin + s + m) * padded(p.width);
    dot_group(w2, first, last, x, count, y, kMaxGroup, &then);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t slot = p.slots[begin + s + m];
      float* row = out + slot / p.top_k * p.size_in;
      for (int64_t o = first; o < last; ++o) {
        row[o] += p.weights[slot] * y[(o - first) * kMaxGroup + m];
      }
    }
  }
}

// Adds the weighted outputs [first, last) of a slot to its row.
MOONLET_INLINE void add_weighted(const MoeProblem& p, int64_t slot, const float* y, int64_t first,
                                 int64_t last, float* out) {
  float* row = out + slot / p.top_k * p.size_in;
  for (int64_t o = first; o < last; o += kLanes) {
    add_to(row + o, p.weights[slot] * load(y + o - first));
  }
}

void down_many(const MoeProblem& p, const Rows& w2, int64_t begin, int64_t slots, int64_t first,
               int64_t last, float* out) {
  float y[kRowBatch * kExpertOutputs];
  const float* x[kRowBatch];
  for (int64_t s = 0; s < slots; s += kRowBatch) {
    const int64_t count = smaller(slots - s, kRowBatch);
    for (int64_t m = 0; m < count; ++m) x[m] = p.hidden + (begin + s + m) * padded(p.width);
    multiply_many(w2, first, last, x, count, y, kExpertOutputs);
    for (int64_t m = 0; m < count; ++m) {
      add_weighted(p, p.slots[begin + s + m], y + m * kExpertOutputs, first, last, out);
    }
  }
}

#if defined(__AVX512VNNI__)

void down_coded(const MoeProblem& p, const Rows& w2, int64_t begin, int64_t slots, int64_t first,
                int64_t last, float* out, const Rows* next, const Then& then) {
  float y[kRowBatch * kExpertOutputs];
  const CodedGroup* x[kRowBatch];
  for (int64_t s = 0; s < slots; s += kRowBatch) {
    const int64_t count = smaller(slots - s, kRowBatch);
    for (int64_t m = 0; m < count; ++m) x[m] = p.coded_hidden + (begin + s + m) * w2.groups;
    if (slots > kMaxStreamedCoded) {
      multiply_coded(w2, first, last, x, count, y, next);
    } else {
      dot_coded_rows(w2, first, last, x, count, y, &then);
    }
    for (int64_t m = 0; m < count; ++m) {
      add_weighted(p, p.slots[begin + s + m], y + m * kExpertOutputs, first, last, out);
    }
  }
}

#endif

void down(const MoeProblem& p, float* out, int64_t first, int64_t last) {
  for (int64_t t = 0; t < p.num_rows; ++t) {
    memset(out + t * p.size_in + first, 0, (last - first) * sizeof(float));
  }
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const int64_t begin = p.starts[e], slots = p.starts[e + 1] - begin;
    if (slots == 0) continue;
    const Rows w2 = rows_of(p.w2, e, p.size_in, p.width);
#if defined(__AVX512VNNI__)
    if (p.coded_inputs) {
      const Rows next = rows_of(p.w2, e + 1, p.size_in, p.width);
      const bool is_used = e + 1 < p.num_experts && p.starts[e + 1] < p.starts[e + 2];
      down_coded(p, w2, begin, slots, first, last, out, is_used ? &next : nullptr,
                 after(p, e, first, last));
      continue;
    }
#endif
    if (slots > kMaxStreamedSlots) {
      down_many(p, w2, begin, slots, first, last, out);
    } else {
      down_few(p, w2, begin, slots, first, last, out, after(p, e, first, last));
    }
  }
}

}  // namespace

extern const MoeTable moe_table;
const MoeTable moe_table = {prepare, round_groups, up, round_hidden, down};

}  // namespace MOONLET_ISA
}  // namespace moonlet

// From the raw rows of Kimi Delta Attention to decays, unit keys and write strengths.
//
// Like lanes.h: every level gets its private copy (anonymous namespace). Include after lanes.h,
// inside a file that is compiled once per level.
#pragma once

#include <stdint.h>

#include "kda_infer.h"
#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr float kUnitEps = 1e-6f;

// ln(1 + e^x). With y = e^-|x|, ln(1 + y) = 2 atanh(y / (2 + y)): the argument is at most 1/3, and
// the series keeps the relative precision of small y.
MOONLET_INLINE Lanes softplus(Lanes x) {
  const Lanes y = exponential(-magnitude(x));
  const Lanes s = y / (2.0f + y);
  const Lanes z = s * s;
  Lanes p = fill(2.0f / 15.0f);
  p = p * z + 2.0f / 13.0f;
  p = p * z + 2.0f / 11.0f;
  p = p * z + 2.0f / 9.0f;
  p = p * z + 2.0f / 7.0f;
  p = p * z + 2.0f / 5.0f;
  p = p * z + 2.0f / 3.0f;
  p = p * z + 2.0f;
  const Lanes zero = {};
  return choose(x > zero, x, zero) + p * s;
}

// One row of one head.
struct Row {
  const float *q, *k, *v, *z, *bias;
  float gate_scale, lower_bound;
  float query_scale, key_scale;  // to the unit length; the query's holds K^-1/2 too
  float beta;
};

MOONLET_INLINE float inverse_norm(const float* x, int64_t size) {
  Lanes sum = {};
  for (int64_t c = 0; c < size; c += kLanes) sum += load(x + c) * load(x + c);
  return 1.0f / __builtin_sqrtf(total(sum) + kUnitEps);
}

MOONLET_INLINE Row row_of(const KdaInputs& in, int64_t row, int64_t head) {
  const int64_t key = head * in.key_size;
  Row r;
  r.q = in.q + row * in.q_stride + key;
  r.k = in.k + row * in.k_stride + key;
  r.v = in.v + row * in.v_stride + head * in.value_size;
  r.z = in.z + row * in.z_stride + key;
  r.bias = in.dt_bias + key;
  r.gate_scale = __builtin_expf(in.a_log[head]);
  r.lower_bound = in.lower_bound;
  r.query_scale =
      inverse_norm(r.q, in.key_size) / __builtin_sqrtf(static_cast<float>(in.key_size));
  r.key_scale = inverse_norm(r.k, in.key_size);
  r.beta = 1.0f / (1.0f + __builtin_expf(-in.beta[row * in.num_heads + head]));
  return r;
}

// The log decay of channels c..c + 15, at most 0.
MOONLET_INLINE Lanes log_decay(const Row& r, int64_t c) {
  const Lanes y = load(r.z + c) + load(r.bias + c);
  if (r.lower_bound < 0.0f) return r.lower_bound * logistic(r.gate_scale * y);
  return -r.gate_scale * softplus(y);
}

}  // namespace
}  // namespace MOONLET_ISA
}  // namespace moonlet

// One decode step of Kimi Delta Attention for one head, the state updated where it lies.
//
//   S <- diag(exp(g)) S      d = beta (v - S^T k)      S <- S + k d^T      o = S^T q
//
// The columns of S do not depend on each other: a panel of them is read once for S^T k and, out of
// the first cache level, once more for the update and the read, so memory sees S once in each
// direction. Letters: K key width, V value width, multiples of 16.
#include "kda_infer.h"

#include "kda_rows.h"
#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// two vectors of sums and one of state for each of these fill AVX2's registers
constexpr int kPanel = 4;

struct Step {
  float decay[kMaxKdaSize], key[kMaxKdaSize], query[kMaxKdaSize];
  float decayed_key[kMaxKdaSize];
};

void prepare(const Row& r, int64_t K, Step& s) {
  for (int64_t c = 0; c < K; c += kLanes) {
    const Lanes decay = exponential(log_decay(r, c));
    const Lanes key = load(r.k + c) * r.key_scale;
    store(s.decay + c, decay);
    store(s.key + c, key);
    store(s.decayed_key + c, key * decay);
    store(s.query + c, load(r.q + c) * r.query_scale);
  }
}

template <int P>
MOONLET_INLINE void columns(const Step& s, float beta, const float* v, int64_t K, int64_t V,
                            float* state, float* out) {
  Lanes known[P] = {};
  for (int64_t i = 0; i < K; ++i) {
    for (int p = 0; p < P; ++p) known[p] += s.decayed_key[i] * load(state + i * V + p * kLanes);
  }
  Lanes delta[P], read[P] = {};
  for (int p = 0; p < P; ++p) delta[p] = beta * (load(v + p * kLanes) - known[p]);
  for (int64_t i = 0; i < K; ++i) {
    for (int p = 0; p < P; ++p) {
      float* at = state + i * V + p * kLanes;
      const Lanes updated = s.decay[i] * load(at) + s.key[i] * delta[p];
      store(at, updated);
      read[p] += s.query[i] * updated;
    }
  }
  for (int p = 0; p < P; ++p) store(out + p * kLanes, read[p]);
}

void step(const KdaInputs& in, int64_t row, int64_t head, float* state, float* out) {
  const int64_t K = in.key_size, V = in.value_size;
  const Row r = row_of(in, row, head);
  Step s;
  prepare(r, K, s);
  int64_t c = 0;
  for (; c + kPanel * kLanes <= V; c += kPanel * kLanes) {
    columns<kPanel>(s, r.beta, r.v + c, K, V, state + c, out + c);
  }
  for (; c < V; c += kLanes) columns<1>(s, r.beta, r.v + c, K, V, state + c, out + c);
}

}  // namespace

extern const KdaStepTable kda_step_table;
const KdaStepTable kda_step_table = {step};

}  // namespace MOONLET_ISA
}  // namespace moonlet

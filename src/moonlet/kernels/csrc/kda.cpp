// Chunkwise Kimi Delta Attention with its backward (training.md section 5), lower-bound gate.
//
// One chunk of one head at a time: everything it needs fits the first two cache levels. Decays are
// referenced to the chunk's middle row, so both factors of exp(G_i - G_j) stay below e^80 at 32
// rows and a bound of -5. The backward keeps only the state entering each chunk and recomputes the
// rest. Letters: C rows of a chunk, K key width, V value width; K and V are multiples of 16.
#include "training.h"

#include "lanes.h"
#include "products.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kRows = 32;
constexpr float kNormEps = 1e-6f;

typedef float RowsBySize[kRows * kMaxHeadSize];
typedef float SizeByRows[kMaxHeadSize * kRows];
typedef float SizeBySize[kMaxHeadSize * kMaxHeadSize];
typedef float RowsByRows[kRows * kRows];

// The raw rows of one chunk of one head; consecutive rows are `stride` (or value_stride) apart.
struct Source {
  const float *q, *k, *v, *z, *beta;
  const float* dt_bias;
  float scale_gate;  // exp(A_log)
  float lower_bound;
  int64_t key_stride, value_stride, beta_stride;
  int64_t K, V, rows;
};

// Everything of one chunk that both passes use.
struct Chunk {
  RowsBySize qm, km, ki, kl;      // referenced to the middle row; kl to the last
  RowsBySize qd, kd;              // referenced to the chunk's start
  SizeByRows ki_t;
  RowsByRows pairs, reads;        // A (strictly lower, without beta) and P (lower)
  RowsBySize fresh_u, fresh_w;    // U and W
  RowsBySize fresh;               // V~ = U - W S
  float rq[kRows], rk[kRows], beta[kRows];
  float end[kMaxHeadSize];            // exp(G_C)
  float middle[kMaxHeadSize];         // exp(G at the middle row)
  float tail[kMaxHeadSize];           // exp(G_C - G at the middle row)
};

MOONLET_INLINE float squared_norm(const float* x, int64_t size) {
  Lanes sum = {};
  for (int64_t i = 0; i < size; i += kLanes) sum += load(x + i) * load(x + i);
  return total(sum);
}

void gates(const Source& s, float* G) {
  Lanes zero = {};
  for (int64_t i = 0; i < s.rows; ++i) {
    for (int64_t c = 0; c < s.K; c += kLanes) {
      const Lanes y = load(s.z + i * s.key_stride + c) + load(s.dt_bias + c);
      const Lanes g = s.lower_bound * logistic(s.scale_gate * y);
      store(G + i * s.K + c, g + (i ? load(G + (i - 1) * s.K + c) : zero));
    }
  }
}

void decayed_rows(const Source& s, const float* G, Chunk& h) {
  const int64_t K = s.K, last = s.rows - 1;
  const float* mid = G + (s.rows / 2) * K;
  for (int64_t c = 0; c < K; c += kLanes) {
    store(h.middle + c, exponential(load(mid + c)));
    store(h.end + c, exponential(load(G + last * K + c)));
    store(h.tail + c, exponential(load(G + last * K + c) - load(mid + c)));
  }
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(K));
  for (int64_t i = 0; i < s.rows; ++i) {
    const float* q = s.q + i * s.key_stride;
    const float* k = s.k + i * s.key_stride;
    h.rq[i] = 1.0f / __builtin_sqrtf(squared_norm(q, K) + kNormEps);
    h.rk[i] = 1.0f / __builtin_sqrtf(squared_norm(k, K) + kNormEps);
    for (int64_t c = 0; c < K; c += kLanes) {
      const Lanes down = exponential(load(G + i * K + c) - load(mid + c));
      const Lanes up = 1.0f / down;
      const Lanes qm = load(q + c) * (h.rq[i] * query_scale) * down;
      const Lanes kn = load(k + c) * h.rk[i];
      const Lanes km = kn * down, ki = kn * up;
      store(h.qm + i * K + c, qm);
      store(h.km + i * K + c, km);
      store(h.ki + i * K + c, ki);
      store(h.kl + i * K + c, ki * load(h.tail + c));
      store(h.qd + i * K + c, qm * load(h.middle + c));
      store(h.kd + i * K + c, km * load(h.middle + c));
    }
  }
}

void keep_lower(float* x, int64_t rows, bool with_diagonal) {
  for (int64_t i = 0; i < kRows; ++i) {
    const int64_t first = i < rows ? i + (with_diagonal ? 1 : 0) : 0;
    for (int64_t j = first; j < kRows; ++j) x[i * kRows + j] = 0.0f;
  }
}

// x <- (I + diag(beta) A)^-1 x by forward substitution.
void solve(const Chunk& h, float* x, int64_t size, int64_t rows) {
  for (int64_t i = 1; i < rows; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      const float l = h.beta[i] * h.pairs[i * kRows + j];
      for (int64_t c = 0; c < size; c += kLanes) {
        store(x + i * size + c, load(x + i * size + c) - l * load(x + j * size + c));
      }
    }
  }
}

// x <- (I + diag(beta) A)^-T x by backward substitution.
void solve_transposed(const Chunk& h, float* x, int64_t size, int64_t rows) {
  for (int64_t i = rows - 2; i >= 0; --i) {
    for (int64_t j = i + 1; j < rows; ++j) {
      const float l = h.beta[j] * h.pairs[j * kRows + i];
      for (int64_t c = 0; c < size; c += kLanes) {
        store(x + i * size + c, load(x + i * size + c) - l * load(x + j * size + c));
      }
    }
  }
}

void prepare(const Source& s, const float* state, Chunk& h) {
  const int64_t K = s.K, V = s.V, n = s.rows;
  RowsBySize G;
  gates(s, G);
  decayed_rows(s, G, h);
  transpose(h.ki_t, kRows, h.ki, K, n, K);
  multiply(h.pairs, kRows, {h.km, K, 1}, h.ki_t, kRows, n, K, kRows, 1.0f, false);
  multiply(h.reads, kRows, {h.qm, K, 1}, h.ki_t, kRows, n, K, kRows, 1.0f, false);
  keep_lower(h.pairs, n, false);
  keep_lower(h.reads, n, true);
  for (int64_t i = 0; i < n; ++i) {
    h.beta[i] = 1.0f / (1.0f + __builtin_expf(-s.beta[i * s.beta_stride]));
    for (int64_t c = 0; c < V; c += kLanes) {
      store(h.fresh_u + i * V + c, h.beta[i] * load(s.v + i * s.value_stride + c));
    }
    for (int64_t c = 0; c < K; c += kLanes) {
      store(h.fresh_w + i * K + c, h.beta[i] * load(h.kd + i * K + c));
    }
  }
  solve(h, h.fresh_u, V, n);
  solve(h, h.fresh_w, K, n);
  memcpy(h.fresh, h.fresh_u, static_cast<size_t>(n * V) * sizeof(float));
  multiply(h.fresh, V, {h.fresh_w, K, 1}, state, V, n, K, V, -1.0f, true);
}

Source source_of(const float* q, const float* k, const float* v, const float* z, const float* beta,
                 const float* a_log, const float* dt_bias, float lower_bound, int64_t head,
                 int64_t row, int64_t rows, const KdaShape& shape) {
  const int64_t H = shape.num_heads, K = shape.key_size, V = shape.value_size;
  const int64_t key = row * H * K + head * K;
  Source s;
  s.q = q + key, s.k = k + key, s.z = z + key;
  s.v = v + row * H * V + head * V;
  s.beta = beta + row * H + head;
  s.dt_bias = dt_bias + head * K;
  s.scale_gate = __builtin_expf(a_log[head]);
  s.lower_bound = lower_bound;
  s.key_stride = H * K, s.value_stride = H * V, s.beta_stride = H;
  s.K = K, s.V = V, s.rows = rows;
  return s;
}

void decay_state(float* state, const float* end, int64_t K, int64_t V) {
  for (int64_t i = 0; i < K; ++i) {
    float* row = state + i * V;
    for (int64_t c = 0; c < V; c += kLanes) store(row + c, end[i] * load(row + c));
  }
}

void forward(const float* q, const float* k, const float* v, const float* z, const float* beta,
             const float* a_log, const float* dt_bias, float lower_bound, const float* state,
             const int64_t* starts, float* out, float* final_state, float* entering,
             const KdaShape& shape) {
  const int64_t H = shape.num_heads, K = shape.key_size, V = shape.value_size;
  const size_t state_bytes = static_cast<size_t>(K * V) * sizeof(float);
  Chunk h;
  for (int64_t s = 0; s < shape.num_seqs; ++s) {
    const int64_t num_chunks = (starts[s + 1] - starts[s] + kRows - 1) / kRows;
    for (int64_t head = 0; head < H; ++head) {
      float* S = final_state + (s * H + head) * K * V;
      memcpy(S, state + (s * H + head) * K * V, state_bytes);
      for (int64_t j = 0; j < num_chunks; ++j) {
        const int64_t row = starts[s] + j * kRows;
        const int64_t n = starts[s + 1] - row < kRows ? starts[s + 1] - row : kRows;
        const Source part = source_of(q, k, v, z, beta, a_log, dt_bias, lower_bound, head, row, n,
                                      shape);
        if (entering) memcpy(entering + (j * H + head) * K * V, S, state_bytes);
        prepare(part, S, h);
        float* o = out + row * H * V + head * V;
        multiply(o, H * V, {h.qd, K, 1}, S, V, n, K, V, 1.0f, false);
        multiply(o, H * V, {h.reads, kRows, 1}, h.fresh, V, n, n, V, 1.0f, true);
        decay_state(S, h.end, K, V);
        multiply(S, V, {h.kl, 1, K}, h.fresh, V, K, n, V, 1.0f, true);
      }
    }
    if (entering) entering += num_chunks * H * K * V;
  }
}

// Gradients of one chunk's intermediates.
struct Gradient {
  RowsBySize fresh, qd, kd, qm, km, ki, kl, w;
  SizeBySize transposed_state, transposed_dstate;
  SizeByRows fresh_t, u_t, w_t;
  RowsByRows reads, pairs, system;
  float beta[kRows];
  float end[kMaxHeadSize];
};

// From dO and dS' to the gradients of the chunk's factors; dstate becomes that of the entering S.
void chunk_gradient(const Source& s, const Chunk& h, const float* S, const float* dout,
                    int64_t out_stride, float* dstate, Gradient& d, float* dv) {
  const int64_t K = s.K, V = s.V, n = s.rows;
  multiply(d.fresh, V, {h.reads, 1, kRows}, dout, out_stride, n, n, V, 1.0f, false);
  multiply(d.fresh, V, {h.kl, K, 1}, dstate, V, n, K, V, 1.0f, true);
  transpose(d.fresh_t, kRows, h.fresh, V, n, V);
  transpose(d.transposed_state, K, S, V, K, V);
  transpose(d.transposed_dstate, K, dstate, V, K, V);
  multiply(d.reads, kRows, {dout, out_stride, 1}, d.fresh_t, kRows, n, V, kRows, 1.0f, false);
  keep_lower(d.reads, n, true);
  multiply(d.qd, K, {dout, out_stride, 1}, d.transposed_state, K, n, V, K, 1.0f, false);
  multiply(d.qm, K, {d.reads, kRows, 1}, h.ki, K, n, n, K, 1.0f, false);
  multiply(d.ki, K, {d.reads, 1, kRows}, h.qm, K, n, n, K, 1.0f, false);
  multiply(d.kl, K, {h.fresh, V, 1}, d.transposed_dstate, K, n, V, K, 1.0f, false);
  multiply(d.w, K, {d.fresh, V, 1}, d.transposed_state, K, n, V, K, -1.0f, false);
  for (int64_t i = 0; i < K; ++i) {
    Lanes sum = {};
    for (int64_t c = 0; c < V; c += kLanes) sum += load(S + i * V + c) * load(dstate + i * V + c);
    d.end[i] = h.end[i] * total(sum);
  }
  decay_state(dstate, h.end, K, V);
  multiply(dstate, V, {h.qd, 1, K}, dout, out_stride, K, n, V, 1.0f, true);
  multiply(dstate, V, {h.fresh_w, 1, K}, d.fresh, V, K, n, V, -1.0f, true);
  // d.fresh is dU: both become the gradients of the right-hand sides
  solve_transposed(h, d.fresh, V, n);
  solve_transposed(h, d.w, K, n);
  transpose(d.u_t, kRows, h.fresh_u, V, n, V);
  transpose(d.w_t, kRows, h.fresh_w, K, n, K);
  multiply(d.system, kRows, {d.fresh, V, 1}, d.u_t, kRows, n, V, kRows, -1.0f, false);
  multiply(d.system, kRows, {d.w, K, 1}, d.w_t, kRows, n, K, kRows, -1.0f, true);
  keep_lower(d.system, n, false);
  for (int64_t i = 0; i < n; ++i) {
    Lanes sum = {};
    for (int64_t c = 0; c < V; c += kLanes) {
      const Lanes y = load(d.fresh + i * V + c);
      sum += y * load(s.v + i * s.value_stride + c);
      store(dv + i * s.value_stride + c, h.beta[i] * y);
    }
    for (int64_t c = 0; c < K; c += kLanes) {
      const Lanes y = load(d.w + i * K + c);
      sum += y * load(h.kd + i * K + c);
      store(d.kd + i * K + c, h.beta[i] * y);
    }
    for (int64_t j = 0; j < kRows; j += kLanes) {
      const Lanes l = load(d.system + i * kRows + j);
      sum += l * load(h.pairs + i * kRows + j);
      store(d.pairs + i * kRows + j, h.beta[i] * l);
    }
    d.beta[i] = total(sum);
  }
  multiply(d.km, K, {d.pairs, kRows, 1}, h.ki, K, n, n, K, 1.0f, false);
  multiply(d.ki, K, {d.pairs, 1, kRows}, h.km, K, n, n, K, 1.0f, true);
}

// One row of dq or dk through the L2 norm: x_hat has norm factor r, dx <- r (dy - y <y, dy>).
MOONLET_INLINE void through_norm(const float* x, float r, float* dx, int64_t size) {
  Lanes sum = {};
  for (int64_t c = 0; c < size; c += kLanes) sum += load(x + c) * load(dx + c);
  const float shared = total(sum) * r * r;
  for (int64_t c = 0; c < size; c += kLanes) {
    store(dx + c, r * (load(dx + c) - load(x + c) * shared));
  }
}

// From the factors to the raw inputs; runs over the rows backwards to sum dG.
void input_gradient(const Source& s, const Chunk& h, const Gradient& d, float* dq, float* dk,
                    float* dz, float* dbeta, float* da_log, float* ddt_bias) {
  const int64_t K = s.K;
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(K));
  Lanes gate_sum = {};
  for (int64_t c = 0; c < K; c += kLanes) {
    Lanes dG = load(d.end + c);
    for (int64_t i = 0; i < s.rows; ++i) dG += load(d.kl + i * K + c) * load(h.kl + i * K + c);
    Lanes ddt = {};
    Lanes middle = load(h.middle + c), tail = load(h.tail + c);
    for (int64_t i = s.rows - 1; i >= 0; --i) {
      const int64_t at = i * K + c;
      const Lanes dqm = load(d.qm + at) + load(d.qd + at) * middle;
      const Lanes dkm = load(d.km + at) + load(d.kd + at) * middle;
      const Lanes dki = load(d.ki + at) + load(d.kl + at) * tail;
      const Lanes qm = load(h.qm + at), km = load(h.km + at), ki = load(h.ki + at);
      dG += dqm * qm + dkm * km - dki * ki;
      // decay factors from the stored products would divide by zero; recompute from the gate
      const int64_t raw = i * s.key_stride + c;
      const Lanes y = load(s.z + raw) + load(s.dt_bias + c);
      const Lanes sigma = logistic(s.scale_gate * y);
      const Lanes t = dG * s.lower_bound * sigma * (1.0f - sigma);
      store(dz + raw, t * s.scale_gate);
      ddt += t * s.scale_gate;
      gate_sum += t * s.scale_gate * y;
      store(dq + raw, dqm);
      store(dk + raw, dkm);
    }
    add_to(ddt_bias + c, ddt);
  }
  *da_log += total(gate_sum);
  RowsBySize G;
  gates(s, G);
  const float* mid = G + (s.rows / 2) * K;
  for (int64_t i = 0; i < s.rows; ++i) {
    dbeta[i * s.beta_stride] = d.beta[i] * h.beta[i] * (1.0f - h.beta[i]);
    float* dqi = dq + i * s.key_stride;
    float* dki = dk + i * s.key_stride;
    for (int64_t c = 0; c < K; c += kLanes) {
      const int64_t at = i * K + c;
      const Lanes down = exponential(load(G + at) - load(mid + c));
      const Lanes up = 1.0f / down;
      const Lanes dinverse = load(d.ki + at) + load(d.kl + at) * load(h.tail + c);
      store(dqi + c, load(dqi + c) * down * query_scale);
      store(dki + c, load(dki + c) * down + dinverse * up);
    }
    through_norm(s.q + i * s.key_stride, h.rq[i], dqi, K);
    through_norm(s.k + i * s.key_stride, h.rk[i], dki, K);
  }
}

void backward(const float* q, const float* k, const float* v, const float* z, const float* beta,
              const float* a_log, const float* dt_bias, float lower_bound, const int64_t* starts,
              const float* entering, const float* dout, const float* dfinal, float* dq, float* dk,
              float* dv, float* dz, float* dbeta, float* da_log, float* ddt_bias, float* dstate,
              const KdaShape& shape) {
  const int64_t H = shape.num_heads, K = shape.key_size, V = shape.value_size;
  const size_t state_bytes = static_cast<size_t>(K * V) * sizeof(float);
  Chunk h;
  Gradient d;
  for (int64_t s = 0; s < shape.num_seqs; ++s) {
    const int64_t num_chunks = (starts[s + 1] - starts[s] + kRows - 1) / kRows;
    for (int64_t head = 0; head < H; ++head) {
      float* dS = dstate + (s * H + head) * K * V;
      memcpy(dS, dfinal + (s * H + head) * K * V, state_bytes);
      for (int64_t j = num_chunks - 1; j >= 0; --j) {
        const int64_t row = starts[s] + j * kRows;
        const int64_t n = starts[s + 1] - row < kRows ? starts[s + 1] - row : kRows;
        const Source part = source_of(q, k, v, z, beta, a_log, dt_bias, lower_bound, head, row, n,
                                      shape);
        const float* S = entering + (j * H + head) * K * V;
        prepare(part, S, h);
        const int64_t key = row * H * K + head * K, value = row * H * V + head * V;
        chunk_gradient(part, h, S, dout + value, H * V, dS, d, dv + value);
        input_gradient(part, h, d, dq + key, dk + key, dz + key, dbeta + row * H + head,
                       da_log + head, ddt_bias + head * K);
      }
    }
    entering += num_chunks * H * K * V;
  }
}

}  // namespace

extern const KdaTable kda_table;
const KdaTable kda_table = {forward, backward};

}  // namespace MOONLET_ISA
}  // namespace moonlet

// Row-wise training operators: gated activation, norms, depth mixing, short convolution.
//
// Each reads its inputs once and writes its results once; what eager code keeps as temporaries
// stays in registers. Row sizes are multiples of 16, weight gradients are added to.
#include "training.h"

#include "lanes.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

struct Situ {
  Lanes value, dgate, dup;
};

// training.md section 4.1; dgate and dup are the partial derivatives.
MOONLET_INLINE Situ situ(Lanes gate, Lanes up, float beta, float linear_beta) {
  const Lanes a_unit = hyperbolic_tangent(gate * (1.0f / beta));
  const Lanes sigma = logistic(gate);
  const bool capped = linear_beta > 0.0f;
  const Lanes c_unit = capped ? hyperbolic_tangent(up * (1.0f / linear_beta)) : up;
  const Lanes c = capped ? linear_beta * c_unit : up;
  const Lanes a = beta * a_unit;
  Situ r;
  r.value = a * sigma * c;
  r.dgate = c * sigma * ((1.0f - a_unit * a_unit) + a * (1.0f - sigma));
  r.dup = capped ? a * sigma * (1.0f - c_unit * c_unit) : a * sigma;
  return r;
}

Lanes load_tail(const float* p, int64_t count) {
  Lanes v = {};
  memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
  return v;
}

void store_tail(float* p, Lanes v, int64_t count) {
  memcpy(p, &v, static_cast<size_t>(count) * sizeof(float));
}

void situ_forward(const float* gate, const float* up, float* out, int64_t count, float beta,
                  float linear_beta) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(out + i, situ(load(gate + i), load(up + i), beta, linear_beta).value);
  }
  if (i < count) {
    const int64_t left = count - i;
    const Situ r = situ(load_tail(gate + i, left), load_tail(up + i, left), beta, linear_beta);
    store_tail(out + i, r.value, left);
  }
}

void situ_backward(const float* gate, const float* up, const float* dout, float* dgate, float* dup,
                   int64_t count, float beta, float linear_beta) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Situ r = situ(load(gate + i), load(up + i), beta, linear_beta);
    const Lanes d = load(dout + i);
    store(dgate + i, d * r.dgate);
    store(dup + i, d * r.dup);
  }
  if (i < count) {
    const int64_t left = count - i;
    const Situ r = situ(load_tail(gate + i, left), load_tail(up + i, left), beta, linear_beta);
    const Lanes d = load_tail(dout + i, left);
    store_tail(dgate + i, d * r.dgate, left);
    store_tail(dup + i, d * r.dup, left);
  }
}

MOONLET_INLINE float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

MOONLET_INLINE float dot(const float* a, const float* b, int64_t size) {
  Lanes sum = {};
  for (int64_t i = 0; i < size; i += kLanes) sum += load(a + i) * load(b + i);
  return total(sum);
}

void rms_norm_forward(const float* x, const float* weight, float* out, float* rstd,
                      int64_t num_rows, int64_t size, float eps) {
  for (int64_t t = 0; t < num_rows; ++t, x += size, out += size) {
    const float r = inverse_root(dot(x, x, size) / static_cast<float>(size) + eps);
    rstd[t] = r;
    for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(x + i) * r * load(weight + i));
  }
}

void rms_norm_backward(const float* x, const float* weight, const float* rstd, const float* dout,
                       float* dx, float* dweight, int64_t num_rows, int64_t size) {
  for (int64_t t = 0; t < num_rows; ++t, x += size, dout += size, dx += size) {
    const float r = rstd[t];
    Lanes sum = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Lanes xd = load(x + i) * load(dout + i);
      add_to(dweight + i, xd * r);
      sum += xd * load(weight + i);
    }
    const float shared = total(sum) * r * r / static_cast<float>(size);
    for (int64_t i = 0; i < size; i += kLanes) {
      store(dx + i, r * (load(dout + i) * load(weight + i) - load(x + i) * shared));
    }
  }
}

void gated_norm_forward(const float* x, const float* weight, const float* gate, float* out,
                        float* rstd, int64_t num_rows, int64_t size, float eps) {
  for (int64_t t = 0; t < num_rows; ++t, x += size, gate += size, out += size) {
    const float r = inverse_root(dot(x, x, size) / static_cast<float>(size) + eps);
    rstd[t] = r;
    for (int64_t i = 0; i < size; i += kLanes) {
      store(out + i, load(x + i) * r * load(weight + i) * logistic(load(gate + i)));
    }
  }
}

void gated_norm_backward(const float* x, const float* weight, const float* gate, const float* rstd,
                         const float* dout, float* dx, float* dgate, float* dweight,
                         int64_t num_rows, int64_t size) {
  for (int64_t t = 0; t < num_rows; ++t) {
    const float r = rstd[t];
    Lanes sum = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Lanes s = logistic(load(gate + i));
      const Lanes d = load(dout + i);
      const Lanes xr = load(x + i) * r;
      const Lanes w = load(weight + i);
      const Lanes dnormed = d * s * w;
      add_to(dweight + i, d * s * xr);
      store(dgate + i, d * xr * w * s * (1.0f - s));
      store(dx + i, dnormed);
      sum += dnormed * xr;
    }
    const float shared = total(sum) * r / static_cast<float>(size);
    for (int64_t i = 0; i < size; i += kLanes) {
      store(dx + i, r * load(dx + i) - load(x + i) * r * shared);
    }
    x += size, gate += size, dout += size, dx += size, dgate += size;
  }
}

void attn_res_forward(const float* const* sources, int64_t num_sources, const float* weight,
                      float* out, float* alpha, float* rstd, int64_t num_rows, int64_t size,
                      float eps) {
  for (int64_t t = 0; t < num_rows; ++t) {
    float* a = alpha + t * num_sources;
    float* r = rstd + t * num_sources;
    float top = -3.0e38f;
    for (int64_t n = 0; n < num_sources; ++n) {
      const float* v = sources[n] + t * size;
      Lanes squares = {}, products = {};
      for (int64_t i = 0; i < size; i += kLanes) {
        const Lanes x = load(v + i);
        squares += x * x;
        products += x * load(weight + i);
      }
      r[n] = inverse_root(total(squares) / static_cast<float>(size) + eps);
      a[n] = total(products) * r[n];
      top = a[n] > top ? a[n] : top;
    }
    float sum = 0.0f;
    for (int64_t first = 0; first < num_sources; first += kLanes) {
      const int64_t left = num_sources - first < kLanes ? num_sources - first : kLanes;
      store_tail(a + first, exponential(load_tail(a + first, left) - top), left);
      for (int64_t n = first; n < first + left; ++n) sum += a[n];
    }
    for (int64_t n = 0; n < num_sources; ++n) a[n] /= sum;
    float* o = out + t * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      Lanes mixed = {};
      for (int64_t n = 0; n < num_sources; ++n) mixed += a[n] * load(sources[n] + t * size + i);
      store(o + i, mixed);
    }
  }
}

// training.md section 4.3
void attn_res_backward(const float* const* sources, int64_t num_sources, const float* weight,
                       const float* alpha, const float* rstd, const float* dout,
                       float* const* dsources, float* dweight, int64_t num_rows, int64_t size) {
  for (int64_t t = 0; t < num_rows; ++t) {
    const float* a = alpha + t * num_sources;
    const float* r = rstd + t * num_sources;
    const float* d = dout + t * size;
    float dalpha[kMaxSources], scores[kMaxSources];
    float mean = 0.0f;
    for (int64_t n = 0; n < num_sources; ++n) {
      const float* v = sources[n] + t * size;
      Lanes reads = {}, products = {};
      for (int64_t i = 0; i < size; i += kLanes) {
        const Lanes x = load(v + i);
        reads += x * load(d + i);
        products += x * load(weight + i);
      }
      dalpha[n] = total(reads);
      scores[n] = total(products);
      mean += a[n] * dalpha[n];
    }
    for (int64_t n = 0; n < num_sources; ++n) {
      const float ds = a[n] * (dalpha[n] - mean) * r[n];
      const float shared = r[n] * r[n] * scores[n] / static_cast<float>(size);
      const float* v = sources[n] + t * size;
      float* dv = dsources[n] + t * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const Lanes x = load(v + i);
        store(dv + i, a[n] * load(d + i) + ds * (load(weight + i) - x * shared));
        add_to(dweight + i, ds * x);
      }
    }
  }
}

// Row t - back of the sequence, from the carry before its first row.
MOONLET_INLINE Lanes history(const float* x, const float* carry, int64_t t, int64_t back, int64_t c,
                             int64_t channels, int64_t width) {
  if (t >= back) return load(x + (t - back) * channels + c);
  Lanes v;
  for (int64_t i = 0; i < kLanes; ++i) v[i] = carry[(c + i) * width + width + t - back];
  return v;
}

MOONLET_INLINE Lanes convolve(const float* x, const float* weight, const float* carry, int64_t t,
                              int64_t c, int64_t channels, int64_t taps) {
  Lanes sum = {};
  for (int64_t j = 0; j < taps; ++j) {
    const Lanes u = history(x, carry, t, taps - 1 - j, c, channels, taps - 1);
    sum += load(weight + j * channels + c) * u;
  }
  return sum;
}

void short_conv_forward(const float* x, const float* weight, const float* carry,
                        const int64_t* starts, float* out, int64_t num_seqs, int64_t channels,
                        int64_t taps) {
  for (int64_t s = 0; s < num_seqs; ++s) {
    const float* xs = x + starts[s] * channels;
    const float* carried = carry + s * channels * (taps - 1);
    float* o = out + starts[s] * channels;
    for (int64_t t = 0; t < starts[s + 1] - starts[s]; ++t) {
      for (int64_t c = 0; c < channels; c += kLanes) {
        const Lanes y = convolve(xs, weight, carried, t, c, channels, taps);
        store(o + t * channels + c, y * logistic(y));
      }
    }
  }
}

void short_conv_backward(const float* x, const float* weight, const float* carry,
                         const int64_t* starts, const float* dout, float* dx, float* dweight,
                         float* scratch, int64_t num_seqs, int64_t channels, int64_t taps) {
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t length = starts[s + 1] - starts[s];
    const float* xs = x + starts[s] * channels;
    const float* carried = carry + s * channels * (taps - 1);
    const float* ds = dout + starts[s] * channels;
    float* dxs = dx + starts[s] * channels;
    // scratch: gradient of the pre-activations of this sequence
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t c = 0; c < channels; c += kLanes) {
        const Lanes y = convolve(xs, weight, carried, t, c, channels, taps);
        const Lanes sigma = logistic(y);
        const Lanes dy = load(ds + t * channels + c) * sigma * (1.0f + y * (1.0f - sigma));
        store(scratch + t * channels + c, dy);
        for (int64_t j = 0; j < taps; ++j) {
          const Lanes u = history(xs, carried, t, taps - 1 - j, c, channels, taps - 1);
          add_to(dweight + j * channels + c, dy * u);
        }
      }
    }
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t c = 0; c < channels; c += kLanes) {
        Lanes sum = {};
        for (int64_t ahead = 0; ahead < taps && t + ahead < length; ++ahead) {
          sum += load(weight + (taps - 1 - ahead) * channels + c) *
                 load(scratch + (t + ahead) * channels + c);
        }
        store(dxs + t * channels + c, sum);
      }
    }
  }
}

}  // namespace

extern const RowTable row_table;
const RowTable row_table = {
    situ_forward,       situ_backward,       rms_norm_forward, rms_norm_backward,
    gated_norm_forward, gated_norm_backward, attn_res_forward, attn_res_backward,
    short_conv_forward, short_conv_backward,
};

}  // namespace MOONLET_ISA
}  // namespace moonlet

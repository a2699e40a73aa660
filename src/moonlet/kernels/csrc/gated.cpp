// SiTU-GLU and SwiGLU of one run of elements (model.md section 3.5).
#include "gated.h"

#include "lanes.h"
#include "tails.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

struct Situ {
  float beta, linear_beta;

  MOONLET_INLINE Lanes apply(const Situ& s, Lanes gate, Lanes up) {
    const Lanes a = s.beta * hyperbolic_tangent(gate * (1.0f / s.beta)) * logistic(gate);
    if (s.linear_beta <= 0.0f) return a * up;
    return a * (s.linear_beta * hyperbolic_tangent(up * (1.0f / s.linear_beta)));
  }
};

struct Swish {
  MOONLET_INLINE Lanes apply(const Swish&, Lanes gate, Lanes up) {
    return gate * logistic(gate) * up;
  }
};

template <typename Activation>
MOONLET_INLINE void run(const Activation& activation, const float* gate, const float* up,
                        float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(out + i, Activation::apply(activation, load(gate + i), load(up + i)));
  }
  if (i < count) {
    const int64_t left = count - i;
    const Lanes g = load_first(gate + i, left, Lanes{}), u = load_first(up + i, left, Lanes{});
    store_first(out + i, Activation::apply(activation, g, u), left);
  }
}

void situ_glu(const float* gate, const float* up, float* out, int64_t count, float beta,
              float linear_beta) {
  run(Situ{beta, linear_beta}, gate, up, out, count);
}

void swiglu(const float* gate, const float* up, float* out, int64_t count) {
  run(Swish{}, gate, up, out, count);
}

}  // namespace

extern const GatedTable gated_table;
const GatedTable gated_table = {situ_glu, swiglu};

}  // namespace MOONLET_ISA
}  // namespace moonlet

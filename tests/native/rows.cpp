// Norms, gated activations and the mixing over depth, of rows of any size.
#include "check.h"

using namespace test;

namespace {

constexpr float kEps = 1e-5f;

// Rows and sizes; the last pair is shared out over threads by every operator.
template <typename Run>
void for_shapes(const Run& run) {
  for (int64_t size : kSizes) {
    for (int64_t rows : {1, 3, 17}) run(rows, size);
  }
  run(257, 257);
}

void norms(int64_t rows, int64_t size, Random& random) {
  CASE("rms_norm", rows, size);
  const Floats x = random.floats(rows * size, 3.0f), weight = random.floats(size);
  const Floats gate = random.floats(rows * size, 20.0f);
  Floats out(rows * size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_rms_norm_f32(x.data(), weight.data(), out.data(), rows, size, size, kEps,
                                    level, threads);
      },
      {{&out}}, 1e-5);
  const Floats plain = out;
  CASE("gated_rms_norm", rows, size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_gated_rms_norm_f32(x.data(), weight.data(), gate.data(), out.data(), rows,
                                          size, kEps, level, threads);
      },
      {{&out}}, 1e-5);
  Floats want(out.size()), want_gated(out.size());
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (int64_t i = 0; i < size; ++i) squares += std::pow(static_cast<double>(x[r * size + i]), 2);
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(size) + kEps);
    for (int64_t at = r * size; at < (r + 1) * size; ++at) {
      const double y = x[at] * factor * weight[at - r * size];
      want[at] = static_cast<float>(y);
      want_gated[at] = static_cast<float>(y / (1.0 + std::exp(-gate[at])));
    }
  }
  CHECK(close(plain, want, 1e-5));
  CHECK(close(out, want_gated, 1e-5));
}

// Gate and up side by side, as one product gives them.
void gated_activations(int64_t rows, int64_t size, Random& random) {
  const Floats both = random.floats(rows * 2 * size, 30.0f);
  Floats out(rows * size);
  for (float linear_beta : {0.0f, 25.0f}) {
    CASE("situ_glu", rows, size, linear_beta > 0);
    compare(
        [&](int32_t level, int32_t threads) {
          return moonlet_situ_glu(both.data(), both.data() + size, out.data(), rows, size,
                                  2 * size, 2 * size, 4.0f, linear_beta, level, threads);
        },
        {{&out}}, 1e-5);
  }
  CASE("swiglu", rows, size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_swiglu(both.data(), both.data() + size, out.data(), rows, size, 2 * size,
                              2 * size, level, threads);
      },
      {{&out}}, 1e-5);
  Floats want(out.size());
  for (int64_t at = 0; at < rows * size; ++at) {
    const double gate = both[at / size * 2 * size + at % size];
    const double up = both[at / size * 2 * size + size + at % size];
    want[at] = static_cast<float>(gate / (1.0 + std::exp(-gate)) * up);
  }
  CHECK(close(out, want, 1e-5));
}

std::vector<Floats> sources_of(int64_t count, int64_t values, Random& random) {
  std::vector<Floats> sources;
  for (int64_t n = 0; n < count; ++n) sources.push_back(random.floats(values, 2.0f));
  return sources;
}

std::vector<const float*> pointers(const std::vector<Floats>& sources) {
  std::vector<const float*> addresses;
  for (const Floats& source : sources) addresses.push_back(source.data());
  return addresses;
}

// The blocks and one more source at once, and in two phases: both must be the same mix.
void depth_mix(int64_t num_blocks, int64_t sublayers, int64_t rows, int64_t size, Random& random) {
  CASE("attn_res_mix", num_blocks, sublayers, rows, size);
  const std::vector<Floats> sources = sources_of(num_blocks + 1, rows * size, random);
  const std::vector<const float*> places = pointers(sources);
  const std::vector<const float*> blocks(places.begin(), places.end() - 1);
  const Floats weights = random.floats(sublayers * size);
  const float* last_weight = weights.data() + (sublayers - 1) * size;
  Floats out(rows * size), m(sublayers * rows), l(m.size()), acc(m.size() * size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_attn_res_mix(places.data(), num_blocks + 1, last_weight, out.data(), rows,
                                    size, kEps, level, threads);
      },
      {{&out}});
  const Floats whole = out;
  CASE("attn_res_fold", num_blocks, sublayers, rows, size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_attn_res_fold(blocks.data(), num_blocks, weights.data(), m.data(), l.data(),
                                     acc.data(), sublayers, rows, size, kEps, level, threads);
      },
      {{&m, &l, &acc}});
  const int64_t first = (sublayers - 1) * rows;
  CASE("attn_res_join", num_blocks, sublayers, rows, size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_attn_res_join(m.data() + first, l.data() + first, acc.data() + first * size,
                                     places.back(), last_weight, out.data(), rows, size, kEps,
                                     level, threads);
      },
      {{&out}});
  CHECK(close(out, whole, 1e-5));
}

void refusals() {
  CASE("refusals of row operators");
  Floats x(64, 1.0f), out(64);
  float *p = x.data(), *o = out.data();
  CHECK(moonlet_rms_norm_f32(p, p, o, 0, 4, 4, kEps, 0, 1) == MOONLET_OK);
  CHECK(moonlet_rms_norm_f32(p, p, o, -1, 4, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_rms_norm_f32(p, p, o, 1, 0, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_rms_norm_f32(p, p, o, 2, 4, 3, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_gated_rms_norm_f32(p, p, p, o, -1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_gated_rms_norm_f32(p, p, p, o, 1, 0, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_situ_glu(p, p, o, 0, 4, 4, 4, 1.0f, 0.0f, 0, 1) == MOONLET_OK);
  CHECK(moonlet_situ_glu(p, p, o, -1, 4, 4, 4, 1.0f, 0.0f, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_situ_glu(p, p, o, 2, 4, 3, 4, 1.0f, 0.0f, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_situ_glu(p, p, o, 2, 4, 4, 3, 1.0f, 0.0f, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_situ_glu(nullptr, p, o, 2, 4, 4, 4, 1.0f, 0.0f, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_swiglu(p, p, o, 2, 0, 4, 4, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_swiglu(p, p, nullptr, 2, 4, 4, 4, 0, 1) == MOONLET_BAD_ARGUMENT);
  const std::vector<const float*> sources(65, p);
  const float* const* s = sources.data();
  CHECK(moonlet_attn_res_mix(s, 64, p, o, 1, 4, kEps, 0, 1) == MOONLET_OK);
  CHECK(moonlet_attn_res_mix(s, 65, p, o, 1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_mix(s, 0, p, o, 1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_mix(s, 1, p, o, 1, 0, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_mix(nullptr, 1, p, o, 1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_fold(s, 65, p, o, o, o, 1, 1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_fold(s, 1, p, o, o, o, 0, 1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_fold(s, 1, p, o, o, nullptr, 1, 1, 4, kEps, 0, 1) ==
        MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_join(p, p, p, p, p, o, -1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_attn_res_join(p, p, p, nullptr, p, o, 1, 4, kEps, 0, 1) == MOONLET_BAD_ARGUMENT);
}

}  // namespace

int main() {
  Random random(5);
  for_shapes([&](int64_t rows, int64_t size) { norms(rows, size, random); });
  for_shapes([&](int64_t rows, int64_t size) { gated_activations(rows, size, random); });
  gated_activations(3, 10000, random);
  for (int64_t size : kSizes) depth_mix(2, 3, 3, size, random);
  for (int64_t blocks : {1, 5, 8, 63}) {
    for (int64_t sublayers : {1, 4, 9}) depth_mix(blocks, sublayers, 17, 100, random);
  }
  depth_mix(8, 5, 100, 257, random);
  refusals();
  return finish();
}

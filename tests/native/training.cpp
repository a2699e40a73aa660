// The training operators: forward and backward of every one, on the calling thread.
#include "check.h"

using namespace test;

namespace {

constexpr float kEps = 1e-5f;
constexpr double kTolerance = 1e-4;

// Runs call(level) at every level.
template <typename Call>
void compare_alone(const Call& call, const Written& written) {
  compare([&](int32_t level, int32_t) { return call(level); }, written, kTolerance, 1);
}

void situ(int64_t count, float linear_beta, Random& random) {
  CASE("situ", count, linear_beta > 0);
  const Floats gate = random.floats(count, 20.0f), up = random.floats(count, 40.0f);
  const Floats dout = random.floats(count);
  Floats out(count), dgate(count), dup(count);
  compare_alone(
      [&](int32_t level) {
        return moonlet_situ_forward(gate.data(), up.data(), out.data(), count, 4.0f, linear_beta,
                                    level);
      },
      {{&out}});
  compare_alone(
      [&](int32_t level) {
        return moonlet_situ_backward(gate.data(), up.data(), dout.data(), dgate.data(),
                                     dup.data(), count, 4.0f, linear_beta, level);
      },
      {{&dgate, &dup}});
}

// Weight gradients are added to what was there: the inputs of a call set it.
void norms(int64_t rows, int64_t size, Random& random) {
  CASE("norms", rows, size);
  const Floats x = random.floats(rows * size, 3.0f), weight = random.floats(size);
  const Floats gate = random.floats(rows * size, 10.0f), dout = random.floats(rows * size);
  const Floats before = random.floats(size);
  Floats out(rows * size), rstd(rows), dx(rows * size), dgate(rows * size), dweight(size);
  compare_alone(
      [&](int32_t level) {
        return moonlet_rms_norm_forward(x.data(), weight.data(), out.data(), rstd.data(), rows,
                                        size, kEps, level);
      },
      {{&out, &rstd}});
  const auto with_gradient = [&](const auto& call) {
    return [&, call](int32_t level) {
      Floats sum = before;
      const int32_t status = call(sum.data(), level);
      if (status == MOONLET_OK) dweight = sum;
      return status;
    };
  };
  compare_alone(with_gradient([&](float* sum, int32_t level) {
                  return moonlet_rms_norm_backward(x.data(), weight.data(), rstd.data(),
                                                   dout.data(), dx.data(), sum, rows, size, level);
                }),
                {{&dx, &dweight}});
  compare_alone(
      [&](int32_t level) {
        return moonlet_gated_norm_forward(x.data(), weight.data(), gate.data(), out.data(),
                                          rstd.data(), rows, size, kEps, level);
      },
      {{&out, &rstd}});
  compare_alone(with_gradient([&](float* sum, int32_t level) {
                  return moonlet_gated_norm_backward(x.data(), weight.data(), gate.data(),
                                                     rstd.data(), dout.data(), dx.data(),
                                                     dgate.data(), sum, rows, size, level);
                }),
                {{&dx, &dgate, &dweight}});
}

void attn_res(int64_t num_sources, int64_t rows, int64_t size, Random& random) {
  CASE("attn_res", num_sources, rows, size);
  std::vector<Floats> sources, dsources;
  std::vector<const float*> addresses;
  std::vector<float*> gradients;
  for (int64_t n = 0; n < num_sources; ++n) sources.push_back(random.floats(rows * size, 2.0f));
  dsources.assign(num_sources, Floats(rows * size));
  for (const Floats& source : sources) addresses.push_back(source.data());
  for (Floats& gradient : dsources) gradients.push_back(gradient.data());
  const Floats weight = random.floats(size), dout = random.floats(rows * size);
  const Floats before = random.floats(size);
  Floats out(rows * size), alpha(rows * num_sources), rstd(alpha.size()), dweight(size);
  compare_alone(
      [&](int32_t level) {
        return moonlet_attn_res_forward(addresses.data(), num_sources, weight.data(), out.data(),
                                        alpha.data(), rstd.data(), rows, size, kEps, level);
      },
      {{&out, &alpha, &rstd}});
  Written written = {{&dweight}};
  for (Floats& gradient : dsources) written.near.push_back(&gradient);
  compare_alone(
      [&](int32_t level) {
        Floats sum = before;
        const int32_t status = moonlet_attn_res_backward(
            addresses.data(), num_sources, weight.data(), alpha.data(), rstd.data(), dout.data(),
            gradients.data(), sum.data(), rows, size, level);
        if (status == MOONLET_OK) dweight = sum;
        return status;
      },
      written);
}

void short_conv(const Ints& lengths, int64_t channels, int64_t taps, Random& random) {
  const Ints starts = starts_of(lengths);
  const int64_t num_seqs = static_cast<int64_t>(lengths.size()), rows = starts.back();
  CASE("short_conv", num_seqs, rows, channels, taps);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const Floats x = random.floats(rows * channels, 2.0f), weight = random.floats(taps * channels);
  const Floats carry = random.floats(num_seqs * channels * (taps - 1));
  const Floats dout = random.floats(rows * channels), before = random.floats(taps * channels);
  Floats out(rows * channels), dx(rows * channels), dweight(taps * channels);
  compare_alone(
      [&](int32_t level) {
        return moonlet_short_conv_forward(x.data(), weight.data(), carry.data(), starts.data(),
                                          out.data(), num_seqs, channels, taps, level);
      },
      {{&out}});
  compare_alone(
      [&](int32_t level) {
        Floats sum = before, scratch(longest * channels, NAN);
        const int32_t status = moonlet_short_conv_backward(
            x.data(), weight.data(), carry.data(), starts.data(), dout.data(), dx.data(),
            sum.data(), scratch.data(), num_seqs, channels, taps, level);
        if (status == MOONLET_OK) dweight = sum;
        return status;
      },
      {{&dx, &dweight}});
}

void kda(const Ints& lengths, int64_t heads, int64_t key, int64_t value, Random& random) {
  constexpr int64_t kChunk = 32;
  const Ints starts = starts_of(lengths);
  const int64_t num_seqs = static_cast<int64_t>(lengths.size()), rows = starts.back();
  CASE("kda", num_seqs, rows, heads, key, value);
  int64_t chunks = 0;
  for (int64_t length : lengths) chunks += (length + kChunk - 1) / kChunk;
  const int64_t keys = rows * heads * key, values = rows * heads * value;
  const int64_t state_size = heads * key * value;
  const Floats q = random.floats(keys), k = random.floats(keys), v = random.floats(values);
  const Floats z = random.floats(keys, 4.0f), beta = random.floats(rows * heads, 3.0f);
  const Floats a_log = random.floats(heads), dt_bias = random.floats(heads * key);
  const Floats state = random.floats(num_seqs * state_size);
  const Floats dout = random.floats(values), dfinal = random.floats(state.size());
  Floats out(values), final_state(state.size()), entering(chunks * state_size);
  const auto forward = [&](float* before_chunks, int32_t level) {
    return moonlet_kda_forward(q.data(), k.data(), v.data(), z.data(), beta.data(), a_log.data(),
                               dt_bias.data(), -5.0f, state.data(), starts.data(), out.data(),
                               final_state.data(), before_chunks, num_seqs, heads, key, value,
                               level);
  };
  compare_alone([&](int32_t level) { return forward(nullptr, level); }, {{&out, &final_state}});
  const Floats alone = out;
  compare_alone([&](int32_t level) { return forward(entering.data(), level); },
                {{&out, &final_state, &entering}});
  CHECK(same(out, alone));
  const Floats da_before = random.floats(heads), dt_before = random.floats(heads * key);
  Floats dq(keys), dk(keys), dv(values), dz(keys), dbeta(rows * heads), da_log(heads);
  Floats ddt_bias(heads * key), dstate(state.size());
  compare_alone(
      [&](int32_t level) {
        Floats da_sum = da_before, dt_sum = dt_before;
        const int32_t status = moonlet_kda_backward(
            q.data(), k.data(), v.data(), z.data(), beta.data(), a_log.data(), dt_bias.data(),
            -5.0f, starts.data(), entering.data(), dout.data(), dfinal.data(), dq.data(),
            dk.data(), dv.data(), dz.data(), dbeta.data(), da_sum.data(), dt_sum.data(),
            dstate.data(), num_seqs, heads, key, value, level);
        if (status == MOONLET_OK) da_log = da_sum, ddt_bias = dt_sum;
        return status;
      },
      {{&dq, &dk, &dv, &dz, &dbeta, &da_log, &ddt_bias, &dstate}});
}

void refusals() {
  CASE("refusals of training operators");
  Floats values(64, 1.0f);
  float* p = values.data();
  const Ints starts = {0, 1};
  const int64_t* s = starts.data();
  const std::vector<const float*> sources(65, p);
  const std::vector<float*> gradients(65, p);
  CHECK(moonlet_situ_forward(p, p, p, -1, 1.0f, 0.0f, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_situ_backward(p, p, p, p, p, -1, 1.0f, 0.0f, 0) == MOONLET_BAD_ARGUMENT);
  for (int64_t size : {0, 8, 24}) {
    CHECK(moonlet_rms_norm_forward(p, p, p, p, 1, size, kEps, 0) == MOONLET_BAD_ARGUMENT);
    CHECK(moonlet_rms_norm_backward(p, p, p, p, p, p, 1, size, 0) == MOONLET_BAD_ARGUMENT);
    CHECK(moonlet_gated_norm_forward(p, p, p, p, p, 1, size, kEps, 0) == MOONLET_BAD_ARGUMENT);
    CHECK(moonlet_gated_norm_backward(p, p, p, p, p, p, p, p, 1, size, 0) == MOONLET_BAD_ARGUMENT);
    CHECK(moonlet_short_conv_forward(p, p, p, s, p, 1, size, 4, 0) == MOONLET_BAD_ARGUMENT);
    CHECK(moonlet_short_conv_backward(p, p, p, s, p, p, p, p, 1, size, 4, 0) ==
          MOONLET_BAD_ARGUMENT);
  }
  for (int64_t count : {0, 65}) {
    CHECK(moonlet_attn_res_forward(sources.data(), count, p, p, p, p, 1, 16, kEps, 0) ==
          MOONLET_BAD_ARGUMENT);
    CHECK(moonlet_attn_res_backward(sources.data(), count, p, p, p, p, gradients.data(), p, 1, 16,
                                    0) == MOONLET_BAD_ARGUMENT);
  }
  CHECK(moonlet_short_conv_forward(p, p, p, s, p, 1, 16, 0, 0) == MOONLET_BAD_ARGUMENT);
  for (int64_t key : {0, 24, 144}) {
    CHECK(moonlet_kda_forward(p, p, p, p, p, p, p, -5.0f, p, s, p, p, p, 1, 1, key, 16, 0) ==
          MOONLET_BAD_ARGUMENT);
    CHECK(moonlet_kda_backward(p, p, p, p, p, p, p, -5.0f, s, p, p, p, p, p, p, p, p, p, p, p, 1,
                               1, 16, key, 0) == MOONLET_BAD_ARGUMENT);
  }
}

}  // namespace

int main() {
  Random random(9);
  for (int64_t count : kSizes) {
    for (float linear_beta : {0.0f, 25.0f}) situ(count, linear_beta, random);
  }
  for (int64_t size : {16, 48, 112, 272}) {
    for (int64_t rows : {1, 3, 17}) norms(rows, size, random);
    for (int64_t sources : {1, 2, 5, 17, 64}) attn_res(sources, 3, size, random);
  }
  for (int64_t taps : {1, 2, 4}) {
    short_conv({1}, 16, taps, random);
    short_conv({3, 1, 17}, 48, taps, random);
  }
  kda({1}, 1, 16, 16, random);
  kda({33, 1, 100}, 2, 32, 48, random);
  kda({64, 17}, 1, 128, 128, random);
  refusals();
  return finish();
}

// Verification windows of Kimi Delta Attention: what plain decode steps give, with and without effect.
#include "check.h"

using namespace test;

namespace {

// Windows of Kimi Delta Attention with their arenas, of which some slots belong to nobody.
struct Windows {
  Ints starts, counts, slots, addresses;
  int64_t heads, key, value, taps, channels, num_slots;
  float lower_bound;
  Floats x, z, beta, a_log, dt_bias, state, conv;
  std::vector<Floats> weights;

  Windows(const Ints& lengths, int64_t heads, int64_t key, int64_t value, int64_t taps,
          float lower_bound, Random& random)
      : starts(starts_of(lengths)),
        heads(heads),
        key(key),
        value(value),
        taps(taps),
        channels(heads * (2 * key + value)),
        num_slots(static_cast<int64_t>(lengths.size()) + 2),
        lower_bound(lower_bound),
        x(random.floats(rows() * channels, 2.0f)),
        z(random.floats(rows() * heads * key, 6.0f)),
        beta(random.floats(rows() * heads, 3.0f)),
        a_log(random.floats(heads)),
        dt_bias(random.floats(heads * key)),
        state(num_slots * state_size(), NAN),
        conv(num_slots * conv_size(), NAN) {
    for (int64_t size : {key, key, value}) weights.push_back(random.floats(heads * size * taps));
    for (const Floats& w : weights) addresses.push_back(reinterpret_cast<int64_t>(w.data()));
    for (size_t s = 0; s < lengths.size(); ++s) {
      counts.push_back(random.below(lengths[s] + 1));
      slots.push_back(num_slots - 1 - static_cast<int64_t>(s));
      fill(state, slots[s] * state_size(), random.floats(state_size()));
      fill(conv, slots[s] * conv_size(), random.floats(conv_size()));
    }
  }

  int64_t rows() const { return starts.back(); }
  int64_t num_seqs() const { return static_cast<int64_t>(starts.size()) - 1; }
  int64_t state_size() const { return heads * key * value; }
  int64_t conv_size() const { return channels * (taps - 1); }
  static void fill(Floats& arena, int64_t at, const Floats& values) {
    std::copy(values.begin(), values.end(), arena.begin() + at);
  }

  int32_t window(Floats& out, int32_t level, int32_t threads) const {
    return moonlet_kda_window_f32(x.data(), addresses.data(), z.data(), beta.data(), a_log.data(),
                                  dt_bias.data(), lower_bound, state.data(),
                                  taps > 1 ? conv.data() : nullptr, slots.data(), starts.data(),
                                  out.data(), num_slots, num_seqs(), heads, key, value, taps,
                                  level, threads);
  }

  int32_t replay(Floats& states, Floats& carries, int32_t level, int32_t threads) const {
    return moonlet_kda_replay_f32(x.data(), addresses.data(), z.data(), beta.data(), a_log.data(),
                                  dt_bias.data(), lower_bound, states.data(),
                                  taps > 1 ? carries.data() : nullptr, slots.data(),
                                  starts.data(), counts.data(), num_slots, num_seqs(), heads, key,
                                  value, taps, level, threads);
  }

  // The first `count` rows of sequence s by plain decode steps.
  void decode(int64_t s, int64_t count, Floats& states, Floats& carries, Floats& out,
              int32_t level) const {
    Floats weight, y(channels);
    for (const Floats& w : weights) weight.insert(weight.end(), w.begin(), w.end());
    const Ints address = {reinterpret_cast<int64_t>(weight.data())};
    const int64_t keys = heads * key, values = heads * value;
    for (int64_t row = starts[s]; row < starts[s] + count; ++row) {
      CHECK(moonlet_short_conv_step_f32(x.data() + row * channels, address.data(), 1,
                                        taps > 1 ? carries.data() : nullptr, &slots[s], y.data(),
                                        num_slots, 1, channels, taps, level, 1) == MOONLET_OK);
      CHECK(moonlet_kda_step_f32(y.data(), y.data() + keys, y.data() + 2 * keys,
                                 z.data() + row * keys, beta.data() + row * heads, a_log.data(),
                                 dt_bias.data(), lower_bound, states.data(), &slots[s],
                                 out.data() + row * values, keys, keys, values, keys, num_slots, 1,
                                 heads, key, value, level, 1) == MOONLET_OK);
    }
  }
};

void kda_windows(const Ints& lengths, int64_t heads, int64_t key, int64_t value, int64_t taps,
                 float lower_bound, Random& random) {
  const Windows w(lengths, heads, key, value, taps, lower_bound, random);
  CASE("kda_window", w.num_seqs(), w.rows(), heads, key, value, taps, lower_bound < 0);
  Floats out(w.rows() * heads * value), states, carries;
  compare(
      [&](int32_t level, int32_t threads) {
        const int32_t status = w.window(out, level, threads);
        if (status != MOONLET_OK) return status;
        Floats want(out.size(), NAN);
        states = w.state, carries = w.conv;
        for (int64_t s = 0; s < w.num_seqs(); ++s) {
          w.decode(s, w.starts[s + 1] - w.starts[s], states, carries, want, level);
        }
        CHECK(same(out, want));
        return status;
      },
      {{&out}});
  CASE("kda_replay", w.num_seqs(), w.rows(), heads, key, value, taps, lower_bound < 0);
  Floats kept(w.num_seqs() * w.state_size());
  compare(
      [&](int32_t level, int32_t threads) {
        states = w.state, carries = w.conv;
        const int32_t status = w.replay(states, carries, level, threads);
        if (status != MOONLET_OK) {
          CHECK(same(states, w.state) && same(carries, w.conv));
          return status;
        }
        Floats want = w.state, want_carries = w.conv, unused(out.size());
        for (int64_t s = 0; s < w.num_seqs(); ++s) {
          w.decode(s, w.counts[s], want, want_carries, unused, level);
          const auto from = states.begin() + w.slots[s] * w.state_size();
          std::copy(from, from + w.state_size(), kept.begin() + s * w.state_size());
        }
        CHECK(same(states, want));
        CHECK(same(carries, want_carries));
        return status;
      },
      {{&kept}});
}

void kda_windows_refuse(Random& random) {
  CASE("refusals of kda_window and kda_replay");
  const Windows good({3, 2}, 2, 16, 32, 4, -5.0f, random);
  Floats out(good.rows() * good.heads * good.value), states = good.state, carries = good.conv;
  CHECK(good.window(out, 0, 1) == MOONLET_OK);
  const auto refuses = [&](const Windows& w) {
    states = good.state, carries = good.conv;
    return w.replay(states, carries, 0, 1) == MOONLET_BAD_ARGUMENT && same(states, good.state) &&
           same(carries, good.conv);
  };
  CHECK(good.replay(states, carries, 0, 1) == MOONLET_OK);
  Windows bad = good;
  for (const Ints& slots : {Ints{4, 0}, Ints{0, -1}}) {
    bad.slots = slots;
    CHECK(refuses(bad) && bad.window(out, 0, 1) == MOONLET_BAD_ARGUMENT);
  }
  bad = good;
  for (const Ints& counts : {Ints{4, 0}, Ints{0, 3}, Ints{-1, 0}}) {
    bad.counts = counts;
    CHECK(refuses(bad));
  }
  bad = good;
  bad.starts = {0, 3, 2};
  CHECK(refuses(bad) && bad.window(out, 0, 1) == MOONLET_BAD_ARGUMENT);
  bad = good;
  bad.lower_bound = 1.0f;
  CHECK(refuses(bad) && bad.window(out, 0, 1) == MOONLET_BAD_ARGUMENT);
  bad = good;
  bad.key = 24;
  CHECK(refuses(bad) && bad.window(out, 0, 1) == MOONLET_BAD_ARGUMENT);
  for (int64_t taps : {0, 17}) {
    bad = good;
    bad.taps = taps;
    CHECK(refuses(bad) && bad.window(out, 0, 1) == MOONLET_BAD_ARGUMENT);
  }
}

}  // namespace

int main() {
  Random random(8);
  for (float bound : {-5.0f, 0.0f}) {
    kda_windows({1}, 1, 16, 16, 4, bound, random);
    kda_windows({2, 1, 8, 3}, 2, 32, 48, 4, bound, random);
    kda_windows({17, 33, 16}, 3, 48, 16, 4, bound, random);
    for (int64_t taps : {1, 2, 16}) kda_windows({35, 1, 15}, 2, 16, 32, taps, bound, random);
    kda_windows({20}, 1, 256, 256, 4, bound, random);
  }
  kda_windows_refuse(random);
  return finish();
}

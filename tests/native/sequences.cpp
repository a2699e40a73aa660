// Operators that carry something from row to row: the short convolution, Kimi Delta Attention.
#include "check.h"

using namespace test;

namespace {

// Some rows after which a copy is wanted: the first and the last of every sequence, and one within.
Ints emit_rows_of(const Ints& starts) {
  Ints rows;
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    for (int64_t row : {starts[s], (starts[s] + starts[s + 1]) / 2, starts[s + 1] - 1}) {
      if (rows.empty() || row > rows.back()) rows.push_back(row);
    }
  }
  return rows;
}

Ints reversed_places(const Ints& rows) {
  Ints places;
  for (size_t e = rows.size(); e > 0; --e) places.push_back(static_cast<int64_t>(e) - 1);
  return places;
}

// ---- short convolution --------------------------------------------------------------------------

void short_conv(const Ints& lengths, int64_t channels, int64_t taps, Random& random) {
  const Ints starts = starts_of(lengths), rows = emit_rows_of(starts);
  const int64_t num_seqs = static_cast<int64_t>(lengths.size()), num_rows = starts.back();
  const int64_t num_emits = static_cast<int64_t>(rows.size()), carried = channels * (taps - 1);
  CASE("short_conv", num_seqs, num_rows, channels, taps);
  const Ints places = reversed_places(rows);
  const Floats x = random.floats(num_rows * channels, 3.0f);
  const Floats weight = random.floats(channels * taps), carry = random.floats(num_seqs * carried);
  Floats out(x.size()), new_carry(carry.size()), emitted(num_emits * carried);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_short_conv_f32(x.data(), weight.data(), taps > 1 ? carry.data() : nullptr,
                                      starts.data(), out.data(),
                                      taps > 1 ? new_carry.data() : nullptr, rows.data(),
                                      places.data(), taps > 1 ? emitted.data() : nullptr,
                                      num_emits, num_seqs, channels, taps, level, threads);
      },
      {{&out}, {&new_carry, &emitted}});
  // the carry after a sequence's last row, by two ways
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t e = std::find(rows.begin(), rows.end(), starts[s + 1] - 1) - rows.begin();
    CHECK(std::equal(new_carry.begin() + s * carried, new_carry.begin() + (s + 1) * carried,
                     emitted.begin() + places[e] * carried));
  }
  CASE("short_conv without emits", num_seqs, num_rows, channels, taps);
  const Floats with_emits = out;
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_short_conv_f32(x.data(), weight.data(), carry.data(), starts.data(),
                                      out.data(), new_carry.data(), nullptr, nullptr, nullptr, 0,
                                      num_seqs, channels, taps, level, threads);
      },
      {{&out}, {&new_carry}});
  CHECK(same(out, with_emits));
}

void short_conv_refuses() {
  CASE("refusals of short_conv");
  Floats x(64, 1.0f), out(64);
  const Ints starts = {0, 2};
  const auto call = [&](const float* carry, const int64_t* s, int64_t emits, int64_t seqs,
                        int64_t channels, int64_t taps) {
    return moonlet_short_conv_f32(x.data(), x.data(), carry, s, out.data(), out.data() + 32,
                                  nullptr, nullptr, nullptr, emits, seqs, channels, taps, 0, 1);
  };
  const float* carry = x.data();
  const int64_t* s = starts.data();
  CHECK(call(carry, s, 0, 1, 3, 4) == MOONLET_OK);
  CHECK(call(nullptr, s, 0, 1, 3, 4) == MOONLET_BAD_ARGUMENT);
  CHECK(call(carry, nullptr, 0, 1, 3, 4) == MOONLET_BAD_ARGUMENT);
  CHECK(call(carry, s, 1, 1, 3, 4) == MOONLET_BAD_ARGUMENT);
  CHECK(call(carry, s, -1, 1, 3, 4) == MOONLET_BAD_ARGUMENT);
  CHECK(call(carry, s, 0, -1, 3, 4) == MOONLET_BAD_ARGUMENT);
  CHECK(call(carry, s, 0, 1, 0, 4) == MOONLET_BAD_ARGUMENT);
  CHECK(call(carry, s, 0, 1, 3, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(carry, s, 0, 1, 3, 17) == MOONLET_BAD_ARGUMENT);
}

// ---- Kimi Delta Attention -----------------------------------------------------------------------

// Rows of all inputs, with gaps behind them.
struct Kda {
  int64_t rows, heads, key, value, keys, values;
  float lower_bound;
  Floats q, k, v, z, beta, a_log, dt_bias;

  static constexpr int64_t kQueryGap = 1, kKeyGap = 2, kValueGap = 3, kGateGap = 4;

  Kda(int64_t rows, int64_t heads, int64_t key, int64_t value, float lower_bound, Random& random)
      : rows(rows),
        heads(heads),
        key(key),
        value(value),
        keys(heads * key),
        values(heads * value),
        lower_bound(lower_bound),
        q(random.floats(span(rows, keys, keys + kQueryGap))),
        k(random.floats(span(rows, keys, keys + kKeyGap))),
        v(random.floats(span(rows, values, values + kValueGap))),
        z(random.floats(span(rows, keys, keys + kGateGap), 6.0f)),
        beta(random.floats(rows * heads, 3.0f)),
        a_log(random.floats(heads)),
        dt_bias(random.floats(keys)) {}

  int64_t state_size() const { return heads * key * value; }

  int32_t step(Floats& state, const Ints& slots, Floats& out, int32_t level,
               int32_t threads) const {
    return moonlet_kda_step_f32(q.data(), k.data(), v.data(), z.data(), beta.data(), a_log.data(),
                                dt_bias.data(), lower_bound, state.data(), slots.data(),
                                out.data(), keys + kQueryGap, keys + kKeyGap, values + kValueGap,
                                keys + kGateGap, static_cast<int64_t>(state.size()) / state_size(),
                                rows, heads, key, value, level, threads);
  }

  int32_t chunk(const Floats& state, const Ints& starts, Floats& out, Floats& final_state,
                const Ints& emit_rows, const Ints& places, Floats& emitted, int32_t level,
                int32_t threads) const {
    return moonlet_kda_chunk_f32(
        q.data(), k.data(), v.data(), z.data(), beta.data(), a_log.data(), dt_bias.data(),
        lower_bound, state.data(), starts.data(), out.data(), final_state.data(),
        emit_rows.empty() ? nullptr : emit_rows.data(),
        emit_rows.empty() ? nullptr : places.data(), emit_rows.empty() ? nullptr : emitted.data(),
        keys + kQueryGap, keys + kKeyGap, values + kValueGap, keys + kGateGap,
        static_cast<int64_t>(emit_rows.size()), static_cast<int64_t>(starts.size()) - 1, heads,
        key, value, level, threads);
  }
};

void kda_step(int64_t num_seqs, int64_t heads, int64_t key, int64_t value, float lower_bound,
              Random& random) {
  CASE("kda_step", num_seqs, heads, key, value, lower_bound < 0);
  const Kda kda(num_seqs, heads, key, value, lower_bound, random);
  const int64_t size = kda.state_size(), num_slots = num_seqs + 3;
  Floats before(num_slots * size, NAN), out(num_seqs * heads * value), states(num_seqs * size);
  Ints slots;
  for (int64_t s = 0; s < num_seqs; ++s) {
    slots.push_back(num_slots - 2 - s);
    const Floats state = random.floats(size);
    std::copy(state.begin(), state.end(), before.begin() + slots[s] * size);
  }
  compare(
      [&](int32_t level, int32_t threads) {
        Floats arena = before;
        const int32_t status = kda.step(arena, slots, out, level, threads);
        if (status != MOONLET_OK) {
          CHECK(same(arena, before));
          return status;
        }
        for (int64_t s = 0; s < num_seqs; ++s) {
          const auto from = arena.begin() + slots[s] * size;
          std::copy(from, from + size, states.begin() + s * size);
          std::fill(from, from + size, NAN);
        }
        CHECK(is_poison(arena));
        return status;
      },
      {{&out, &states}});
}

void kda_chunk(const Ints& lengths, int64_t heads, int64_t key, int64_t value, float lower_bound,
               Random& random) {
  const Ints starts = starts_of(lengths), rows = emit_rows_of(starts);
  const int64_t num_seqs = static_cast<int64_t>(lengths.size());
  CASE("kda_chunk", num_seqs, starts.back(), heads, key, value, lower_bound < 0);
  const Kda kda(starts.back(), heads, key, value, lower_bound, random);
  const int64_t size = kda.state_size();
  const Ints places = reversed_places(rows);
  const Floats state = random.floats(num_seqs * size);
  Floats out(starts.back() * heads * value), final_state(state.size());
  Floats emitted(static_cast<int64_t>(rows.size()) * size);
  compare(
      [&](int32_t level, int32_t threads) {
        return kda.chunk(state, starts, out, final_state, rows, places, emitted, level, threads);
      },
      {{&out, &final_state, &emitted}});
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t e = std::find(rows.begin(), rows.end(), starts[s + 1] - 1) - rows.begin();
    CHECK(std::equal(final_state.begin() + s * size, final_state.begin() + (s + 1) * size,
                     emitted.begin() + places[e] * size));
  }
  CASE("kda_chunk without emits", num_seqs, starts.back(), heads, key, value, lower_bound < 0);
  const Floats with_emits = out;
  Floats none;
  compare(
      [&](int32_t level, int32_t threads) {
        return kda.chunk(state, starts, out, final_state, {}, {}, none, level, threads);
      },
      {{&out, &final_state}});
  CHECK(same(out, with_emits));
}

void kda_refuses(Random& random) {
  CASE("refusals of kda");
  const Kda good(2, 3, 16, 32, -5.0f, random);
  const int64_t size = good.state_size();
  Floats state(4 * size, 1.0f), out(2 * good.values), final_state(2 * size), emitted(size);
  const Floats before = state;
  CHECK(good.step(state, {3, 0}, out, 0, 1) == MOONLET_OK);
  CHECK(!same(state, before));
  const Ints starts = {0, 1, 2};
  CHECK(good.chunk(before, starts, out, final_state, {0}, {0}, emitted, 0, 1) == MOONLET_OK);
  const auto refuses = [&](const Kda& kda) {
    state = before;
    const int32_t step = kda.step(state, {3, 0}, out, 0, 1);
    const int32_t chunk = kda.chunk(state, starts, out, final_state, {0}, {0}, emitted, 0, 1);
    return step == MOONLET_BAD_ARGUMENT && chunk == MOONLET_BAD_ARGUMENT && same(state, before);
  };
  for (const Ints& slots : {Ints{4, 0}, Ints{0, -1}}) {
    state = before;
    CHECK(good.step(state, slots, out, 0, 1) == MOONLET_BAD_ARGUMENT);
    CHECK(same(state, before));
  }
  Kda bad = good;
  bad.lower_bound = 1.0f;
  CHECK(refuses(bad));
  bad = good;
  bad.key = 24;
  CHECK(refuses(bad));
  bad = good;
  bad.value = 272;
  CHECK(refuses(bad));
  // strides below a row
  bad = good;
  bad.keys = good.keys - Kda::kGateGap - 1;
  CHECK(refuses(bad));
  bad = good;
  bad.values = good.values - Kda::kValueGap - 1;
  CHECK(refuses(bad));
}

}  // namespace

int main() {
  Random random(6);
  for (int64_t channels : kSizes) {
    for (int64_t taps : {1, 2, 4, 16}) short_conv({3, 1, 17, 40}, channels, taps, random);
  }
  for (int64_t taps : {3, 4}) short_conv({1, 257, 100}, 600, taps, random);
  short_conv({1}, 1, 4, random);
  short_conv_refuses();
  for (float bound : {-5.0f, 0.0f}) {
    kda_step(1, 1, 16, 16, bound, random);
    kda_step(3, 2, 48, 80, bound, random);
    kda_step(17, 3, 32, 48, bound, random);
    kda_step(2, 1, 256, 256, bound, random);
    kda_chunk({1}, 1, 16, 16, bound, random);
    kda_chunk({17}, 2, 32, 48, bound, random);
    kda_chunk({33, 1, 100, 32}, 3, 32, 48, bound, random);
    kda_chunk({257, 3}, 2, 48, 16, bound, random);
    kda_chunk({40}, 1, 256, 256, bound, random);
  }
  kda_refuses(random);
  return finish();
}

// What a decode step is made of beside the large operators, and recorded calls.
#include "check.h"

using namespace test;

namespace {

constexpr int64_t kGap = 5;

int64_t word(const void* address) { return reinterpret_cast<int64_t>(address); }

// Two matrices of different forms side by side in one result, and a third with its own; a packed
// one where the rows are whole groups.
void linear_many(int64_t rows, int64_t size_in, Random& random) {
  CASE("linear_many", rows, size_in);
  const int64_t sizes[] = {7, 600, 33}, wide = sizes[0] + sizes[1], stride = size_in + kGap;
  const Floats x = random.floats(span(rows, size_in, stride)), first = random.floats(7 * size_in);
  const Halves second = to_bfloat16(random.floats(600 * size_in));
  std::vector<int8_t> third(33 * size_in);
  for (int8_t& value : third) value = static_cast<int8_t>(random.below(256) - 128);
  const Floats scale = random.floats(33);
  const bool has_packed = size_in % 32 == 0;
  const Bytes codes = random.bytes(90 * size_in / 2);
  const Bytes bytes = random.bytes(90 * size_in / 32, 120, 124);
  Floats both(rows * wide), alone(rows * 33), packed(has_packed ? rows * 90 : 0);
  compare(
      [&](int32_t level, int32_t threads) {
        Floats inputs(has_packed ? rows * ((size_in + 127) / 128 * 128) : 0, NAN);
        Ints words = {word(first.data()),  0,                  word(both.data()),     7,  wide, 0,
                      word(second.data()), 0,                  word(both.data() + 7), 600, wide, 1,
                      word(third.data()),  word(scale.data()), word(alone.data()),    33, 33,   2};
        if (has_packed) {
          words.insert(words.end(), {word(codes.data()), word(bytes.data()), word(packed.data()),
                                     90, 90, 3});
        }
        return moonlet_linear_many(x.data(), words.data(), inputs.data(), 3 + has_packed, rows,
                                   size_in, stride, level, threads);
      },
      {{&both, &alone, &packed}});
  Floats one(rows * 600), quantized(rows * 33);
  const int32_t level = moonlet_isa_level();
  CHECK(moonlet_linear(x.data(), second.data(), nullptr, one.data(), nullptr, rows, size_in, 600,
                       stride, 600, 1, level, 2) == MOONLET_OK);
  CHECK(moonlet_linear(x.data(), third.data(), scale.data(), quantized.data(), nullptr, rows,
                       size_in, 33, stride, 33, 2, level, 1) == MOONLET_OK);
  CHECK(same(alone, quantized));
  for (int64_t r = 0; r < rows; ++r) {
    CHECK(std::equal(one.begin() + r * 600, one.begin() + (r + 1) * 600,
                     both.begin() + r * wide + 7));
  }
}

void refusals_of_linear_many() {
  CASE("refusals of linear_many");
  const Floats x(4, 1.0f), weight(4, 1.0f);
  Floats y(4);
  const auto call = [&](int64_t count, int64_t size_out, int64_t y_stride, int64_t type) {
    Ints words;
    for (int64_t i = 0; i < 17; ++i) {
      words.insert(words.end(), {word(weight.data()), 0, word(y.data()), size_out, y_stride, type});
    }
    return moonlet_linear_many(x.data(), words.data(), nullptr, count, 2, 2, 2, 0, 1);
  };
  CHECK(call(1, 2, 2, 0) == MOONLET_OK);
  for (int64_t count : {0, -1, 17}) CHECK(call(count, 2, 2, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(1, -1, 2, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(2, 2, 1, 0) == MOONLET_BAD_ARGUMENT);
  // no whole groups, and no room for the inputs of a packed one
  CHECK(call(1, 2, 2, 3) == MOONLET_BAD_ARGUMENT);
  CHECK(call(1, 2, 2, 4) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_linear_many(x.data(), nullptr, nullptr, 1, 1, 2, 2, 0, 1) == MOONLET_BAD_ARGUMENT);
}

// A step after a carry is the second row of a sequence that starts from it.
void short_conv_step(int64_t num_seqs, int64_t parts, int64_t part, int64_t taps, Random& random) {
  const int64_t channels = parts * part, carried = channels * (taps - 1), num_slots = num_seqs + 2;
  CASE("short_conv_step", num_seqs, parts, part, taps);
  const Floats x = random.floats(num_seqs * channels, 3.0f), before = random.floats(num_slots * carried);
  const Floats weight = random.floats(channels * taps);
  std::vector<Floats> separate;
  Ints addresses, slots, starts;
  for (int64_t p = 0; p < parts; ++p) {
    separate.emplace_back(weight.begin() + p * part * taps, weight.begin() + (p + 1) * part * taps);
  }
  for (const Floats& values : separate) addresses.push_back(word(values.data()));
  for (int64_t s = 0; s < num_seqs; ++s) slots.push_back(num_slots - 1 - s);
  Floats out(x.size()), state(before.size());
  compare(
      [&](int32_t level, int32_t threads) {
        Floats arena = before;
        const int32_t status = moonlet_short_conv_step_f32(
            x.data(), addresses.data(), parts, taps > 1 ? arena.data() : nullptr, slots.data(),
            out.data(), num_slots, num_seqs, channels, taps, level, threads);
        if (status == MOONLET_OK) state = arena;
        return status;
      },
      {{&out}, {&state}});
  Floats carry, rows(x.size()), next(num_seqs * carried);
  for (int64_t s = 0; s < num_seqs; ++s) {
    carry.insert(carry.end(), before.begin() + slots[s] * carried,
                 before.begin() + (slots[s] + 1) * carried);
    starts.push_back(s);
  }
  starts.push_back(num_seqs);
  CHECK(moonlet_short_conv_f32(x.data(), weight.data(), carry.data(), starts.data(), rows.data(),
                               next.data(), nullptr, nullptr, nullptr, 0, num_seqs, channels, taps,
                               moonlet_isa_level(), 1) == MOONLET_OK);
  CHECK(same(out, rows));
  CHECK(std::equal(state.begin(), state.begin() + 2 * carried, before.begin()));
  for (int64_t s = 0; s < num_seqs; ++s) {
    CHECK(std::equal(next.begin() + s * carried, next.begin() + (s + 1) * carried,
                     state.begin() + slots[s] * carried));
  }
  const Ints outside = {num_slots};
  CHECK(moonlet_short_conv_step_f32(x.data(), addresses.data(), parts, state.data(),
                                    outside.data(), out.data(), num_slots, 1, channels, taps, 0,
                                    1) == MOONLET_BAD_ARGUMENT);
}

void whole_rows(int64_t size, Random& random) {
  CASE("add", size);
  const Floats a = random.floats(size), b = random.floats(size, 20.0f);
  Floats out(size), want(size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_add_f32(a.data(), b.data(), out.data(), size, level, threads);
      },
      {{}, {&out}});
  for (int64_t i = 0; i < size; ++i) want[i] = a[i] + b[i];
  CHECK(same(out, want));
  CASE("sigmoid_gate", size);
  compare(
      [&](int32_t level, int32_t threads) {
        return moonlet_sigmoid_gate_f32(a.data(), b.data(), out.data(), size, level, threads);
      },
      {{&out}}, 1e-6);
  for (int64_t i = 0; i < size; ++i) {
    want[i] = static_cast<float>(a[i] / (1.0 + std::exp(-static_cast<double>(b[i]))));
  }
  CHECK(close(out, want, 1e-6));
}

void embed(int64_t size, Random& random) {
  const Floats table = random.floats(5 * size);
  const Halves halves = to_bfloat16(table);
  const Floats widened = from_bfloat16(halves);
  Ints ids = {4, 0, 2, 2};
  Floats out(4 * size);
  for (int32_t is_bfloat16 : {0, 1}) {
    CASE("embed", size, is_bfloat16);
    const void* data = is_bfloat16 ? static_cast<const void*>(halves.data()) : table.data();
    const auto call = [&](int32_t level, int32_t threads) {
      return moonlet_embed(ids.data(), data, is_bfloat16, out.data(), 4, 5, size, level, threads);
    };
    compare(call, {{}, {&out}});
    const Floats& values = is_bfloat16 ? widened : table;
    for (int64_t t = 0; t < 4; ++t) {
      CHECK(std::equal(out.begin() + t * size, out.begin() + (t + 1) * size,
                       values.begin() + ids[t] * size));
    }
    for (int64_t bad : {-1, 5}) {
      ids[1] = bad;
      CHECK(call(0, 1) == MOONLET_BAD_ARGUMENT);
      ids[1] = 0;
    }
  }
}

void mla_append(int64_t latent_size, int64_t shared_size, Random& random) {
  CASE("mla_append", latent_size, shared_size);
  const int64_t stride = latent_size + shared_size + kGap, row_size = latent_size + shared_size;
  const Floats wide = random.floats(span(3, row_size, stride));
  Ints rows = {6, 0, 3};
  Floats pages(7 * row_size);
  const auto call = [&](int32_t level, int32_t threads) {
    return moonlet_mla_append(wide.data(), wide.data() + latent_size, rows.data(), pages.data(), 3,
                              7, latent_size, shared_size, stride, stride, level, threads);
  };
  compare(call, {{}, {&pages}});
  for (int64_t r = 0; r < 7; ++r) {
    const int64_t t = std::find(rows.begin(), rows.end(), r) - rows.begin();
    const Floats row(pages.begin() + r * row_size, pages.begin() + (r + 1) * row_size);
    CHECK(t == 3 ? is_poison(row) : std::equal(row.begin(), row.end(), wide.begin() + t * stride));
  }
  rows[2] = 7;
  CHECK(call(0, 1) == MOONLET_BAD_ARGUMENT);
}

void replay(Random& random) {
  CASE("replay");
  const int64_t add = moonlet_call_number("moonlet_add_f32");
  const int64_t norm = moonlet_call_number("moonlet_rms_norm_f32");
  CHECK(add >= 0 && norm >= 0 && add != norm);
  CHECK(moonlet_call_number("moonlet_replay") == -1);
  CHECK(moonlet_call_number("") == -1);
  CHECK(moonlet_call_number(nullptr) == -1);
  const int32_t level = moonlet_isa_level();
  Floats a = random.floats(20), b = random.floats(20), weight = random.floats(10);
  Floats sum(20), out(20), want(20);
  const float eps = 1e-5f;
  int32_t bits;
  std::memcpy(&bits, &eps, sizeof(bits));
  Ints words = {add,  word(a.data()),      word(b.data()),   word(sum.data()), 20, level, 2,
                norm, word(sum.data()),    word(weight.data()), word(out.data()), 2, 10, 10,
                bits, level,               1};
  const auto run_all = [&](int64_t* failed) {
    return moonlet_replay(words.data(), static_cast<int64_t>(words.size()), failed);
  };
  int64_t failed = -1;
  for (int round = 0; round < 3; ++round) {
    a = random.floats(20);
    words[1] = word(a.data());
    CHECK(run_all(&failed) == MOONLET_OK);
    for (int64_t i = 0; i < 20; ++i) sum[i] = a[i] + b[i];
    CHECK(moonlet_rms_norm_f32(sum.data(), weight.data(), want.data(), 2, 10, 10, eps, level, 1) ==
          MOONLET_OK);
    CHECK(same(out, want));
  }
  // a refused call ends it and is named
  words[15] = level + 1;
  CHECK(run_all(&failed) == MOONLET_BAD_ISA);
  CHECK(failed == 1);
  words.pop_back();
  CHECK(run_all(&failed) == MOONLET_BAD_ARGUMENT);
  words = {1000};
  CHECK(run_all(&failed) == MOONLET_BAD_ARGUMENT);
  CHECK(failed == 0);
  words = {-1};
  CHECK(run_all(&failed) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_replay(nullptr, 0, &failed) == MOONLET_OK);
  CHECK(moonlet_replay(nullptr, 1, &failed) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_replay(words.data(), 1, nullptr) == MOONLET_BAD_ARGUMENT);
}

}  // namespace

int main() {
  Random random(9);
  for (int64_t rows : {1, 4, 13, 40}) {
    for (int64_t size_in : {1, 17, 96, 257}) linear_many(rows, size_in, random);
  }
  refusals_of_linear_many();
  for (int64_t taps : {1, 2, 4, 16}) {
    short_conv_step(1, 1, 3, taps, random);
    short_conv_step(3, 3, 17, taps, random);
    short_conv_step(17, 3, 257, taps, random);
    short_conv_step(2, 1, 1100, taps, random);
  }
  for (int64_t size : kSizes) {
    whole_rows(size, random);
    embed(size, random);
    mla_append(size, 5, random);
  }
  whole_rows(1 << 17, random);
  replay(random);
  return finish();
}

// Choices among many: experts of the router, ids of the sampler.
#include "check.h"

using namespace test;

namespace {

// ---- router -------------------------------------------------------------------------------------

struct Route {
  int64_t rows, size, experts, top_k;
  Floats x, weight, bias, scores, weights, cut, chosen;
  Halves halves;
  Ints ids;

  Route(int64_t rows, int64_t size, int64_t experts, int64_t top_k, Random& random)
      : rows(rows),
        size(size),
        experts(experts),
        top_k(top_k),
        x(random.floats(rows * size)),
        weight(random.floats(experts * size)),
        bias(random.floats(experts, 0.5f)),
        scores(rows * experts),
        weights(rows * top_k),
        cut(rows),
        chosen(rows * top_k),
        halves(to_bfloat16(weight)),
        ids(rows * top_k) {}

  int32_t call(bool is_bfloat16, bool renormalizes, int32_t level, int32_t threads) {
    const void* stored = is_bfloat16 ? static_cast<const void*>(halves.data()) : weight.data();
    std::fill(ids.begin(), ids.end(), -1);
    const int32_t status = moonlet_route_topk(
        x.data(), stored, is_bfloat16, bias.data(), scores.data(), ids.data(), weights.data(),
        cut.data(), rows, size, experts, top_k, renormalizes, 2.5f, level, threads);
    if (status == MOONLET_OK) chosen.assign(ids.begin(), ids.end());
    return status;
  }

  // Whether the choice of a row is the one that its scores ask for.
  bool is_right(int64_t row, bool renormalizes) const {
    const float* s = scores.data() + row * experts;
    Ints order(experts);
    for (int64_t e = 0; e < experts; ++e) order[e] = e;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return s[a] + bias[a] > s[b] + bias[b]; });
    double sum = 0.0;
    for (int64_t a = 0; a < top_k; ++a) sum += s[order[a]];
    Floats want;
    for (int64_t a = 0; a < top_k; ++a) {
      if (ids[row * top_k + a] != order[a]) return false;
      const double share = renormalizes && top_k > 1 ? s[order[a]] / sum : s[order[a]];
      want.push_back(static_cast<float>(2.5 * share));
    }
    const auto first = weights.begin() + row * top_k;
    if (!close(Floats(first, first + top_k), want, 1e-5)) return false;
    if (top_k == experts) return cut[row] == -INFINITY;
    return cut[row] == s[order[top_k]] + bias[order[top_k]];
  }
};

void route(int64_t rows, int64_t size, int64_t experts, int64_t top_k, Random& random) {
  Route r(rows, size, experts, top_k, random);
  for (bool is_bfloat16 : {false, true}) {
    CASE("route_topk", rows, size, experts, top_k, is_bfloat16);
    const bool renormalizes = !is_bfloat16;
    // levels may differ where two scores nearly tie: each is held to its own scores
    compare(
        [&](int32_t level, int32_t threads) {
          const int32_t status = r.call(is_bfloat16, renormalizes, level, threads);
          for (int64_t t = 0; status == MOONLET_OK && t < rows; ++t) {
            CHECK(r.is_right(t, renormalizes));
          }
          return status;
        },
        {{&r.scores}, {}, {&r.chosen, &r.weights, &r.cut}}, 1e-5);
  }
}

void route_ties_and_refusals(Random& random) {
  CASE("route_topk with ties");
  Route r(2, 3, 5, 3, random);
  std::fill(r.weight.begin(), r.weight.end(), 0.0f);
  std::fill(r.bias.begin(), r.bias.end(), 0.0f);
  for (int32_t level = 0; level <= moonlet_isa_level(); ++level) {
    CHECK(r.call(false, true, level, 1) == MOONLET_OK);
    CHECK(r.ids == Ints{0, 1, 2, 0, 1, 2});
  }
  CASE("refusals of route_topk");
  const auto refused = [&](int64_t Route::* size, int64_t value) {
    const int64_t before = r.*size;
    r.*size = value;
    const int32_t status = r.call(false, true, 0, 1);
    r.*size = before;
    return status == MOONLET_BAD_ARGUMENT;
  };
  CHECK(refused(&Route::rows, -1));
  CHECK(refused(&Route::size, 0));
  CHECK(refused(&Route::experts, 0));
  CHECK(refused(&Route::experts, 1025));
  CHECK(refused(&Route::experts, 2));
  CHECK(refused(&Route::top_k, 0));
  CHECK(refused(&Route::top_k, 6));
  CHECK(moonlet_route_topk(nullptr, r.weight.data(), 0, r.bias.data(), r.scores.data(),
                           r.ids.data(), r.weights.data(), r.cut.data(), 2, 3, 5, 3, 1, 1.0f, 0,
                           1) == MOONLET_BAD_ARGUMENT);
}

// ---- sampler ------------------------------------------------------------------------------------

struct Filter {
  double temperature, min_p, top_k, top_p;
};

// A filter that changes nothing goes as a null pointer.
struct Sample {
  int64_t rows, size;
  Floats logits, chosen;
  Doubles uniform;

  Sample(int64_t rows, int64_t size, Random& random)
      : rows(rows), size(size), logits(random.floats(rows * size, 8.0f)), chosen(rows) {
    for (int64_t t = 0; t < rows; ++t) uniform.push_back(random.uniform(0.0f, 1.0f));
    // equal logits, and ids that are forbidden
    for (int64_t i = 0; i + 1 < rows * size; i += 5) logits[i] = logits[i + 1];
    for (int64_t i = 0; i < rows * size; i += 11) {
      if (i % size != size - 1) logits[i] = -INFINITY;
    }
  }

  int32_t call(const Filter& f, int64_t groups, int32_t level, int32_t threads) {
    const Doubles temperature(rows, f.temperature), min_p(rows, f.min_p), top_k(rows, f.top_k);
    const Doubles top_p(rows, f.top_p);
    Doubles scratch(groups * (3 * size + 64), NAN);
    Ints ids(rows, -1);
    const int32_t status = moonlet_sample(
        logits.data(), temperature.data(), f.min_p > 0 ? min_p.data() : nullptr,
        f.top_k > 0 ? top_k.data() : nullptr, f.top_p < 1 ? top_p.data() : nullptr, uniform.data(),
        ids.data(), scratch.data(), groups, rows, size, level, threads);
    if (status == MOONLET_OK) chosen.assign(ids.begin(), ids.end());
    return status;
  }

  // Whether every id exists and was not forbidden.
  bool is_allowed() const {
    for (int64_t t = 0; t < rows; ++t) {
      if (!(chosen[t] >= 0 && chosen[t] < size)) return false;
      if (std::isinf(logits[t * size + static_cast<int64_t>(chosen[t])])) return false;
    }
    return true;
  }
};

void sample(int64_t rows, int64_t size, Random& random) {
  constexpr Filter kFilters[] = {{1.0, 0.0, 0.0, 1.0},  {0.7, 0.0, 0.0, 0.9},
                                 {1.5, 0.05, 0.0, 1.0}, {1.0, 0.0, 7.0, 1.0},
                                 {1.3, 0.01, 40.0, 0.8}, {1e-300, 0.0, 0.0, 1.0},
                                 {1.0, 0.0, 300.0, 0.5}, {1e6, 0.0, 1.0, 1.0}};
  Sample s(rows, size, random);
  for (const Filter& filter : kFilters) {
    Floats of_one_group;
    for (int64_t groups : {1, 3}) {
      CASE("sample", rows, size, groups, &filter - kFilters);
      compare(
          [&](int32_t level, int32_t threads) { return s.call(filter, groups, level, threads); },
          {{}, {&s.chosen}});
      CHECK(s.is_allowed());
      if (groups == 1) of_one_group = s.chosen;
      CHECK(same(s.chosen, of_one_group));
    }
  }
}

void sample_takes_the_largest_and_refuses(Random& random) {
  CASE("sample of one");
  Sample s(3, 257, random);
  for (int64_t t = 0; t < 3; ++t) s.logits[t * 257 + 31 * (t + 1)] = 9.0f;
  for (int32_t level = 0; level <= moonlet_isa_level(); ++level) {
    CHECK(s.call({1.0, 0.0, 1.0, 1.0}, 1, level, 1) == MOONLET_OK);
    CHECK(same(s.chosen, {31.0f, 62.0f, 93.0f}));
  }
  CASE("refusals of sample");
  const Doubles one(3, 1.0);
  Doubles scratch(3 * 257 + 64);
  Ints ids(3);
  const auto call = [&](const float* logits, int64_t groups, int64_t rows, int64_t size) {
    return moonlet_sample(logits, one.data(), nullptr, nullptr, nullptr, one.data(), ids.data(),
                          scratch.data(), groups, rows, size, 0, 1);
  };
  const float* logits = s.logits.data();
  CHECK(call(logits, 1, 0, 257) == MOONLET_OK);
  CHECK(call(nullptr, 1, 3, 257) == MOONLET_BAD_ARGUMENT);
  CHECK(call(logits, 0, 3, 257) == MOONLET_BAD_ARGUMENT);
  CHECK(call(logits, 1, -1, 257) == MOONLET_BAD_ARGUMENT);
  CHECK(call(logits, 1, 3, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(logits, 1, 3, int64_t{1} << 31) == MOONLET_BAD_ARGUMENT);
}

}  // namespace

int main() {
  Random random(8);
  for (int64_t size : kSizes) {
    route(1, size, 1, 1, random);
    route(3, size, 17, 3, random);
  }
  route(17, 100, 100, 32, random);
  route(100, 257, 257, 8, random);
  route(3, 17, 1024, 4, random);
  route(5, 3, 8, 8, random);
  route_ties_and_refusals(random);
  for (int64_t size : kSizes) sample(3, size, random);
  sample(5, 1024, random);
  sample(2, 20000, random);
  sample_takes_the_largest_and_refuses(random);
  return finish();
}

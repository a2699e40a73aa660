// Gated MLA over pages, absorbed and expanded, with scratch of exactly the size that is asked for.
#include "check.h"

using namespace test;

namespace {

struct Shape {
  int64_t heads, nope, shared, value, latent;

  int64_t query() const { return heads * (nope + shared); }
  int64_t row() const { return latent + shared; }
};

// Sequences in pages. The pool holds NaN wherever no row lies: on a page of nobody, and behind the
// last row of a sequence; places of the table behind its last page hold no page.
struct Cache {
  int64_t page_size, pages_per_seq, num_pages;
  Ints lengths, table;
  Floats pool;

  Cache(const Shape& shape, const Ints& lengths, int64_t page_size, bool scattered, Random& random)
      : page_size(page_size), num_pages(1), lengths(lengths) {
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    pages_per_seq = pages_of(longest) + 1;
    for (int64_t length : lengths) num_pages += pages_of(length);
    table.assign(pages_per_seq * lengths.size(), -1);
    pool.assign(num_pages * page_size * shape.row(), NAN);
    int64_t used = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int64_t b = 0; b < pages_of(lengths[s]); ++b, ++used) {
        const int64_t page = scattered ? num_pages - 1 - used : 1 + used;
        table[s * pages_per_seq + b] = page;
        const int64_t rows = std::min(page_size, lengths[s] - b * page_size);
        const Floats values = random.floats(rows * shape.row());
        std::copy(values.begin(), values.end(), pool.begin() + page * page_size * shape.row());
      }
    }
  }

  int64_t pages_of(int64_t length) const { return (length + page_size - 1) / page_size; }
  int64_t num_seqs() const { return static_cast<int64_t>(lengths.size()); }
};

struct Weight {
  Floats wide;
  Halves halves;
  bool is_bfloat16;

  Weight(const Shape& s, bool is_bfloat16, Random& random)
      : wide(random.floats(s.heads * (s.nope + s.value) * s.latent)),
        halves(to_bfloat16(wide)),
        is_bfloat16(is_bfloat16) {}
  const void* data() const {
    return is_bfloat16 ? static_cast<const void*>(halves.data()) : wide.data();
  }
};

// Query rows of the absorbed form: row t sees the first lengths[t] rows of sequence seqs[t].
struct Absorbed {
  Ints seqs, lengths;

  int64_t scratch(const Shape& s, int32_t level, int32_t threads) const {
    int64_t size = -1;
    const int32_t status = moonlet_mla_absorbed_scratch(
        *std::max_element(lengths.begin(), lengths.end()), &size,
        static_cast<int64_t>(lengths.size()), s.heads, s.nope, s.shared, s.value, s.latent, level,
        threads);
    return status == MOONLET_OK ? size : -status;
  }

  int32_t call(const Shape& s, const Cache& cache, const Weight& weight, const Floats& q,
               Floats& out, Floats* max_score, Floats& scratch, int32_t level,
               int32_t threads) const {
    return moonlet_mla_absorbed(
        q.data(), cache.pool.data(), cache.table.data(), seqs.data(), lengths.data(),
        weight.data(), weight.is_bfloat16, out.data(), max_score ? max_score->data() : nullptr,
        scratch.data(), static_cast<int64_t>(scratch.size()), static_cast<int64_t>(seqs.size()),
        cache.num_seqs(), cache.num_pages, cache.page_size, cache.pages_per_seq, s.heads, s.nope,
        s.shared, s.value, s.latent, level, threads);
  }
};

// Query rows of the expanded form: the last counts[s] rows of each sequence.
struct Expanded {
  Ints starts;

  int64_t scratch(const Shape& s, const Cache& cache, int32_t level, int32_t threads) const {
    int64_t size = -1;
    const int32_t status = moonlet_mla_expanded_scratch(
        starts.data(), cache.lengths.data(), &size, cache.num_seqs(), s.heads, s.nope, s.shared,
        s.value, s.latent, level, threads);
    return status == MOONLET_OK ? size : -status;
  }

  int32_t call(const Shape& s, const Cache& cache, const Weight& weight, const Floats& q,
               Floats& out, Floats* max_score, Floats& scratch, int32_t level,
               int32_t threads) const {
    return moonlet_mla_expanded(
        q.data(), cache.pool.data(), cache.table.data(), starts.data(), cache.lengths.data(),
        weight.data(), weight.is_bfloat16, out.data(), max_score ? max_score->data() : nullptr,
        scratch.data(), static_cast<int64_t>(scratch.size()), cache.num_seqs(), cache.num_pages,
        cache.page_size, cache.pages_per_seq, s.heads, s.nope, s.shared, s.value, s.latent, level,
        threads);
  }
};

// Both forms of the same attention, which must agree.
void attend(const Shape& s, const Cache& cache, const Ints& counts, bool is_bfloat16,
            Random& random) {
  const Expanded expanded = {starts_of(counts)};
  Absorbed absorbed;
  for (size_t i = 0; i < counts.size(); ++i) {
    for (int64_t t = 0; t < counts[i]; ++t) {
      absorbed.seqs.push_back(static_cast<int64_t>(i));
      absorbed.lengths.push_back(cache.lengths[i] - counts[i] + t + 1);
    }
  }
  const int64_t rows = expanded.starts.back();
  const Weight weight(s, is_bfloat16, random);
  const Floats q = random.floats(rows * s.query());
  Floats out(rows * s.heads * s.value), max_score(rows * s.heads);
  CASE("mla_absorbed", s.heads, s.nope, s.shared, s.value, s.latent, rows, cache.page_size);
  compare(
      [&](int32_t level, int32_t threads) {
        const int64_t size = absorbed.scratch(s, level, threads);
        if (size < 0) return static_cast<int32_t>(-size);
        Floats scratch(size, NAN);
        return absorbed.call(s, cache, weight, q, out, &max_score, scratch, level, threads);
      },
      {{&out, &max_score}});
  const Floats out_absorbed = out, max_absorbed = max_score;
  CASE("mla_expanded", s.heads, s.nope, s.shared, s.value, s.latent, rows, cache.page_size);
  compare(
      [&](int32_t level, int32_t threads) {
        const int64_t size = expanded.scratch(s, cache, level, threads);
        if (size < 0) return static_cast<int32_t>(-size);
        Floats scratch(size, NAN);
        return expanded.call(s, cache, weight, q, out, &max_score, scratch, level, threads);
      },
      {{&out, &max_score}});
  CHECK(close(out, out_absorbed, 1e-4));
  CHECK(close(max_score, max_absorbed, 1e-4));
}

void without_max_score_and_with_little_scratch(Random& random) {
  CASE("mla without max_score");
  const Shape s = {3, 24, 8, 17, 40};
  const Cache cache(s, {5, 33}, 16, true, random);
  const Weight weight(s, true, random);
  const Absorbed absorbed = {{1, 0, 1}, {33, 5, 20}};
  const Expanded expanded = {{0, 2, 3}};
  const Floats q = random.floats(3 * s.query());
  Floats out(3 * s.heads * s.value);
  for (int32_t level = 0; level <= moonlet_isa_level(); ++level) {
    for (int32_t threads : {1, 3}) {
      Floats scratch(absorbed.scratch(s, level, threads), NAN);
      poison(out);
      CHECK(absorbed.call(s, cache, weight, q, out, nullptr, scratch, level, threads) ==
            MOONLET_OK);
      CHECK(is_finite(out));
      scratch.assign(expanded.scratch(s, cache, level, threads), NAN);
      poison(out);
      CHECK(expanded.call(s, cache, weight, q, out, nullptr, scratch, level, threads) ==
            MOONLET_OK);
      CHECK(is_finite(out));
      poison(out);
      scratch.resize(absorbed.scratch(s, level, threads) - 1);
      CHECK(absorbed.call(s, cache, weight, q, out, nullptr, scratch, level, threads) ==
            MOONLET_BAD_ARGUMENT);
      scratch.resize(expanded.scratch(s, cache, level, threads) - 1);
      CHECK(expanded.call(s, cache, weight, q, out, nullptr, scratch, level, threads) ==
            MOONLET_BAD_ARGUMENT);
      CHECK(is_poison(out));
    }
  }
}

void refusals(Random& random) {
  CASE("refusals of mla");
  const Shape s = {2, 16, 16, 16, 32};
  const Cache cache(s, {5, 33}, 16, false, random);
  const Weight weight(s, false, random);
  const Absorbed absorbed = {{0, 1}, {5, 33}};
  const Expanded expanded = {{0, 1, 2}};
  const Floats q = random.floats(2 * s.query());
  Floats out(2 * s.heads * s.value), scratch(1 << 20);
  const auto absorbs = [&](const Absorbed& rows, const Cache& c, const Shape& shape) {
    return rows.call(shape, c, weight, q, out, nullptr, scratch, 0, 1);
  };
  const auto expands = [&](const Expanded& rows, const Cache& c, const Shape& shape) {
    return rows.call(shape, c, weight, q, out, nullptr, scratch, 0, 1);
  };
  CHECK(absorbs(absorbed, cache, s) == MOONLET_OK);
  CHECK(expands(expanded, cache, s) == MOONLET_OK);
  poison(out);
  CHECK(absorbs({{0, 2}, {5, 33}}, cache, s) == MOONLET_BAD_ARGUMENT);
  CHECK(absorbs({{-1, 1}, {5, 33}}, cache, s) == MOONLET_BAD_ARGUMENT);
  CHECK(absorbs({{0, 1}, {0, 33}}, cache, s) == MOONLET_BAD_ARGUMENT);
  // beyond the last page, and beyond the table
  CHECK(absorbs({{0, 1}, {17, 33}}, cache, s) == MOONLET_BAD_ARGUMENT);
  CHECK(absorbs({{0, 1}, {5, 16 * cache.pages_per_seq + 1}}, cache, s) == MOONLET_BAD_ARGUMENT);
  CHECK(expands({{1, 1, 2}}, cache, s) == MOONLET_BAD_ARGUMENT);
  CHECK(expands({{0, 0, 2}}, cache, s) == MOONLET_BAD_ARGUMENT);
  CHECK(expands({{0, 6, 7}}, cache, s) == MOONLET_BAD_ARGUMENT);
  Cache bad = cache;
  bad.table[0] = bad.num_pages;
  CHECK(absorbs(absorbed, bad, s) == MOONLET_BAD_ARGUMENT);
  CHECK(expands(expanded, bad, s) == MOONLET_BAD_ARGUMENT);
  bad = cache;
  bad.page_size = 0;
  CHECK(absorbs(absorbed, bad, s) == MOONLET_BAD_ARGUMENT);
  CHECK(expands(expanded, bad, s) == MOONLET_BAD_ARGUMENT);
  for (int64_t Shape::* size :
       {&Shape::heads, &Shape::nope, &Shape::shared, &Shape::value, &Shape::latent}) {
    Shape empty = s;
    empty.*size = 0;
    CHECK(absorbs(absorbed, cache, empty) == MOONLET_BAD_ARGUMENT);
    CHECK(expands(expanded, cache, empty) == MOONLET_BAD_ARGUMENT);
    CHECK(absorbed.scratch(empty, 0, 1) == -MOONLET_BAD_ARGUMENT);
    CHECK(expanded.scratch(empty, cache, 0, 1) == -MOONLET_BAD_ARGUMENT);
  }
  const int32_t no_threads[] = {
      absorbed.call(s, cache, weight, q, out, nullptr, scratch, 0, 0),
      expanded.call(s, cache, weight, q, out, nullptr, scratch, 0, 0)};
  const int32_t no_level[] = {
      absorbed.call(s, cache, weight, q, out, nullptr, scratch, moonlet_isa_level() + 1, 1),
      expanded.call(s, cache, weight, q, out, nullptr, scratch, -1, 1)};
  for (int i = 0; i < 2; ++i) {
    CHECK(no_threads[i] == MOONLET_BAD_ARGUMENT);
    CHECK(no_level[i] == MOONLET_BAD_ISA);
  }
  CHECK(is_poison(out));
}

}  // namespace

int main() {
  Random random(7);
  constexpr Shape kShapes[] = {
      {1, 1, 1, 1, 1}, {3, 24, 8, 17, 40}, {17, 16, 16, 16, 48}, {100, 3, 5, 3, 17}};
  for (const Shape& s : kShapes) {
    for (int64_t page_size : {1, 16, 100}) {
      const bool is_bfloat16 = page_size != 16, is_scattered = page_size != 100;
      const Cache cache(s, {1, 17, 100, 3}, page_size, is_scattered, random);
      attend(s, cache, {1, 1, 1, 1}, is_bfloat16, random);
      attend(s, cache, {1, 17, 40, 2}, is_bfloat16, random);
    }
  }
  // queries of many passes, whose weights are worth several threads
  const Shape wide = {3, 100, 17, 33, 100};
  attend(wide, Cache(wide, {100, 257}, 64, true, random), {50, 140}, true, random);
  // a context of many parts, and more queries than one task takes
  const Shape narrow = {2, 16, 16, 16, 32};
  attend(narrow, Cache(narrow, {3000, 1}, 64, false, random), {3, 1}, false, random);
  attend(narrow, Cache(narrow, {600}, 64, true, random), {600}, true, random);
  without_max_score_and_with_little_scratch(random);
  refusals(random);
  return finish();
}

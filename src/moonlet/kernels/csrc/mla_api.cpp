// The C interface of Gated MLA inference: argument checks, the cut into tasks, threads, scratch.
//
// Compiled with baseline flags only.
#include "mla.h"

#include <atomic>
#include <stdint.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// A row's context is cut by its length alone, so neither threads nor neighbours change its result:
// into kFewSplits parts, but no shorter than kMinSplit rows (a part costs the time of
// about 50 more rows), and into up to kMaxSplits once they are longer than kLongSplit.
constexpr int64_t kMinSplit = 256;
constexpr int64_t kLongSplit = 4096;
constexpr int64_t kFewSplits = 32;
constexpr int64_t kMaxSplits = 64;
// partials that are kept at a time, which bounds the scratch; one row has at most kMaxSplits
constexpr int64_t kMaxPartials = 128;
// queries of one expanded task: more of them share an expansion, fewer make more tasks
constexpr int64_t kMaxTaskRows = 2048;
constexpr int64_t kMinTaskRows = 256;
constexpr int64_t kMaxThreads = 64;
// work that pays for waking another thread
constexpr int64_t kThreadProducts = 2000000;

int64_t padded(int64_t n) { return (n + kMlaPad - 1) / kMlaPad * kMlaPad; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

bool make_shape(int64_t heads, int64_t nope, int64_t shared, int64_t value, int64_t latent,
                MlaShape* s) {
  if (heads < 1 || nope < 1 || shared < 1 || value < 1 || latent < 1) return false;
  s->num_heads = heads, s->nope_size = nope, s->shared_size = shared;
  s->value_size = value, s->latent_size = latent;
  s->query_size = nope + shared, s->row_size = latent + shared, s->weight_rows = nope + value;
  s->padded_heads = padded(heads), s->padded_nope = padded(nope), s->padded_value = padded(value);
  s->padded_latent = padded(latent), s->padded_row = padded(latent + shared);
  s->key_size = shared + s->padded_nope;
  s->expanded_size = s->key_size + s->padded_value;
  return true;
}

// Hands out parts of the scratch; with a null base it only counts.
struct Arena {
  float* base;
  int64_t used;
  float* take(int64_t count) {
    float* p = base ? base + used : nullptr;
    used += padded(count);
    return p;
  }
};

// Runs task(index, slot) for every index; a slot is one thread's own, so it can have scratch.
template <typename Task>
void run_tasks(int64_t count, int64_t num_slots, const Task& task) {
  std::atomic<int64_t> next{0};
  parallel(num_slots, 1, static_cast<int32_t>(num_slots), [&](int64_t first, int64_t last) {
    for (int64_t slot = first; slot < last; ++slot) {
      for (;;) {
        const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
        if (index >= count) break;
        task(index, slot);
      }
    }
  });
}

int64_t slots_for(int64_t products, int32_t num_threads) {
  return smaller(smaller(num_threads, kMaxThreads), 1 + products / kThreadProducts);
}

// ---- absorbed ----

int64_t share(int64_t length, int64_t parts) {
  return ((length + parts - 1) / parts + kMlaBlock - 1) / kMlaBlock * kMlaBlock;
}

int64_t split_size(int64_t length) {
  const int64_t size = smaller(share(length, kFewSplits), kLongSplit);
  return larger(kMinSplit, larger(size, share(length, kMaxSplits)));
}

int64_t num_splits(int64_t length) {
  return (length + split_size(length) - 1) / split_size(length);
}

MlaAbsorbedScratch absorbed_slot(const MlaShape& s, Arena* arena) {
  MlaAbsorbedScratch scratch;
  scratch.weights = arena->take(kMlaPad * s.padded_latent);
  scratch.queries = arena->take(s.padded_heads * s.row_size);
  scratch.block = arena->take(kMlaBlock * s.padded_row);
  scratch.scores = arena->take(kMlaBlock * kMlaQueries);
  scratch.keep = arena->take(kMlaQueries);
  return scratch;
}

struct AbsorbedPlan {
  float* absorbed;
  MlaPartial partials[kMaxPartials];
  MlaAbsorbedScratch slots[kMaxThreads];
};

int64_t plan_absorbed(const MlaShape& s, int64_t num_rows, int64_t partials, int32_t num_threads,
                      float* base, AbsorbedPlan* plan) {
  Arena arena = {base, 0};
  plan->absorbed = arena.take(smaller(num_rows, kMaxPartials) * s.num_heads * s.padded_latent);
  for (int64_t i = 0; i < smaller(partials, kMaxPartials); ++i) {
    plan->partials[i].max = arena.take(s.padded_heads);
    plan->partials[i].sum = arena.take(s.padded_heads);
    plan->partials[i].out = arena.take(s.num_heads * s.padded_latent);
  }
  const int64_t slots = smaller(num_threads, kMaxThreads);
  for (int64_t i = 0; i < slots; ++i) plan->slots[i] = absorbed_slot(s, &arena);
  return arena.used;
}

int64_t partials_of(const int64_t* lengths, int64_t num_rows) {
  int64_t partials = 0;
  for (int64_t t = 0; t < num_rows && partials < kMaxPartials; ++t) {
    partials += num_splits(lengths[t]);
  }
  return partials;
}

// No fewer than the rows of any such lengths have.
int64_t most_partials(int64_t max_length, int64_t num_rows) {
  const int64_t most = smaller(max_length / kMinSplit + 1, kMaxSplits);
  return smaller(num_rows, kMaxPartials) * most;
}

struct Pages {
  const float* rows;
  const int64_t* table;
  int64_t num_pages, page_size, pages_per_seq;
};

MlaContext context_of(const MlaShape& s, const Pages& pages, int64_t seq) {
  return {pages.rows, pages.table + seq * pages.pages_per_seq, pages.page_size, s.row_size};
}

// Whether the first `length` rows of a sequence lie in pages that exist.
bool has_rows(const Pages& pages, int64_t seq, int64_t length) {
  if (length < 1 || length > pages.pages_per_seq * pages.page_size) return false;
  const int64_t* table = pages.table + seq * pages.pages_per_seq;
  for (int64_t b = 0; b * pages.page_size < length; ++b) {
    if (table[b] < 0 || table[b] >= pages.num_pages) return false;
  }
  return true;
}

bool bad_pages(const Pages& pages, int64_t num_seqs) {
  return !pages.rows || !pages.table || num_seqs < 1 || pages.num_pages < 1 ||
         pages.page_size < 1 || pages.pages_per_seq < 1;
}

struct Split {
  int64_t row, first, last;
};

// Runs the rows of one pass, whose partials are numbered by firsts.
void run_pass(const MlaAbsorbedTable& table, const MlaShape& s, const MlaWeights& weights,
              const Pages& pages, const int64_t* seqs, const int64_t* lengths, const MlaPass& pass,
              const AbsorbedPlan& plan, int32_t num_threads) {
  Split splits[kMaxPartials];
  int64_t rows = 0;
  for (int64_t t = 0; t < pass.num_rows; ++t) {
    const int64_t size = split_size(lengths[t]);
    for (int64_t i = pass.firsts[t]; i < pass.firsts[t + 1]; ++i) {
      const int64_t first = (i - pass.firsts[t]) * size;
      splits[i] = {t, first, smaller(first + size, lengths[t])};
    }
    rows += lengths[t];
  }
  const int64_t weight_products = pass.num_rows * s.num_heads * s.nope_size * s.latent_size;
  run_tasks(s.num_heads, slots_for(weight_products, num_threads), [&](int64_t head, int64_t slot) {
    table.absorb(s, weights, pass, head, plan.slots[slot]);
  });
  const int64_t products = rows * s.padded_heads * (s.row_size + s.latent_size);
  run_tasks(pass.firsts[pass.num_rows], slots_for(products, num_threads),
            [&](int64_t i, int64_t slot) {
              const Split& split = splits[i];
              table.attend(s, context_of(s, pages, seqs[split.row]), pass, split.row, split.first,
                           split.last, plan.partials[i], plan.slots[slot]);
            });
  run_tasks(s.num_heads, slots_for(weight_products, num_threads), [&](int64_t head, int64_t slot) {
    table.finish(s, weights, pass, head, plan.slots[slot]);
  });
}

// ---- expanded ----

MlaExpandedScratch expanded_slot(const MlaShape& s, int64_t task_rows, Arena* arena) {
  MlaExpandedScratch scratch;
  scratch.weights = arena->take((s.padded_nope + s.padded_value) * s.latent_size);
  scratch.wide = arena->take(kMlaPad * s.latent_size);
  scratch.queries = arena->take(task_rows * s.key_size);
  scratch.out = arena->take(task_rows * s.padded_value);
  scratch.max = arena->take(task_rows);
  scratch.sum = arena->take(task_rows);
  scratch.keep = arena->take(kMlaQueries);
  scratch.block = arena->take(kMlaBlock * s.padded_row);
  scratch.expanded = arena->take(kMlaExpanded * s.expanded_size);
  scratch.scores = arena->take(kMlaBlock * kMlaQueries);
  return scratch;
}

struct ExpandedPlan {
  int64_t task_rows, num_tasks, num_slots;
  MlaExpandedScratch slots[kMaxThreads];
};

int64_t blocks_of(int64_t rows, int64_t task_rows) { return (rows + task_rows - 1) / task_rows; }

int64_t plan_expanded(const MlaShape& s, const int64_t* starts, const int64_t* lengths,
                      int64_t num_seqs, int32_t num_threads, float* base, ExpandedPlan* plan) {
  int64_t longest = 0, products = 0;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t rows = starts[i + 1] - starts[i];
    longest = larger(longest, rows);
    products += s.num_heads * lengths[i] * s.weight_rows * s.latent_size;
    products += s.num_heads * lengths[i] * rows * (s.key_size + s.value_size);
  }
  plan->num_slots = slots_for(products, num_threads);
  for (int64_t size = kMaxTaskRows;; size /= 2) {
    plan->task_rows = size;
    plan->num_tasks = 0;
    for (int64_t i = 0; i < num_seqs; ++i) {
      plan->num_tasks += s.num_heads * blocks_of(starts[i + 1] - starts[i], size);
    }
    if (plan->num_tasks >= 2 * plan->num_slots || size <= kMinTaskRows) break;
  }
  Arena arena = {base, 0};
  for (int64_t i = 0; i < plan->num_slots; ++i) {
    plan->slots[i] = expanded_slot(s, padded(smaller(longest, plan->task_rows)), &arena);
  }
  return arena.used;
}

struct TaskPlace {
  int64_t seq, head, block;
};

// Tasks in order of sequences; late queries, which see most, come first.
TaskPlace place_of(const MlaShape& s, const int64_t* starts, int64_t task_rows, int64_t index) {
  for (int64_t seq = 0;; ++seq) {
    const int64_t blocks = blocks_of(starts[seq + 1] - starts[seq], task_rows);
    if (index < s.num_heads * blocks) {
      return {seq, index % s.num_heads, blocks - 1 - index / s.num_heads};
    }
    index -= s.num_heads * blocks;
  }
}

bool bad_starts(const int64_t* starts, const int64_t* lengths, int64_t num_seqs) {
  if (!starts || !lengths || num_seqs < 1 || starts[0] != 0) return true;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t rows = starts[i + 1] - starts[i];
    if (rows < 1 || rows > lengths[i]) return true;
  }
  return false;
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_mla_absorbed_scratch(int64_t max_length, int64_t* num_floats, int64_t num_rows,
                                     int64_t num_heads, int64_t nope_size, int64_t shared_size,
                                     int64_t value_size, int64_t latent_size, int32_t isa_level,
                                     int32_t num_threads) {
  moonlet::MlaShape shape;
  if (!MOONLET_PICK(mla_absorbed_table, isa_level)) return MOONLET_BAD_ISA;
  if (max_length < 1 || !num_floats || num_rows < 1 || num_threads < 1 ||
      !moonlet::make_shape(num_heads, nope_size, shared_size, value_size, latent_size, &shape)) {
    return MOONLET_BAD_ARGUMENT;
  }
  moonlet::AbsorbedPlan plan;
  const int64_t partials = moonlet::most_partials(max_length, num_rows);
  *num_floats = moonlet::plan_absorbed(shape, num_rows, partials, num_threads, nullptr, &plan);
  return MOONLET_OK;
}

int32_t moonlet_mla_absorbed(const float* q, const float* rows, const int64_t* table,
                             const int64_t* seqs, const int64_t* lengths, const void* kv_b,
                             int32_t is_bfloat16, float* out, float* max_score, float* scratch,
                             int64_t scratch_size, int64_t num_rows, int64_t num_seqs,
                             int64_t num_pages, int64_t page_size, int64_t pages_per_seq,
                             int64_t num_heads, int64_t nope_size, int64_t shared_size,
                             int64_t value_size, int64_t latent_size, int32_t isa_level,
                             int32_t num_threads) {
  const moonlet::MlaAbsorbedTable* functions = MOONLET_PICK(mla_absorbed_table, isa_level);
  if (!functions) return MOONLET_BAD_ISA;
  moonlet::MlaShape shape;
  const moonlet::Pages pages = {rows, table, num_pages, page_size, pages_per_seq};
  if (!q || !seqs || !lengths || !kv_b || !out || !scratch || num_rows < 1 || num_threads < 1 ||
      moonlet::bad_pages(pages, num_seqs) ||
      !moonlet::make_shape(num_heads, nope_size, shared_size, value_size, latent_size, &shape)) {
    return MOONLET_BAD_ARGUMENT;
  }
  for (int64_t t = 0; t < num_rows; ++t) {
    if (seqs[t] < 0 || seqs[t] >= num_seqs || !moonlet::has_rows(pages, seqs[t], lengths[t])) {
      return MOONLET_BAD_ARGUMENT;
    }
  }
  moonlet::AbsorbedPlan plan;
  const int64_t partials = moonlet::partials_of(lengths, num_rows);
  if (moonlet::plan_absorbed(shape, num_rows, partials, num_threads, scratch, &plan) >
      scratch_size) {
    return MOONLET_BAD_ARGUMENT;
  }
  const moonlet::MlaWeights weights = {kv_b, is_bfloat16 != 0};
  int64_t firsts[moonlet::kMaxPartials + 1] = {};
  for (int64_t t = 0; t < num_rows;) {
    int64_t count = 0;
    for (; t + count < num_rows; ++count) {
      const int64_t next = firsts[count] + moonlet::num_splits(lengths[t + count]);
      if (next > moonlet::kMaxPartials) break;
      firsts[count + 1] = next;
    }
    const int64_t heads_before = t * num_heads;
    const moonlet::MlaPass pass = {q + heads_before * shape.query_size, plan.absorbed,
                                   plan.partials, firsts, out + heads_before * value_size,
                                   max_score ? max_score + heads_before : nullptr, count};
    moonlet::run_pass(*functions, shape, weights, pages, seqs + t, lengths + t, pass, plan,
                      num_threads);
    t += count;
  }
  return MOONLET_OK;
}

int32_t moonlet_mla_expanded_scratch(const int64_t* starts, const int64_t* lengths,
                                     int64_t* num_floats, int64_t num_seqs, int64_t num_heads,
                                     int64_t nope_size, int64_t shared_size, int64_t value_size,
                                     int64_t latent_size, int32_t isa_level, int32_t num_threads) {
  moonlet::MlaShape shape;
  if (!MOONLET_PICK(mla_expanded_table, isa_level)) return MOONLET_BAD_ISA;
  if (!num_floats || num_threads < 1 || moonlet::bad_starts(starts, lengths, num_seqs) ||
      !moonlet::make_shape(num_heads, nope_size, shared_size, value_size, latent_size, &shape)) {
    return MOONLET_BAD_ARGUMENT;
  }
  moonlet::ExpandedPlan plan;
  *num_floats =
      moonlet::plan_expanded(shape, starts, lengths, num_seqs, num_threads, nullptr, &plan);
  return MOONLET_OK;
}

int32_t moonlet_mla_expanded(const float* q, const float* rows, const int64_t* table,
                             const int64_t* starts, const int64_t* lengths, const void* kv_b,
                             int32_t is_bfloat16, float* out, float* max_score, float* scratch,
                             int64_t scratch_size, int64_t num_seqs, int64_t num_pages,
                             int64_t page_size, int64_t pages_per_seq, int64_t num_heads,
                             int64_t nope_size, int64_t shared_size, int64_t value_size,
                             int64_t latent_size, int32_t isa_level, int32_t num_threads) {
  const moonlet::MlaExpandedTable* functions = MOONLET_PICK(mla_expanded_table, isa_level);
  if (!functions) return MOONLET_BAD_ISA;
  moonlet::MlaShape shape;
  const moonlet::Pages pages = {rows, table, num_pages, page_size, pages_per_seq};
  if (!q || !kv_b || !out || !scratch || num_threads < 1 || moonlet::bad_pages(pages, num_seqs) ||
      moonlet::bad_starts(starts, lengths, num_seqs) ||
      !moonlet::make_shape(num_heads, nope_size, shared_size, value_size, latent_size, &shape)) {
    return MOONLET_BAD_ARGUMENT;
  }
  for (int64_t i = 0; i < num_seqs; ++i) {
    if (!moonlet::has_rows(pages, i, lengths[i])) return MOONLET_BAD_ARGUMENT;
  }
  moonlet::ExpandedPlan plan;
  if (moonlet::plan_expanded(shape, starts, lengths, num_seqs, num_threads, scratch, &plan) >
      scratch_size) {
    return MOONLET_BAD_ARGUMENT;
  }
  const moonlet::MlaWeights weights = {kv_b, is_bfloat16 != 0};
  moonlet::run_tasks(plan.num_tasks, plan.num_slots, [&](int64_t index, int64_t slot) {
    const auto place = moonlet::place_of(shape, starts, plan.task_rows, index);
    const int64_t first = place.block * plan.task_rows;
    const int64_t count = starts[place.seq + 1] - starts[place.seq];
    const int64_t at = (starts[place.seq] + first) * num_heads + place.head;
    moonlet::MlaExpandedTask task;
    task.context = moonlet::context_of(shape, pages, place.seq);
    task.q = q + at * shape.query_size;
    task.out = out + at * value_size;
    task.max_score = max_score ? max_score + at : nullptr;
    task.head = place.head;
    task.position = lengths[place.seq] - count + first;
    task.num_rows = moonlet::smaller(count - first, plan.task_rows);
    functions->attend(shape, weights, task, plan.slots[slot]);
  });
  return MOONLET_OK;
}

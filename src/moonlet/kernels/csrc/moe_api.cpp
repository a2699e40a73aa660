// The C interface of the routed experts: checks, grouping of rows by expert, level, threads.
#include "moe.h"

#include <string.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

constexpr int64_t kRowGrain = 4;
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMinSharedProducts = 1 << 19;
constexpr int64_t kFewSlots = 4;
constexpr int64_t kPiecesPerThread = 3;
constexpr int64_t kPieceElements = 1 << 14;  // whole blocks

// Sorts slots by expert, in the order of rows; false where an id does not exist.
bool group_by_expert(const int64_t* ids, int64_t count, int64_t num_experts, int64_t* starts,
                     int64_t* slots) {
  int64_t next[kMaxExperts];
  memset(starts, 0, (num_experts + 1) * sizeof(int64_t));
  for (int64_t s = 0; s < count; ++s) {
    if (ids[s] < 0 || ids[s] >= num_experts) return false;
    ++starts[ids[s] + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    next[e] = starts[e];
    starts[e + 1] += starts[e];
  }
  for (int64_t s = 0; s < count; ++s) slots[next[ids[s]]++] = s;
  return true;
}

int64_t most_slots(const int64_t* starts, int64_t num_experts) {
  int64_t most = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t slots = starts[e + 1] - starts[e];
    if (slots > most) most = slots;
  }
  return most;
}

// Blocks of outputs that a thread takes at a time. Where experts have few slots, reading bounds the
// speed: pieces that lie side by side let more of what is fetched ahead be the thread's own.
int64_t grain_of(int64_t blocks, const MoeProblem& problem, int32_t num_threads) {
  if (problem.most_slots > kFewSlots) return 1;
  const int64_t grain = blocks / (kPiecesPerThread * num_threads);
  return grain > 1 ? grain : 1;
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_round_groups(const float* x, float* out, int64_t count, int32_t mode,
                             int32_t isa_level, int32_t num_threads) {
  using namespace moonlet;
  const MoeTable* table = MOONLET_PICK(moe_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (count < 0 || count % 32 || mode < 1 || mode > 3 || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  const int64_t pieces = (count + kPieceElements - 1) / kPieceElements;
  parallel(pieces, 1, num_threads, [=](int64_t first, int64_t last) {
    const int64_t from = first * kPieceElements, to = last * kPieceElements;
    table->round_groups(x + from, out + from, (to < count ? to : count) - from, mode);
  });
  return MOONLET_OK;
}

int32_t moonlet_moe_mxfp4(const float* z, const int64_t* ids, const float* weights,
                          const uint8_t* w1, const uint8_t* w1_scale, const uint8_t* w3,
                          const uint8_t* w3_scale, const uint8_t* w2, const uint8_t* w2_scale,
                          float* out, float* inputs, float* hidden, int64_t* places,
                          void* codes, int64_t num_rows, int64_t top_k, int64_t num_experts,
                          int64_t size_in, int64_t width, int32_t activation, float beta,
                          float linear_beta, int32_t mode, int32_t isa_level,
                          int32_t num_threads) {
  using namespace moonlet;
  const MoeTable* table = MOONLET_PICK(moe_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_rows < 0 || top_k < 1 || num_experts < 1 || num_experts > kMaxExperts || size_in < 32 ||
      size_in % 32 || width < 32 || width % 32 || activation < 0 || activation > 1 || mode < 0 ||
      mode > 3 || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0) return MOONLET_OK;
  // small experts are done before another thread has woken up
  if (num_rows * top_k * size_in * width < kMinSharedProducts) num_threads = 1;
  int64_t* starts = places;
  int64_t* slots = places + num_experts + 1;
  const int64_t num_slots = num_rows * top_k;
  if (!group_by_expert(ids, num_slots, num_experts, starts, slots)) return MOONLET_BAD_ARGUMENT;
  // the level that multiplies integers
  const bool is_coded = mode == 3 && isa_level >= MOONLET_ISA_LEVEL_VNNI;
  CodedGroup* coded = is_coded ? static_cast<CodedGroup*>(codes) : nullptr;
  CodedGroup* coded_hidden = coded ? coded + num_rows * (size_in / 32) : nullptr;
  const MoeProblem problem = {
      num_rows,       top_k,          num_experts,    size_in,
      width,          {w1, w1_scale}, {w3, w3_scale}, {w2, w2_scale},
      weights,        starts,         slots,          inputs,
      hidden,         coded,          coded_hidden,   most_slots(starts, num_experts),
      activation,     beta,           linear_beta,    mode};
  parallel(num_rows, kRowGrain, num_threads, [&](int64_t first, int64_t last) {
    table->prepare(problem, z, first, last);
  });
  const int64_t blocks = (width + kExpertOutputs - 1) / kExpertOutputs;
  parallel(num_experts * blocks, grain_of(blocks, problem, num_threads), num_threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t expert = i / blocks, at = i % blocks * kExpertOutputs;
      if (starts[expert] == starts[expert + 1]) continue;
      const int64_t end = at + kExpertOutputs;
      table->up(problem, expert, at, end < width ? end : width);
    }
  });
  if (mode != 0 && !coded) {
    parallel(num_slots, kRowGrain, num_threads, [&](int64_t first, int64_t last) {
      table->round_hidden(problem, first, last);
    });
  }
  const int64_t pieces = (size_in + kExpertOutputs - 1) / kExpertOutputs;
  parallel(pieces, grain_of(pieces, problem, num_threads), num_threads,
           [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t end = (i + 1) * kExpertOutputs;
      table->down(problem, out, i * kExpertOutputs, end < size_in ? end : size_in);
    }
  });
  return MOONLET_OK;
}

// Recorded calls of the C interface, run again in one call.
//
// A decode step of a small model is some hundred calls that take less time than the caller needs to
// prepare them. Their arguments repeat from step to step, so the caller records them once
// (kernels/tape.py). Compiled with baseline flags only.
#include <stdint.h>
#include <string.h>

#include <utility>

#include "moonlet.h"

namespace moonlet {
namespace {

template <typename T>
T argument(const int64_t& word) {
  T value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

template <typename Function, Function function>
struct Call;

template <typename... Arguments, int32_t (*function)(Arguments...)>
struct Call<int32_t (*)(Arguments...), function> {
  static constexpr int64_t count = sizeof...(Arguments);

  template <size_t... Index>
  static int32_t with(const int64_t* words, std::index_sequence<Index...>) {
    return function(argument<Arguments>(words[Index])...);
  }

  static int32_t run(const int64_t* words) {
    return with(words, std::make_index_sequence<sizeof...(Arguments)>());
  }
};

struct Entry {
  const char* name;
  int32_t (*run)(const int64_t* words);
  int64_t count;
};

#define MOONLET_CALL(name) \
  {#name, Call<decltype(&name), &name>::run, Call<decltype(&name), &name>::count}

// what decode steps and verification windows consist of
const Entry kEntries[] = {
    MOONLET_CALL(moonlet_linear),
    MOONLET_CALL(moonlet_linear_many),
    MOONLET_CALL(moonlet_moe_mxfp4),
    MOONLET_CALL(moonlet_situ_glu),
    MOONLET_CALL(moonlet_swiglu),
    MOONLET_CALL(moonlet_attn_res_mix),
    MOONLET_CALL(moonlet_attn_res_fold),
    MOONLET_CALL(moonlet_attn_res_join),
    MOONLET_CALL(moonlet_route_topk),
    MOONLET_CALL(moonlet_kda_step_f32),
    MOONLET_CALL(moonlet_kda_window_f32),
    MOONLET_CALL(moonlet_kda_replay_f32),
    MOONLET_CALL(moonlet_short_conv_step_f32),
    MOONLET_CALL(moonlet_rms_norm_f32),
    MOONLET_CALL(moonlet_gated_rms_norm_f32),
    MOONLET_CALL(moonlet_mla_absorbed),
    MOONLET_CALL(moonlet_mla_append),
    MOONLET_CALL(moonlet_add_f32),
    MOONLET_CALL(moonlet_sigmoid_gate_f32),
    MOONLET_CALL(moonlet_embed),
};

constexpr int64_t kNumEntries = sizeof(kEntries) / sizeof(kEntries[0]);

}  // namespace
}  // namespace moonlet

int32_t moonlet_call_number(const char* name) {
  for (int64_t i = 0; name && i < moonlet::kNumEntries; ++i) {
    if (strcmp(moonlet::kEntries[i].name, name) == 0) return static_cast<int32_t>(i);
  }
  return -1;
}

int32_t moonlet_replay(const int64_t* words, int64_t num_words, int64_t* failed) {
  if (num_words < 0 || (num_words && !words) || !failed) return MOONLET_BAD_ARGUMENT;
  int64_t place = 0;
  for (int64_t i = 0; i < num_words; ++place) {
    *failed = place;
    if (words[i] < 0 || words[i] >= moonlet::kNumEntries) return MOONLET_BAD_ARGUMENT;
    const moonlet::Entry& entry = moonlet::kEntries[words[i]];
    if (num_words - i - 1 < entry.count) return MOONLET_BAD_ARGUMENT;
    const int32_t status = entry.run(words + i + 1);
    if (status != MOONLET_OK) return status;
    i += 1 + entry.count;
  }
  return MOONLET_OK;
}

// The C interface of sums, gates and copies of whole rows: checks, level, threads.
//
// Compiled with baseline flags only.
#include "step_rows.h"

#include <stdint.h>
#include <string.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// fewer elements than this are not worth a second thread
constexpr int64_t kMinElements = 1 << 15;

// out = run(a, b), value by value.
int32_t pairwise(void (*run)(const float*, const float*, float*, int64_t), const float* a,
                 const float* b, float* out, int64_t count, int32_t num_threads) {
  if (count < 0 || num_threads < 1 || !a || !b || !out) return MOONLET_BAD_ARGUMENT;
  parallel(count, kMinElements, num_threads, [=](int64_t first, int64_t last) {
    run(a + first, b + first, out + first, last - first);
  });
  return MOONLET_OK;
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_add_f32(const float* a, const float* b, float* out, int64_t count,
                        int32_t isa_level, int32_t num_threads) {
  const moonlet::StepRowTable* table = MOONLET_PICK(step_row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  return moonlet::pairwise(table->add, a, b, out, count, num_threads);
}

int32_t moonlet_sigmoid_gate_f32(const float* x, const float* gate, float* out, int64_t count,
                                 int32_t isa_level, int32_t num_threads) {
  const moonlet::StepRowTable* table = MOONLET_PICK(step_row_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  return moonlet::pairwise(table->sigmoid_gate, x, gate, out, count, num_threads);
}

int32_t moonlet_embed(const int64_t* ids, const void* table, int32_t is_bfloat16, float* out,
                      int64_t num_rows, int64_t num_entries, int64_t size, int32_t isa_level,
                      int32_t num_threads) {
  const moonlet::StepRowTable* functions = MOONLET_PICK(step_row_table, isa_level);
  if (!functions) return MOONLET_BAD_ISA;
  if (num_rows < 0 || size < 1 || num_threads < 1) return MOONLET_BAD_ARGUMENT;
  if (num_rows == 0) return MOONLET_OK;
  if (!ids || !table || !out) return MOONLET_BAD_ARGUMENT;
  for (int64_t t = 0; t < num_rows; ++t) {
    if (ids[t] < 0 || ids[t] >= num_entries) return MOONLET_BAD_ARGUMENT;
  }
  const int64_t grain = 1 + moonlet::kMinElements / size;
  moonlet::parallel(num_rows, grain, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      if (is_bfloat16) {
        const uint16_t* row = static_cast<const uint16_t*>(table) + ids[t] * size;
        functions->widen(row, out + t * size, size);
      } else {
        memcpy(out + t * size, static_cast<const float*>(table) + ids[t] * size, size * 4);
      }
    }
  });
  return MOONLET_OK;
}

int32_t moonlet_mla_append(const float* latent, const float* shared, const int64_t* rows,
                           float* pages, int64_t num_rows, int64_t num_page_rows,
                           int64_t latent_size, int64_t shared_size, int64_t latent_stride,
                           int64_t shared_stride, int32_t isa_level, int32_t num_threads) {
  if (!MOONLET_PICK(step_row_table, isa_level)) return MOONLET_BAD_ISA;
  if (num_rows < 0 || num_threads < 1 || latent_size < 1 || shared_size < 1 ||
      latent_stride < latent_size || shared_stride < shared_size) {
    return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0) return MOONLET_OK;
  if (!latent || !shared || !rows || !pages) return MOONLET_BAD_ARGUMENT;
  for (int64_t t = 0; t < num_rows; ++t) {
    if (rows[t] < 0 || rows[t] >= num_page_rows) return MOONLET_BAD_ARGUMENT;
  }
  const int64_t size = latent_size + shared_size;
  for (int64_t t = 0; t < num_rows; ++t) {
    float* row = pages + rows[t] * size;
    memcpy(row, latent + t * latent_stride, latent_size * sizeof(float));
    memcpy(row + latent_size, shared + t * shared_stride, shared_size * sizeof(float));
  }
  return MOONLET_OK;
}

// The C interface of the norms in inference: argument checks, level, threads over rows.
//
// Compiled with baseline flags only.
#include "norms.h"

#include <stdint.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// fewer elements than this are not worth a second thread
constexpr int64_t kMinElements = 1 << 15;

bool bad_rows(int64_t num_rows, int64_t size, int32_t num_threads) {
  return num_rows < 0 || size < 1 || num_threads < 1;
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_rms_norm_f32(const float* x, const float* weight, float* out, int64_t num_rows,
                             int64_t size, int64_t x_stride, float eps, int32_t isa_level,
                             int32_t num_threads) {
  const moonlet::NormTable* table = MOONLET_PICK(norm_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size, num_threads) || x_stride < size) {
    return MOONLET_BAD_ARGUMENT;
  }
  const int64_t grain = 1 + moonlet::kMinElements / size;
  moonlet::parallel(num_rows, grain, num_threads, [=](int64_t first, int64_t last) {
    table->plain(x + first * x_stride, weight, out + first * size, last - first, size, x_stride,
                 eps);
  });
  return MOONLET_OK;
}

int32_t moonlet_gated_rms_norm_f32(const float* x, const float* weight, const float* gate,
                                   float* out, int64_t num_rows, int64_t size, float eps,
                                   int32_t isa_level, int32_t num_threads) {
  const moonlet::NormTable* table = MOONLET_PICK(norm_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::bad_rows(num_rows, size, num_threads)) return MOONLET_BAD_ARGUMENT;
  const int64_t grain = 1 + moonlet::kMinElements / size;
  moonlet::parallel(num_rows, grain, num_threads, [=](int64_t first, int64_t last) {
    table->gated(x + first * size, weight, gate + first * size, out + first * size, last - first,
                 size, eps);
  });
  return MOONLET_OK;
}

// The C interface of the probes: argument checks, choice of the level, threads.
//
// Compiled with baseline flags only.
#include <stdint.h>

#include "moonlet.h"
#include "pool.h"
#include "probe.h"

int32_t moonlet_probe_read(const float* data, float* sums, int64_t count, int64_t piece,
                           int32_t isa_level, int32_t num_threads) {
  const moonlet::ProbeTable* table = MOONLET_PICK(probe_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (!data || !sums || count < 1 || piece < 1 || num_threads < 1) return MOONLET_BAD_ARGUMENT;
  const int64_t num_pieces = (count + piece - 1) / piece;
  moonlet::parallel(num_pieces, 1, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t left = count - p * piece;
      sums[p] = table->read(data + p * piece, left < piece ? left : piece);
    }
  });
  return MOONLET_OK;
}

int32_t moonlet_probe_fma(float* out, int64_t num_blocks, int64_t count, int32_t isa_level,
                          int32_t num_threads) {
  const moonlet::ProbeTable* table = MOONLET_PICK(probe_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (!out || num_blocks < 1 || count < 1 || count % moonlet::kProbeUnit || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  moonlet::parallel(num_blocks, 1, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) out[b] = table->fma(count);
  });
  return MOONLET_OK;
}

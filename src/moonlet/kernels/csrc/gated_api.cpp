// The C interface of the gated activations: argument checks, choice of the level, threads.
//
// Compiled with baseline flags only.
#include <stdint.h>

#include "gated.h"
#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// elements of one piece: about 10 us of work, more than waking a thread costs
constexpr int64_t kPiece = 4096;

// Calls run(row, first column, number of columns) for pieces of all rows.
template <typename Run>
void for_pieces(int64_t num_rows, int64_t size, int32_t num_threads, const Run& run) {
  const int64_t pieces = (size + kPiece - 1) / kPiece;
  const int64_t grain = pieces > 1 ? 1 : kPiece / size + 1;
  parallel(num_rows * pieces, grain, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t column = p % pieces * kPiece;
      run(p / pieces, column, size - column < kPiece ? size - column : kPiece);
    }
  });
}

bool is_bad(const float* gate, const float* up, const float* out, int64_t num_rows, int64_t size,
            int64_t gate_row_stride, int64_t up_row_stride, int32_t num_threads) {
  return num_rows < 0 || size < 1 || num_threads < 1 || !gate || !up || !out ||
         (num_rows > 1 && (gate_row_stride < size || up_row_stride < size));
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_situ_glu(const float* gate, const float* up, float* out, int64_t num_rows,
                         int64_t size, int64_t gate_row_stride, int64_t up_row_stride, float beta,
                         float linear_beta, int32_t isa_level, int32_t num_threads) {
  const moonlet::GatedTable* table = MOONLET_PICK(gated_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::is_bad(gate, up, out, num_rows, size, gate_row_stride, up_row_stride, num_threads)) {
    return MOONLET_BAD_ARGUMENT;
  }
  moonlet::for_pieces(num_rows, size, num_threads, [=](int64_t row, int64_t column, int64_t count) {
    table->situ_glu(gate + row * gate_row_stride + column, up + row * up_row_stride + column,
                    out + row * size + column, count, beta, linear_beta);
  });
  return MOONLET_OK;
}

int32_t moonlet_swiglu(const float* gate, const float* up, float* out, int64_t num_rows,
                       int64_t size, int64_t gate_row_stride, int64_t up_row_stride,
                       int32_t isa_level, int32_t num_threads) {
  const moonlet::GatedTable* table = MOONLET_PICK(gated_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (moonlet::is_bad(gate, up, out, num_rows, size, gate_row_stride, up_row_stride, num_threads)) {
    return MOONLET_BAD_ARGUMENT;
  }
  moonlet::for_pieces(num_rows, size, num_threads, [=](int64_t row, int64_t column, int64_t count) {
    table->swiglu(gate + row * gate_row_stride + column, up + row * up_row_stride + column,
                  out + row * size + column, count);
  });
  return MOONLET_OK;
}

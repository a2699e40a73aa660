// The C interface of products with weight matrices: checks, level, threads.
#include "linear.h"
#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// A piece of streamed work reads this many bytes: enough that its start costs nothing, and that most
// of what is fetched ahead of use is the thread's own; fewer where threads would run out of pieces.
constexpr int64_t kMinPieceBytes = 1 << 16;
constexpr int64_t kMaxPieceBytes = 1 << 20;
constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kStreamedTile = 12;

int64_t bytes_of(int32_t type) { return type == kFloat32 ? 4 : type == kBfloat16 ? 2 : 1; }

}  // namespace
}  // namespace moonlet

int32_t moonlet_linear(const float* x, const void* weight, const float* scale, float* y,
                       int64_t num_rows, int64_t size_in, int64_t size_out, int64_t x_stride,
                       int64_t y_stride, int32_t weight_type, int32_t isa_level,
                       int32_t num_threads) {
  using namespace moonlet;
  const LinearTable* table = MOONLET_PICK(linear_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_rows < 0 || size_in < 1 || size_out < 0 || num_threads < 1 || weight_type < 0 ||
      weight_type > 2 || x_stride < size_in || y_stride < size_out) {
    return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0 || size_out == 0) return MOONLET_OK;
  if (!x || !weight || !y) return MOONLET_BAD_ARGUMENT;
  const LinearShape shape = {num_rows, size_in, size_out, x_stride, y_stride};
  if (num_rows > kMaxStreamedRows) {
    const int64_t pieces = (size_out + kPackedOutputs - 1) / kPackedOutputs;
    parallel(pieces, 1, num_threads, [=](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) {
        const int64_t end = (p + 1) * kPackedOutputs;
        table->packed[weight_type](x, weight, scale, y, shape, p * kPackedOutputs,
                                   end < size_out ? end : size_out);
      }
    });
    return MOONLET_OK;
  }
  const int64_t row_bytes = size_in * bytes_of(weight_type);
  int64_t piece = row_bytes * size_out / (kPiecesPerThread * num_threads);
  piece = piece < kMinPieceBytes ? kMinPieceBytes : piece > kMaxPieceBytes ? kMaxPieceBytes : piece;
  const int64_t outputs = piece / row_bytes + 1;
  const int64_t grain = (outputs + kStreamedTile - 1) / kStreamedTile * kStreamedTile;
  parallel(size_out, grain, num_threads, [=](int64_t first, int64_t last) {
    table->streamed[weight_type](x, weight, scale, y, shape, first, last);
  });
  return MOONLET_OK;
}

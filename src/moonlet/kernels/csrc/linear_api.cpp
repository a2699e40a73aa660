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
// Less than this is done before another thread has woken up.
constexpr int64_t kMinSharedBytes = 1 << 19;
constexpr int64_t kMinSharedProducts = 1 << 21;
constexpr int64_t kMaxMatrices = 16;
constexpr int64_t kWords = 6;

struct Matrix {
  const void* weight;
  const float* scale;
  float* y;
  LinearShape shape;
  int64_t type;
  int64_t grain, pieces;  // outputs of a piece of work, and how many pieces there are
};

int64_t row_bytes(const Matrix& m) {
  return m.shape.size_in * (m.type == kFloat32 ? 4 : m.type == kBfloat16 ? 2 : 1);
}

bool is_packed(const Matrix& m) { return m.shape.num_rows > kMaxStreamedRows; }

bool is_bad(const Matrix& m) {
  const LinearShape& s = m.shape;
  return s.num_rows < 0 || s.size_in < 1 || s.size_out < 0 || m.type < 0 || m.type > 2 ||
         s.x_stride < s.size_in || s.y_stride < s.size_out ||
         (s.num_rows > 0 && s.size_out > 0 && !(m.weight && m.y));
}

// Cuts the outputs of every matrix into pieces of work.
void cut(Matrix* matrices, int64_t count, int64_t bytes, int32_t num_threads) {
  int64_t piece = bytes / (kPiecesPerThread * num_threads);
  piece = piece < kMinPieceBytes ? kMinPieceBytes : piece > kMaxPieceBytes ? kMaxPieceBytes : piece;
  for (int64_t i = 0; i < count; ++i) {
    Matrix& m = matrices[i];
    const int64_t outputs = piece / row_bytes(m) + 1;
    m.grain = is_packed(m) ? kPackedOutputs
                           : (outputs + kStreamedTile - 1) / kStreamedTile * kStreamedTile;
    m.pieces = (m.shape.size_out + m.grain - 1) / m.grain;
  }
}

void run_piece(const LinearTable& table, const float* x, const Matrix& m, int64_t piece) {
  const LinearRange range = is_packed(m) ? table.packed[m.type] : table.streamed[m.type];
  const int64_t first = piece * m.grain, last = first + m.grain;
  range(x, m.weight, m.scale, m.y, m.shape, first,
        last < m.shape.size_out ? last : m.shape.size_out);
}

// The matrices one after the other, as one list of pieces.
void run(const LinearTable& table, const float* x, Matrix* matrices, int64_t count,
         int32_t num_threads) {
  int64_t bytes = 0, products = 0, pieces = 0;
  for (int64_t i = 0; i < count; ++i) {
    const LinearShape& s = matrices[i].shape;
    bytes += row_bytes(matrices[i]) * s.size_out;
    products += s.num_rows * s.size_in * s.size_out;
  }
  if (bytes < kMinSharedBytes && products < kMinSharedProducts) num_threads = 1;
  cut(matrices, count, bytes, num_threads);
  for (int64_t i = 0; i < count; ++i) pieces += matrices[i].pieces;
  parallel(pieces, 1, num_threads, [=, &table](int64_t first, int64_t last) {
    const Matrix* m = matrices;
    int64_t before = 0;
    for (int64_t p = first; p < last; ++p) {
      for (; p - before >= m->pieces; ++m) before += m->pieces;
      run_piece(table, x, *m, p - before);
    }
  });
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_linear(const float* x, const void* weight, const float* scale, float* y,
                       int64_t num_rows, int64_t size_in, int64_t size_out, int64_t x_stride,
                       int64_t y_stride, int32_t weight_type, int32_t isa_level,
                       int32_t num_threads) {
  using namespace moonlet;
  const LinearTable* table = MOONLET_PICK(linear_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  Matrix matrix = {weight, scale, y, {num_rows, size_in, size_out, x_stride, y_stride},
                   weight_type, 0, 0};
  if (num_threads < 1 || is_bad(matrix)) return MOONLET_BAD_ARGUMENT;
  if (num_rows == 0 || size_out == 0) return MOONLET_OK;
  if (!x) return MOONLET_BAD_ARGUMENT;
  run(*table, x, &matrix, 1, num_threads);
  return MOONLET_OK;
}

int32_t moonlet_linear_many(const float* x, const int64_t* matrices, int64_t num_matrices,
                            int64_t num_rows, int64_t size_in, int64_t x_stride,
                            int32_t isa_level, int32_t num_threads) {
  using namespace moonlet;
  const LinearTable* table = MOONLET_PICK(linear_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (!matrices || num_matrices < 1 || num_matrices > kMaxMatrices || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  Matrix list[kMaxMatrices];
  for (int64_t i = 0; i < num_matrices; ++i) {
    const int64_t* words = matrices + i * kWords;
    list[i] = {reinterpret_cast<const void*>(words[0]), reinterpret_cast<const float*>(words[1]),
               reinterpret_cast<float*>(words[2]),
               {num_rows, size_in, words[3], x_stride, words[4]}, words[5], 0, 0};
    if (is_bad(list[i])) return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0) return MOONLET_OK;
  if (!x) return MOONLET_BAD_ARGUMENT;
  run(*table, x, list, num_matrices, num_threads);
  return MOONLET_OK;
}

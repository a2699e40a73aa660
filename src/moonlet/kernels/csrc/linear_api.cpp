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
// MXFP4: 32 weights share a scale and take seventeen bytes with it
constexpr int64_t kGroupSize = 32;
constexpr int64_t kGroupBytes = 17;
constexpr int64_t kRowGrain = 4;
constexpr int64_t kFp4Block = 128;

struct Tables {
  const LinearTable* plain;
  const Fp4LinearTable* fp4;
  const Int8LinearTable* int8;
};

// Rows of x as the products of some weights read them, made once for all matrices of a call.
struct Prepared {
  float* fp4;
  Int8Group* int8;
};

struct Matrix {
  const void* weight;
  const void* scale;
  float* y;
  LinearShape shape;
  int64_t type;
  int64_t grain, pieces;  // outputs of a piece of work, and how many pieces there are
};

int64_t row_bytes(const Matrix& m) {
  if (m.type == kMxfp4) return m.shape.size_in / kGroupSize * kGroupBytes;
  if (m.type == kInt8Panels) return (m.shape.size_in + kInt8Group - 1) / kInt8Group * kInt8Group;
  return m.shape.size_in * (m.type == kFloat32 ? 4 : m.type == kBfloat16 ? 2 : 1);
}

bool is_packed(const Matrix& m) {
  return m.shape.num_rows > (m.type == kMxfp4 ? kMaxStreamedFp4Rows : kMaxStreamedRows);
}

bool is_bad(const Matrix& m, const float* inputs) {
  const LinearShape& s = m.shape;
  if (s.num_rows < 0 || s.size_in < 1 || s.size_out < 0 || m.type < 0 || m.type > kInt8Panels ||
      s.x_stride < s.size_in || s.y_stride < s.size_out) {
    return true;
  }
  if (m.type == kMxfp4 && s.size_in % kGroupSize) return true;
  if (s.num_rows == 0 || s.size_out == 0) return false;
  return !m.weight || !m.y || (m.type >= kMxfp4 && !(m.scale && inputs));
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
    // whole panels
    if (m.type == kInt8Panels) m.grain = (m.grain + kInt8Outputs - 1) / kInt8Outputs * kInt8Outputs;
    m.pieces = (m.shape.size_out + m.grain - 1) / m.grain;
  }
}

LinearRange range_of(const Tables& tables, const Matrix& m) {
  if (m.type == kMxfp4) return is_packed(m) ? tables.fp4->packed : tables.fp4->streamed;
  return is_packed(m) ? tables.plain->packed[m.type] : tables.plain->streamed[m.type];
}

void run_piece(const Tables& tables, const float* x, const Prepared& inputs, const Matrix& m,
               int64_t piece) {
  const int64_t first = piece * m.grain, end = first + m.grain;
  const int64_t last = end < m.shape.size_out ? end : m.shape.size_out;
  if (m.type == kInt8Panels) {
    tables.int8->products(inputs.int8, static_cast<const uint8_t*>(m.weight),
                          static_cast<const float*>(m.scale), m.y, m.shape, first, last);
    return;
  }
  range_of(tables, m)(m.type == kMxfp4 ? inputs.fp4 : x, m.weight, m.scale, m.y, m.shape, first,
                      last);
}

// Rows of x in the forms that the matrices read, once for all of them: they share their input.
Prepared prepare(const Tables& tables, const float* x, float* inputs, const Matrix* fp4,
                 const Matrix* int8, int32_t num_threads) {
  Prepared prepared = {inputs, nullptr};
  if (fp4) {
    const LinearShape& s = fp4->shape;
    parallel(s.num_rows, kRowGrain, num_threads, [=](int64_t first, int64_t last) {
      tables.fp4->prepare(x, prepared.fp4, s, first, last);
    });
    inputs += s.num_rows * ((s.size_in + kFp4Block - 1) / kFp4Block * kFp4Block);
  }
  prepared.int8 = reinterpret_cast<Int8Group*>(inputs);
  if (int8) {
    const LinearShape& s = int8->shape;
    parallel(s.num_rows, kRowGrain, num_threads, [=](int64_t first, int64_t last) {
      tables.int8->prepare(x, prepared.int8, s, first, last);
    });
  }
  return prepared;
}

// The matrices one after the other, as one list of pieces.
void run(const Tables& tables, const float* x, float* inputs, Matrix* matrices, int64_t count,
         int32_t num_threads) {
  int64_t bytes = 0, products = 0, pieces = 0;
  const Matrix *fp4 = nullptr, *int8 = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const LinearShape& s = matrices[i].shape;
    bytes += row_bytes(matrices[i]) * s.size_out;
    products += s.num_rows * s.size_in * s.size_out;
    if (matrices[i].type == kMxfp4) fp4 = matrices + i;
    if (matrices[i].type == kInt8Panels) int8 = matrices + i;
  }
  if (bytes < kMinSharedBytes && products < kMinSharedProducts) num_threads = 1;
  const Prepared prepared = prepare(tables, x, inputs, fp4, int8, num_threads);
  cut(matrices, count, bytes, num_threads);
  for (int64_t i = 0; i < count; ++i) pieces += matrices[i].pieces;
  parallel(pieces, 1, num_threads, [=](int64_t first, int64_t last) {
    const Matrix* m = matrices;
    int64_t before = 0;
    for (int64_t p = first; p < last; ++p) {
      for (; p - before >= m->pieces; ++m) before += m->pieces;
      run_piece(tables, x, prepared, *m, p - before);
    }
  });
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_linear(const float* x, const void* weight, const void* scale, float* y,
                       float* inputs, int64_t num_rows, int64_t size_in, int64_t size_out,
                       int64_t x_stride, int64_t y_stride, int32_t weight_type, int32_t isa_level,
                       int32_t num_threads) {
  using namespace moonlet;
  const Tables tables = {MOONLET_PICK(linear_table, isa_level),
                         MOONLET_PICK(fp4_linear_table, isa_level),
                         MOONLET_PICK(int8_linear_table, isa_level)};
  if (!tables.plain) return MOONLET_BAD_ISA;
  Matrix matrix = {weight, scale, y, {num_rows, size_in, size_out, x_stride, y_stride},
                   weight_type, 0, 0};
  if (num_threads < 1 || is_bad(matrix, inputs)) return MOONLET_BAD_ARGUMENT;
  if (num_rows == 0 || size_out == 0) return MOONLET_OK;
  if (!x) return MOONLET_BAD_ARGUMENT;
  run(tables, x, inputs, &matrix, 1, num_threads);
  return MOONLET_OK;
}

int32_t moonlet_linear_many(const float* x, const int64_t* matrices, float* inputs,
                            int64_t num_matrices, int64_t num_rows, int64_t size_in,
                            int64_t x_stride, int32_t isa_level, int32_t num_threads) {
  using namespace moonlet;
  const Tables tables = {MOONLET_PICK(linear_table, isa_level),
                         MOONLET_PICK(fp4_linear_table, isa_level),
                         MOONLET_PICK(int8_linear_table, isa_level)};
  if (!tables.plain) return MOONLET_BAD_ISA;
  if (!matrices || num_matrices < 1 || num_matrices > kMaxMatrices || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  Matrix list[kMaxMatrices];
  for (int64_t i = 0; i < num_matrices; ++i) {
    const int64_t* words = matrices + i * kWords;
    list[i] = {reinterpret_cast<const void*>(words[0]), reinterpret_cast<const void*>(words[1]),
               reinterpret_cast<float*>(words[2]),
               {num_rows, size_in, words[3], x_stride, words[4]}, words[5], 0, 0};
    if (is_bad(list[i], inputs)) return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0) return MOONLET_OK;
  if (!x) return MOONLET_BAD_ARGUMENT;
  run(tables, x, inputs, list, num_matrices, num_threads);
  return MOONLET_OK;
}

// Gated MLA in its absorbed form: decode, and windows of few queries over a long context.
//
// All heads of a query row share the latent rows, so a block of rows meets many heads in two small
// matrix products: scores with heads in lanes, weighted sums with latent columns in lanes. Neither
// operand is transposed.
#include "mla_blocks.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kAbsorbedRows = 16;  // rows of kv_b widened at a time
constexpr int64_t kDots = 4;

void absorb(const MlaShape& shape, const MlaWeights& weights, const MlaPass& pass, int64_t head,
            const MlaAbsorbedScratch& scratch) {
  const int64_t size = shape.padded_latent, stride = shape.num_heads * shape.query_size;
  const float* q = pass.q + head * shape.query_size;
  float* out = pass.absorbed + head * size;
  for (int64_t n = 0; n < shape.nope_size; n += kAbsorbedRows) {
    const int64_t depth = smaller(kAbsorbedRows, shape.nope_size - n);
    for (int64_t i = 0; i < depth; ++i) {
      float* row = scratch.weights + i * size;
      const int64_t at = (head * shape.weight_rows + n + i) * shape.latent_size;
      widen(weights, at, shape.latent_size, row);
      for (int64_t r = shape.latent_size; r < size; ++r) row[r] = 0.0f;
    }
    const Left part = {q + n, stride, 1};
    const Right right = {scratch.weights, size, kLanes};
    if (n == 0) {
      product<Old::kDropped>(out, shape.num_heads * size, part, right, pass.num_rows, depth,
                             size / kLanes, nullptr, nullptr);
    } else {
      product<Old::kAdded>(out, shape.num_heads * size, part, right, pass.num_rows, depth,
                           size / kLanes, nullptr, nullptr);
    }
  }
}

// A row's absorbed queries and the parts that meet the shared key, scaled, with heads in lanes.
void turn(const MlaShape& shape, const MlaPass& pass, int64_t row, float* out) {
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape.query_size));
  for (int64_t head = 0; head < shape.num_heads; head += kLanes, out += kLanes * shape.row_size) {
    const int64_t heads = smaller(kLanes, shape.num_heads - head);
    const int64_t at = row * shape.num_heads + head;
    transpose_rows(out, pass.absorbed + at * shape.padded_latent, shape.padded_latent, heads,
                   shape.latent_size, scale);
    const float* shared = pass.q + at * shape.query_size + shape.nope_size;
    transpose_rows(out + kLanes * shape.latent_size, shared, shape.query_size, heads,
                   shape.shared_size, scale);
  }
}

// Lines of the next block per step of the products of this one, so that all of it is there in time.
int64_t lines_ahead(const MlaShape& shape) {
  const int64_t lines = kMlaBlock * ((shape.row_size + 15) / 16);
  const int64_t tiles = shape.num_heads / (kTileGroups * kLanes) + 1;
  const int64_t scores = tiles * (kMlaBlock / kTileRows) * shape.row_size;
  const int64_t sums = (shape.num_heads / kTileRows + 1) * kMlaBlock * shape.padded_latent /
                       (kTileGroups * kLanes);
  return lines * kAheadSteps / (scores + sums) + 1;
}

void attend(const MlaShape& shape, const MlaContext& context, const MlaPass& pass, int64_t row,
            int64_t first, int64_t last, const MlaPartial& partial,
            const MlaAbsorbedScratch& scratch) {
  turn(shape, pass, row, scratch.queries);
  const float* rows[kMlaBlock];
  Ahead ahead = {rows, shape.row_size * static_cast<int64_t>(sizeof(float)), lines_ahead(shape),
                 0, 0, 0};
  for (int64_t n = first; n < last; n += kMlaBlock) {
    const int64_t count = smaller(kMlaBlock, last - n);
    // weighted sums read whole vectors of latent columns
    const Rows block_rows = rows_of(context, n, count, shape.latent_size == shape.padded_latent,
                                    scratch.block, shape.padded_row);
    ahead.next = ahead.offset = 0;
    ahead.count = smaller(kMlaBlock, last - n - count);
    for (int64_t i = 0; i < ahead.count; ++i) rows[i] = row_of(context, n + count + i);
    const ContextBlock block = {block_rows.data, block_rows.data, block_rows.stride, count};
    for (int64_t head = 0; head < shape.num_heads; head += kMlaQueries) {
      const Queries q = {scratch.queries + head * shape.row_size, shape.row_size,
                         smaller(kMlaQueries, shape.num_heads - head)};
      const Running running = {partial.max + head, partial.sum + head,
                               partial.out + head * shape.padded_latent, shape.padded_latent,
                               shape.padded_latent / kLanes};
      attend_block(q, block, count, n == first, running, scratch.scores, scratch.keep, &ahead);
    }
  }
}

MOONLET_INLINE float exponential_of(float x) { return exponential(fill(x))[0]; }

// Weighted latent of one head of one row over all its partials, zeros beyond latent_size.
float join(const MlaShape& shape, const MlaPass& pass, int64_t row, int64_t head, float* out) {
  const int64_t first = pass.firsts[row], last = pass.firsts[row + 1];
  float top = pass.partials[first].max[head];
  for (int64_t i = first + 1; i < last; ++i) {
    const float m = pass.partials[i].max[head];
    top = m > top ? m : top;
  }
  float sum = 0.0f;
  for (int64_t i = first; i < last; ++i) {
    const MlaPartial& part = pass.partials[i];
    const float weight = exponential_of(part.max[head] - top);
    const float* in = part.out + head * shape.padded_latent;
    sum += weight * part.sum[head];
    for (int64_t r = 0; r < shape.padded_latent; r += kLanes) {
      const Lanes old = i == first ? Lanes{} : load(out + r);
      store(out + r, old + weight * load(in + r));
    }
  }
  const float share = 1.0f / sum;
  for (int64_t r = 0; r < shape.padded_latent; r += kLanes) store(out + r, share * load(out + r));
  for (int64_t r = shape.latent_size; r < shape.padded_latent; ++r) out[r] = 0.0f;
  return top;
}

// kDots rows of kv_b from `row` on, zeros beyond the head's last row and beyond latent_size.
void widen_values(const MlaShape& shape, const MlaWeights& weights, int64_t head, int64_t row,
                  float* out) {
  for (int64_t k = 0; k < kDots; ++k, out += shape.padded_latent) {
    const int64_t valid = row + k < shape.weight_rows ? shape.latent_size : 0;
    if (valid) {
      const int64_t at = (head * shape.weight_rows + row + k) * shape.latent_size;
      widen(weights, at, valid, out);
    }
    for (int64_t r = valid; r < shape.padded_latent; ++r) out[r] = 0.0f;
  }
}

void finish(const MlaShape& shape, const MlaWeights& weights, const MlaPass& pass, int64_t head,
            const MlaAbsorbedScratch& scratch) {
  const int64_t size = shape.padded_latent;
  for (int64_t t = 0; t < pass.num_rows; t += kMlaBlock) {
    const int64_t rows = smaller(kMlaBlock, pass.num_rows - t);
    for (int64_t i = 0; i < rows; ++i) {
      const float top = join(shape, pass, t + i, head, scratch.block + i * size);
      if (pass.max_score) pass.max_score[(t + i) * shape.num_heads + head] = top;
    }
    for (int64_t v = 0; v < shape.value_size; v += kDots) {
      widen_values(shape, weights, head, shape.nope_size + v, scratch.weights);
      for (int64_t i = 0; i < rows; ++i) {
        const float* latent = scratch.block + i * size;
        Lanes sum[kDots] = {};
        for (int64_t r = 0; r < size; r += kLanes) {
          for (int64_t k = 0; k < kDots; ++k) {
            sum[k] += load(scratch.weights + k * size + r) * load(latent + r);
          }
        }
        float* out = pass.out + ((t + i) * shape.num_heads + head) * shape.value_size + v;
        for (int64_t k = 0; k < smaller(kDots, shape.value_size - v); ++k) out[k] = total(sum[k]);
      }
    }
  }
}

}  // namespace

extern const MlaAbsorbedTable mla_absorbed_table;
const MlaAbsorbedTable mla_absorbed_table = {absorb, attend, finish};

}  // namespace MOONLET_ISA
}  // namespace moonlet

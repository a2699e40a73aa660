// Gated MLA in its expanded form: prompts.
//
// One head of one sequence at a time: blocks of latent rows become keys and values, and the
// queries, many at a time in lanes, keep a running softmax over the blocks. Nothing of the size of
// queries times context is kept.
#include "mla_blocks.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// Rows of kv_b to lanes: first the key's, padded, then the value's, padded.
void prepare_weights(const MlaShape& shape, const MlaWeights& weights, int64_t head,
                     const MlaExpandedScratch& scratch) {
  float* out = scratch.weights;
  const int64_t firsts[] = {0, shape.nope_size};
  const int64_t sizes[] = {shape.nope_size, shape.value_size};
  const int64_t padded[] = {shape.padded_nope, shape.padded_value};
  for (int part = 0; part < 2; ++part) {
    for (int64_t o = 0; o < padded[part]; o += kLanes, out += kLanes * shape.latent_size) {
      const int64_t left = sizes[part] - o;
      const int64_t rows = left < 0 ? 0 : smaller(kLanes, left);
      const int64_t at = head * shape.weight_rows + firsts[part] + o;
      widen(weights, at * shape.latent_size, rows * shape.latent_size, scratch.wide);
      transpose_rows(out, scratch.wide, shape.latent_size, rows, shape.latent_size, 1.0f);
    }
  }
}

// Queries to lanes, in the order of a key: shared part, then the padded nope part.
void prepare_queries(const MlaShape& shape, const MlaExpandedTask& task,
                     const MlaExpandedScratch& scratch) {
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape.query_size));
  const int64_t stride = shape.num_heads * shape.query_size;
  float* out = scratch.queries;
  for (int64_t i = 0; i < task.num_rows; i += kLanes, out += kLanes * shape.key_size) {
    const int64_t rows = smaller(kLanes, task.num_rows - i);
    const float* q = task.q + i * stride;
    float* nope = out + shape.shared_size * kLanes;
    transpose_rows(out, q + shape.nope_size, stride, rows, shape.shared_size, scale);
    transpose_rows(nope, q, stride, rows, shape.nope_size, scale);
    for (int64_t j = shape.nope_size * kLanes; j < shape.padded_nope * kLanes; ++j) nope[j] = 0.0f;
  }
}

void expand(const MlaShape& shape, const MlaContext& context, int64_t first, int64_t count,
            const MlaExpandedScratch& scratch) {
  const size_t shared_bytes = static_cast<size_t>(shape.shared_size) * sizeof(float);
  const Right weights = {scratch.weights, kLanes, kLanes * shape.latent_size};
  for (int64_t n = 0; n < count; n += kMlaBlock) {
    const int64_t num_rows = smaller(kMlaBlock, count - n);
    const Rows rows = rows_of(context, first + n, num_rows, true, scratch.block, shape.padded_row);
    float* out = scratch.expanded + n * shape.expanded_size;
    deep_product(out + shape.shared_size, shape.expanded_size,
                 {rows.data, rows.stride, 1}, weights, num_rows, shape.latent_size,
                 (shape.padded_nope + shape.padded_value) / kLanes, nullptr);
    for (int64_t i = 0; i < num_rows; ++i) {
      const float* row = rows.data + i * rows.stride;
      memcpy(out + i * shape.expanded_size, row + shape.latent_size, shared_bytes);
    }
  }
}

// Shows `count` expanded rows from context row `first` on to the queries that may see them.
void attend_rows(const MlaShape& shape, const MlaExpandedTask& task, int64_t first, int64_t count,
                 const MlaExpandedScratch& scratch) {
  for (int64_t j = 0; j < task.num_rows; j += kMlaQueries) {
    const Queries q = {scratch.queries + j * shape.key_size, shape.key_size,
                       smaller(kMlaQueries, task.num_rows - j)};
    const Running running = {scratch.max + j, scratch.sum + j,
                             scratch.out + j * shape.padded_value, shape.padded_value,
                             shape.padded_value / kLanes};
    const int64_t seen = task.position + j + q.count - first;  // by the last of these queries
    for (int64_t n = 0; n < smaller(count, seen); n += kMlaBlock) {
      const float* keys = scratch.expanded + n * shape.expanded_size;
      const ContextBlock block = {keys, keys + shape.key_size, shape.expanded_size,
                                  smaller(kMlaBlock, smaller(count, seen) - n)};
      attend_block(q, block, task.position + j - first - n, first + n == 0, running,
                   scratch.scores, scratch.keep, nullptr);
    }
  }
}

void write_out(const MlaShape& shape, const MlaExpandedTask& task,
               const MlaExpandedScratch& scratch) {
  for (int64_t i = 0; i < task.num_rows; ++i) {
    const float share = 1.0f / scratch.sum[i];
    const float* in = scratch.out + i * shape.padded_value;
    float* out = task.out + i * shape.num_heads * shape.value_size;
    for (int64_t v = 0; v < shape.value_size; ++v) out[v] = share * in[v];
    if (task.max_score) task.max_score[i * shape.num_heads] = scratch.max[i];
  }
}

void attend(const MlaShape& shape, const MlaWeights& weights, const MlaExpandedTask& task,
            const MlaExpandedScratch& scratch) {
  prepare_weights(shape, weights, task.head, scratch);
  prepare_queries(shape, task, scratch);
  const int64_t reach = task.position + task.num_rows;
  for (int64_t first = 0; first < reach; first += kMlaExpanded) {
    const int64_t count = smaller(kMlaExpanded, reach - first);
    expand(shape, task.context, first, count, scratch);
    attend_rows(shape, task, first, count, scratch);
  }
  write_out(shape, task, scratch);
}

}  // namespace

extern const MlaExpandedTable mla_expanded_table;
const MlaExpandedTable mla_expanded_table = {attend};

}  // namespace MOONLET_ISA
}  // namespace moonlet

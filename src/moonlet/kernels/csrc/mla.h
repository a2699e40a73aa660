// What one instruction-set level offers for Gated MLA inference (model.md section 3.4).
//
// Two forms of the same attention. Absorbed: the queries of all heads of a row go through the key
// part of kv_b once and read the latent rows themselves, as one wide key. Expanded: one head at a
// time expands blocks of latent rows to keys and values. Both keep a running softmax per query.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace moonlet {

// Context rows scored at a time, context rows expanded at a time, queries scored at a time. Blocks
// start at multiples of the first two.
constexpr int64_t kMlaBlock = 64;
constexpr int64_t kMlaExpanded = 256;
constexpr int64_t kMlaQueries = 96;
// widths in scratch are multiples of this, for every level
constexpr int64_t kMlaPad = 16;

struct MlaShape {
  int64_t num_heads, nope_size, shared_size, value_size, latent_size;
  // of a query, of a context row, and of a head's rows of kv_b
  int64_t query_size, row_size, weight_rows;
  // multiples of kMlaPad
  int64_t padded_heads, padded_nope, padded_value, padded_latent, padded_row;
  // an expanded row: key (shared part, padded nope part), then padded value
  int64_t key_size, expanded_size;
};

// [num_heads, weight_rows, latent_size], float32 or bfloat16.
struct MlaWeights {
  const void* data;
  bool is_bfloat16;
};

// One sequence: row n is row n % page_size of page pages[n / page_size].
struct MlaContext {
  const float* rows;
  const int64_t* pages;
  int64_t page_size, row_size;
};

// Softmax over a part of the context: per head the largest score, the sum of the weights relative
// to it, and the weighted sum of the latents [num_heads, padded_latent].
struct MlaPartial {
  float* max;
  float* sum;
  float* out;
};

// Absorbed form: the query rows of one pass. Row t has partials [firsts[t], firsts[t + 1]).
struct MlaPass {
  const float* q;   // [num_rows, num_heads, query_size]
  float* absorbed;  // [num_rows, num_heads, padded_latent], not scaled
  const MlaPartial* partials;
  const int64_t* firsts;
  float* out;        // [num_rows, num_heads, value_size]
  float* max_score;  // [num_rows, num_heads] or null
  int64_t num_rows;
};

struct MlaAbsorbedScratch {
  float* weights;  // [16, padded_latent]: rows of kv_b in float32
  float* queries;  // [groups of heads, row_size, heads of a group]
  float* block;    // [kMlaBlock, padded_row]
  float* scores;   // [kMlaBlock, kMlaQueries]
  float* keep;     // [kMlaQueries]
};

// Expanded form: consecutive queries of one head of one sequence.
struct MlaExpandedTask {
  MlaContext context;
  const float* q;    // query i at q + i * num_heads * query_size
  float* out;        // its output at out + i * num_heads * value_size
  float* max_score;  // its largest score at max_score + i * num_heads; or null
  int64_t head, position, num_rows;  // query i sees the context rows 0 .. position + i
};

struct MlaExpandedScratch {
  float* weights;   // kv_b of the head, transposed: [groups of its rows, latent_size, group]
  float* wide;      // [kMlaPad, latent_size]
  float* queries;   // [groups of queries, key_size, group]
  float* out;       // [queries, padded_value]
  float* max;       // [queries, padded]
  float* sum;       // [queries, padded]
  float* keep;      // [kMlaQueries]
  float* block;     // [kMlaBlock, padded_row]
  float* expanded;  // [kMlaExpanded, expanded_size]
  float* scores;    // [kMlaBlock, kMlaQueries]
};

struct MlaAbsorbedTable {
  // Sends the queries of one head of every row through the key part of kv_b.
  void (*absorb)(const MlaShape& shape, const MlaWeights& weights, const MlaPass& pass,
                 int64_t head, const MlaAbsorbedScratch& scratch);
  // All heads of one row over context rows [first, last).
  void (*attend)(const MlaShape& shape, const MlaContext& context, const MlaPass& pass,
                 int64_t row, int64_t first, int64_t last, const MlaPartial& partial,
                 const MlaAbsorbedScratch& scratch);
  // Joins the partials of one head of every row and expands the result to values.
  void (*finish)(const MlaShape& shape, const MlaWeights& weights, const MlaPass& pass,
                 int64_t head, const MlaAbsorbedScratch& scratch);
};

struct MlaExpandedTable {
  void (*attend)(const MlaShape& shape, const MlaWeights& weights, const MlaExpandedTask& task,
                 const MlaExpandedScratch& scratch);
};

MOONLET_TABLE(MlaAbsorbedTable, mla_absorbed_table)
MOONLET_TABLE(MlaExpandedTable, mla_expanded_table)

}  // namespace moonlet

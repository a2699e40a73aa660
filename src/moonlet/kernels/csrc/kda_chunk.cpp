// Chunkwise Kimi Delta Attention for inference: both gates, states after any row.
//
// With D(j, i) the product of the decays of rows j + 1..i and D(i) that from the chunk's start:
//
//   A_ij = beta_i <k_i, D(j, i) k_j> (i > j)      P_ij = <q_i, D(j, i) k_j> (i >= j)
//   (I + A) F = beta V - (beta D K) S             O = (D Q) S + P F
//   S <- diag(D(C)) S + (D(j, C) k_j)^T F
//
// No decay is ever divided by: D(j, i) is built by multiplying, inside tiles of 16 rows row by
// row, and between tiles as D(j, end of j's tile) D(that end, i). Every factor is at most 1, so
// neither gate can overflow, and what underflows is zero in the recurrence too. The decay of the
// whole chunk is the exponential of a sum: it is applied to the state once per chunk, and the
// rounding of a product would add up over a long sequence. The system is solved by substitution,
// tile by tile.
// Letters: C rows of a chunk, K key width, V value width; K and V are multiples of 16.
#include "kda_infer.h"

#include "kda_rows.h"
#include "lanes.h"
#include "products.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int64_t kTile = 16;
// 16, 32 and 64 rows measured alike at K = V = 128; more rows touch the state less often
constexpr int64_t kRows = 2 * kTile;

typedef float RowsBySize[kRows * kMaxKdaSize];
typedef float TileBySize[kTile * kMaxKdaSize];
typedef float RowsByRows[kRows * kRows];
typedef float Channels[kMaxKdaSize];

// About 280 KiB on the stack of the working thread; rows are packed by the size in use.
struct Chunk {
  RowsBySize decay, key, query;
  RowsBySize start_key, start_query;  // D K with beta, D Q
  RowsBySize end_key;                 // D(j, last row seen) k_j
  RowsBySize fresh;                   // F
  TileBySize tile_key, tile_query;    // decayed from the tile's start
  float earlier[kMaxKdaSize * (kRows - kTile)];  // end_key of the earlier tiles, transposed
  RowsByRows pairs, reads;            // A and P
  Channels tile_decay, prefix, log_total, total;
  float beta[kRows];
  int64_t rows, K, V;
};

// Decays, unit keys and queries of the chunk's rows, and the values that F starts from.
void load_rows(const KdaInputs& in, int64_t head, int64_t first, Chunk& h) {
  const int64_t K = h.K, V = h.V;
  memset(h.log_total, 0, sizeof(h.log_total));
  for (int64_t i = 0; i < h.rows; ++i) {
    const Row r = row_of(in, first + i, head);
    h.beta[i] = r.beta;
    for (int64_t c = 0; c < K; c += kLanes) {
      const Lanes log = log_decay(r, c);
      add_to(h.log_total + c, log);
      store(h.decay + i * K + c, exponential(log));
      store(h.key + i * K + c, load(r.k + c) * r.key_scale);
      store(h.query + i * K + c, load(r.q + c) * r.query_scale);
    }
    for (int64_t c = 0; c < V; c += kLanes) store(h.fresh + i * V + c, r.beta * load(r.v + c));
  }
  for (int64_t c = 0; c < K; c += kLanes) {
    store(h.total + c, exponential(load(h.log_total + c)));
  }
}

// Rows decayed from the start of their tile and of the chunk.
void decay_from_start(Chunk& h, int64_t first, int64_t last) {
  const int64_t K = h.K;
  for (int64_t c = 0; c < K; c += kLanes) {
    const Lanes prefix = first ? load(h.prefix + c) : fill(1.0f);
    Lanes decay = fill(1.0f);
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = i * K + c, in_tile = (i - first) * K + c;
      decay = decay * load(h.decay + at);
      const Lanes key = load(h.key + at) * decay, query = load(h.query + at) * decay;
      store(h.tile_key + in_tile, key);
      store(h.tile_query + in_tile, query);
      store(h.start_key + at, h.beta[i] * key * prefix);
      store(h.start_query + at, query * prefix);
    }
    store(h.tile_decay + c, decay);
    store(h.prefix + c, prefix * decay);
  }
}

// A and P between rows of one tile; leaves the tile's keys decayed to its last row.
void pairs_in_tile(Chunk& h, int64_t first, int64_t last) {
  const int64_t K = h.K;
  for (int64_t i = first; i < last; ++i) {
    const float *decay = h.decay + i * K, *key = h.key + i * K, *query = h.query + i * K;
    Lanes own = {};
    for (int64_t c = 0; c < K; c += kLanes) {
      own += load(query + c) * load(key + c);
      store(h.end_key + i * K + c, load(key + c));
    }
    h.reads[i * kRows + i] = total(own);
    for (int64_t j = first; j < i; ++j) {
      float* carried = h.end_key + j * K;
      Lanes pair = {}, read = {};
      for (int64_t c = 0; c < K; c += kLanes) {
        const Lanes x = load(carried + c) * load(decay + c);
        store(carried + c, x);
        pair += load(key + c) * x;
        read += load(query + c) * x;
      }
      h.pairs[i * kRows + j] = h.beta[i] * total(pair);
      h.reads[i * kRows + j] = total(read);
    }
  }
}

// A and P between the rows of one tile and all earlier ones; decays the earlier keys past the tile.
void pairs_with_earlier(Chunk& h, int64_t first, int64_t last) {
  const int64_t K = h.K, rows = last - first;
  transpose(h.earlier, first, h.end_key, K, first, K);
  float* pairs = h.pairs + first * kRows;
  multiply(pairs, kRows, {h.tile_key, K, 1}, h.earlier, first, rows, K, first, 1.0f, false);
  multiply(h.reads + first * kRows, kRows, {h.tile_query, K, 1}, h.earlier, first, rows, K, first,
           1.0f, false);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < first; j += kLanes) {
      store(pairs + i * kRows + j, h.beta[first + i] * load(pairs + i * kRows + j));
    }
  }
  for (int64_t j = 0; j < first; ++j) {
    float* key = h.end_key + j * K;
    for (int64_t c = 0; c < K; c += kLanes) store(key + c, load(key + c) * load(h.tile_decay + c));
  }
}

// F of one tile by forward substitution, the F of earlier tiles being final.
void solve_tile(Chunk& h, int64_t first, int64_t last) {
  const int64_t V = h.V;
  if (first) {
    multiply(h.fresh + first * V, V, {h.pairs + first * kRows, kRows, 1}, h.fresh, V, last - first,
             first, V, -1.0f, true);
  }
  for (int64_t i = first + 1; i < last; ++i) {
    const float* pairs = h.pairs + i * kRows;
    for (int64_t c = 0; c < V; c += kLanes) {
      Lanes x = load(h.fresh + i * V + c);
      for (int64_t j = first; j < i; ++j) x -= pairs[j] * load(h.fresh + j * V + c);
      store(h.fresh + i * V + c, x);
    }
  }
}

template <int R, int P>
MOONLET_INLINE void advance_tile(float* out, const float* state, const float* decay,
                                 const float* keys, const Chunk& h, int64_t rows, int64_t c) {
  Lanes sum[R][P] = {};
  for (int64_t j = 0; j < rows; ++j) {
    for (int r = 0; r < R; ++r) {
      const float key = keys[j * h.K + r];
      for (int p = 0; p < P; ++p) sum[r][p] += key * load(h.fresh + j * h.V + c + p * kLanes);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const int64_t at = r * h.V + c + p * kLanes;
      store(out + at, decay[r] * load(state + at) + sum[r][p]);
    }
  }
}

// out = diag(decay) state + keys^T F over the chunk's first `rows` rows; out may be the state.
void advance(float* out, const float* state, const float* decay, const float* keys, const Chunk& h,
             int64_t rows) {
  for (int64_t i = 0; i < h.K; i += 4) {
    float* o = out + i * h.V;
    const float* s = state + i * h.V;
    int64_t c = 0;
    for (; c + 2 * kLanes <= h.V; c += 2 * kLanes) {
      advance_tile<4, 2>(o, s, decay + i, keys + i, h, rows, c);
    }
    if (c < h.V) advance_tile<4, 1>(o, s, decay + i, keys + i, h, rows, c);
  }
}

// The state after row `last` of the chunk, which is not its last row.
void emit(Chunk& h, const float* state, int64_t last, float* out) {
  const int64_t K = h.K;
  // start_key and prefix have served
  for (int64_t c = 0; c < K; c += kLanes) {
    Lanes decay = fill(1.0f);
    for (int64_t j = last; j >= 0; --j) {
      store(h.start_key + j * K + c, load(h.key + j * K + c) * decay);
      decay = decay * load(h.decay + j * K + c);
    }
    store(h.prefix + c, decay);
  }
  advance(out, state, h.prefix, h.start_key, h, last + 1);
}

// One chunk up to F and the output; the state is as it was.
void run_chunk(Chunk& h, const float* state, float* out, int64_t out_stride) {
  const int64_t K = h.K, V = h.V;
  memset(h.reads, 0, sizeof(h.reads));
  for (int64_t first = 0; first < h.rows; first += kTile) {
    const int64_t last = first + kTile < h.rows ? first + kTile : h.rows;
    decay_from_start(h, first, last);
    pairs_in_tile(h, first, last);
    if (first) pairs_with_earlier(h, first, last);
  }
  multiply(h.fresh, V, {h.start_key, K, 1}, state, V, h.rows, K, V, -1.0f, true);
  multiply(out, out_stride, {h.start_query, K, 1}, state, V, h.rows, K, V, 1.0f, false);
  for (int64_t first = 0; first < h.rows; first += kTile) {
    const int64_t last = first + kTile < h.rows ? first + kTile : h.rows;
    solve_tile(h, first, last);
    multiply(out + first * out_stride, out_stride, {h.reads + first * kRows, kRows, 1}, h.fresh, V,
             last - first, last, V, 1.0f, true);
  }
}

void sequence(const KdaInputs& in, int64_t head, int64_t first, int64_t last, float* state,
              float* out, const KdaEmits& emits) {
  const int64_t H = in.num_heads, V = in.value_size, size = in.key_size * V;
  Chunk h;
  h.K = in.key_size, h.V = V;
  int64_t e = 0;
  for (int64_t step = emits.count; step > 0; step /= 2) {
    while (e + step <= emits.count && emits.rows[e + step - 1] < first) e += step;
  }
  for (int64_t row = first; row < last; row += kRows) {
    h.rows = last - row < kRows ? last - row : kRows;
    load_rows(in, head, row, h);
    run_chunk(h, state, out + (row * H + head) * V, H * V);
    const int64_t end = row + h.rows;
    for (; e < emits.count && emits.rows[e] < end - 1; ++e) {
      emit(h, state, emits.rows[e] - row, emits.states + (emits.places[e] * H + head) * size);
    }
    advance(state, state, h.total, h.end_key, h, h.rows);
    for (; e < emits.count && emits.rows[e] == end - 1; ++e) {
      memcpy(emits.states + (emits.places[e] * H + head) * size, state,
             static_cast<size_t>(size) * sizeof(float));
    }
  }
}

}  // namespace

extern const KdaChunkTable kda_chunk_table;
const KdaChunkTable kda_chunk_table = {sequence};

}  // namespace MOONLET_ISA
}  // namespace moonlet

// AttnRes for inference (model.md section 3.2): softmax over depth, one row at a time.
//
// A score is <v, w> / rms(v). Every product and every square sum has its own sixteen lanes, so a
// result does not depend on what else is computed beside it.
#include "attn_res.h"

#include "lanes.h"
#include "sums.h"
#include "tails.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

// more sums in flight than this do not fit the registers of the level
#if defined(MOONLET_ISA_avx512) || defined(MOONLET_ISA_vnni)
constexpr int kWeights = 4;
#else
constexpr int kWeights = 2;
#endif

// scores[m * stride + s] of S sources and M weights that lie `size` apart.
template <int S, int M>
MOONLET_INLINE void score(const float* const* sources, int64_t offset, const float* weight,
                          int64_t size, float eps, float* scores, int64_t stride) {
  const float *rows[S], *weights[M];
  for (int s = 0; s < S; ++s) rows[s] = sources[s] + offset;
  for (int m = 0; m < M; ++m) weights[m] = weight + m * size;
  float products[S][M], squares[S];
  dot_products<S, M>(rows, weights, size, products, squares);
  for (int s = 0; s < S; ++s) {
    const float r = 1.0f / __builtin_sqrtf(squares[s] / static_cast<float>(size) + eps);
    for (int m = 0; m < M; ++m) scores[m * stride + s] = products[s][m] * r;
  }
}

template <int M>
MOONLET_INLINE void score_all(const float* const* sources, int64_t num_sources, int64_t offset,
                              const float* weight, int64_t size, float eps, float* scores) {
  int64_t n = 0;
  for (; n + 2 <= num_sources; n += 2) {
    score<2, M>(sources + n, offset, weight, size, eps, scores + n, kMaxDepthSources);
  }
  if (n < num_sources) {
    score<1, M>(sources + n, offset, weight, size, eps, scores + n, kMaxDepthSources);
  }
}

// scores <- e^(score - largest), returns the largest and the sum.
struct Softmax {
  float largest, sum;
};

MOONLET_INLINE Softmax exponentials(float* scores, int64_t count) {
  Softmax r = {scores[0], 0.0f};
  for (int64_t n = 1; n < count; ++n) r.largest = scores[n] > r.largest ? scores[n] : r.largest;
  for (int64_t n = 0; n < count; n += kLanes) {
    // the array has room for whole vectors, what lies behind the scores is not read again
    store(scores + n, exponential(load(scores + n) - r.largest));
  }
  for (int64_t n = 0; n < count; ++n) r.sum += scores[n];
  return r;
}

// out[m] = sum_n weights[m][n] sources[n] for M outputs that lie `stride` apart.
template <int M>
MOONLET_INLINE void combine(const float* const* sources, int64_t num_sources, int64_t offset,
                            const float* weights, float* out, int64_t stride, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Lanes sum[M] = {};
    for (int64_t n = 0; n < num_sources; ++n) {
      const Lanes x = load(sources[n] + offset + i);
      for (int m = 0; m < M; ++m) sum[m] += weights[m * kMaxDepthSources + n] * x;
    }
    for (int m = 0; m < M; ++m) store(out + m * stride + i, sum[m]);
  }
  for (; i < size; ++i) {
    for (int m = 0; m < M; ++m) {
      float sum = 0.0f;
      for (int64_t n = 0; n < num_sources; ++n) {
        sum += weights[m * kMaxDepthSources + n] * sources[n][offset + i];
      }
      out[m * stride + i] = sum;
    }
  }
}

void mix(const float* const* sources, int64_t num_sources, int64_t offset, const float* weight,
         float* out, int64_t size, float eps) {
  float scores[kMaxDepthSources] = {};
  score_all<1>(sources, num_sources, offset, weight, size, eps, scores);
  const float scale = 1.0f / exponentials(scores, num_sources).sum;
  for (int64_t n = 0; n < num_sources; ++n) scores[n] *= scale;
  combine<1>(sources, num_sources, offset, scores, out, 0, size);
}

template <int M>
MOONLET_INLINE void fold_tile(const float* const* blocks, const float* weight, float* m, float* l,
                              float* acc, int64_t row, int64_t first, const FoldShape& s) {
  float scores[M * kMaxDepthSources] = {};
  const int64_t offset = row * s.size;
  score_all<M>(blocks, s.num_blocks, offset, weight + first * s.size, s.size, s.eps, scores);
  for (int k = 0; k < M; ++k) {
    const Softmax part = exponentials(scores + k * kMaxDepthSources, s.num_blocks);
    m[(first + k) * s.num_rows + row] = part.largest;
    l[(first + k) * s.num_rows + row] = part.sum;
  }
  float* out = acc + (first * s.num_rows + row) * s.size;
  combine<M>(blocks, s.num_blocks, offset, scores, out, s.num_rows * s.size, s.size);
}

void fold(const float* const* blocks, const float* weight, float* m, float* l, float* acc,
          int64_t row, int64_t first, int64_t last, const FoldShape& shape) {
  for (; first + kWeights <= last; first += kWeights) {
    fold_tile<kWeights>(blocks, weight, m, l, acc, row, first, shape);
  }
  for (; first < last; ++first) fold_tile<1>(blocks, weight, m, l, acc, row, first, shape);
}

void join(float m, float l, const float* acc, const float* prefix, const float* weight, float* out,
          int64_t size, float eps) {
  float scores[kLanes] = {};
  score<1, 1>(&prefix, 0, weight, size, eps, scores, 0);
  const float top = m > scores[0] ? m : scores[0];
  scores[0] -= top;
  scores[1] = m - top;
  store(scores, exponential(load(scores)));
  const float scale = 1.0f / (l * scores[1] + scores[0]);
  const float new_share = scores[0] * scale, old_share = scores[1] * scale;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store(out + i, load(acc + i) * old_share + load(prefix + i) * new_share);
  }
  if (i < size) {
    const Lanes a = load_first(acc + i, size - i, Lanes{});
    const Lanes p = load_first(prefix + i, size - i, Lanes{});
    store_first(out + i, a * old_share + p * new_share, size - i);
  }
}

}  // namespace

extern const AttnResTable attn_res_table;
const AttnResTable attn_res_table = {mix, fold, join};

}  // namespace MOONLET_ISA
}  // namespace moonlet

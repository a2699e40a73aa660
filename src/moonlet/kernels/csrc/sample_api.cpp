// The C interface of sampling: argument checks, threads, and one row from logits to an id.
//
// Compiled with baseline flags only. Nothing is sorted: a floor under the logits that can matter
// comes from the filters, what lies above it is collected, and cuts are found by digits of the
// weights' bit patterns. All sums run over fixed pieces in a fixed order.
#include "sample.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "moonlet.h"
#include "pool.h"

namespace moonlet {
namespace {

// logits of one piece; its weights fit the stack
constexpr int64_t kPiece = 1024;
// pieces of one grab, about 10 us of work
constexpr int64_t kGrain = 8;
// floors lie this much below their place, as a difference of exponents: rounding is below 1e-12
constexpr double kSlack = 1e-9;

struct Filters {
  double temperature, min_p, top_p;
  int64_t top_k;
};

struct Scratch {
  double *weights, *work, *sums;
  float* maxima;
  int32_t *ids, *counts;
};

// One row; weights are e^((logit - top) * rate), so the largest is 1.
struct Row {
  const SampleTable* table;
  const float* logits;
  int64_t size, pieces;
  int32_t num_threads;
  double top, rate;
  Scratch scratch;
};

int64_t pieces_of(int64_t size) { return (size + kPiece - 1) / kPiece; }

// Doubles of scratch that cut_up lays out.
int64_t scratch_size(int64_t size) { return 3 * size + 64; }

Scratch cut_up(double* memory, int64_t size) {
  const int64_t pieces = pieces_of(size);
  Scratch s;
  s.weights = memory;
  s.work = s.weights + size;
  s.sums = s.work + (size > kMaxima * pieces ? size : kMaxima * pieces);
  s.maxima = reinterpret_cast<float*>(s.sums + pieces);
  s.ids = reinterpret_cast<int32_t*>(s.maxima + kMaxima * pieces);
  s.counts = s.ids + size;
  return s;
}

template <typename Run>
void for_pieces(const Row& row, const Run& run) {
  parallel(row.pieces, kGrain, row.num_threads, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t begin = p * kPiece;
      run(p, begin, row.size - begin < kPiece ? row.size - begin : kPiece);
    }
  });
}

// ---- cuts ---------------------------------------------------------------------------------------

// In descending order a value is cut if `max_count` values stand before it, or if these sum to
// the share `limit` of `total`. The first is never cut.
struct Cut {
  int64_t max_count;
  double limit, total;

  bool ends(int64_t count, double mass) const {
    return count >= max_count || mass / total >= limit;
  }
};

// What a cut keeps: every larger value, and the first `ties` of those equal to `value`.
struct Border {
  double value;
  int64_t ties;
};

struct Bin {
  double mass;
  int64_t count;
};

int64_t digit_of(double value, int shift, int64_t num_bins) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return static_cast<int64_t>(bits >> shift) & (num_bins - 1);
}

// Finds the border of at least one value in [0, 1] by their bit patterns, which order as they do:
// twelve bits first, then ten at a time, each time within the digit where the cut falls.
Border find_border(const double* values, int64_t count, double* work, const Cut& cut) {
  Bin bins[4096];
  int64_t before = 0;
  double mass = 0.0;
  bool are_equal = false;
  for (int shift = 50; shift >= 0 && !are_equal; shift -= 10) {
    const int64_t num_bins = shift == 50 ? 4096 : 1024;
    memset(bins, 0, static_cast<size_t>(num_bins) * sizeof(Bin));
    for (int64_t i = 0; i < count; ++i) {
      Bin& bin = bins[digit_of(values[i], shift, num_bins)];
      bin.mass += values[i];
      ++bin.count;
    }
    int64_t chosen = -1;
    for (int64_t b = num_bins - 1; b >= 0; --b) {
      if (bins[b].count == 0) continue;
      if (chosen >= 0) {
        before += bins[chosen].count;
        mass += bins[chosen].mass;
      }
      chosen = b;
      if (cut.ends(before + bins[b].count, mass + bins[b].mass)) break;
    }
    int64_t left = 0;
    are_equal = true;
    for (int64_t i = 0; i < count; ++i) {
      if (digit_of(values[i], shift, num_bins) != chosen) continue;
      work[left] = values[i];
      are_equal &= work[left++] == work[0];
    }
    values = work;
    count = left;
  }
  Border border = {work[0], 1};
  while (border.ties < count &&
         !cut.ends(before + border.ties, mass + static_cast<double>(border.ties) * work[0])) {
    ++border.ties;
  }
  return border;
}

// Drops what the border cuts off; the order of ids stays. Returns how many are left.
int64_t apply(Border border, double* weights, int32_t* ids, int64_t count) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] < border.value || (weights[i] == border.value && border.ties-- <= 0)) continue;
    weights[kept] = weights[i];
    ids[kept++] = ids[i];
  }
  return kept;
}

// ---- floors -------------------------------------------------------------------------------------

// A float below `logit` by so much that no rounding lifts a weight across it.
float floor_below(double logit, double temperature) {
  const double floor = logit - temperature * kSlack;
  return floor > -FLT_MAX ? nextafterf(static_cast<float>(floor), -INFINITY) : -INFINITY;
}

// Bit patterns of floats in their order, as numbers in [0, 1).
double place_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  bits ^= bits >> 31 ? 0xFFFFFFFFu : 0x80000000u;
  return ldexp(bits, -32);
}

float float_at(double place) {
  uint32_t bits = static_cast<uint32_t>(ldexp(place, 32));
  bits ^= bits >> 31 ? 0x80000000u : 0xFFFFFFFFu;
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// A logit at or above which lie the `count` largest: as many of the maxima do.
float floor_of_count(const Row& row, int64_t count) {
  const int64_t num_maxima = kMaxima * row.pieces;
  if (count > num_maxima) return -INFINITY;
  double* places = row.scratch.work;
  for (int64_t i = 0; i < num_maxima; ++i) places[i] = place_of(row.scratch.maxima[i]);
  return float_at(find_border(places, num_maxima, places, {count, INFINITY, 1.0}).value);
}

// ---- passes over the vocabulary -----------------------------------------------------------------

double find_top(const Row& row) {
  for_pieces(row, [&](int64_t p, int64_t begin, int64_t count) {
    row.table->find_maxima(row.logits + begin, count, row.scratch.maxima + kMaxima * p);
  });
  float top = -INFINITY;
  for (int64_t i = 0; i < kMaxima * row.pieces; ++i) top = fmaxf(top, row.scratch.maxima[i]);
  return top;
}

double weigh_all(const Row& row) {
  for_pieces(row, [&](int64_t p, int64_t begin, int64_t count) {
    row.scratch.sums[p] =
        row.table->weigh(row.logits + begin, count, row.top, row.rate, nullptr);
  });
  double total = 0.0;
  for (int64_t p = 0; p < row.pieces; ++p) total += row.scratch.sums[p];
  return total;
}

// Ids and weights of the logits of at least `floor`, in the order of ids; returns how many.
int64_t collect(const Row& row, float floor) {
  const Scratch& s = row.scratch;
  for_pieces(row, [&](int64_t p, int64_t begin, int64_t count) {
    float kept[kPiece];
    int32_t* ids = s.ids + begin;
    const int64_t n = row.table->gather(row.logits + begin, count, floor, ids, kept);
    for (int64_t i = 0; i < n; ++i) ids[i] += static_cast<int32_t>(begin);
    row.table->weigh(kept, n, row.top, row.rate, s.weights + begin);
    s.counts[p] = static_cast<int32_t>(n);
  });
  int64_t count = 0;
  for (int64_t p = 0; p < row.pieces; ++p) {
    const size_t n = static_cast<size_t>(s.counts[p]);
    memmove(s.ids + count, s.ids + p * kPiece, n * sizeof(int32_t));
    memmove(s.weights + count, s.weights + p * kPiece, n * sizeof(double));
    count += s.counts[p];
  }
  return count;
}

// ---- draws --------------------------------------------------------------------------------------

// The running sum to pass: below the total, so that the answer stays left of weights of zero.
double target_of(double uniform, double total) {
  return fmin(uniform * total, total * (1.0 - 0x1p-52));
}

int64_t draw_of_all(const Row& row, double total, double uniform) {
  const double target = target_of(uniform, total);
  const double* sums = row.scratch.sums;
  double before = 0.0;
  int64_t p = 0;
  while (p + 1 < row.pieces && !(before + sums[p] > target)) before += sums[p++];
  const int64_t begin = p * kPiece;
  const int64_t count = row.size - begin < kPiece ? row.size - begin : kPiece;
  double weights[kPiece];
  row.table->weigh(row.logits + begin, count, row.top, row.rate, weights);
  // one by one the sum may end a rounding below the sum of the piece: then the last one is meant
  int64_t last = 0;
  for (int64_t i = 0; i < count && !(before > target); ++i) {
    before += weights[i];
    if (weights[i] > 0.0) last = i;
  }
  return begin + last;
}

double sum_of(const double* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

int64_t draw_of_some(const Scratch& s, int64_t count, double uniform) {
  const double target = target_of(uniform, sum_of(s.weights, count));
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    sum += s.weights[i];
    if (sum > target) return s.ids[i];
  }
  return count > 0 ? s.ids[count - 1] : 0;
}

int64_t sample_row(Row row, const Filters& f, double uniform) {
  const bool cuts_count = f.top_k < row.size, cuts_mass = f.top_p < 1.0;
  const Scratch& s = row.scratch;
  row.top = find_top(row);
  // a tiny temperature must not turn 0 * rate into NaN
  row.rate = fmin(1.0 / f.temperature, DBL_MAX);
  float floor = -INFINITY;
  double total = 0.0;
  if (f.min_p > 0.0) floor = floor_below(row.top + f.temperature * log(f.min_p), f.temperature);
  if (cuts_count) {
    floor = fmaxf(floor, floor_below(floor_of_count(row, f.top_k), f.temperature));
  } else if (f.min_p <= 0.0) {
    total = weigh_all(row);
    if (!cuts_mass) return draw_of_all(row, total, uniform);
    // values below this one sum to less than the share that is cut
    const double least = (1.0 - f.top_p) * total / static_cast<double>(row.size);
    floor = floor_below(row.top + f.temperature * log(least), f.temperature);
  }
  int64_t count = collect(row, floor);
  if (count == 0) return 0;
  if (f.min_p > 0.0) count = apply({f.min_p, INT64_MAX}, s.weights, s.ids, count);
  if (cuts_count && count > f.top_k) {
    const Cut cut = {f.top_k, INFINITY, 1.0};
    count = apply(find_border(s.weights, count, s.work, cut), s.weights, s.ids, count);
  }
  if (cuts_mass) {
    // the mass before this cut: known already where it was the reason for the floor
    const Cut cut = {INT64_MAX, f.top_p, total > 0.0 ? total : sum_of(s.weights, count)};
    count = apply(find_border(s.weights, count, s.work, cut), s.weights, s.ids, count);
  }
  return draw_of_some(s, count, uniform);
}

}  // namespace
}  // namespace moonlet

int32_t moonlet_sample(const float* logits, const double* temperature, const double* min_p,
                       const double* top_k, const double* top_p, const double* uniform,
                       int64_t* ids, double* scratch, int64_t num_groups, int64_t num_rows,
                       int64_t size, int32_t isa_level, int32_t num_threads) {
  const moonlet::SampleTable* table = MOONLET_PICK(sample_table, isa_level);
  if (!table) return MOONLET_BAD_ISA;
  if (num_rows < 0 || size < 1 || size > INT32_MAX || num_groups < 1 || num_threads < 1) {
    return MOONLET_BAD_ARGUMENT;
  }
  if (num_rows == 0) return MOONLET_OK;
  if (!logits || !temperature || !uniform || !ids || !scratch) return MOONLET_BAD_ARGUMENT;
  // with one group the pieces of a row are spread over the threads, else each takes whole rows
  moonlet::parallel(num_groups, 1, num_threads, [=](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const moonlet::Scratch part =
          moonlet::cut_up(scratch + g * moonlet::scratch_size(size), size);
      for (int64_t t = g; t < num_rows; t += num_groups) {
        const bool limits = top_k && top_k[t] < static_cast<double>(size);
        const moonlet::Filters filters = {temperature[t], min_p ? min_p[t] : 0.0,
                                          top_p ? top_p[t] : 1.0,
                                          limits ? static_cast<int64_t>(top_k[t]) : size};
        const moonlet::Row row = {table,       logits + t * size, size, moonlet::pieces_of(size),
                                  num_threads, 0.0,               0.0,  part};
        ids[t] = moonlet::sample_row(row, filters, uniform[t]);
      }
    }
  });
  return MOONLET_OK;
}

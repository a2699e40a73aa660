// Passes over float32 logits for sampling: largest value, weights in float64, selection by a floor.
#include "sample.h"

#include "lanes.h"
#include "sums.h"
#include "tails.h"

namespace moonlet {
namespace MOONLET_ISA {
namespace {

constexpr int kDoubles = kLanes / 2;

typedef double Doubles __attribute__((vector_size(4 * kLanes)));
typedef double UnalignedDoubles __attribute__((vector_size(4 * kLanes), aligned(8), may_alias));
typedef int64_t Longs __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(2 * kLanes), aligned(4), may_alias));

// e^x for x <= 0, relative error about 2e-16; 0 below the smallest normal number.
MOONLET_INLINE Doubles exponential64(Doubles x) {
  const Doubles magic = Doubles{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds
  const Doubles shifted = x * 1.4426950408889634074 + magic;
  const Doubles n = shifted - magic;
  // ln 2 in two parts, the first with enough trailing zeros that its product with n is exact
  const Doubles r = x - n * 6.93145751953125e-1 - n * 1.42860682030941723212e-6;
  // Taylor series: |r| <= 0.35, the first term left out is below 4e-18
  Doubles p = Doubles{} + 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r * r + r + 1.0;
  // the low bits of the shifted sum hold n; its own bits drop out of the left shift
  const Longs power = (reinterpret_cast<Longs>(shifted) + 1023) << 52;
  const Longs is_normal = x > Doubles{} - 708.0;
  const Doubles y = p * reinterpret_cast<Doubles>(power);
  return reinterpret_cast<Doubles>(reinterpret_cast<Longs>(y) & is_normal);
}

MOONLET_INLINE Doubles weights_of(const float* logits, double top, double rate) {
  const Floats x = *reinterpret_cast<const Floats*>(logits);
  return exponential64((__builtin_convertvector(x, Doubles) - top) * rate);
}

// The one copy of the exponential serves whole vectors and the end of the run: equal logits must get
// equal weights wherever they stand.
double weigh(const float* logits, int64_t count, double top, double rate, double* out) {
  Doubles sum = {};
  float end[kDoubles];
  for (int64_t i = 0; i < count; i += kDoubles) {
    const int64_t left = count - i;
    const float* source = logits + i;
    if (left < kDoubles) {
      for (float& x : end) x = -__builtin_inff();
      memcpy(end, source, static_cast<size_t>(left) * sizeof(float));
      source = end;
    }
    const Doubles w = weights_of(source, top, rate);
    sum += w;
    if (!out) continue;
    if (left >= kDoubles) {
      *reinterpret_cast<UnalignedDoubles*>(out + i) = w;
    } else {
      memcpy(out + i, &w, static_cast<size_t>(left) * sizeof(double));
    }
  }
  double all = 0.0;
  for (int k = 0; k < kDoubles; ++k) all += sum[k];
  return all;
}

void find_maxima(const float* logits, int64_t count, float* maxima) {
  constexpr int64_t kVectors = kMaxima / kLanes;
  Lanes top[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) top[v] = fill(-__builtin_inff());
  int64_t i = 0;
  for (; i + kMaxima <= count; i += kMaxima) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const Lanes x = load(logits + i + v * kLanes);
      top[v] = choose(x > top[v], x, top[v]);
    }
  }
  for (int64_t v = 0; v < kVectors; ++v) store(maxima + v * kLanes, top[v]);
  for (int64_t lane = 0; i < count; ++i, ++lane) {
    maxima[lane] = logits[i] > maxima[lane] ? logits[i] : maxima[lane];
  }
}

int64_t gather(const float* logits, int64_t count, float floor, int32_t* positions, float* kept) {
  constexpr int64_t kBlock = 4 * kLanes;
  int64_t n = 0;
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t end = count - i < kBlock ? count : i + kBlock;
    if (end - i == kBlock) {
      // most blocks have nothing: one comparison of their largest values says so
      Lanes a = load(logits + i), b = load(logits + i + 2 * kLanes);
      const Lanes c = load(logits + i + kLanes), d = load(logits + i + 3 * kLanes);
      a = choose(c > a, c, a);
      b = choose(d > b, d, b);
      a = choose(b > a, b, a);
      const IntLanes hits = a >= fill(floor);
      typedef int64_t Words __attribute__((vector_size(4 * kLanes)));
      const Words words = reinterpret_cast<Words>(hits);
      int64_t any = 0;
      for (int k = 0; k < kLanes / 2; ++k) any |= words[k];
      if (!any) continue;
    }
    for (int64_t j = i; j < end; ++j) {
      positions[n] = static_cast<int32_t>(j);
      kept[n] = logits[j];
      n += logits[j] >= floor;
    }
  }
  return n;
}

}  // namespace

extern const SampleTable sample_table;
const SampleTable sample_table = {find_maxima, weigh, gather};

}  // namespace MOONLET_ISA
}  // namespace moonlet

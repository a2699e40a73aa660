// What the tests of the C interface share: checks, inputs, the comparison of levels and threads.
//
// Every file beside this one is a program. Buffers are exactly as large as moonlet.h says, so the
// address sanitizer sees a read or a write beyond; outputs are NaN before each call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "moonlet.h"

namespace test {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ints = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;
using Halves = std::vector<uint16_t>;

// Sizes around the widths of registers and blocks.
constexpr int64_t kSizes[] = {1, 3, 17, 100, 257};
constexpr int32_t kThreads = 4;

// ---- checks -------------------------------------------------------------------------------------

constexpr int64_t kMaxFailures = 20;

inline int64_t num_checks = 0, num_failures = 0;
inline std::string current_case;
inline int32_t current_level = 0, current_threads = 1;

inline void check(bool holds, const char* text, const char* file, int line) {
  ++num_checks;
  if (holds) return;
  std::printf("%s:%d: does not hold: %s [%s; level %d, threads %d]\n", file, line, text,
              current_case.c_str(), static_cast<int>(current_level),
              static_cast<int>(current_threads));
  std::fflush(stdout);
  if (++num_failures >= kMaxFailures) std::exit(1);
}

inline void begin_case(const char* file, int line, const char* name,
                       std::initializer_list<int64_t> sizes) {
  current_case = std::string(file) + ":" + std::to_string(line) + ": " + name;
  for (int64_t size : sizes) current_case += " " + std::to_string(size);
  current_level = 0;
  current_threads = 1;
}

#define CHECK(...) ::test::check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

// Names what is tested until the next one: a name and the sizes that tell the cases apart.
#define CASE(name, ...) ::test::begin_case(__FILE__, __LINE__, name, {__VA_ARGS__})

// The last line of a program's main.
inline int finish() {
  std::printf("%lld checks, %lld failed\n", static_cast<long long>(num_checks),
              static_cast<long long>(num_failures));
  return num_checks == 0 || num_failures > 0;
}

// ---- inputs -------------------------------------------------------------------------------------

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) { next(), next(); }

  uint32_t next() {
    bits_ = bits_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(bits_ >> 33);
  }
  int64_t below(int64_t limit) { return next() % limit; }
  float uniform(float low, float high) {
    return low + (high - low) * (static_cast<float>(next() >> 7) / 16777216.0f);
  }
  Floats floats(int64_t count, float size = 1.0f) {
    Floats values(count);
    for (float& x : values) x = uniform(-size, size);
    return values;
  }
  // Bytes from `low` to `high`.
  Bytes bytes(int64_t count, int low = 0, int high = 255) {
    Bytes values(count);
    for (uint8_t& x : values) x = static_cast<uint8_t>(low + below(high - low + 1));
    return values;
  }

 private:
  uint64_t bits_;
};

inline Halves to_bfloat16(const Floats& values) {
  Halves halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], sizeof(bits));
    halves[i] = static_cast<uint16_t>(bits >> 16);
  }
  return halves;
}

inline Floats from_bfloat16(const Halves& halves) {
  Floats values(halves.size());
  for (size_t i = 0; i < halves.size(); ++i) {
    const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
    std::memcpy(&values[i], &bits, sizeof(bits));
  }
  return values;
}

// First rows of sequences of these lengths, and the number of all rows.
inline Ints starts_of(const Ints& lengths) {
  Ints starts = {0};
  for (int64_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

// Elements of `rows` rows that begin `stride` apart: the last one has no gap behind it.
inline int64_t span(int64_t rows, int64_t size, int64_t stride) {
  return (rows - 1) * stride + size;
}

// ---- comparisons --------------------------------------------------------------------------------

inline bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline bool is_finite(const Floats& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

inline bool is_poison(const Floats& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isnan(x); });
}

// Whether no difference is larger than `tolerance` times the largest wanted magnitude.
inline bool close(const Floats& got, const Floats& want, double tolerance) {
  if (got.size() != want.size()) return false;
  double largest = 0.0;
  for (float x : want) largest = std::fmax(largest, std::fabs(x));
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(got[i]) - want[i]);
    if (!(difference <= tolerance * largest)) return false;
  }
  return true;
}

inline void poison(Floats& values) { std::fill(values.begin(), values.end(), NAN); }

// Rows that lie `stride` apart, side by side; what is between them must still be poison.
inline Floats packed_rows(const Floats& strided, int64_t rows, int64_t size, int64_t stride) {
  Floats packed;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < stride && r * stride + i < static_cast<int64_t>(strided.size()); ++i) {
      const float x = strided[r * stride + i];
      if (i < size) {
        packed.push_back(x);
      } else {
        CHECK(std::isnan(x));
      }
    }
  }
  return packed;
}

// What a call writes, poisoned before every call. Levels agree within the tolerance on `near` and
// exactly on `equal`; `own` may differ between levels. Thread counts agree exactly on everything.
struct Written {
  std::vector<Floats*> near;
  std::vector<Floats*> equal = {};
  std::vector<Floats*> own = {};
};

inline std::vector<Floats*> all_of(const Written& written) {
  std::vector<Floats*> all = written.near;
  all.insert(all.end(), written.equal.begin(), written.equal.end());
  all.insert(all.end(), written.own.begin(), written.own.end());
  return all;
}

template <typename Call>
std::vector<Floats> run(const Call& call, const Written& written, int32_t level, int32_t threads) {
  current_level = level;
  current_threads = threads;
  for (Floats* values : all_of(written)) poison(*values);
  CHECK(call(level, threads) == MOONLET_OK);
  std::vector<Floats> copies;
  for (const Floats* values : all_of(written)) copies.push_back(*values);
  return copies;
}

// Runs call(level, threads) at every level and up to `max_threads` threads (1: it takes none), and
// with a level and a thread count that do not exist.
template <typename Call>
void compare(const Call& call, const Written& written, double tolerance = 1e-4,
             int32_t max_threads = kThreads) {
  std::vector<Floats> scalar;
  for (int32_t level = 0; level <= moonlet_isa_level(); ++level) {
    const std::vector<Floats> alone = run(call, written, level, 1);
    if (level == 0) scalar = alone;
    for (size_t i = 0; i < written.near.size(); ++i) {
      CHECK(is_finite(alone[i]));
      CHECK(close(alone[i], scalar[i], tolerance));
    }
    for (size_t i = 0; i < written.equal.size(); ++i) {
      const size_t at = written.near.size() + i;
      CHECK(same(alone[at], scalar[at]));
    }
    for (int32_t threads = 2; threads <= max_threads; ++threads) {
      const std::vector<Floats> shared = run(call, written, level, threads);
      for (size_t i = 0; i < alone.size(); ++i) CHECK(same(shared[i], alone[i]));
    }
  }
  for (Floats* values : all_of(written)) poison(*values);
  CHECK(call(-1, 1) == MOONLET_BAD_ISA);
  CHECK(call(moonlet_isa_level() + 1, 1) == MOONLET_BAD_ISA);
  if (max_threads > 1) CHECK(call(0, 0) == MOONLET_BAD_ARGUMENT);
  for (const Floats* values : all_of(written)) CHECK(is_poison(*values));
  // the caller looks at the results of the highest level
  run(call, written, moonlet_isa_level(), 1);
}

}  // namespace test

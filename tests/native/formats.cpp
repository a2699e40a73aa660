// MXFP4 decoding, rounding of activation groups, the probes.
#include "check.h"

using namespace test;

namespace {

constexpr int64_t kGroupSize = 32, kGroupBytes = 16;

float decoded(int code, int scale) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  if (scale == 255) return NAN;
  const float size = std::ldexp(kMagnitudes[code & 7], scale - 127);
  return code & 8 ? -size : size;
}

// Rows with gaps behind them.
struct Packed {
  int64_t rows, groups, packed_stride, scale_stride, out_stride;
  Bytes packed, scale;

  Packed(int64_t rows, int64_t groups, int64_t gap)
      : rows(rows),
        groups(groups),
        packed_stride(groups * kGroupBytes + gap),
        scale_stride(groups + gap),
        out_stride(groups * kGroupSize + gap),
        packed(span(rows, groups * kGroupBytes, packed_stride)),
        scale(span(rows, groups, scale_stride)) {}

  int64_t out_size() const { return span(rows, groups * kGroupSize, out_stride); }

  float value(int64_t row, int64_t i) const {
    const uint8_t byte = packed[row * packed_stride + i / 2];
    return decoded(i % 2 ? byte >> 4 : byte & 15, scale[row * scale_stride + i / kGroupSize]);
  }
};

void decode(const Packed& p) {
  const int64_t size = p.groups * kGroupSize;
  Floats out(p.rows * size), want;
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t i = 0; i < size; ++i) want.push_back(p.value(r, i));
  }
  const auto to_float = [&](int32_t level, int32_t threads) {
    Floats strided(p.out_size(), NAN);
    const int32_t status = moonlet_mxfp4_dequantize_f32(
        p.packed.data(), p.scale.data(), strided.data(), p.rows, p.groups, p.packed_stride,
        p.scale_stride, p.out_stride, level, threads);
    if (status == MOONLET_OK) out = packed_rows(strided, p.rows, size, p.out_stride);
    return status;
  };
  compare(to_float, {{}, {&out}});
  CHECK(same(out, want));
  const auto to_half = [&](int32_t level, int32_t threads) {
    Halves strided(p.out_size(), 0x7FC0);
    const int32_t status = moonlet_mxfp4_dequantize_bf16(
        p.packed.data(), p.scale.data(), strided.data(), p.rows, p.groups, p.packed_stride,
        p.scale_stride, p.out_stride, level, threads);
    if (status == MOONLET_OK) {
      out = packed_rows(from_bfloat16(strided), p.rows, size, p.out_stride);
    }
    return status;
  };
  compare(to_half, {{}, {&out}});
  CHECK(same(out, want));
}

void every_code_at_every_scale() {
  CASE("every code and scale");
  Packed p(255, 1, 0);
  for (int64_t r = 0; r < p.rows; ++r) {
    p.scale[r] = static_cast<uint8_t>(r);
    for (int64_t j = 0; j < kGroupBytes; ++j) {
      const int64_t low = 2 * j % 16;
      p.packed[r * kGroupBytes + j] = static_cast<uint8_t>(low | (low + 1) << 4);
    }
  }
  decode(p);
  CASE("the scale that is no number");
  const Bytes packed(kGroupBytes, 0x21), scale = {255};
  for (int32_t level = 0; level <= moonlet_isa_level(); ++level) {
    Floats out(kGroupSize, 0.0f);
    Halves halves(kGroupSize, 0);
    CHECK(moonlet_mxfp4_dequantize_f32(packed.data(), scale.data(), out.data(), 1, 1, 16, 1, 32,
                                       level, 1) == MOONLET_OK);
    CHECK(moonlet_mxfp4_dequantize_bf16(packed.data(), scale.data(), halves.data(), 1, 1, 16, 1,
                                        32, level, 1) == MOONLET_OK);
    CHECK(is_poison(out) && is_poison(from_bfloat16(halves)));
  }
}

void decoding_of_any_shape() {
  Random random(1);
  for (int64_t rows : kSizes) {
    for (int64_t groups : {1, 3, 17}) {
      for (int64_t gap : {0, 5}) {
        CASE("decoding", rows, groups, gap);
        Packed p(rows, groups, gap);
        p.packed = random.bytes(static_cast<int64_t>(p.packed.size()));
        p.scale = random.bytes(static_cast<int64_t>(p.scale.size()), 0, 254);
        decode(p);
      }
    }
  }
}

void decoding_refuses() {
  CASE("refusals of decoding");
  const Bytes packed(16), scale(1);
  Floats out(32);
  const auto call = [&](const uint8_t* p, const uint8_t* s, float* o, int64_t rows, int64_t groups,
                        int64_t packed_stride, int64_t scale_stride, int64_t out_stride) {
    return moonlet_mxfp4_dequantize_f32(p, s, o, rows, groups, packed_stride, scale_stride,
                                        out_stride, 0, 1);
  };
  const uint8_t *p = packed.data(), *s = scale.data();
  float* o = out.data();
  CHECK(call(p, s, o, 1, 1, 16, 1, 32) == MOONLET_OK);
  CHECK(call(nullptr, nullptr, nullptr, 0, 1, 16, 1, 32) == MOONLET_OK);
  CHECK(call(nullptr, s, o, 1, 1, 16, 1, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(p, nullptr, o, 1, 1, 16, 1, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(p, s, nullptr, 1, 1, 16, 1, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(p, s, o, -1, 1, 16, 1, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(p, s, o, 1, -1, 16, 1, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(p, s, o, 1, 1, 15, 1, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(p, s, o, 1, 1, 16, 0, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(p, s, o, 1, 1, 16, 1, 31) == MOONLET_BAD_ARGUMENT);
}

// Whole groups of ordinary, huge, subnormal, infinite, undefined and zero values.
Floats groups_of_all_kinds(int64_t count, Random& random) {
  Floats x = random.floats(count, 8.0f);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t kind = i / kGroupSize % 7;
    if (kind == 1) x[i] *= 1e37f;
    if (kind == 2) x[i] *= 1e-40f;
    if (kind == 3 && i % kGroupSize == 5) x[i] = INFINITY;
    if (kind == 4 && i % kGroupSize == 31) x[i] = -NAN;
    if (kind == 5) x[i] = 0.0f;
  }
  return x;
}

void rounding_of_groups() {
  Random random(2);
  for (int64_t count : {0, 32, 96, 544, 3200, 41120}) {
    for (int32_t mode : {1, 2, 3}) {
      CASE("rounding", count, mode);
      // half a step of the largest value; floor scales cut it off by up to an eighth
      const double tolerance = mode == 3 ? 0.5 / 127 + 1e-6 : mode == 1 ? 1.0 / 16 : 1.0 / 8;
      const Floats x = groups_of_all_kinds(count, random);
      Floats out(count);
      compare(
          [&](int32_t level, int32_t threads) {
            return moonlet_round_groups(x.data(), out.data(), count, mode, level, threads);
          },
          {{}, {&out}});
      // a group that is not finite becomes NaN, another one keeps its largest value nearly
      for (int64_t i = 0; i < count; i += kGroupSize) {
        const Floats from(x.begin() + i, x.begin() + i + kGroupSize);
        const Floats to(out.begin() + i, out.begin() + i + kGroupSize);
        if (is_finite(from)) {
          const bool is_subnormal = i / kGroupSize % 7 == 2;
          CHECK(is_finite(to));
          CHECK(is_subnormal || close(to, from, tolerance));
        } else {
          CHECK(is_poison(to));
        }
      }
    }
  }
  CASE("refusals of rounding");
  const Floats x(32, 1.0f);
  Floats out(32);
  CHECK(moonlet_round_groups(x.data(), out.data(), 31, 1, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_round_groups(x.data(), out.data(), -32, 1, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_round_groups(x.data(), out.data(), 32, 0, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_round_groups(x.data(), out.data(), 32, 4, 0, 1) == MOONLET_BAD_ARGUMENT);
}

void probe_of_reading() {
  for (int64_t count : {1, 3, 17, 100, 257, 5000}) {
    for (int64_t piece : {1, 17, 200, 6000}) {
      CASE("probe_read", count, piece);
      // small whole numbers: every sum is exact
      Floats data(count), want((count + piece - 1) / piece), sums(want.size());
      for (int64_t i = 0; i < count; ++i) {
        data[i] = static_cast<float>(i % 9);
        want[i / piece] += data[i];
      }
      compare(
          [&](int32_t level, int32_t threads) {
            return moonlet_probe_read(data.data(), sums.data(), count, piece, level, threads);
          },
          {{}, {&sums}});
      CHECK(same(sums, want));
    }
  }
  CASE("refusals of probe_read");
  Floats one(1);
  float* p = one.data();
  CHECK(moonlet_probe_read(nullptr, p, 1, 1, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_probe_read(p, nullptr, 1, 1, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_probe_read(p, p, 0, 1, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_probe_read(p, p, 1, 0, 0, 1) == MOONLET_BAD_ARGUMENT);
}

void probe_of_arithmetic() {
  for (int64_t blocks : kSizes) {
    CASE("probe_fma", blocks);
    Floats out(blocks);
    // after so many steps every chain is at its limit
    compare(
        [&](int32_t level, int32_t threads) {
          return moonlet_probe_fma(out.data(), blocks, 1200, level, threads);
        },
        {{&out}}, 1e-5);
    CHECK(close(out, Floats(blocks, 1.0f), 1e-5));
  }
  CASE("refusals of probe_fma");
  Floats out(1);
  CHECK(moonlet_probe_fma(out.data(), 1, 12, 0, 1) == MOONLET_OK);
  CHECK(moonlet_probe_fma(out.data(), 1, 13, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_probe_fma(out.data(), 1, 0, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_probe_fma(out.data(), 0, 12, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_probe_fma(nullptr, 1, 12, 0, 1) == MOONLET_BAD_ARGUMENT);
}

}  // namespace

int main() {
  CASE("version");
  CHECK(moonlet_abi_version() == MOONLET_ABI_VERSION);
  CHECK(moonlet_isa_level() >= MOONLET_ISA_LEVEL_SCALAR);
  every_code_at_every_scale();
  decoding_of_any_shape();
  decoding_refuses();
  rounding_of_groups();
  probe_of_reading();
  probe_of_arithmetic();
  return finish();
}

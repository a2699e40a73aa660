// Routed experts with MXFP4 weights: few and many slots, an expert without rows, every rounding.
#include "check.h"

using namespace test;

namespace {

constexpr int64_t kInputBlock = 128;

int64_t padded(int64_t size) { return (size + kInputBlock - 1) / kInputBlock * kInputBlock; }

struct Matrix {
  Bytes packed, scale;

  Matrix(int64_t values, Random& random)
      // small weights, and now and then the smallest scale of all
      : packed(random.bytes(values / 2)), scale(random.bytes(values / 32, 120, 124)) {
    for (size_t i = 0; i < scale.size(); i += 29) scale[i] = 0;
  }
};

struct Moe {
  int64_t rows, top_k, experts, size_in, width;
  Floats z, weights;
  Ints ids;
  Matrix w1, w3, w2;
  Floats out;
  bool has_codes = true;

  Moe(int64_t rows, int64_t top_k, int64_t experts, int64_t size_in, int64_t width, Random& random)
      : rows(rows),
        top_k(top_k),
        experts(experts),
        size_in(size_in),
        width(width),
        z(random.floats(rows * size_in, 2.0f)),
        weights(random.floats(rows * top_k)),
        ids(rows * top_k),
        w1(experts * width * size_in, random),
        w3(experts * width * size_in, random),
        w2(experts * size_in * width, random),
        out(rows * size_in) {
    // the last of several experts stays without rows
    const int64_t used = std::max<int64_t>(experts - 1, 1);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = random.below(used);
      for (int64_t k = 0; k < top_k; ++k) ids[r * top_k + k] = (first + k) % used;
    }
  }

  int32_t call(int32_t activation, float linear_beta, int32_t mode, int32_t level,
               int32_t threads) {
    Floats inputs(rows * padded(size_in), NAN), hidden(rows * top_k * padded(width), NAN);
    Ints places(experts + 1 + rows * top_k, -1);
    Bytes codes(rows * (size_in + top_k * width) / 32 * 40, 255);
    return moonlet_moe_mxfp4(z.data(), ids.data(), weights.data(), w1.packed.data(),
                             w1.scale.data(), w3.packed.data(), w3.scale.data(), w2.packed.data(),
                             w2.scale.data(), out.data(), inputs.data(), hidden.data(),
                             places.data(), mode == 3 && has_codes ? codes.data() : nullptr, rows,
                             top_k, experts, size_in, width, activation, 4.0f, linear_beta, mode,
                             level, threads);
  }
};

void all_modes(Moe& moe) {
  struct Activation {
    int32_t number;
    float linear_beta;
  };
  constexpr Activation kActivations[] = {{0, 0.0f}, {0, 25.0f}, {1, 0.0f}};
  for (const Activation& activation : kActivations) {
    for (int32_t mode : {0, 1, 2, 3}) {
      CASE("moe_mxfp4", moe.rows, moe.top_k, moe.experts, moe.size_in, moe.width,
           activation.number, mode);
      // a hidden value on the border of two roundings may fall to either side
      compare(
          [&](int32_t level, int32_t threads) {
            return moe.call(activation.number, activation.linear_beta, mode, level, threads);
          },
          {{&moe.out}}, mode ? 1e-2 : 1e-4);
    }
  }
}

void refusals(Random& random) {
  CASE("refusals of moe_mxfp4");
  Moe moe(3, 2, 4, 32, 64, random);
  CHECK(moe.call(0, 0.0f, 0, 0, 1) == MOONLET_OK);
  for (int64_t bad : {int64_t{-1}, moe.experts, int64_t{1} << 40}) {
    const int64_t good = moe.ids.back();
    moe.ids.back() = bad;
    poison(moe.out);
    CHECK(moe.call(0, 0.0f, 0, 0, 1) == MOONLET_BAD_ARGUMENT);
    CHECK(is_poison(moe.out));
    moe.ids.back() = good;
  }
  CHECK(moe.call(2, 0.0f, 0, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moe.call(-1, 0.0f, 0, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moe.call(0, 0.0f, 4, 0, 1) == MOONLET_BAD_ARGUMENT);
  CHECK(moe.call(0, 0.0f, -1, 0, 1) == MOONLET_BAD_ARGUMENT);
  const auto refused = [&](int64_t Moe::* size, int64_t value) {
    const int64_t before = moe.*size;
    moe.*size = value;
    // the buffers are those of the good sizes: a refused call must not look at them
    Floats inputs(3 * kInputBlock), hidden(6 * kInputBlock);
    Ints places(11);
    const int32_t status = moonlet_moe_mxfp4(
        moe.z.data(), moe.ids.data(), moe.weights.data(), moe.w1.packed.data(),
        moe.w1.scale.data(), moe.w3.packed.data(), moe.w3.scale.data(), moe.w2.packed.data(),
        moe.w2.scale.data(), moe.out.data(), inputs.data(), hidden.data(), places.data(), nullptr,
        moe.rows, moe.top_k, moe.experts, moe.size_in, moe.width, 0, 4.0f, 0.0f, 0, 0, 1);
    moe.*size = before;
    return status == MOONLET_BAD_ARGUMENT;
  };
  CHECK(refused(&Moe::rows, -1));
  CHECK(refused(&Moe::top_k, 0));
  CHECK(refused(&Moe::experts, 0));
  CHECK(refused(&Moe::experts, 1025));
  CHECK(refused(&Moe::size_in, 0));
  CHECK(refused(&Moe::size_in, 33));
  CHECK(refused(&Moe::width, 16));
  CHECK(refused(&Moe::width, 65));
}

}  // namespace

int main() {
  Random random(4);
  // rows, top_k, experts, size_in, width: few slots of an expert, more than its panels' border of
  // 24, and more than the 256 that share one packing
  constexpr int64_t kShapes[][5] = {{1, 1, 1, 32, 32},    {3, 2, 5, 96, 32},  {17, 4, 9, 160, 96},
                                    {100, 2, 4, 128, 160}, {300, 1, 2, 64, 96}};
  for (const auto& s : kShapes) {
    Moe moe(s[0], s[1], s[2], s[3], s[4], random);
    all_modes(moe);
  }
  CASE("moe_mxfp4 in integers and in float32");
  Moe moe(300, 1, 2, 160, 96, random);
  const int32_t level = moonlet_isa_level();
  CHECK(moe.call(0, 25.0f, 3, level, 1) == MOONLET_OK);
  const Floats with_codes = moe.out;
  moe.has_codes = false;
  CHECK(moe.call(0, 25.0f, 3, level, 1) == MOONLET_OK);
  CHECK(close(with_codes, moe.out, 1e-2));
  refusals(random);
  return finish();
}

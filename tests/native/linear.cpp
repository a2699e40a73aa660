// Products with weight matrices in their five stored forms.
#include "check.h"

using namespace test;

namespace {

constexpr int64_t kGap = 3;

// One weight in the three forms that hold single values; the values that each form stands for.
struct Weight {
  Floats wide;
  Halves halves;
  std::vector<int8_t> bytes;

  Weight(int64_t count, Random& random)
      : wide(random.floats(count)), halves(to_bfloat16(wide)), bytes(count) {
    for (int8_t& x : bytes) x = static_cast<int8_t>(random.below(256) - 128);
  }
  const void* data(int32_t type) const {
    if (type == 0) return wide.data();
    return type == 1 ? static_cast<const void*>(halves.data()) : bytes.data();
  }
  Floats values(int32_t type) const {
    if (type == 0) return wide;
    return type == 1 ? from_bfloat16(halves) : Floats(bytes.begin(), bytes.end());
  }
};

Floats product(const Floats& x, const Floats& weight, const Floats& scale, int64_t rows,
               int64_t size_in, int64_t size_out) {
  Floats y;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < size_out; ++o) {
      double sum = 0.0;
      for (int64_t k = 0; k < size_in; ++k) {
        sum += static_cast<double>(x[r * (size_in + kGap) + k]) * weight[o * size_in + k];
      }
      y.push_back(static_cast<float>(scale.empty() ? sum : sum * scale[o]));
    }
  }
  return y;
}

void multiply(int64_t rows, int64_t size_in, int64_t size_out, int32_t type, bool scales,
              Random& random) {
  CASE("linear", rows, size_in, size_out, type, scales);
  const int64_t x_stride = size_in + kGap, y_stride = size_out + kGap;
  const Floats x = random.floats(span(rows, size_in, x_stride));
  const Floats scale = scales ? random.floats(size_out) : Floats();
  const Weight weight(size_in * size_out, random);
  Floats y(rows * size_out);
  compare(
      [&](int32_t level, int32_t threads) {
        Floats strided(span(rows, size_out, y_stride), NAN);
        const int32_t status = moonlet_linear(
            x.data(), weight.data(type), scales ? scale.data() : nullptr, strided.data(), nullptr,
            rows, size_in, size_out, x_stride, y_stride, type, level, threads);
        if (status == MOONLET_OK) y = packed_rows(strided, rows, size_out, y_stride);
        return status;
      },
      {{&y}});
  CHECK(close(y, product(x, weight.values(type), scale, rows, size_in, size_out), 1e-5));
}

// MXFP4, with scratch of exactly the documented size.
void multiply_packed(int64_t rows, int64_t size_in, int64_t size_out, Random& random) {
  CASE("linear of MXFP4", rows, size_in, size_out);
  const int64_t x_stride = size_in + kGap, y_stride = size_out + kGap;
  const Floats x = random.floats(span(rows, size_in, x_stride));
  const Bytes codes = random.bytes(size_out * size_in / 2);
  const Bytes scale = random.bytes(size_out * size_in / 32, 118, 124);
  Floats weight(size_out * size_in), y(rows * size_out);
  CHECK(moonlet_mxfp4_dequantize_f32(codes.data(), scale.data(), weight.data(), size_out,
                                     size_in / 32, size_in / 2, size_in / 32, size_in, 0,
                                     1) == MOONLET_OK);
  compare(
      [&](int32_t level, int32_t threads) {
        Floats strided(span(rows, size_out, y_stride), NAN);
        Floats inputs(rows * ((size_in + 127) / 128 * 128), NAN);
        const int32_t status =
            moonlet_linear(x.data(), codes.data(), scale.data(), strided.data(), inputs.data(),
                           rows, size_in, size_out, x_stride, y_stride, 3, level, threads);
        if (status == MOONLET_OK) y = packed_rows(strided, rows, size_out, y_stride);
        return status;
      },
      {{&y}});
  CHECK(close(y, product(x, weight, {}, rows, size_in, size_out), 1e-5));
}

// Int8 in panels, with scratch of exactly the documented size. Inputs and scales are whole numbers
// whose groups have the step one, so that every result is exact.
void multiply_panels(int64_t rows, int64_t size_in, int64_t size_out, Random& random) {
  CASE("linear of int8 in panels", rows, size_in, size_out);
  const int64_t x_stride = size_in + kGap, y_stride = size_out + kGap;
  const int64_t groups = (size_in + 31) / 32, panels = (size_out + 15) / 16;
  Floats x(span(rows, size_in, x_stride)), weight(size_out * size_in), scale(size_out);
  Bytes stored(panels * groups * 512, 128);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(random.below(255)) - 127.0f;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < size_in; k += 32) x[r * x_stride + k] = 127.0f;
  }
  for (int64_t o = 0; o < size_out; ++o) {
    scale[o] = static_cast<float>(1 << random.below(4));
    for (int64_t k = 0; k < size_in; ++k) {
      const int32_t code = static_cast<int32_t>(random.below(255)) - 127;
      weight[o * size_in + k] = static_cast<float>(code);
      const int64_t at = (o / 16 * groups * 8 + k / 4) * 64 + o % 16 * 4 + k % 4;
      stored[at] = static_cast<uint8_t>(code + 128);
    }
  }
  Floats y(rows * size_out);
  const Floats want = product(x, weight, scale, rows, size_in, size_out);
  compare(
      [&](int32_t level, int32_t threads) {
        Floats strided(span(rows, size_out, y_stride), NAN);
        Floats inputs(rows * groups * 10, NAN);
        const int32_t status =
            moonlet_linear(x.data(), stored.data(), scale.data(), strided.data(), inputs.data(),
                           rows, size_in, size_out, x_stride, y_stride, 4, level, threads);
        if (status == MOONLET_OK) {
          y = packed_rows(strided, rows, size_out, y_stride);
          CHECK(y == want);
        }
        return status;
      },
      {{&y}});
}

void refusals_of_panels() {
  CASE("refusals of linear of int8 in panels");
  const Floats x(32, 1.0f), scale(2, 1.0f);
  const Bytes panels(512, 128);
  Floats y(2), inputs(10);
  const auto call = [&](const Floats* scales, Floats* scratch) {
    return moonlet_linear(x.data(), panels.data(), scales ? scales->data() : nullptr, y.data(),
                          scratch ? scratch->data() : nullptr, 1, 32, 2, 32, 2, 4, 0, 1);
  };
  CHECK(call(&scale, &inputs) == MOONLET_OK);
  CHECK(call(nullptr, &inputs) == MOONLET_BAD_ARGUMENT);
  CHECK(call(&scale, nullptr) == MOONLET_BAD_ARGUMENT);
}

void refusals_of_packed() {
  CASE("refusals of linear of MXFP4");
  const Floats x(64, 1.0f);
  const Bytes codes(32, 0), scale(2, 127);
  Floats y(2), inputs(128);
  const auto call = [&](const Bytes* scales, Floats* scratch, int64_t size_in) {
    return moonlet_linear(x.data(), codes.data(), scales ? scales->data() : nullptr, y.data(),
                          scratch ? scratch->data() : nullptr, 1, size_in, 2, 64, 2, 3, 0, 1);
  };
  CHECK(call(&scale, &inputs, 32) == MOONLET_OK);
  CHECK(call(nullptr, &inputs, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(&scale, nullptr, 32) == MOONLET_BAD_ARGUMENT);
  CHECK(call(&scale, &inputs, 16) == MOONLET_BAD_ARGUMENT);
}

void refusals() {
  CASE("refusals of linear");
  const Floats x(4, 1.0f), weight(4, 1.0f);
  Floats y(4);
  const auto call = [&](int64_t rows, int64_t size_in, int64_t size_out, int64_t x_stride,
                        int64_t y_stride, int32_t type) {
    return moonlet_linear(x.data(), weight.data(), nullptr, y.data(), nullptr, rows, size_in,
                          size_out, x_stride, y_stride, type, 0, 1);
  };
  CHECK(call(2, 2, 2, 2, 2, 0) == MOONLET_OK);
  CHECK(call(0, 2, 2, 2, 2, 0) == MOONLET_OK);
  CHECK(call(2, 2, 0, 2, 2, 0) == MOONLET_OK);
  CHECK(call(-1, 2, 2, 2, 2, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(2, 0, 2, 2, 2, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(2, 2, -1, 2, 2, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(2, 2, 2, 1, 2, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(2, 2, 2, 2, 1, 0) == MOONLET_BAD_ARGUMENT);
  CHECK(call(2, 2, 2, 2, 2, 5) == MOONLET_BAD_ARGUMENT);
  CHECK(call(2, 2, 2, 2, 2, -1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_linear(nullptr, weight.data(), nullptr, y.data(), nullptr, 1, 2, 2, 2, 2, 0, 0,
                       1) == MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_linear(x.data(), nullptr, nullptr, y.data(), nullptr, 1, 2, 2, 2, 2, 0, 0, 1) ==
        MOONLET_BAD_ARGUMENT);
  CHECK(moonlet_linear(x.data(), weight.data(), nullptr, nullptr, nullptr, 1, 2, 2, 2, 2, 0, 0,
                       1) == MOONLET_BAD_ARGUMENT);
}

}  // namespace

int main() {
  Random random(3);
  constexpr int64_t kShapes[][2] = {{1, 1}, {3, 17}, {17, 3}, {100, 257}, {257, 100}, {600, 129}};
  for (int64_t rows : {1, 3, 4, 5, 13, 40}) {
    for (const auto& shape : kShapes) {
      for (int32_t type : {0, 1, 2}) {
        multiply(rows, shape[0], shape[1], type, type == 2 || rows == 3, random);
      }
    }
  }
  constexpr int64_t kPackedShapes[][2] = {{32, 1}, {96, 17}, {160, 65}, {416, 130}};
  for (int64_t rows : {1, 3, 4, 9, 24, 25, 40}) {
    for (const auto& shape : kPackedShapes) multiply_packed(rows, shape[0], shape[1], random);
  }
  constexpr int64_t kPanelShapes[][2] = {{1, 1}, {3, 17}, {32, 16}, {100, 257}, {600, 33}};
  for (int64_t rows : {1, 2, 6, 7, 13, 17, 40}) {
    for (const auto& shape : kPanelShapes) multiply_panels(rows, shape[0], shape[1], random);
  }
  refusals_of_panels();
  refusals();
  refusals_of_packed();
  return finish();
}

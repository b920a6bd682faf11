// Compares the NEON kernels with the scalar ones and with exact sums, on a machine or an emulator
// that runs AArch64 programs without Python: `make test-neon`. Prints one line and returns 0, or a
// line for each failure and returns 1.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "policy_kernels.h"

namespace {

int checks = 0;
int failures = 0;

void expect(bool holds, const std::string& claim) {
  ++checks;
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n", claim.c_str());
}

void ok(pk_status status, const char* what) {
  expect(status == PK_OK, std::string(what) + ": " + pk_last_error());
}

struct Shape {
  int64_t m, n, k;
  std::string name() const {
    return std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
  }
};

const std::vector<std::string> kIsas = {"scalar", "neon"};

std::mt19937 generator(7);

std::vector<float> normal(int64_t count, float spread) {
  std::normal_distribution<float> draw(0.0f, spread);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = draw(generator);
  return values;
}

std::vector<uint8_t> finite_codes(int64_t count, pk_format format) {
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (uint8_t& code : codes) {
    do {
      code = static_cast<uint8_t>(generator() & 0xff);
    } while (format == PK_F8_E4M3FN ? (code & 0x7f) == 0x7f : (code & 0x7c) == 0x7c);
  }
  return codes;
}

std::vector<int8_t> int8_codes(int64_t count) {
  std::vector<int8_t> codes(static_cast<size_t>(count));
  for (int8_t& code : codes) code = static_cast<int8_t>(static_cast<int>(generator() % 255) - 127);
  return codes;
}

std::vector<char> packed(pk_format format, const Shape& shape, const void* codes) {
  int64_t bytes = 0;
  ok(pk_packed_bytes(shape.n, shape.k, &bytes), "pk_packed_bytes");
  std::vector<char> buffer(static_cast<size_t>(bytes));
  ok(pk_pack(format, shape.n, shape.k, codes, shape.k, buffer.data()), "pk_pack");
  std::vector<char> back(static_cast<size_t>(shape.n * shape.k));
  ok(pk_unpack(format, shape.n, shape.k, buffer.data(), back.data(), shape.k), "pk_unpack");
  expect(back.empty() || std::memcmp(back.data(), codes, back.size()) == 0,
         "unpacking gives what was packed, " + shape.name());
  return buffer;
}

// Runs an operation that fills m * n floats under both instruction sets.
template <class Operation>
std::vector<std::vector<float>> under_both(const Shape& shape, Operation operation) {
  std::vector<std::vector<float>> results;
  for (const std::string& isa : kIsas) {
    ok(pk_set_isa(isa.c_str()), "pk_set_isa");
    std::vector<float> y(static_cast<size_t>(shape.m * shape.n), -1.0f);
    ok(operation(y.data()), "product");
    results.push_back(y);
  }
  return results;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

void check_int8(const Shape& shape) {
  const auto [m, n, k] = shape;
  std::vector<float> x = normal(m * k, 3.0f);
  if (m > 1 && k > 0) x[static_cast<size_t>(k)] = NAN;
  const std::vector<int8_t> w = int8_codes(n * k);
  const std::vector<float> w_scale = normal(n, 1.0f), bias = normal(n, 1.0f);
  const std::vector<char> weights = packed(PK_S8, shape, w.data());
  const auto quantized = under_both(shape, [&](float* y) {
    return pk_linear_s8(nullptr, m, n, k, PK_FLOAT32, x.data(), k, weights.data(), w_scale.data(),
                        PK_FLOAT32, bias.data(), PK_FLOAT32, y, n);
  });
  expect(same_bits(quantized[0], quantized[1]), "linear_s8 has the scalar bits, " + shape.name());

  const std::vector<int8_t> codes = int8_codes(m * k);
  const std::vector<float> ones(static_cast<size_t>(m > n ? m : n), 1.0f);
  const auto exact = under_both(shape, [&](float* y) {
    return pk_linear_s8_codes(nullptr, m, n, k, codes.data(), k, ones.data(), weights.data(),
                              ones.data(), PK_FLOAT32, nullptr, PK_FLOAT32, y, n);
  });
  bool right = same_bits(exact[0], exact[1]);
  for (int64_t row = 0; row < m && k <= 131072; ++row) {
    for (int64_t channel = 0; channel < n; ++channel) {
      int64_t sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += codes[row * k + i] * w[channel * k + i];
      right = right && exact[1][row * n + channel] == static_cast<float>(sum);
    }
  }
  expect(right, "linear_s8_codes is the int64 sum, " + shape.name());
}

// What a float product may be off by: 1e-6 of sum |x w| (docs/numerics.md).
void expect_near(const Shape& shape, const std::vector<float>& y, const std::vector<double>& x,
                 const std::vector<double>& w, const std::string& claim) {
  bool near = true;
  for (int64_t row = 0; row < shape.m; ++row) {
    for (int64_t channel = 0; channel < shape.n; ++channel) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < shape.k; ++i) {
        const double term = x[row * shape.k + i] * w[channel * shape.k + i];
        sum += term;
        size += std::fabs(term);
      }
      near = near && std::fabs(y[row * shape.n + channel] - sum) <= 1e-6 * size;
    }
  }
  expect(near, claim + ", " + shape.name());
}

std::vector<double> decoded(pk_format format, const std::vector<uint8_t>& codes) {
  std::vector<float> values(codes.size());
  ok(pk_decode_f8(format, static_cast<int64_t>(codes.size()), codes.data(), values.data()),
     "pk_decode_f8");
  return {values.begin(), values.end()};
}

void check_float8(const Shape& shape, pk_format format) {
  const auto [m, n, k] = shape;
  const std::vector<float> one(1, 1.0f);
  const std::vector<uint8_t> w = finite_codes(n * k, format);
  const std::vector<uint8_t> x = finite_codes(m * k, PK_F8_E4M3FN);
  const std::vector<char> weights = packed(format, shape, w.data());
  const auto codes = under_both(shape, [&](float* y) {
    return pk_linear_f8(nullptr, m, n, k, PK_F8_E4M3FN, x.data(), k, one.data(), 0, format,
                        weights.data(), one.data(), 0, PK_FLOAT32, nullptr, PK_FLOAT32, y, n);
  });
  expect_near(shape, codes[1], decoded(PK_F8_E4M3FN, x), decoded(format, w), "linear_f8");
  const std::vector<float> floats = normal(m * k, 2.0f);
  const auto weight_only = under_both(shape, [&](float* y) {
    return pk_linear_f8w(nullptr, m, n, k, PK_FLOAT32, floats.data(), k, format, weights.data(),
                         one.data(), 0, PK_FLOAT32, nullptr, PK_FLOAT32, y, n);
  });
  expect_near(shape, weight_only[1], {floats.begin(), floats.end()}, decoded(format, w),
              "linear_f8w");
}

void check_weight_only_int8(const Shape& shape) {
  const auto [m, n, k] = shape;
  const std::vector<float> ones(static_cast<size_t>(n), 1.0f), x = normal(m * k, 2.0f);
  const std::vector<int8_t> w = int8_codes(n * k);
  const std::vector<char> weights = packed(PK_S8, shape, w.data());
  const auto y = under_both(shape, [&](float* out) {
    return pk_linear_s8w(nullptr, m, n, k, PK_FLOAT32, x.data(), k, weights.data(), ones.data(),
                         PK_FLOAT32, nullptr, PK_FLOAT32, out, n);
  });
  expect_near(shape, y[1], {x.begin(), x.end()}, {w.begin(), w.end()}, "linear_s8w");
}

void check_largest_codes() {
  const Shape shape = {3, 33, 131072};
  const std::vector<int8_t> x(static_cast<size_t>(shape.m * shape.k), 127);
  const std::vector<int8_t> w(static_cast<size_t>(shape.n * shape.k), -127);
  const std::vector<float> ones(33, 1.0f);
  const std::vector<char> weights = packed(PK_S8, shape, w.data());
  const auto y = under_both(shape, [&](float* out) {
    return pk_linear_s8_codes(nullptr, shape.m, shape.n, shape.k, x.data(), shape.k, ones.data(),
                              weights.data(), ones.data(), PK_FLOAT32, nullptr, PK_FLOAT32, out,
                              shape.n);
  });
  const float wanted = static_cast<float>(-int64_t{127} * 127 * shape.k);
  bool right = true;
  for (float value : y[1]) right = right && value == wanted;
  expect(right, "codes of 127 all along 131072 do not overflow");
}

void check_rows() {
  const int64_t m = 9, k = 67;
  std::vector<float> x = normal(m * k, 100.0f);
  for (int64_t i = 0; i < k; ++i) x[i] = 0.0f, x[k + i] = 1e-40f;
  x[2 * k + 5] = NAN, x[3 * k] = INFINITY;
  std::vector<std::vector<char>> results;
  for (const std::string& isa : kIsas) {
    ok(pk_set_isa(isa.c_str()), "pk_set_isa");
    std::vector<int8_t> codes(static_cast<size_t>(m * k));
    std::vector<uint8_t> codes8(codes.size()), all(256);
    std::vector<float> scale(m), scale8(m), values(256);
    for (int code = 0; code < 256; ++code) all[code] = static_cast<uint8_t>(code);
    std::vector<char> bytes;
    auto keep = [&bytes](const void* from, size_t size) {
      bytes.insert(bytes.end(), static_cast<const char*>(from),
                   static_cast<const char*>(from) + size);
    };
    ok(pk_quantize_rows_s8(m, k, x.data(), k, codes.data(), k, scale.data()), "quantize_rows_s8");
    keep(codes.data(), codes.size());
    keep(scale.data(), scale.size() * 4);
    for (pk_format format : {PK_F8_E4M3FN, PK_F8_E5M2}) {
      ok(pk_quantize_rows_f8(format, m, k, x.data(), k, codes8.data(), k, scale8.data()),
         "quantize_rows_f8");
      keep(codes8.data(), codes8.size());
      keep(scale8.data(), scale8.size() * 4);
      ok(pk_encode_f8(format, m * k, x.data(), 0.37f, codes8.data()), "encode_f8");
      keep(codes8.data(), codes8.size());
      ok(pk_decode_f8(format, 256, all.data(), values.data()), "decode_f8");
      keep(values.data(), values.size() * 4);
    }
    results.push_back(bytes);
  }
  expect(results[0] == results[1], "quantizers and decoders have the scalar bits");
}

}  // namespace

int main() {
  expect(std::string(pk_present_isas()).find("neon") != std::string::npos,
         std::string("this CPU has the neon kernels; present: ") + pk_present_isas());
  if (failures != 0) return 1;
  for (int64_t m : {0, 1, 2, 3, 5, 8, 9, 17}) {
    for (int64_t k : {0, 1, 15, 63, 64, 65, 300}) {
      for (int64_t n : {1, 7, 31, 33, 64}) {
        const Shape shape = {m, n, k};
        check_int8(shape);
        check_weight_only_int8(shape);
        check_float8(shape, PK_F8_E4M3FN);
        check_float8(shape, PK_F8_E5M2);
      }
    }
  }
  check_int8({2, 5, 131072 + 70});
  check_float8({2, 5, 20000}, PK_F8_E4M3FN);
  check_largest_codes();
  check_rows();
  std::printf("%s: %d checks, %d failures\n", pk_present_isas(), checks, failures);
  return failures == 0 ? 0 : 1;
}

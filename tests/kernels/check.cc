// Compares every instruction set of a build with the scalar kernels, without Python: for builds
// that run under an emulator. Exits with 0 when all agree; docs/kernels.md has the command.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "policy_kernels.h"

namespace {

int failures = 0;

void expect(bool fine, const char* what, const std::string& isa, int64_t m, int64_t n, int64_t k) {
  if (fine) return;
  std::printf("FAILED %s on %s, m=%lld n=%lld k=%lld: %s\n", what, isa.c_str(),
              static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k),
              pk_last_error());
  ++failures;
}

uint32_t next_random() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}

float random_float() { return static_cast<float>(next_random() % 20001) / 10000.0f - 1.0f; }

// The codes of all finite values of both float8 formats, and every int8 but -128.
uint8_t random_code(pk_format code) {
  for (;;) {
    const uint8_t bits = static_cast<uint8_t>(next_random());
    if (code == PK_S8 ? bits != 0x80 : (bits & 0x7c) != 0x7c) return bits;
  }
}

struct Case {
  int64_t m, n, k;
  std::vector<float> x, x_scale, w_scale, bias;
  std::vector<uint8_t> codes[3], x_codes[3], packed[3];

  Case(int64_t m, int64_t n, int64_t k) : m(m), n(n), k(k) {
    for (int64_t i = 0; i < m * k; ++i) x.push_back(random_float());
    for (int64_t i = 0; i < m; ++i) x_scale.push_back(0.1f + std::fabs(random_float()));
    for (int64_t i = 0; i < n; ++i) w_scale.push_back(0.1f + std::fabs(random_float()));
    for (int64_t i = 0; i < n; ++i) bias.push_back(random_float());
    int64_t bytes = 0;
    pk_packed_bytes(n, k, &bytes);
    for (pk_format code = 0; code < 3; ++code) {
      for (int64_t i = 0; i < n * k; ++i) codes[code].push_back(random_code(code));
      for (int64_t i = 0; i < m * k; ++i) x_codes[code].push_back(random_code(code));
      packed[code].resize(static_cast<size_t>(bytes));
      pk_pack(code, n, k, codes[code].data(), k, packed[code].data());
    }
  }

  std::vector<float> linear_s8() const {
    std::vector<float> y(static_cast<size_t>(m * n));
    pk_linear_s8(nullptr, m, n, k, PK_FLOAT32, x.data(), k, packed[PK_S8].data(), w_scale.data(),
                 PK_FLOAT32, bias.data(), PK_FLOAT32, y.data(), n);
    return y;
  }

  std::vector<float> linear_s8_codes() const {
    std::vector<float> y(static_cast<size_t>(m * n));
    pk_linear_s8_codes(nullptr, m, n, k, reinterpret_cast<const int8_t*>(x_codes[PK_S8].data()), k,
                       x_scale.data(), packed[PK_S8].data(), w_scale.data(), PK_FLOAT32, nullptr,
                       PK_FLOAT32, y.data(), n);
    return y;
  }

  std::vector<float> weight_only(pk_format code) const {
    std::vector<float> y(static_cast<size_t>(m * n));
    if (code == PK_S8) {
      pk_linear_s8w(nullptr, m, n, k, PK_FLOAT32, x.data(), k, packed[code].data(), w_scale.data(),
                    PK_FLOAT32, nullptr, PK_FLOAT32, y.data(), n);
    } else {
      pk_linear_f8w(nullptr, m, n, k, PK_FLOAT32, x.data(), k, code, packed[code].data(),
                    w_scale.data(), 1, PK_FLOAT32, nullptr, PK_FLOAT32, y.data(), n);
    }
    return y;
  }

  std::vector<float> linear_f8(pk_format code) const {
    std::vector<float> y(static_cast<size_t>(m * n));
    pk_linear_f8(nullptr, m, n, k, code, x_codes[code].data(), k, x_scale.data(), 1, code,
                 packed[code].data(), w_scale.data(), 1, PK_FLOAT32, nullptr, PK_FLOAT32, y.data(),
                 n);
    return y;
  }

  std::vector<float> values(const std::vector<uint8_t>& bits, pk_format code) const {
    std::vector<float> decoded(bits.size());
    if (code != PK_S8) {
      pk_decode_f8(code, static_cast<int64_t>(bits.size()), bits.data(), decoded.data());
    } else {
      for (size_t i = 0; i < bits.size(); ++i) decoded[i] = static_cast<int8_t>(bits[i]);
    }
    return decoded;
  }

  // Within 1e-6 of the sum in double, scaled by the sum of magnitudes.
  bool close(const std::vector<float>& y, const std::vector<float>& rows,
             const std::vector<float>& weights, bool scaled) const {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, size = 0;
        for (int64_t l = 0; l < k; ++l) {
          const double product = static_cast<double>(rows[static_cast<size_t>(i * k + l)]) *
                                 static_cast<double>(weights[static_cast<size_t>(j * k + l)]);
          sum += product;
          size += std::fabs(product);
        }
        const double scale = static_cast<double>(w_scale[static_cast<size_t>(j)]) *
                             (scaled ? static_cast<double>(x_scale[static_cast<size_t>(i)]) : 1.0);
        const double got = static_cast<double>(y[static_cast<size_t>(i * n + j)]);
        if (!(std::fabs(got - sum * scale) <= 1e-6 * size * scale)) return false;
      }
    }
    return true;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check(const Case& given, const std::string& isa) {
  const int64_t m = given.m, n = given.n, k = given.k;
  pk_set_isa("scalar");
  const std::vector<float> s8 = given.linear_s8(), s8_codes = given.linear_s8_codes();
  pk_set_isa(isa.c_str());
  expect(same(given.linear_s8(), s8), "linear_s8", isa, m, n, k);
  expect(same(given.linear_s8_codes(), s8_codes), "linear_s8_codes", isa, m, n, k);
  for (pk_format code = 0; code < 3; ++code) {
    const std::vector<float> weights = given.values(given.codes[code], code);
    expect(given.close(given.weight_only(code), given.x, weights, false),
           code == PK_S8 ? "linear_s8w" : "linear_f8w", isa, m, n, k);
    if (code == PK_S8) continue;
    const std::vector<float> rows = given.values(given.x_codes[code], code);
    expect(given.close(given.linear_f8(code), rows, weights, true), "linear_f8", isa, m, n, k);
  }
}

// Every code as a weight, alone in its channel, and the quantizers, against the scalar ones.
void check_codes(const std::string& isa) {
  std::vector<uint8_t> all(256), packed(65536);
  for (size_t i = 0; i < 256; ++i) all[i] = static_cast<uint8_t>(i);
  std::vector<float> x(1000), one(256, 1.0f), y[2], decoded[2];
  for (float& value : x)
    value = std::ldexp(random_float(), static_cast<int>(next_random() % 40) - 20);
  std::vector<uint8_t> codes[2];
  for (pk_format format = 0; format < 2; ++format) {
    pk_pack(format, 256, 1, all.data(), 1, packed.data());
    for (int i = 0; i < 2; ++i) {
      pk_set_isa(i == 0 ? "scalar" : isa.c_str());
      y[i].assign(256, 0);
      pk_linear_f8w(nullptr, 1, 256, 1, PK_FLOAT32, one.data(), 1, format, packed.data(),
                    one.data(), 0, PK_FLOAT32, nullptr, PK_FLOAT32, y[i].data(), 256);
      codes[i].assign(1000, 0);
      float scale;
      pk_quantize_rows_f8(format, 1, 1000, x.data(), 1000, codes[i].data(), 1000, &scale);
    }
    bool equal = true;
    for (size_t i = 0; i < 256; ++i) {
      equal = equal && (y[0][i] == y[1][i] || (std::isnan(y[0][i]) && std::isnan(y[1][i])));
    }
    expect(equal, "the value of every code", isa, 1, 256, 1);
    expect(codes[0] == codes[1], "quantize_rows_f8", isa, 1, 1, 1000);
  }
}

}  // namespace

int main() {
  const int64_t sizes_m[] = {1, 2, 3, 4, 5, 7, 13}, sizes_n[] = {1, 31, 33, 64};
  const int64_t sizes_k[] = {1, 15, 64, 65, 127, 1000, 4500};
  const std::string present = pk_present_isas();
  std::printf("%s; here: %s\n", pk_build_info(), present.c_str());
  for (size_t start = 0; start < present.size();) {
    const size_t end = std::min(present.find(',', start), present.size());
    const std::string isa = present.substr(start, end - start);
    start = end + 1;
    if (pk_set_isa(isa.c_str()) != PK_OK) return 2;
    std::printf("%s: %s", isa.c_str(), pk_kernel_name("linear_s8"));
    std::printf(", %s\n", pk_kernel_name("linear_f8w"));
    check_codes(isa);
    for (int64_t k : sizes_k) {
      for (int64_t n : sizes_n) {
        for (int64_t m : sizes_m) check(Case(m, n, k), isa);
      }
    }
    check(Case(2, 3, 131072 + 5), isa);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

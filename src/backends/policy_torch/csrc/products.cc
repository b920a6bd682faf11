/* linear_* of plain codes, and packed_linear_*. */
#include "executor.h"
#include "kernel_functions.h"
#include "operators.h"
#include "weight.h"

namespace {

enum Operation { kS8, kS8w, kF8, kF8w };

struct Product {
  Operation operation;
  View x, x_scale, weight, scale, bias;
  bool packed;
  int64_t n, k;
  pk_format code; /* of the weight */
  int32_t dtype;  /* of the result */
};

bool is_float8(pk_format code) { return code == PK_F8_E4M3FN || code == PK_F8_E5M2; }

void check_vector(Call& call, const char* name, const View& given, int64_t size, bool or_one,
                  bool any_float = false) {
  if (given.dtype != dtypes.float32 && !any_float) {
    call.fail("policy_torch: expected %s in float32", name);
  }
  if (given.elements == size || (or_one && given.elements == 1)) return;
  call.fail("policy_torch: expected %s of %lld elements%s, got %lld", name,
            static_cast<long long>(size), or_one ? " or one" : "",
            static_cast<long long>(given.elements));
}

void check(Call& call, const Product& product) {
  const bool float8 = product.operation == kF8 || product.operation == kF8w;
  if (product.x.dim < 1 || product.x.last() != product.k) {
    call.fail(
        "policy_torch: expected an input of shape (..., %lld), got one of %lld axes, the last "
        "of size %lld",
        static_cast<long long>(product.k), static_cast<long long>(product.x.dim),
        static_cast<long long>(product.x.last()));
  } else if (float8 ? !is_float8(product.code) : product.code != PK_S8) {
    call.fail("policy_torch: expected a weight in %s", float8 ? "float8" : "int8");
  }
  check_vector(call, "a weight's scale", product.scale, product.n, float8);
  if (product.bias) check_vector(call, "a bias", product.bias, product.n, false, true);
}

/* The input's codes and scales for linear_f8: those that were given, or made from floats. */
void quantize_input(Call& call, const TorchExecutor& executor, Product* product) {
  if (call.failed()) return;
  if (is_float8(code_kind(product->x.dtype))) {
    if (!product->x_scale) call.fail("policy_torch: expected a scale beside an input in float8");
  } else if (product->x_scale) {
    product->x = encoded(call, executor, product->x, product->x_scale, PK_F8_E4M3FN);
  } else {
    product->x = quantized_rows(call, executor, product->x, &product->x_scale);
  }
}

pk_status run(const Product& product, const pk_executor* threads, const Rows& x, const void* w,
              pk_dtype y_kind, void* y) {
  const int64_t m = x.m, n = product.n, k = product.k, ldy = n > 0 ? n : 1;
  const void *data = x.view.data, *bias = product.bias.data;
  const float* scale = product.scale.as<float>();
  const int64_t step = product.scale.elements == n ? 1 : 0;
  const pk_dtype x_kind = float_kind(x.view.dtype);
  const pk_dtype bias_kind = product.bias ? float_kind(product.bias.dtype) : PK_FLOAT32;
  switch (product.operation) {
    case kS8:
      return kernels.linear_s8(threads, m, n, k, x_kind, data, x.stride, w, scale, bias_kind, bias,
                               y_kind, y, ldy);
    case kS8w:
      return kernels.linear_s8w(threads, m, n, k, x_kind, data, x.stride, w, scale, bias_kind, bias,
                                y_kind, y, ldy);
    case kF8w:
      return kernels.linear_f8w(threads, m, n, k, x_kind, data, x.stride, product.code, w, scale,
                                step, bias_kind, bias, y_kind, y, ldy);
    default:
      return kernels.linear_f8(threads, m, n, k, code_kind(x.view.dtype), x.view.as<uint8_t>(),
                               x.stride, product.x_scale.as<float>(),
                               product.x_scale.elements == m ? 1 : 0, product.code, w, scale, step,
                               bias_kind, bias, y_kind, y, ldy);
  }
}

void multiply(Call& call, Product product) {
  check(call, product);
  const TorchExecutor executor;
  const bool codes = product.operation == kF8;
  if (codes) quantize_input(call, executor, &product);
  const Rows x = call.rows(product.x, codes ? product.x.dtype : float_or_float32(product.x.dtype));
  if (codes) check_vector(call, "an input's scale", product.x_scale, x.m, true);
  Weight weight;
  const void* w = product.packed ? weight.packed(call, product.weight, product.n, product.k)
                                 : weight.pack(call, executor.get(), product.weight, product.code,
                                               product.n, product.k);
  product.scale = call.dense(product.scale, dtypes.float32);
  if (codes) product.x_scale = call.dense(product.x_scale, dtypes.float32);
  if (product.bias) product.bias = call.dense(product.bias, float_or_float32(product.bias.dtype));
  const int32_t inside = float_or_float32(product.dtype);
  const View y = call.empty_rows(product.x, product.x.dim - 1, product.n, inside);
  void* out = call.data_of(y);
  if (call.failed()) return;
  call.check(run(product, executor.get(), x, w, float_kind(inside), out));
  call.give(0, call.dense(y, product.dtype));
}

void multiply_codes(Call& call, Product product) {
  const View& codes = product.weight;
  if (codes.dim != 2) {
    call.fail("policy_torch: expected codes of shape (n, k), got %lld axes",
              static_cast<long long>(codes.dim));
    return;
  }
  product.n = codes.sizes[0];
  product.k = codes.sizes[1];
  product.code = code_kind(codes.dtype);
  multiply(call, product);
}

/* (x, codes, scale, bias, dtype) */
Product codes_arguments(Call& call, Operation operation) {
  return {operation,
          call.tensor(0),
          View{},
          call.tensor(1),
          call.tensor(2),
          call.optional_tensor(3),
          false,
          0,
          0,
          -1,
          call.dtype(4)};
}

/* (x, packed, n, k, codes, scale, bias, dtype) */
Product packed_arguments(Call& call, Operation operation) {
  return {operation,       call.tensor(0),           View{},       call.tensor(1),
          call.tensor(5),  call.optional_tensor(6),  true,         call.integer(2),
          call.integer(3), code_kind(call.dtype(4)), call.dtype(7)};
}

}  // namespace

void linear_s8(Call& call) { multiply_codes(call, codes_arguments(call, kS8)); }
void linear_s8w(Call& call) { multiply_codes(call, codes_arguments(call, kS8w)); }
void linear_f8w(Call& call) { multiply_codes(call, codes_arguments(call, kF8w)); }

/* (x_codes, x_scale, codes, scale, bias, dtype) */
void linear_f8(Call& call) {
  const View x = call.tensor(0), x_scale = call.tensor(1), codes = call.tensor(2);
  const View scale = call.tensor(3), bias = call.optional_tensor(4);
  if (!is_float8(code_kind(x.dtype))) call.fail("policy_torch: expected an input in float8");
  multiply_codes(call, {kF8, x, x_scale, codes, scale, bias, false, 0, 0, -1, call.dtype(5)});
}

void packed_linear_s8(Call& call) { multiply(call, packed_arguments(call, kS8)); }
void packed_linear_s8w(Call& call) { multiply(call, packed_arguments(call, kS8w)); }
void packed_linear_f8w(Call& call) { multiply(call, packed_arguments(call, kF8w)); }

/* (x, x_scale, packed, n, k, codes, scale, bias, dtype) */
void packed_linear_f8(Call& call) {
  const View x = call.tensor(0), x_scale = call.optional_tensor(1), packed = call.tensor(2);
  const View scale = call.tensor(6), bias = call.optional_tensor(7);
  multiply(call, {kF8, x, x_scale, packed, scale, bias, true, call.integer(3), call.integer(4),
                  code_kind(call.dtype(5)), call.dtype(8)});
}

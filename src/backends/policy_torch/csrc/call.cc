#include "call.h"

#include <stdarg.h>
#include <stdio.h>

#include "kernel_functions.h"

using shim::torch;

Dtypes dtypes;

static constexpr int kMostAxes = 64;

pk_dtype float_kind(int32_t dtype) {
  if (dtype == dtypes.float32) return PK_FLOAT32;
  if (dtype == dtypes.bfloat16) return PK_BFLOAT16;
  return dtype == dtypes.float16 ? PK_FLOAT16 : -1;
}

int32_t float_or_float32(int32_t dtype) { return float_kind(dtype) >= 0 ? dtype : dtypes.float32; }

pk_format code_kind(int32_t dtype) {
  if (dtype == dtypes.int8) return PK_S8;
  if (dtype == dtypes.float8_e4m3fn) return PK_F8_E4M3FN;
  return dtype == dtypes.float8_e5m2 ? PK_F8_E5M2 : -1;
}

bool View::contiguous() const {
  int64_t expected = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    if (sizes[i] != 1 && strides[i] != expected) return elements == 0;
    expected *= sizes[i];
  }
  return true;
}

void Call::fail(const char* format, ...) {
  if (failed()) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message_, sizeof(message_), format, arguments);
  va_end(arguments);
}

void Call::check(pk_status status) {
  if (status != PK_OK) fail("%s", kernels.last_error());
}

View Call::own(shim::Tensor handle) {
  View view = {handle, nullptr, nullptr, nullptr, 0, 1, -1};
  if (owned_count_ == kMostTensors) {
    fail("policy_torch: expected at most %d tensors in a call", kMostTensors);
    return view;
  }
  owned_[owned_count_++] = handle;
  int64_t *sizes = nullptr, *strides = nullptr;
  if (torch.aoti_torch_get_dim(handle, &view.dim) != 0 ||
      torch.aoti_torch_get_sizes(handle, &sizes) != 0 ||
      torch.aoti_torch_get_strides(handle, &strides) != 0 ||
      torch.aoti_torch_get_dtype(handle, &view.dtype) != 0 ||
      torch.torch_get_const_data_ptr(handle, &view.data) != 0) {
    fail("policy_torch: torch could not describe a tensor");
    view.dim = 0;
    return view;
  }
  view.sizes = sizes;
  view.strides = strides;
  for (int64_t i = 0; i < view.dim; ++i) view.elements *= sizes[i];
  return view;
}

View Call::tensor(int place) { return own(reinterpret_cast<shim::Tensor>(stack_[place])); }

View Call::optional_tensor(int place) {
  shim::Value* value = reinterpret_cast<shim::Value*>(stack_[place]);
  if (value == nullptr) return View{};
  const shim::Tensor handle = reinterpret_cast<shim::Tensor>(*value);
  if (torch.torch_delete_stable_ivalue != nullptr) {
    torch.torch_delete_stable_ivalue(value);
  } else {
    torch.operator_delete(value);
  }
  return own(handle);
}

View Call::empty(int64_t dim, const int64_t* sizes, int32_t dtype) {
  int64_t strides[kMostAxes];
  if (dim > kMostAxes) fail("policy_torch: expected at most %d axes", kMostAxes);
  if (failed()) return View{};
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  shim::Tensor made = nullptr;
  if (torch.aoti_torch_empty_strided(dim, sizes, strides, dtype, torch.aoti_torch_device_type_cpu(),
                                     0, &made) != 0) {
    fail("policy_torch: torch could not make a tensor");
    return View{};
  }
  return own(made);
}

View Call::empty_rows(const View& of, int64_t axes, int64_t k, int32_t dtype) {
  int64_t sizes[kMostAxes + 1];
  if (axes > kMostAxes) fail("policy_torch: expected at most %d axes", kMostAxes);
  if (failed()) return View{};
  for (int64_t i = 0; i < axes; ++i) sizes[i] = of.sizes[i];
  sizes[axes] = k;
  return empty(axes + 1, sizes, dtype);
}

void* Call::data_of(const View& made) {
  void* data = nullptr;
  if (!failed() && torch.torch_get_mutable_data_ptr(made.handle, &data) != 0) {
    fail("policy_torch: torch could not give a tensor's memory");
  }
  return data;
}

View Call::dense(const View& view, int32_t dtype) {
  if (failed() || (view.dtype == dtype && view.contiguous())) return view;
  const View made = empty(view.dim, view.sizes, dtype);
  if (!failed() && torch.aoti_torch_copy_(made.handle, view.handle, 0) != 0) {
    fail("policy_torch: torch could not copy a tensor");
  }
  return made;
}

/* Whether axes before the last are steps of one length, and of no less than a row. */
static bool has_rows(const View& view, Rows* out) {
  out->k = view.last();
  out->m = 1;
  out->stride = out->k;
  for (int64_t i = view.dim - 2; i >= 0; --i) {
    if (view.sizes[i] == 1) continue;
    if (out->m == 1) {
      out->stride = view.strides[i];
    } else if (view.strides[i] != out->stride * out->m) {
      return false;
    }
    out->m *= view.sizes[i];
  }
  const bool whole = view.dim == 0 || out->k <= 1 || view.strides[view.dim - 1] == 1;
  return whole && (out->m <= 1 || out->stride >= out->k);
}

Rows Call::rows(const View& view, int32_t dtype) {
  Rows found = {view, 1, 1, 1};
  if (failed()) return found;
  if (view.dtype != dtype || view.elements == 0 || !has_rows(view, &found)) {
    found.view = dense(view, dtype);
    if (failed()) return found;
    found.k = found.stride = view.last();
    found.m = 1;
    for (int64_t i = 0; i < view.dim - 1; ++i) found.m *= view.sizes[i];
  }
  if (found.m <= 1 || found.stride < 1) found.stride = found.k > 0 ? found.k : 1;
  return found;
}

void Call::give(int place, const View& made) {
  if (failed()) return;
  for (int i = 0; i < owned_count_; ++i) {
    if (owned_[i] == made.handle) owned_[i] = nullptr;
  }
  results_[place] = made.handle;
}

void Call::end(int results) {
  for (int i = 0; i < owned_count_; ++i) {
    if (owned_[i] != nullptr) torch.aoti_torch_delete_tensor_object(owned_[i]);
  }
  for (int i = 0; i < results; ++i) {
    if (!failed()) {
      stack_[i] = reinterpret_cast<shim::Value>(results_[i]);
    } else if (results_[i] != nullptr) {
      torch.aoti_torch_delete_tensor_object(results_[i]);
    }
  }
}

#include "torch_shim.h"

#include <dlfcn.h>
#include <string.h>

namespace shim {

Functions torch;

namespace {

/* A function's address as a pointer to it, which C++ has no cast for. */
template <class Function>
bool find(void* library, const char* name, Function* out) {
  void* address = dlsym(library, name);
  memcpy(out, &address, sizeof(address));
  return address != nullptr;
}

}  // namespace

const char* find_functions() {
  /* Never closed: the operators live as long as the process. */
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "libtorch_cpu.so";
#define POLICY_TORCH_FIND(result, name, arguments) \
  if (!find(library, #name, &torch.name)) return #name;
  POLICY_TORCH_SHIM(POLICY_TORCH_FIND)
#undef POLICY_TORCH_FIND
  if (!find(library, "torch_delete_stable_ivalue", &torch.torch_delete_stable_ivalue) &&
      !find(library, "_ZdlPv", &torch.operator_delete)) {
    return "torch_delete_stable_ivalue";
  }
  return nullptr;
}

}  // namespace shim

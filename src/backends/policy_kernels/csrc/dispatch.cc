// Compiled without any instruction set flag: it runs before the CPU is known.
#include "dispatch.h"

#include <atomic>
#include <cstring>

#include "checks.h"

#define PK_TEXT_(value) #value
#define PK_TEXT(value) PK_TEXT_(value)

#if defined(__clang__)
#define PK_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define PK_COMPILER \
  "gcc " PK_TEXT(__GNUC__) "." PK_TEXT(__GNUC_MINOR__) "." PK_TEXT(__GNUC_PATCHLEVEL__)
#else
#error "the kernels are written for gcc or clang"
#endif

// The tables below, plainest first.
#define PK_COMPILED_ISAS "scalar"

namespace pk {
namespace {

bool always() { return true; }

struct Candidate {
  const KernelTable* table;
  bool (*present)();
};

// Plainest first; the last one that is present is the default.
const Candidate candidates[] = {
    {&scalar_kernels, always},
};

const KernelTable* best() {
  const KernelTable* table = &scalar_kernels;
  for (const Candidate& candidate : candidates) {
    if (candidate.present()) table = candidate.table;
  }
  return table;
}

// Null until the first use, so that nothing runs while the library is loaded.
std::atomic<const KernelTable*> chosen{nullptr};

// The names of the instruction sets of this build that this CPU has, comma separated.
void list_present(char* text, size_t capacity) {
  size_t length = 0;
  text[0] = '\0';
  for (const Candidate& candidate : candidates) {
    if (!candidate.present()) continue;
    const char* separator = length == 0 ? "" : ",";
    const size_t added = std::strlen(separator) + std::strlen(candidate.table->isa);
    if (length + added >= capacity) return;
    std::strcat(std::strcat(text, separator), candidate.table->isa);
    length += added;
  }
}

struct Operation {
  const char* op;
  const char* (*kernel)(const KernelTable&);
};

#define PK_OPERATION(op) {#op, [](const KernelTable& table) { return table.op.name; }}

const Operation operations[] = {
    PK_OPERATION(quantize_rows_s8), PK_OPERATION(encode_f8), PK_OPERATION(quantize_rows_f8),
    PK_OPERATION(decode_f8),        PK_OPERATION(linear_s8), PK_OPERATION(linear_s8_codes),
    PK_OPERATION(linear_s8w),       PK_OPERATION(linear_f8), PK_OPERATION(linear_f8w),
};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* table = chosen.load(std::memory_order_relaxed);
  if (table == nullptr) {
    // Two threads may both get here; they store the same value unless pk_set_isa came between,
    // whose choice must then stand.
    const KernelTable* expected = nullptr;
    const KernelTable* found = best();
    table = chosen.compare_exchange_strong(expected, found) ? found : expected;
  }
  return *table;
}

}  // namespace pk

int32_t pk_abi_version(void) { return PK_ABI_VERSION; }

const char* pk_build_info(void) { return "compiler=" PK_COMPILER ";isas=" PK_COMPILED_ISAS; }

const char* pk_isa(void) { return pk::kernels().isa; }

pk_status pk_set_isa(const char* name) {
  for (const pk::Candidate& candidate : pk::candidates) {
    if (name == nullptr || std::strcmp(name, candidate.table->isa) != 0) continue;
    if (!candidate.present()) break;
    pk::chosen.store(candidate.table);
    return PK_OK;
  }
  char present[128];
  pk::list_present(present, sizeof present);
  return pk::fail(PK_ERR_UNSUPPORTED,
                  "pk_set_isa: expected an instruction set that is compiled in and that this CPU "
                  "has, got '%.64s'. Compiled: %s. Of these this CPU has: %s",
                  name == nullptr ? "NULL" : name, PK_COMPILED_ISAS, present);
}

const char* pk_kernel_name(const char* op) {
  for (const pk::Operation& operation : pk::operations) {
    if (op != nullptr && std::strcmp(op, operation.op) == 0) {
      return operation.kernel(pk::kernels());
    }
  }
  pk::fail(PK_ERR_UNSUPPORTED,
           "pk_kernel_name: expected an operation, got '%.64s'. Operations: quantize_rows_s8, "
           "encode_f8, quantize_rows_f8, decode_f8, linear_s8, linear_s8_codes, linear_s8w, "
           "linear_f8, linear_f8w",
           op == nullptr ? "NULL" : op);
  return nullptr;
}

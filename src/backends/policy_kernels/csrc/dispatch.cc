// Compiled without any instruction set flag: it runs before the CPU is known.
#include "dispatch.h"

#include <atomic>
#include <cstdio>
#include <cstring>

#include "checks.h"
#include "cpu.h"
#if defined(PK_X86)
#include "amx/amx.h"
#include "avx2/avx2.h"
#include "avx512/avx512.h"
#elif defined(PK_NEON)
#include "neon/neon.h"
#endif

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

// The names of the tables below, in their order.
#if defined(PK_X86)
#define PK_COMPILED_ISAS "scalar,avx2,avxvnni,avx512vnni,avx512bf16,amx"
#elif defined(PK_NEON)
#define PK_COMPILED_ISAS "scalar,neon"
#else
#define PK_COMPILED_ISAS "scalar"
#endif

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
#if defined(PK_X86)
    {&avx2_kernels, cpu_has_avx2},
    {&avxvnni_kernels, cpu_has_avxvnni},
    {&avx512vnni_kernels, cpu_has_avx512vnni},
    {&avx512bf16_kernels, cpu_has_avx512bf16},
    {&amx_kernels, cpu_has_amx},
#elif defined(PK_NEON)
    {&neon_kernels, cpu_has_dotprod},
#endif
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

// The group of kernels that serves an operation, by the name of its instruction set.
struct Operation {
  const char* op;
  const char* (*isa)(const KernelTable&);
};

const char* rows_isa(const KernelTable& table) { return table.rows->isa; }
const char* s8_isa(const KernelTable& table) { return table.s8->isa; }
const char* float_isa(const KernelTable& table) {
  return table.bfloat16 != nullptr ? table.bfloat16->product.isa : table.float32->isa;
}

const Operation operations[] = {
    {"quantize_rows_s8", rows_isa}, {"encode_f8", rows_isa},       {"quantize_rows_f8", rows_isa},
    {"decode_f8", rows_isa},        {"dequantize_rows", rows_isa}, {"linear_s8", s8_isa},
    {"linear_s8_codes", s8_isa},    {"linear_s8w", float_isa},     {"linear_f8", float_isa},
    {"linear_f8w", float_isa},
};

thread_local char kernel_name[64];
char present_names[128];

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

const char* pk_present_isas(void) {
  // Every thread that gets here writes the same bytes.
  pk::list_present(pk::present_names, sizeof pk::present_names);
  return pk::present_names;
}

const char* pk_amx_permission(void) { return pk::amx_permission(); }

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
    if (op == nullptr || std::strcmp(op, operation.op) != 0) continue;
    std::snprintf(pk::kernel_name, sizeof pk::kernel_name, "%s_%s", op,
                  operation.isa(pk::kernels()));
    return pk::kernel_name;
  }
  pk::fail(PK_ERR_UNSUPPORTED,
           "pk_kernel_name: expected an operation, got '%.64s'. Operations: quantize_rows_s8, "
           "encode_f8, quantize_rows_f8, decode_f8, dequantize_rows, linear_s8, linear_s8_codes, "
           "linear_s8w, "
           "linear_f8, linear_f8w",
           op == nullptr ? "NULL" : op);
  return nullptr;
}

#include "cpu.h"

#include <atomic>
#include <cerrno>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pk {

#if defined(__x86_64__)

namespace {

struct Leaf {
  unsigned a, b, c, d;
};

Leaf leaf(unsigned number, unsigned part) {
  Leaf found = {0, 0, 0, 0};
  __get_cpuid_count(number, part, &found.a, &found.b, &found.c, &found.d);
  return found;
}

bool bit(unsigned word, int position) { return (word >> position & 1u) != 0; }

// The register state that the system saves: 0x6 for AVX, 0xe6 for AVX-512, 0x60000 for AMX.
bool system_saves(uint64_t state) {
  if (!bit(leaf(1, 0).c, 27)) return false;  // OSXSAVE
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const uint64_t enabled = static_cast<uint64_t>(high) << 32 | low;
  return (enabled & state) == state;
}

enum Feature : unsigned {
  kKnown = 1,
  kAvx2 = 2,
  kAvxVnni = 4,
  kAvx512Vnni = 8,
  kAvx512Bf16 = 16,
  kTiles = 32,
};

unsigned ask() {
  unsigned found = kKnown;
  const Leaf basic = leaf(1, 0), more = leaf(7, 0), newer = leaf(7, 1);
  if (!system_saves(0x6) || !bit(basic.c, 12) || !bit(basic.c, 29) || !bit(more.b, 5)) return found;
  found |= kAvx2;  // with FMA and F16C
  if (bit(newer.a, 4)) found |= kAvxVnni;
  const bool avx512 = bit(more.b, 16) && bit(more.b, 17) && bit(more.b, 30) && bit(more.b, 31);
  if (!system_saves(0xe6) || !avx512 || !bit(more.c, 11)) return found;
  found |= kAvx512Vnni;
  if (!bit(more.c, 1) || !bit(newer.a, 5)) return found;
  found |= kAvx512Bf16;
  const bool amx = bit(more.d, 22) && bit(more.d, 24) && bit(more.d, 25);
  if (system_saves(0x60000) && amx) found |= kTiles;
  return found;
}

// Asked once: in a virtual machine each question takes some 20 microseconds.
bool has(Feature feature) {
  static std::atomic<unsigned> known{0};
  unsigned found = known.load(std::memory_order_relaxed);
  if (found == 0) known.store(found = ask(), std::memory_order_relaxed);
  return (found & feature) != 0;
}

#ifdef __linux__
// Asks the system for the tile registers; the answer holds for the whole process and its forks.
// Returns 0 or an error number. (Linux Documentation/arch/x86/xstate.rst)
[[maybe_unused]] int request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
}
#else
int request_tiles() { return ENOSYS; }
#endif

}  // namespace

bool cpu_has_avx2() { return has(kAvx2); }
bool cpu_has_avxvnni() { return has(kAvxVnni); }
bool cpu_has_avx512vnni() { return has(kAvx512Vnni); }
bool cpu_has_avx512bf16() { return has(kAvx512Bf16); }

const char* amx_permission() {
#ifdef PK_EMULATE_AMX
  return "emulated";
#else
  if (!has(kTiles)) return "absent";
  static const int error = request_tiles();
  if (error == 0) return "granted";
  return error == ENOSPC ? "refused: a thread's alternative signal stack is too small"
                         : "refused: the system grants no tile registers";
#endif
}

bool cpu_has_amx() {
#ifdef PK_EMULATE_AMX
  return cpu_has_avx512bf16();
#else
  return amx_permission()[0] == 'g';
#endif
}

#else

bool cpu_has_avx2() { return false; }
bool cpu_has_avxvnni() { return false; }
bool cpu_has_avx512vnni() { return false; }
bool cpu_has_avx512bf16() { return false; }
bool cpu_has_amx() { return false; }
const char* amx_permission() { return "absent"; }

#endif

#if defined(__aarch64__) && defined(__linux__)
// HWCAP_ASIMDDP, in Linux Documentation/arch/arm64/elf_hwcaps.rst.
bool cpu_has_dotprod() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
#else
bool cpu_has_dotprod() { return false; }
#endif

}  // namespace pk

#include "cpu.h"

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

[[maybe_unused]] bool cpu_has_tiles() {
  const unsigned features = leaf(7, 0).d;
  return cpu_has_avx512bf16() && system_saves(0x60000) && bit(features, 22) && bit(features, 24) &&
         bit(features, 25);
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

bool cpu_has_avx2() {
  const Leaf basic = leaf(1, 0);
  return system_saves(0x6) && bit(basic.c, 12) && bit(basic.c, 29) && bit(leaf(7, 0).b, 5);
}

bool cpu_has_avxvnni() { return cpu_has_avx2() && bit(leaf(7, 1).a, 4); }

bool cpu_has_avx512vnni() {
  const Leaf features = leaf(7, 0);
  return cpu_has_avx2() && system_saves(0xe6) && bit(features.b, 16) && bit(features.b, 17) &&
         bit(features.b, 30) && bit(features.b, 31) && bit(features.c, 11);
}

bool cpu_has_avx512bf16() {
  return cpu_has_avx512vnni() && bit(leaf(7, 0).c, 1) && bit(leaf(7, 1).a, 5);
}

const char* amx_permission() {
#ifdef PK_EMULATE_AMX
  return "emulated";
#else
  if (!cpu_has_tiles()) return "absent";
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

// What this CPU and system offer. Compiled without any instruction set flag.
#pragma once

namespace pk {

bool cpu_has_avx2();        // with FMA and F16C
bool cpu_has_avxvnni();     // and AVX2
bool cpu_has_avx512vnni();  // with F, BW, DQ, VL
bool cpu_has_avx512bf16();  // and VBMI and AVX512-VNNI
bool cpu_has_amx();         // tiles, int8 and bfloat16, with the system's permission
bool cpu_has_dotprod();     // 64 bit Arm's, with NEON

// As pk_amx_permission().
const char* amx_permission();

}  // namespace pk

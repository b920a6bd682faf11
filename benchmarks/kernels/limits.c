/* What the machine can do at most, for bench_linear.py: compiled with -march=native when it runs.
 * Each function is called by several threads at once and returns what it did, for the caller's
 * clock. */
#include <immintrin.h>
#include <stdint.h>

#define CHAINS 24

/* int8 products of registers alone; returns how many were made. */
int64_t int8_products(int64_t rounds) {
#if defined(__AVX512VNNI__)
  __m512i sums[CHAINS], x = _mm512_set1_epi8(3), w = _mm512_set1_epi8(5);
  for (int i = 0; i < CHAINS; ++i) sums[i] = _mm512_set1_epi32(i);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], x, w);
    __asm__ volatile("" : "+v"(x), "+v"(w));
  }
  int32_t sum = 0;
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; ++i) sum += _mm512_reduce_add_epi32(sums[i]);
  __asm__ volatile("" : : "r"(sum));
  return rounds * CHAINS * 64;
#elif defined(__AVX2__)
  __m256i sums[12], x = _mm256_set1_epi16(3), w = _mm256_set1_epi16(5);
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_epi32(i);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(x, w));
    __asm__ volatile("" : "+x"(x), "+x"(w));
  }
  __m256i sum = sums[0];
  for (int i = 1; i < 12; ++i) sum = _mm256_add_epi32(sum, sums[i]);
  __asm__ volatile("" : : "x"(sum));
  return rounds * 12 * 16;
#else
  return 0 * rounds;
#endif
}

/* bfloat16 products of registers alone; 0 where the CPU has none. */
int64_t bfloat16_products(int64_t rounds) {
#if defined(__AVX512BF16__)
  __m512 sums[CHAINS];
  __m512i x = _mm512_set1_epi16(0x3c00), w = x;
  for (int i = 0; i < CHAINS; ++i) sums[i] = _mm512_set1_ps((float)i);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)x, (__m512bh)w);
    __asm__ volatile("" : "+v"(x), "+v"(w));
  }
  float sum = 0;
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; ++i) sum += _mm512_reduce_add_ps(sums[i]);
  __asm__ volatile("" : : "x"(sum));
  return rounds * CHAINS * 32;
#else
  return 0 * rounds;
#endif
}

typedef uint64_t Line __attribute__((vector_size(64)));

/* Reads memory in order, from an address that is a multiple of 64; returns the number of bytes. */
int64_t bytes_read(const uint8_t* data, int64_t bytes, int64_t rounds) {
  Line sums[8] = {0};
  const int64_t lines = bytes / 64 / 8 * 8;
  for (int64_t round = 0; round < rounds; ++round) {
    const Line* from = (const Line*)data;
    for (int64_t i = 0; i < lines; i += 8) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        __builtin_prefetch(from + i + j + 256);
        sums[j] ^= from[i + j];
      }
    }
    __asm__ volatile("" : : : "memory");
  }
  Line sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
  __asm__ volatile(""
                   :
                   : "r"(sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7]));
  return lines * 64 * rounds;
}

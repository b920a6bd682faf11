// Packing and unpacking: no arithmetic to speak of, so plain four byte copies reach the speed of
// memory and serve every instruction set.
#include "packed.h"

#include "checks.h"
#include "threads.h"

namespace pk {
namespace {

constexpr int64_t kHalf = kPanel / 2;  // channels in one of the two halves of a panel's block

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// One half block from rows of w: `rows` channels of `length` codes.
void pack_half(int64_t rows, int64_t length, const uint8_t* w, int64_t ldw, uint8_t* out) {
  if (rows == kHalf && length == kBlock) {
    for (int64_t channel = 0; channel < kHalf; ++channel) {
      const uint8_t* from = w + channel * ldw;
      for (int64_t k4 = 0; k4 < 16; ++k4)
        std::memcpy(out + k4 * 64 + channel * 4, from + k4 * 4, 4);
    }
    return;
  }
  std::memset(out, 0, kPanelBlockBytes / 2);
  for (int64_t channel = 0; channel < rows; ++channel) {
    for (int64_t k = 0; k < length; ++k) {
      out[k / 4 * 64 + channel * 4 + k % 4] = w[channel * ldw + k];
    }
  }
}

void unpack_half(int64_t rows, int64_t length, const uint8_t* in, uint8_t* w, int64_t ldw) {
  for (int64_t channel = 0; channel < rows; ++channel) {
    uint8_t* to = w + channel * ldw;
    int64_t k = 0;
    for (; k + 4 <= length; k += 4) std::memcpy(to + k, in + k * 16 + channel * 4, 4);
    for (; k < length; ++k) to[k] = in[k / 4 * 64 + channel * 4 + k % 4];
  }
}

uint32_t sum_of_codes(int64_t k, const int8_t* w) {
  int32_t sum = 0;
  for (; k >= kBlock; k -= kBlock, w += kBlock) {
    // A block's sum fits an int16, so that the compiler adds eight at a time.
    int16_t block = 0;
    for (int64_t i = 0; i < kBlock; ++i) block = static_cast<int16_t>(block + w[i]);
    sum += block;
  }
  for (int64_t i = 0; i < k; ++i) sum += w[i];
  return static_cast<uint32_t>(sum);
}

PackedHeader header_of(pk_format code, int64_t n, int64_t k) {
  PackedHeader header{};
  std::memcpy(header.magic, kPackedMagic, sizeof header.magic);
  header.n = n;
  header.k = k;
  header.code = code;
  return header;
}

struct Packing {
  Packed packed;
  uint8_t* w;  // read by pack_panel, written by unpack_panel
  int64_t ldw;
};

void pack_panel(void* context, int64_t panel) {
  const Packing& job = *static_cast<const Packing*>(context);
  const Packed& packed = job.packed;
  const int64_t channels = smaller(packed.n() - panel * kPanel, kPanel);
  const uint8_t* w = job.w + panel * kPanel * job.ldw;
  const bool sums = packed.code() == PK_S8;
  PackedHeader header = header_of(packed.code(), packed.n(), packed.k());
  header.channel = panel * kPanel;
  std::memcpy(const_cast<char*>(packed.header(panel)), &header, sizeof header);
  for (int64_t part = 0; part < packed.parts(); ++part) {
    uint32_t* excess = const_cast<uint32_t*>(packed.excess(part, panel));
    const int64_t length = smaller(packed.k() - part * kSumLength, kSumLength);
    for (int64_t i = 0; i < kPanel; ++i) {
      const int8_t* row = reinterpret_cast<const int8_t*>(w + i * job.ldw + part * kSumLength);
      excess[i] = sums && i < channels ? 128u * sum_of_codes(length, row) : 0u;
    }
  }
  uint8_t* out = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(packed.panel(panel)));
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    const int64_t length = smaller(packed.k() - block * kBlock, kBlock);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t rows = smaller(channels - half * kHalf, kHalf);
      pack_half(rows > 0 ? rows : 0, length, w + half * kHalf * job.ldw + block * kBlock, job.ldw,
                out + (block * 2 + half) * (kPanelBlockBytes / 2));
    }
  }
}

void unpack_panel(void* context, int64_t panel) {
  const Packing& job = *static_cast<const Packing*>(context);
  const Packed& packed = job.packed;
  const int64_t channels = smaller(packed.n() - panel * kPanel, kPanel);
  uint8_t* w = job.w + panel * kPanel * job.ldw;
  const uint8_t* in = reinterpret_cast<const uint8_t*>(packed.panel(panel));
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    const int64_t length = smaller(packed.k() - block * kBlock, kBlock);
    for (int64_t half = 0; half < 2; ++half) {
      unpack_half(smaller(channels - half * kHalf, kHalf), length,
                  in + (block * 2 + half) * (kPanelBlockBytes / 2),
                  w + half * kHalf * job.ldw + block * kBlock, job.ldw);
    }
  }
}

// False where the size does not fit an int64_t.
bool packed_bytes(int64_t n, int64_t k, int64_t* bytes) {
  int64_t padded_n, padded_k, blocks, excess, headers;
  if (__builtin_add_overflow(n, kPanel - 1, &padded_n) ||
      __builtin_add_overflow(k, kBlock - 1, &padded_k)) {
    return false;
  }
  padded_n -= padded_n % kPanel;
  padded_k -= padded_k % kBlock;
  const int64_t parts = k / kSumLength + (k % kSumLength != 0 ? 1 : 0);
  const int64_t header_bytes = static_cast<int64_t>(sizeof(PackedHeader));
  return !__builtin_mul_overflow(padded_n, padded_k, &blocks) &&
         !__builtin_mul_overflow(padded_n, parts * 4, &excess) &&
         !__builtin_mul_overflow(padded_n / kPanel, header_bytes, &headers) &&
         !__builtin_add_overflow(blocks, excess, bytes) &&
         !__builtin_add_overflow(*bytes, headers, bytes) &&
         !__builtin_add_overflow(*bytes, int64_t{63}, bytes);
}

void run(const pk_executor* executor, void (*body)(void*, int64_t), Packing& job) {
  // A panel is copied at some 4 bytes per nanosecond.
  const int64_t nanoseconds = job.packed.panels() * job.packed.blocks() * kPanelBlockBytes / 4;
  parallel_for(executor, threads_for(executor, nanoseconds), job.packed.panels(), body, &job);
}

pk_status pack(const char* name, const pk_executor* executor, pk_format code, int64_t n, int64_t k,
               const void* w, int64_t ldw, void* packed) {
  Checks checks(name);
  checks.executor(executor);
  checks.code("code", code);
  checks.size("n", n);
  checks.size("k", k);
  checks.matrix("w", static_cast<const uint8_t*>(w), n, k, ldw);
  checks.vector("packed", static_cast<const char*>(packed), 1);
  if (!checks.ok()) return checks.status();
  int64_t bytes;
  const pk_status status = pk_packed_bytes(n, k, &bytes);
  if (status != PK_OK) return status;
  if (n == 0) return PK_OK;
  // The first header, by which the view knows where the panels are, which then write their own.
  const PackedHeader header = header_of(code, n, k);
  const uintptr_t start = (reinterpret_cast<uintptr_t>(packed) + 63) / 64 * 64;
  std::memcpy(reinterpret_cast<void*>(start), &header, sizeof header);
  uint8_t* rows = const_cast<uint8_t*>(static_cast<const uint8_t*>(w));
  // Where rows have no elements their pointer may be NULL, and no offset may be added to NULL.
  Packing job{Packed(packed, n), rows, k == 0 ? 0 : ldw};
  run(executor, pack_panel, job);
  return PK_OK;
}

pk_status unpack(const char* name, const pk_executor* executor, pk_format code, int64_t n,
                 int64_t k, const void* packed, void* w, int64_t ldw) {
  Checks checks(name);
  checks.executor(executor);
  checks.code("code", code);
  checks.size("n", n);
  checks.size("k", k);
  if (n != 0) checks.packed("packed", packed, n, k, code);
  checks.matrix("w", static_cast<uint8_t*>(w), n, k, ldw);
  if (!checks.ok() || n == 0 || k == 0) return checks.status();
  Packing job{Packed(packed, n), static_cast<uint8_t*>(w), ldw};
  run(executor, unpack_panel, job);
  return PK_OK;
}

}  // namespace
}  // namespace pk

pk_status pk_packed_bytes(int64_t n, int64_t k, int64_t* bytes) {
  pk::Checks checks("pk_packed_bytes");
  checks.size("n", n);
  checks.size("k", k);
  checks.vector("bytes", bytes, 1);
  if (!checks.ok()) return checks.status();
  if (pk::packed_bytes(n, k, bytes)) return PK_OK;
  return pk::fail(PK_ERR_ARGUMENT,
                  "pk_packed_bytes: expected n and k to fit in memory, got n=%lld and k=%lld",
                  static_cast<long long>(n), static_cast<long long>(k));
}

pk_status pk_pack(pk_format code, int64_t n, int64_t k, const void* w, int64_t ldw, void* packed) {
  return pk::pack("pk_pack", nullptr, code, n, k, w, ldw, packed);
}

pk_status pk_pack_on(const pk_executor* executor, pk_format code, int64_t n, int64_t k,
                     const void* w, int64_t ldw, void* packed) {
  return pk::pack("pk_pack_on", executor, code, n, k, w, ldw, packed);
}

pk_status pk_unpack(pk_format code, int64_t n, int64_t k, const void* packed, void* w,
                    int64_t ldw) {
  return pk::unpack("pk_unpack", nullptr, code, n, k, packed, w, ldw);
}

pk_status pk_unpack_on(const pk_executor* executor, pk_format code, int64_t n, int64_t k,
                       const void* packed, void* w, int64_t ldw) {
  return pk::unpack("pk_unpack_on", executor, code, n, k, packed, w, ldw);
}

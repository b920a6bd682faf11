// What the dispatcher knows of the kernels: one table per instruction set, made of groups that
// several tables may share.
//
// A product goes through tiles of activations and panels of packed weights (docs/kernels.md):
//   a tile  [blocks][rows][64]             rows of x, in the type that the multiplication reads
//   a panel [blocks][2][16 k4][16 n][4 k]  one byte codes of 32 channels
// The driver (linear.cc) cuts the work, the row kernels fill tiles and write results, and the
// product kernels multiply one tile by one panel.
#pragma once

#include "policy_kernels.h"

namespace pk {

// Longest run of code products of +-127 whose sum fits an int32: 127 * 127 * 131072 < 2^31.
constexpr int64_t kSumLength = 131072;

constexpr int64_t kBlock = 64;                         // elements of k in a block
constexpr int64_t kPanel = 32;                         // channels in a panel
constexpr int64_t kPanelBlockBytes = kBlock * kPanel;  // bytes of one block of a panel
constexpr int64_t kSumBlocks = kSumLength / kBlock;    // blocks in one int32 sum
constexpr int64_t kMaxTileRows = 128;                  // no product has taller tiles

// How a product reads the int8 codes of x.
enum class TileCode {
  kSigned8,   // int8
  kOffset8,   // code + 128 as uint8; the sum is then too large by 128 * sum(w)
  kSigned16,  // int16
};

// Where one panel's results go, and what happens to them on the way.
struct Output {
  const float* x_scale;  // null: 1 for all
  int64_t x_scale_stride;
  const float* w_scale;
  int64_t w_scale_stride;
  const float* bias;  // null: none
  pk_dtype dtype;
  void* y;
  int64_t ldy;
};

// Row by row work. Written once (rows.inc) and compiled for each instruction set.
struct RowKernels {
  const char* isa;
  void (*quantize_rows_s8)(int64_t m, int64_t k, const float* x, int64_t ldx, int8_t* codes,
                           int64_t ldq, float* scale);
  void (*encode_f8)(pk_format format, int64_t n, const float* x, float scale, uint8_t* codes);
  void (*quantize_rows_f8)(pk_format format, int64_t m, int64_t k, const float* x, int64_t ldx,
                           uint8_t* codes, int64_t ldq, float* scale);
  void (*decode_f8)(pk_format format, int64_t n, const uint8_t* codes, float* y);
  // One row of n codes of any kind, times its scale, rounded once to `dtype`.
  void (*dequantize_row)(pk_format code, pk_dtype dtype, int64_t n, const void* codes, float scale,
                         void* y);

  void (*to_float32)(pk_dtype dtype, int64_t n, const void* x, float* y);

  // One row of a tile: `stride` elements from block to block; the tail is filled with zeros.
  // The first returns the row's scale.
  float (*tile_quantized)(TileCode code, pk_dtype dtype, int64_t k, const void* x, void* row,
                          int64_t stride);
  void (*tile_codes)(TileCode code, int64_t k, const int8_t* x, void* row, int64_t stride);
  void (*tile_floats)(pk_dtype dtype, int64_t k, const void* x, float* row, int64_t stride);
  void (*tile_decoded)(pk_format format, int64_t k, const uint8_t* x, float* row, int64_t stride);

  // totals [rows][32] += float(sums - excess); `first` starts at 0; excess [32] may be null.
  void (*add_sums)(int64_t rows, const int32_t* sums, const uint32_t* excess, bool first,
                   float* totals);
  // The first `columns` of totals [rows][32] to rows of y, of which output.y is the first.
  void (*write)(int64_t rows, int64_t columns, const float* totals, const Output& output);
};

// sums [rows][32] of products of `blocks` blocks; at most kSumBlocks.
struct ProductS8 {
  const char* isa;
  int64_t tile_rows;
  TileCode code;
  void (*multiply)(int64_t rows, int64_t blocks, const void* tile, const int8_t* panel,
                   int32_t* sums);
};

// The same with sums in float32, in an order that keeps them within 1e-6 * sum |x * w| where
// blocks <= kFloatBlocks. The panel holds codes of `code`.
constexpr int64_t kFloatBlocks = 64;
struct ProductFloat {
  const char* isa;
  int64_t tile_rows;
  void (*multiply)(pk_format code, int64_t rows, int64_t blocks, const void* tile,
                   const int8_t* panel, float* sums);
};

// Products whose tiles are bfloat16; exact for what bfloat16 holds, but blind for values below
// its normal range, which tile_bfloat16 finds.
struct ProductBfloat16 {
  ProductFloat product;
  // Returns false when the row holds a value that the product would take for 0.
  bool (*tile_bfloat16)(int64_t k, const uint16_t* x, uint16_t* row, int64_t stride);
  void (*tile_decoded)(pk_format format, int64_t k, const uint8_t* x, uint16_t* row,
                       int64_t stride);
};

struct KernelTable {
  const char* isa;
  const RowKernels* rows;
  const ProductS8* s8;
  const ProductFloat* float32;
  const ProductBfloat16* bfloat16;  // null: none
  int64_t few_rows;                 // so many rows are better served by
  const KernelTable* few;           // this table; null where few_rows is 0
};

extern const KernelTable scalar_kernels;
extern const RowKernels scalar_rows;

}  // namespace pk

#include "linear.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#include "dispatch.h"
#include "scratch.h"
#include "threads.h"

namespace pk {
namespace {

// Tiles that are multiplied by a panel in turn must stay in a core's second level cache with it.
constexpr int64_t kGroupBytes = 576 << 10;
// Rows whose tiles exist at once; more rows are done one pass after the other.
constexpr int64_t kPassBytes = 16 << 20;
// Tasks for each thread: enough that threads end together, too few for the claims to cost.
constexpr int64_t kTasksPerThread = 16;

enum TileState : uint32_t { kEmpty, kFilling, kReady, kReadyAsFloats };

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// One pass over the weights, with all that its tasks share.
struct Pass {
  const Linear* linear;
  const RowKernels* rows;
  const ProductS8* s8;          // one of these three is set,
  const ProductFloat* float32;  // float32 also beside bfloat16
  const ProductBfloat16* bfloat16;

  int64_t k;
  int64_t first_row, row_count;
  int64_t element_bytes;  // of a tile
  int64_t tile_rows, tile_count, tile_bytes;
  int64_t group_tiles;   // tiles of one task
  int64_t chunk_panels;  // panels of one task
  int64_t chunks;
  char* tiles;
  float* x_scale;  // of this pass's rows; used for Input::kQuantized
  std::atomic<uint32_t>* states;
};

const void* x_row(const Pass& pass, int64_t row) {
  const Linear& linear = *pass.linear;
  const bool wide = linear.input == Input::kQuantized || linear.input == Input::kFloats;
  const int64_t bytes = !wide ? 1 : linear.x_type == PK_FLOAT32 ? 4 : 2;
  return static_cast<const char*>(linear.x) + (pass.first_row + row) * linear.ldx * bytes;
}

int64_t rows_of_tile(const Pass& pass, int64_t tile) {
  return smaller(pass.row_count - tile * pass.tile_rows, pass.tile_rows);
}

void fill_float_rows(const Pass& pass, int64_t first, int64_t rows, float* out) {
  const Linear& linear = *pass.linear;
  for (int64_t row = 0; row < rows; ++row, out += kBlock) {
    const void* x = x_row(pass, first + row);
    if (linear.input == Input::kFloats) {
      pass.rows->tile_floats(linear.x_type, pass.k, x, out, rows * kBlock);
    } else {
      pass.rows->tile_decoded(linear.x_type, pass.k, static_cast<const uint8_t*>(x), out,
                              rows * kBlock);
    }
  }
}

bool fill_bfloat16_rows(const Pass& pass, int64_t first, int64_t rows, uint16_t* out) {
  const Linear& linear = *pass.linear;
  bool exact = true;
  for (int64_t row = 0; row < rows; ++row, out += kBlock) {
    const void* x = x_row(pass, first + row);
    if (linear.input == Input::kFloats) {
      const bool seen =
          pass.bfloat16->tile_bfloat16(pass.k, static_cast<const uint16_t*>(x), out, rows * kBlock);
      exact = exact && seen;
    } else {
      pass.bfloat16->tile_decoded(linear.x_type, pass.k, static_cast<const uint8_t*>(x), out,
                                  rows * kBlock);
    }
  }
  return exact;
}

void fill_s8_rows(const Pass& pass, int64_t first, int64_t rows, char* out) {
  const Linear& linear = *pass.linear;
  for (int64_t row = 0; row < rows; ++row, out += kBlock * pass.element_bytes) {
    const void* x = x_row(pass, first + row);
    if (linear.input == Input::kQuantized) {
      pass.x_scale[first + row] =
          pass.rows->tile_quantized(pass.s8->code, linear.x_type, pass.k, x, out, rows * kBlock);
    } else {
      pass.rows->tile_codes(pass.s8->code, pass.k, static_cast<const int8_t*>(x), out,
                            rows * kBlock);
    }
  }
}

TileState fill_tile(const Pass& pass, int64_t tile) {
  const int64_t first = tile * pass.tile_rows;
  const int64_t rows = rows_of_tile(pass, tile);
  char* out = pass.tiles + tile * pass.tile_bytes;
  if (pass.s8 != nullptr) {
    fill_s8_rows(pass, first, rows, out);
    return kReady;
  }
  if (pass.bfloat16 != nullptr &&
      fill_bfloat16_rows(pass, first, rows, reinterpret_cast<uint16_t*>(out))) {
    return kReady;
  }
  // A tile for the float32 product: as many small tiles, one after the other.
  float* floats = reinterpret_cast<float*>(out);
  const int64_t width = pass.linear->w.blocks() * kBlock;
  for (int64_t row = 0; row < rows; row += pass.float32->tile_rows) {
    fill_float_rows(pass, first + row, smaller(rows - row, pass.float32->tile_rows),
                    floats + row * width);
  }
  return kReadyAsFloats;
}

// Makes sure that the tiles of a group are filled, by filling those that nobody has begun and
// waiting for those that another thread is filling.
void fill_group(const Pass& pass, int64_t first, int64_t end) {
  bool waiting = false;
  for (int64_t tile = first; tile < end; ++tile) {
    uint32_t state = pass.states[tile].load(std::memory_order_acquire);
    if (state == kEmpty && pass.states[tile].compare_exchange_strong(state, kFilling)) {
      pass.states[tile].store(fill_tile(pass, tile), std::memory_order_release);
    } else if (state < kReady) {
      waiting = true;
    }
  }
  if (!waiting) return;
  for (int64_t tile = first; tile < end; ++tile) {
    for (int64_t round = 0; pass.states[tile].load(std::memory_order_acquire) < kReady; ++round) {
      wait_a_little(round);
    }
  }
}

void multiply_s8(const Pass& pass, const char* tile, int64_t rows, int64_t panel, float* totals) {
  alignas(64) int32_t sums[kMaxTileRows * kPanel];
  const Packed& w = pass.linear->w;
  for (int64_t part = 0; part < w.parts(); ++part) {
    const int64_t start = part * kSumBlocks;
    pass.s8->multiply(rows, smaller(w.blocks() - start, kSumBlocks),
                      tile + start * rows * kBlock * pass.element_bytes,
                      w.panel(panel) + start * kPanelBlockBytes, sums);
    const bool offset = pass.s8->code == TileCode::kOffset8;
    pass.rows->add_sums(rows, sums, offset ? w.excess(part, panel) : nullptr, part == 0, totals);
  }
}

// Long sums are added up in double, so that their rounding does not grow with k.
void multiply_float(const Pass& pass, const ProductFloat& product, int64_t element_bytes,
                    const char* tile, int64_t rows, int64_t panel, float* totals) {
  const Packed& w = pass.linear->w;
  if (w.blocks() <= kFloatBlocks) {
    product.multiply(w.code(), rows, w.blocks(), tile, w.panel(panel), totals);
    return;
  }
  double wide[kMaxTileRows * kPanel];
  std::memset(wide, 0, sizeof(double) * static_cast<size_t>(rows * kPanel));
  for (int64_t start = 0; start < w.blocks(); start += kFloatBlocks) {
    product.multiply(w.code(), rows, smaller(w.blocks() - start, kFloatBlocks),
                     tile + start * rows * kBlock * element_bytes,
                     w.panel(panel) + start * kPanelBlockBytes, totals);
    for (int64_t i = 0; i < rows * kPanel; ++i) wide[i] += static_cast<double>(totals[i]);
  }
  for (int64_t i = 0; i < rows * kPanel; ++i) totals[i] = static_cast<float>(wide[i]);
}

void multiply_as_floats(const Pass& pass, const char* tile, int64_t rows, int64_t panel,
                        float* totals) {
  const int64_t row_bytes = pass.linear->w.blocks() * kBlock * 4;
  for (int64_t row = 0; row < rows; row += pass.float32->tile_rows) {
    multiply_float(pass, *pass.float32, 4, tile + row * row_bytes,
                   smaller(rows - row, pass.float32->tile_rows), panel, totals + row * kPanel);
  }
}

void multiply_tile(const Pass& pass, int64_t tile, int64_t panel) {
  const Linear& linear = *pass.linear;
  const int64_t rows = rows_of_tile(pass, tile);
  const char* data = pass.tiles + tile * pass.tile_bytes;
  alignas(64) float totals[kMaxTileRows * kPanel];
  if (linear.w.blocks() == 0) {
    std::memset(totals, 0, sizeof(float) * static_cast<size_t>(rows * kPanel));
  } else if (pass.s8 != nullptr) {
    multiply_s8(pass, data, rows, panel, totals);
  } else if (pass.states[tile].load(std::memory_order_relaxed) == kReadyAsFloats) {
    multiply_as_floats(pass, data, rows, panel, totals);
  } else {
    multiply_float(pass, pass.bfloat16->product, 2, data, rows, panel, totals);
  }

  const int64_t row = tile * pass.tile_rows;
  const int64_t channel = panel * kPanel;
  Output output = linear.output;
  if (linear.input == Input::kQuantized) {
    output.x_scale = pass.x_scale + row;
  } else if (output.x_scale != nullptr) {
    output.x_scale += (pass.first_row + row) * output.x_scale_stride;
  }
  output.w_scale += channel * output.w_scale_stride;
  if (output.bias != nullptr) output.bias += channel;
  const int64_t offset = (pass.first_row + row) * output.ldy + channel;
  output.y = static_cast<char*>(output.y) + offset * (output.dtype == PK_FLOAT32 ? 4 : 2);
  pass.rows->write(rows, smaller(linear.w.n() - channel, kPanel), totals, output);
}

// A group of tiles times a chunk of panels; a panel is used by all tiles while it is in cache.
void run_task(void* context, int64_t index) {
  const Pass& pass = *static_cast<const Pass*>(context);
  const int64_t first = index / pass.chunks * pass.group_tiles;
  const int64_t end = smaller(first + pass.group_tiles, pass.tile_count);
  const int64_t first_panel = index % pass.chunks * pass.chunk_panels;
  const int64_t end_panel = smaller(first_panel + pass.chunk_panels, pass.linear->w.panels());
  fill_group(pass, first, end);
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    for (int64_t tile = first; tile < end; ++tile) multiply_tile(pass, tile, panel);
  }
}

// What one thread would need, roughly, for the whole pass.
int64_t nanoseconds(const Pass& pass) {
  const Packed& w = pass.linear->w;
  const int64_t bytes = w.panels() * w.blocks() * kPanelBlockBytes;
  const int64_t per_nanosecond = pass.s8 != nullptr ? 256 : pass.bfloat16 != nullptr ? 128 : 64;
  const int64_t streaming = bytes / 24;
  const int64_t multiplying = bytes / per_nanosecond * pass.row_count;
  return streaming > multiplying ? streaming : multiplying;
}

// Chooses the products that serve this input.
void choose(const KernelTable& table, Pass& pass) {
  const Linear& linear = *pass.linear;
  pass.rows = table.rows;
  if (linear.input == Input::kQuantized || linear.input == Input::kCodesS8) {
    pass.s8 = table.s8;
    pass.tile_rows = pass.s8->tile_rows;
    pass.element_bytes = pass.s8->code == TileCode::kSigned16 ? 2 : 1;
    return;
  }
  pass.float32 = table.float32;
  pass.element_bytes = 4;
  const bool narrow = linear.input == Input::kCodesF8 || linear.x_type == PK_BFLOAT16;
  if (narrow) pass.bfloat16 = table.bfloat16;
  pass.tile_rows =
      pass.bfloat16 != nullptr ? pass.bfloat16->product.tile_rows : pass.float32->tile_rows;
}

// Runs the rows of a pass; what depends on their number is set here.
void run_pass(Pass& pass, int64_t pass_rows) {
  const Linear& linear = *pass.linear;
  pass.row_count = smaller(linear.m - pass.first_row, pass_rows);
  pass.tile_count = divided_up(pass.row_count, pass.tile_rows);
  for (int64_t tile = 0; tile < pass.tile_count; ++tile) {
    pass.states[tile].store(kEmpty, std::memory_order_relaxed);
  }
  const int64_t threads = threads_for(linear.executor, nanoseconds(pass));
  const int64_t groups = divided_up(pass.tile_count, pass.group_tiles);
  const int64_t panels = linear.w.panels();
  pass.chunk_panels = smaller(panels, divided_up(panels * groups, threads * kTasksPerThread));
  pass.chunks = divided_up(panels, pass.chunk_panels);
  parallel_for(linear.executor, threads, groups * pass.chunks, run_task, &pass);
}

// Cuts `bytes` off the front of the memory at `*next`, in multiples of 64.
void* cut(char** next, int64_t bytes) {
  char* start = *next;
  *next += divided_up(bytes, 64) * 64;
  return start;
}

}  // namespace

pk_status run(Linear linear) {
  Pass pass{};
  pass.linear = &linear;
  pass.k = linear.w.k();
  const KernelTable& chosen = kernels();
  choose(linear.m <= chosen.few_rows ? *chosen.few : chosen, pass);

  // Rows as even as can be: 16 rows are two tiles of 8 rather than 12 and 4.
  pass.tile_rows = divided_up(linear.m, divided_up(linear.m, pass.tile_rows));
  const int64_t row_elements = linear.w.blocks() * kBlock;
  if (__builtin_mul_overflow(row_elements, pass.tile_rows * pass.element_bytes, &pass.tile_bytes) ||
      pass.tile_bytes > INT64_MAX / 4) {
    return PK_ERR_MEMORY;
  }
  const int64_t some_bytes = pass.tile_bytes > 0 ? pass.tile_bytes : 1;
  const int64_t tiles = divided_up(linear.m, pass.tile_rows);
  const int64_t group_tiles = kGroupBytes / some_bytes;
  pass.group_tiles = divided_up(tiles, divided_up(tiles, group_tiles > 1 ? group_tiles : 1));
  const int64_t groups = kPassBytes / (pass.group_tiles * some_bytes);
  const int64_t pass_tiles = smaller(tiles, (groups > 1 ? groups : 1) * pass.group_tiles);
  const int64_t pass_rows = pass_tiles * pass.tile_rows;

  const bool converts_bias = linear.bias != nullptr && linear.bias_dtype != PK_FLOAT32;
  const int64_t bias_bytes = converts_bias ? linear.w.n() * 4 : 0;
  const int64_t state_bytes = pass_tiles * static_cast<int64_t>(sizeof(std::atomic<uint32_t>));
  char* next = static_cast<char*>(thread_scratch(static_cast<size_t>(
      pass_tiles * pass.tile_bytes + pass_rows * 4 + state_bytes + bias_bytes + 4 * 64)));
  if (next == nullptr) return PK_ERR_MEMORY;
  pass.tiles = static_cast<char*>(cut(&next, pass_tiles * pass.tile_bytes));
  pass.x_scale = static_cast<float*>(cut(&next, pass_rows * 4));
  pass.states = static_cast<std::atomic<uint32_t>*>(cut(&next, state_bytes));

  linear.output.bias = static_cast<const float*>(linear.bias);
  if (converts_bias) {
    float* bias = static_cast<float*>(cut(&next, bias_bytes));
    pass.rows->to_float32(linear.bias_dtype, linear.w.n(), linear.bias, bias);
    linear.output.bias = bias;
  }
  if (linear.input == Input::kQuantized) linear.output.x_scale_stride = 1;
  for (; pass.first_row < linear.m; pass.first_row += pass_rows) run_pass(pass, pass_rows);
  return PK_OK;
}

}  // namespace pk

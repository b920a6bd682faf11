// The public look-up of rows: check the arguments, then spread the rows over the threads.
#include <cstring>

#include "checks.h"
#include "dispatch.h"
#include "packed.h"
#include "threads.h"

namespace pk {
namespace {

// Work of one task, so that claiming it costs little beside it.
constexpr int64_t kTaskBytes = 64 << 10;

struct LookUp {
  const RowKernels* kernels;
  int64_t count, rows_per_task, width;
  const int64_t* ids;
  pk_format code;
  const char* codes;  // null: the table is packed
  int64_t ldw;
  const Packed* packed;
  const float* scale;
  int64_t scale_stride;
  pk_dtype dtype;
  char* y;
  int64_t ldy;
};

int64_t float_bytes(pk_dtype dtype) { return dtype == PK_FLOAT32 ? 4 : 2; }

// A packed row's codes lie four by four; a block of them is gathered and then dequantized.
void packed_row(const LookUp& job, int64_t row, float scale, char* y) {
  const int64_t within = row % kPanel;
  const int8_t* from =
      job.packed->panel(row / kPanel) + within / 16 * (kPanelBlockBytes / 2) + within % 16 * 4;
  for (int64_t start = 0; start < job.width; start += kBlock, from += kPanelBlockBytes) {
    int8_t codes[kBlock];
    for (int k4 = 0; k4 < 16; ++k4) std::memcpy(codes + k4 * 4, from + k4 * 64, 4);
    const int64_t left = job.width - start;
    job.kernels->dequantize_row(job.code, job.dtype, left < kBlock ? left : kBlock, codes, scale,
                                y + start * float_bytes(job.dtype));
  }
}

void look_up(void* context, int64_t task) {
  const LookUp& job = *static_cast<const LookUp*>(context);
  const int64_t first = task * job.rows_per_task;
  const int64_t end = job.count - first < job.rows_per_task ? job.count : first + job.rows_per_task;
  for (int64_t i = first; i < end; ++i) {
    const int64_t row = job.ids[i];
    const float scale = job.scale[row * job.scale_stride];
    char* y = job.y + i * job.ldy * float_bytes(job.dtype);
    if (job.codes == nullptr) {
      packed_row(job, row, scale, y);
    } else {
      job.kernels->dequantize_row(job.code, job.dtype, job.width, job.codes + row * job.ldw, scale,
                                  y);
    }
  }
}

// What both forms of the table have in common.
void check_common(Checks& checks, const pk_executor* executor, int64_t rows, const LookUp& job) {
  checks.executor(executor);
  checks.size("count", job.count);
  checks.size("rows", rows);
  checks.size("width", job.width);
  checks.vector("ids", job.ids, job.count);
  checks.code("code", job.code);
  checks.step("scale_stride", job.scale_stride);
  checks.vector("scale", job.scale, rows == 0 || job.scale_stride == 1 ? rows : 1);
  checks.dtype("y_dtype", job.dtype);
  checks.floats("y", job.dtype, job.y, job.count, job.width, job.ldy);
}

pk_status check_ids(const char* function, int64_t rows, const LookUp& job) {
  for (int64_t i = 0; i < job.count; ++i) {
    if (job.ids[i] >= 0 && job.ids[i] < rows) continue;
    return fail(PK_ERR_ARGUMENT,
                "%s: expected ids of at least 0 and less than rows=%lld, got ids[%lld]=%lld",
                function, static_cast<long long>(rows), static_cast<long long>(i),
                static_cast<long long>(job.ids[i]));
  }
  return PK_OK;
}

void run(const pk_executor* executor, LookUp& job) {
  if (job.count == 0 || job.width == 0) return;
  // A code is read and at most four bytes are written for each element.
  const int64_t row_bytes = job.width * 5;
  job.rows_per_task = row_bytes < kTaskBytes ? kTaskBytes / row_bytes : 1;
  // Memory is read and written at some 8 bytes per nanosecond.
  const int64_t threads = threads_for(executor, job.count * row_bytes / 8);
  parallel_for(executor, threads, (job.count - 1) / job.rows_per_task + 1, look_up, &job);
}

}  // namespace
}  // namespace pk

pk_status pk_dequantize_rows(const pk_executor* executor, int64_t count, const int64_t* ids,
                             pk_format code, int64_t rows, int64_t width, const void* codes,
                             int64_t ldw, const float* scale, int64_t scale_stride,
                             pk_dtype y_dtype, void* y, int64_t ldy) {
  constexpr const char* kName = "pk_dequantize_rows";
  pk::LookUp job = {pk::kernels().rows,
                    count,
                    1,
                    width,
                    ids,
                    code,
                    static_cast<const char*>(codes),
                    ldw,
                    nullptr,
                    scale,
                    scale_stride,
                    y_dtype,
                    static_cast<char*>(y),
                    ldy};
  pk::Checks checks(kName);
  pk::check_common(checks, executor, rows, job);
  checks.matrix("codes", static_cast<const int8_t*>(codes), rows, width, ldw);
  if (!checks.ok()) return checks.status();
  const pk_status status = pk::check_ids(kName, rows, job);
  if (status == PK_OK) pk::run(executor, job);
  return status;
}

pk_status pk_dequantize_packed_rows(const pk_executor* executor, int64_t count, const int64_t* ids,
                                    pk_format code, int64_t rows, int64_t width, const void* w,
                                    const float* scale, int64_t scale_stride, pk_dtype y_dtype,
                                    void* y, int64_t ldy) {
  constexpr const char* kName = "pk_dequantize_packed_rows";
  pk::LookUp job = {pk::kernels().rows,
                    count,
                    1,
                    width,
                    ids,
                    code,
                    nullptr,
                    0,
                    nullptr,
                    scale,
                    scale_stride,
                    y_dtype,
                    static_cast<char*>(y),
                    ldy};
  pk::Checks checks(kName);
  pk::check_common(checks, executor, rows, job);
  if (rows != 0) checks.packed("w", w, rows, width, code);
  if (!checks.ok()) return checks.status();
  const pk_status status = pk::check_ids(kName, rows, job);
  if (status != PK_OK || count == 0) return status;
  const pk::Packed packed(w, rows);
  job.packed = &packed;
  pk::run(executor, job);
  return PK_OK;
}

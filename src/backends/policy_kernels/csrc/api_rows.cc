// The public look-up of rows: check the arguments, then spread the rows over the threads.
#include "checks.h"
#include "dispatch.h"
#include "threads.h"

namespace pk {
namespace {

// Rows of one task, so that claiming it costs little beside its work.
constexpr int64_t kTaskBytes = 64 << 10;

struct LookUp {
  const RowKernels* kernels;
  int64_t count, rows_per_task, width;
  const int64_t* ids;
  pk_format code;
  const char* codes;
  int64_t ldw;
  const float* scale;
  int64_t scale_stride;
  pk_dtype dtype;
  char* y;
  int64_t y_row_bytes;
};

void look_up(void* context, int64_t task) {
  const LookUp& job = *static_cast<const LookUp*>(context);
  const int64_t first = task * job.rows_per_task;
  const int64_t end = job.count - first < job.rows_per_task ? job.count : first + job.rows_per_task;
  for (int64_t i = first; i < end; ++i) {
    const int64_t row = job.ids[i];
    job.kernels->dequantize_row(job.code, job.dtype, job.width, job.codes + row * job.ldw,
                                job.scale[row * job.scale_stride], job.y + i * job.y_row_bytes);
  }
}

}  // namespace
}  // namespace pk

pk_status pk_dequantize_rows(const pk_executor* executor, int64_t count, const int64_t* ids,
                             pk_format code, int64_t rows, int64_t width, const void* codes,
                             int64_t ldw, const float* scale, int64_t scale_stride,
                             pk_dtype y_dtype, void* y, int64_t ldy) {
  pk::Checks checks("pk_dequantize_rows");
  checks.executor(executor);
  checks.size("count", count);
  checks.size("rows", rows);
  checks.size("width", width);
  checks.vector("ids", ids, count);
  checks.code("code", code);
  checks.matrix("codes", static_cast<const int8_t*>(codes), rows, width, ldw);
  checks.step("scale_stride", scale_stride);
  checks.vector("scale", scale, rows == 0 || scale_stride == 1 ? rows : 1);
  checks.dtype("y_dtype", y_dtype);
  checks.floats("y", y_dtype, y, count, width, ldy);
  if (!checks.ok()) return checks.status();
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < rows) continue;
    return pk::fail(PK_ERR_ARGUMENT,
                    "pk_dequantize_rows: expected ids of at least 0 and less than rows=%lld, got "
                    "ids[%lld]=%lld",
                    static_cast<long long>(rows), static_cast<long long>(i),
                    static_cast<long long>(ids[i]));
  }
  if (count == 0 || width == 0) return PK_OK;
  const int64_t y_row_bytes = ldy * (y_dtype == PK_FLOAT32 ? 4 : 2);
  const int64_t row_bytes = width * 5;
  const int64_t rows_per_task = row_bytes < pk::kTaskBytes ? pk::kTaskBytes / row_bytes : 1;
  pk::LookUp job = {pk::kernels().rows,
                    count,
                    rows_per_task,
                    width,
                    ids,
                    code,
                    static_cast<const char*>(codes),
                    ldw,
                    scale,
                    scale_stride,
                    y_dtype,
                    static_cast<char*>(y),
                    y_row_bytes};
  // Memory is read and written at some 8 bytes per nanosecond.
  const int64_t threads = pk::threads_for(executor, count * row_bytes / 8);
  pk::parallel_for(executor, threads, (count - 1) / rows_per_task + 1, pk::look_up, &job);
  return PK_OK;
}

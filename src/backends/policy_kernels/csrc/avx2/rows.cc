#define PK_ROWS avx2_rows
#define PK_ROWS_ISA "avx2"
#include "rows.inc"

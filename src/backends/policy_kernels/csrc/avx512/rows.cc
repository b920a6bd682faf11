#define PK_ROWS avx512_rows
#define PK_ROWS_ISA "avx512"
#include "rows.inc"

#define PK_ROWS neon_rows
#define PK_ROWS_ISA "neon"
#include "rows.inc"

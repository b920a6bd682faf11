#define PK_ROWS scalar_rows
#define PK_ROWS_ISA "scalar"
#include "rows.inc"

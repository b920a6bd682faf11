"""Those functions of Keras's `keras.config` that concern policies, by the same names."""

from ._state import dtype_policy as dtype_policy
from ._state import set_dtype_policy as set_dtype_policy

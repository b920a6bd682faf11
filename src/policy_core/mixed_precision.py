"""Keras's legacy `keras.mixed_precision`, by the same names."""

from ._policies import DTypePolicy as DTypePolicy
from ._policies import DTypePolicy as Policy
from ._state import dtype_policy as dtype_policy
from ._state import dtype_policy as global_policy
from ._state import set_dtype_policy as set_dtype_policy
from ._state import set_dtype_policy as set_global_policy

__all__ = [
    "DTypePolicy",
    "Policy",
    "dtype_policy",
    "global_policy",
    "set_dtype_policy",
    "set_global_policy",
]

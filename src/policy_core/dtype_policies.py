"""Keras's `keras.dtype_policies`, by the same names."""

from ._policies import DTypePolicy as DTypePolicy
from ._policies import FloatDTypePolicy as FloatDTypePolicy
from ._policy_map import DTypePolicyMap as DTypePolicyMap
from ._quantized_policies import AWQDTypePolicy as AWQDTypePolicy
from ._quantized_policies import GPTQDTypePolicy as GPTQDTypePolicy
from ._quantized_policies import Int4DTypePolicy as Int4DTypePolicy
from ._quantized_policies import QuantizedDTypePolicy as QuantizedDTypePolicy
from ._quantized_policies import QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy
from ._quantized_policies import TernaryDTypePolicy as TernaryDTypePolicy
from ._serialization import deserialize as deserialize
from ._serialization import get as get
from ._serialization import serialize as serialize

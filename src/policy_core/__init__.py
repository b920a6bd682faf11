"""Dtype policies for any model: one string says how its layers store, compute and quantize."""

from . import config as config
from . import dtype_policies as dtype_policies
from . import mixed_precision as mixed_precision
from ._backend import available_backends as available_backends
from ._backend import backend as backend
from ._backend import register_layer as register_layer
from ._casting import convert_input as convert_input
from ._checkpoint import load as load
from ._checkpoint import save as save
from ._on_import import load_with as _load_with
from ._policies import DTypePolicy as DTypePolicy
from ._policies import FloatDTypePolicy as FloatDTypePolicy
from ._policy_map import DTypePolicyMap as DTypePolicyMap
from ._quantized_policies import AWQDTypePolicy as AWQDTypePolicy
from ._quantized_policies import GPTQDTypePolicy as GPTQDTypePolicy
from ._quantized_policies import Int4DTypePolicy as Int4DTypePolicy
from ._quantized_policies import QuantizedDTypePolicy as QuantizedDTypePolicy
from ._quantized_policies import QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy
from ._quantized_policies import TernaryDTypePolicy as TernaryDTypePolicy
from ._registry import custom_object_scope as custom_object_scope
from ._registry import register_serializable as register_serializable
from ._report import Report as Report
from ._report import report as report
from ._serialization import deserialize as deserialize
from ._serialization import get as get
from ._serialization import serialize as serialize
from ._state import dtype_policy as dtype_policy
from ._state import policy_scope as policy_scope
from ._state import set_dtype_policy as set_dtype_policy
from ._wrap import freeze as freeze
from ._wrap import unwrap as unwrap
from ._wrap import wrap as wrap


def __getattr__(name: str) -> object:
    # PyTorch and Keras scale losses themselves; JAX is imported only by who asks for it.
    if name == "DynamicLossScale":
        return getattr(backend("jax"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# A SavedModel asks for its operators before anyone asks for the backend.
_load_with("tensorflow")

__all__ = [
    "AWQDTypePolicy",
    "DTypePolicy",
    "DTypePolicyMap",
    "FloatDTypePolicy",
    "GPTQDTypePolicy",
    "Int4DTypePolicy",
    "QuantizedDTypePolicy",
    "QuantizedFloat8DTypePolicy",
    "Report",
    "TernaryDTypePolicy",
    "available_backends",
    "backend",
    "config",
    "convert_input",
    "custom_object_scope",
    "deserialize",
    "dtype_policies",
    "dtype_policy",
    "freeze",
    "get",
    "load",
    "mixed_precision",
    "policy_scope",
    "register_layer",
    "register_serializable",
    "report",
    "save",
    "serialize",
    "set_dtype_policy",
    "unwrap",
    "wrap",
]

"""The operators in C: given to torch through its stable C interface, where both are there."""

import ctypes
import functools
import os
from collections.abc import Iterable
from pathlib import Path

import policy_kernels
from policy_kernels import _loader
from policy_kernels._loader import KernelsBrokenError

from ._native import outruns_torch

LIBRARY_NAME = "libpolicy_torch.so"
OPERATIONS = ("linear_s8", "linear_s8w", "linear_f8", "linear_f8w")
_FUNCTIONS = (
    "pk_last_error",
    "pk_num_threads",
    "pk_packed_bytes",
    "pk_pack_on",
    "pk_unpack_on",
    "pk_linear_s8",
    "pk_linear_s8w",
    "pk_linear_f8",
    "pk_linear_f8w",
    "pk_dequantize_packed_rows",
    "pk_encode_f8",
    "pk_quantize_rows_f8",
)


def load(folders: Iterable[str]) -> ctypes.CDLL | None:
    """Gives the library from the first of some folders that has it; None if none has.

    Raises:
        KernelsBrokenError: It cannot be loaded, or is of another version than this package.
    """
    places = [Path(folder) / LIBRARY_NAME for folder in folders]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        version = library.policy_torch_abi_version()
        for name in ("policy_torch_missing", "policy_torch_bind"):
            getattr(library, name).restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise KernelsBrokenError(
            f"{path}: expected a library that loads, got: {error}. Install policy-core again."
        ) from error
    if version != _loader.ABI_VERSION:
        raise KernelsBrokenError(
            f"{path}: expected ABI version {_loader.ABI_VERSION}, got {version}. Install policy-core "
            "again."
        )
    return library


@functools.cache
def reason_against() -> str:
    """Says why the operators on a CPU are those in Python; `""` if torch has those in C, from now on.

    Raises:
        KernelsBrokenError: The library is there but cannot be used; that is never passed over.
    """
    if not policy_kernels.available():
        return policy_kernels.build_info().reason or "the native kernels were not built"
    if not all(map(outruns_torch, OPERATIONS)):
        return "the scalar kernel is slower than torch"
    # An editable installation keeps the library and the Python files in two folders.
    import policy_torch

    library = load(policy_torch.__path__)
    if library is None:
        return f"{LIBRARY_NAME} was not built"
    missing: bytes = library.policy_torch_missing()
    if missing:
        return f"this torch has no {missing.decode()}; torch 2.10 has"
    kernels = _loader.library()
    addresses = [ctypes.cast(getattr(kernels, name), ctypes.c_void_p) for name in _FUNCTIONS]
    array = (ctypes.c_void_p * len(addresses))(*addresses)
    refused: bytes = library.policy_torch_bind(array, ctypes.c_int64(_unasked_threads()))
    if refused:
        raise KernelsBrokenError(f"{LIBRARY_NAME}: torch refused the operator {refused.decode()}")
    return ""


def _unasked_threads() -> int:
    """Gives the kernels' number of threads while nobody asks for one; 0 if the environment does."""
    if "POLICY_NUM_THREADS" in os.environ:
        return 0
    before = policy_kernels.num_threads()
    policy_kernels.set_num_threads(None)
    default = policy_kernels.num_threads()
    if before != default:
        policy_kernels.set_num_threads(before)
    return default

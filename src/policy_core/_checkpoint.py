"""`save` and `load`: one safetensors file that every backend can read, whichever wrote it.

Tensors have plain names, `path/weight`, `path/weight_scale`, `path/bias`, and plain dtypes. The
file's metadata holds, under `policy_core`, JSON text:

    {"version": 1, "layers": {path: {"policy": config, "frozen": bool}}, "tied": {name: name}}

where `policy` is what was asked for the layer, in Keras's form, and `tied` names tensors that are
stored under another name because they are the same storage.
"""

import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._backend import Site, Step, Wrapping, model_backend
from ._dtypes import did_you_mean, is_castable_float, shorten, standardize_dtype
from ._plan import Plan, TensorSpec, plan
from ._policies import DTypePolicy
from ._policy_map import DTypePolicyMap
from ._serialization import MAX_NODES, get, serialize
from ._wrap import float_bytes, walk
from .errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

VERSION = 1

# The names of dtypes in safetensors' format.
_FILE_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Writes a model's tensors and policies to a file that `load` reads on any backend.

    Args:
        model: A model, wrapped or not.
        path: The file, by convention `*.safetensors`; it is replaced whole or not at all.

    Raises:
        TypeError: No backend serves such a model.
        ValueError: The model has no layers.
        CheckpointError: A file cannot have the tensors' names or dtypes: two layers have one path, a
            tensor's own name has a `/`, or it is complex128.
        OSError: The file cannot be written.
    """
    import numpy as np
    from safetensors.numpy import save_file

    adapter = model_backend(model)
    arrays: dict[str, np.ndarray] = {}
    layers: dict[str, Any] = {}
    tied: dict[str, str] = {}
    first_names: dict[object, str] = {}
    sites = walk(adapter, model)
    _check_paths(sites)
    for site in sites:
        if site.wrapping is not None:
            made = site.wrapping.plan
            layers[site.path] = {"policy": serialize(made.asked), "frozen": _is_frozen(made)}
        for name, tensor in site.tensors.items():
            full = _join(site.path, name)
            if "/" in name or full == "__metadata__":
                raise CheckpointError(
                    f"Layer {site.path!r} has a tensor {name!r}, which no file can name. Rename it."
                )
            first = first_names.setdefault(adapter.storage_key(tensor), full)
            if first == full:
                arrays[full] = np.asarray(adapter.to_numpy(tensor), order="C")
                if arrays[full].dtype.name not in _FILE_DTYPES.values():
                    raise CheckpointError(
                        f"Tensor {full!r} has dtype {arrays[full].dtype.name!r}, which files do not "
                        f"know. Expected one of {sorted(_FILE_DTYPES.values())}."
                    )
            else:
                tied[full] = first
    header = {"version": VERSION, "layers": layers, "tied": tied}
    target = Path(path)
    # Written beside the target and moved: a failure leaves the old file.
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.touch()
        # safetensors makes files that only their owner can read; a saved model is an ordinary file.
        mode = partial.stat().st_mode
        save_file(arrays, partial, metadata={"policy_core": json.dumps(header)})
        partial.chmod(mode)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load(model: Any, path: str | os.PathLike[str]) -> Any:
    """Gives a model with the tensors and policies of a file.

    A plain layer takes the policy that the file has for it. A wrapped layer keeps its own policy,
    and takes float tensors (from a checkpoint without policies, for example) as if it had been
    wrapped after they were loaded. The file is checked whole before the model changes.

    Args:
        model: A model of the same layers as the one that was saved.
        path: A file that `save` wrote, or any safetensors file with the same names.

    Returns:
        The model: the same object where the framework's models are mutable.

    Raises:
        TypeError: No backend serves such a model.
        OSError: The file cannot be read.
        CheckpointError: It is no safetensors file, of a newer version, damaged, or its names,
            shapes, dtypes or policies don't fit the model.
        NoKernelError: A layer's mode has no kernel yet.
    """
    adapter = model_backend(model)
    arrays, header = _read(Path(path))
    sites = walk(adapter, model)
    _check_names(sites, arrays, header)
    seen: set[object] = set()
    steps = []
    for site in sites:
        own = {name: arrays[_join(site.path, name)] for name in _names_at(site.path, arrays)}
        before = float_bytes(adapter, site, seen)
        steps.append(_decide(site, header["layers"].get(site.path), own, before))
    for step in steps:
        try:
            adapter.validate(step)
        except ValueError as error:
            raise CheckpointError(f"Layer {step.site.path!r}: {error}") from error
    return adapter.apply(model, steps)


def _is_frozen(made: Plan) -> bool:
    mode = made.policy.quantization
    return made.quantized and mode is not None and mode.scheme.trainable and not made.trainable


def _check_paths(sites: list[Site]) -> None:
    counts = Counter(site.path for site in sites)
    twice = sorted(path for path, count in counts.items() if count > 1)
    if twice:
        raise CheckpointError(
            f"Two layers have the path {shorten(twice[0])}, and a file would hold one of them. Rename "
            "a module whose name has a '/'."
        )


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _names_at(path: str, arrays: "dict[str, np.ndarray]") -> list[str]:
    prefix = _join(path, "")
    names = (full.removeprefix(prefix) for full in arrays if full.startswith(prefix))
    return [name for name in names if "/" not in name]


def _read(path: Path) -> "tuple[dict[str, np.ndarray], dict[str, Any]]":
    import ml_dtypes
    import numpy as np
    from safetensors import SafetensorError, deserialize

    content = path.read_bytes()
    try:
        stored = deserialize(content)  # type: ignore[no-untyped-call]  # a Rust function
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} is not a whole safetensors file: {error}") from error
    # deserialize has checked the form: a length of eight bytes, then that much JSON.
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    header = _header(path, metadata.get("policy_core"))
    arrays = {}
    for name, tensor in stored:
        if tensor["dtype"] not in _FILE_DTYPES:
            raise CheckpointError(
                f"Tensor {name!r} has dtype {tensor['dtype']!r}. Known: {sorted(_FILE_DTYPES)}."
            )
        dtype = _FILE_DTYPES[tensor["dtype"]]
        numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        arrays[name] = np.frombuffer(tensor["data"], numpy_dtype).reshape(tensor["shape"])
    for name, first in header["tied"].items():
        if first not in arrays:
            raise CheckpointError(f"{name!r} is tied to {first!r}, which is not in the file.")
        arrays[name] = arrays[first]
    return arrays, header


def _header(path: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        return {"version": VERSION, "layers": {}, "tied": {}}
    if len(text) > 100 * MAX_NODES:
        raise CheckpointError(
            f"The metadata of {str(path)!r} is too large: {len(text)} characters."
        )
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The metadata of {str(path)!r} is damaged: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("version"), int):
        raise CheckpointError(f"The metadata of {str(path)!r} has no version.")
    if header["version"] > VERSION:
        raise CheckpointError(
            f"{str(path)!r} has version {header['version']}; this policy-core reads up to "
            f"{VERSION}. Install a newer one."
        )
    for field in sorted(map(str, header.keys() - {"version", "layers", "tied"})):
        warnings.warn(
            f"Field {field!r} in the metadata of {str(path)!r} is not known.", stacklevel=4
        )
    layers, tied = header.get("layers", {}), header.get("tied", {})
    if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
        raise CheckpointError(f"'layers' must map paths to objects. Got: {shorten(layers)}")
    if not isinstance(tied, dict) or not all(isinstance(v, str) for v in tied.values()):
        raise CheckpointError(f"'tied' must map names to names. Got: {shorten(tied)}")
    return {"layers": layers, "tied": tied}


def _check_names(
    sites: list[Site], arrays: "dict[str, np.ndarray]", header: dict[str, Any]
) -> None:
    paths = {site.path for site in sites}
    named = {name: name.rpartition("/")[0] for name in arrays}
    for what, path in [*named.items(), *((path, path) for path in header["layers"])]:
        if path not in paths:
            raise CheckpointError(
                f"The file has {what!r}, but the model has no layer {path!r}"
                f"{did_you_mean(path, paths)}"
            )


def _decide(
    site: Site, entry: dict[str, Any] | None, own: "dict[str, np.ndarray]", bytes_before: int
) -> Step:
    """Gives the change to one layer: its plan, and its tensors in the plan's form or as floats."""
    asked = None if entry is None else _policy(site, entry)
    current = None if site.wrapping is None else site.wrapping.plan
    made = current
    if asked is not None and (current is None or asked == current.asked):
        made = plan(asked, site.spec, bool(entry and entry.get("frozen", False)))
    wrapping = None if made is None else Wrapping(plan=made, bytes_before=bytes_before)
    if made is None or _is_float_form(made, site, own):
        return Step(site=site, wrapping=wrapping, floats=_fit(site, site.spec.tensors, own))
    stored = _fit(site, made.storage, own)
    # A layer's own parameter may be named like a state tensor, and hold what it likes.
    for name in stored.keys() - {tensor.name for tensor in site.spec.tensors}:
        _check_state(_join(site.path, name), stored[name])
    return Step(site=site, wrapping=wrapping, stored=stored)


def _is_float_form(made: Plan, site: Site, own: "dict[str, np.ndarray]") -> bool:
    """Says whether the file has the plain tensors of a layer that the plan quantizes."""
    names = {tensor.name for tensor in site.spec.tensors}
    return made.quantized and own.keys() == names and not _holds_codes(own["weight"])


def _check_state(name: str, array: "np.ndarray") -> None:
    import numpy as np

    if name.endswith("_scale") and not (np.isfinite(array) & (array > 0)).all():
        raise CheckpointError(f"{name!r} must be positive and finite.")
    if name.endswith("_amax_history") and not (np.isfinite(array) & (array >= 0)).all():
        raise CheckpointError(f"{name!r} must be finite and not negative.")


def _holds_codes(array: "np.ndarray") -> bool:
    return not is_castable_float(standardize_dtype(array.dtype))


def _policy(site: Site, entry: dict[str, Any]) -> DTypePolicy:
    try:
        policy = get(entry.get("policy"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The policy of {site.path!r} cannot be read: {error}") from error
    if isinstance(policy, DTypePolicyMap):
        raise CheckpointError(f"The policy of {site.path!r} is a map, and a layer has one policy.")
    return policy


def _fit(
    site: Site, wanted: tuple[TensorSpec, ...], own: "dict[str, np.ndarray]"
) -> "dict[str, np.ndarray]":
    """Gives the tensors of one layer, floats in the wanted dtype; all must be there and no more."""
    import ml_dtypes
    import numpy as np

    missing = [t.name for t in wanted if t.name not in own]
    extra = sorted(own.keys() - {t.name for t in wanted})
    if missing or extra:
        raise CheckpointError(
            f"Layer {site.path!r} needs the tensors {[t.name for t in wanted]}; the file lacks "
            f"{missing} and has {extra} besides."
        )
    taken = {}
    for tensor in wanted:
        array = own[tensor.name]
        dtype = standardize_dtype(array.dtype)
        same = dtype == tensor.dtype
        castable = is_castable_float(dtype) and is_castable_float(tensor.dtype)
        if array.shape != tensor.shape or not (same or castable):
            raise CheckpointError(
                f"{_join(site.path, tensor.name)!r} must have shape {tensor.shape} and dtype "
                f"{tensor.dtype}. The file has shape {array.shape} and dtype {dtype}."
            )
        name = tensor.dtype
        taken[tensor.name] = (
            array if same else array.astype(np.dtype(getattr(ml_dtypes, name, name)))
        )
    return taken

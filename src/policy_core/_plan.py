"""What an adapter tells about a layer, and the plan: every decision about it, made once, here."""

import functools
from dataclasses import dataclass
from typing import Literal

from ._dtypes import DTYPES, is_castable_float, is_float
from ._modes import Scheme
from ._policies import DTypePolicy
from ._quantized_policies import QuantizedFloat8DTypePolicy
from .errors import NoKernelError

LayerKind = Literal["linear", "embedding", "norm", "other"]

ROLES = ("input", "weight", "output_grad")
"""The tensor roles that have a delayed-scaling state each."""
STATE_SUFFIXES = ("_scale", "_amax_history")
"""How the names of the two state tensors of a role end."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor of a layer: its name in the layer, shape, and canonical dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What an adapter tells about one layer.

    Attributes:
        path: The layer's place in its model, parts joined by `/`; `""` for the model itself.
        layer_type: The name of its class, for reports.
        kind: How it could be quantized, if at all.
        tensors: Its stored tensors; the one to quantize is named `"weight"`.
        contracted_axes: The axes of the weight that are summed over, or, in an embedding, the axes
            of one row: elements along them share a scale.
        device: Where it computes: `"cpu"`, `"cuda"`, …
        left_out: Why it can't be quantized although its kind could; `""` if it can.
        kernels: For each operation the name of the kernel that would run here, and what a user
            should know about it (`""` for nothing).
    """

    path: str
    layer_type: str
    kind: LayerKind
    tensors: tuple[TensorSpec, ...] = ()
    contracted_axes: tuple[int, ...] = ()
    device: str = "cpu"
    left_out: str = ""
    kernels: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided for one layer.

    Attributes:
        path: The layer's place in its model.
        asked: The policy that was asked for.
        policy: The policy that the layer has: what was asked, or its source.
        autocast: Whether inputs and parameters are cast to the compute dtype at all.
        compute_dtype: In which inputs arrive and outputs leave.
        variable_dtype: In which float variables are kept.
        accumulator: In which sums are formed.
        weight_codes: Dtype of the weight's codes; None for a float layer.
        input_codes: Dtype of the input's codes; None if the input stays float.
        gradient_codes: Dtype of the output gradient's codes; None if it stays float.
        scale_axes: The axes of the weight that share a scale.
        delayed: Whether scales come from amax histories.
        amax_history_length: Their length; 0 without them.
        trainable: Whether the float weight is kept beside what is computed with.
        storage: Every tensor that the layer stores.
        kernel: The name of the routine that multiplies.
        note: What the report says about the layer; `""` for nothing.
    """

    path: str
    asked: DTypePolicy
    policy: DTypePolicy
    autocast: bool
    compute_dtype: str
    variable_dtype: str
    accumulator: str
    weight_codes: str | None = None
    input_codes: str | None = None
    gradient_codes: str | None = None
    scale_axes: tuple[int, ...] = ()
    delayed: bool = False
    amax_history_length: int = 0
    trainable: bool = False
    storage: tuple[TensorSpec, ...] = ()
    kernel: str
    note: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the layer computes with codes."""
        return self.weight_codes is not None

    def __str__(self) -> str:
        if not self.quantized:
            what = f"{self.compute_dtype} over {self.variable_dtype} variables"
        else:
            inputs = self.input_codes or self.compute_dtype
            what = (
                f"{inputs} x {self.weight_codes} -> {self.accumulator} -> {self.compute_dtype}, "
                f"a scale over weight axes {self.scale_axes}"
            )
        note = f" ({self.note})" if self.note else ""
        return f"{self.path or '(model)'}: {self.policy.name}: {what}, by {self.kernel}{note}"


@functools.lru_cache(maxsize=4096)
def plan(policy: DTypePolicy, spec: LayerSpec, frozen: bool = False) -> Plan:
    """Decides how one layer computes under a policy.

    Args:
        policy: What is asked for; not a map.
        spec: What the adapter tells about the layer.
        frozen: Whether a trainable mode keeps only its codes.

    Raises:
        NoKernelError: The mode has no kernel yet.
        ValueError: The policy would compute in float8 without scales.
    """
    if policy.quantization is not None:
        scheme = policy.quantization.scheme
        reason = _reason_against(scheme, spec)
        if reason:
            return _float_plan(policy, policy.source_policy, spec, reason)
        if scheme.weight_codes is None:
            ready = "int8, int8/weight_only, float8, float8/dynamic, float8/weight_only"
            raise NoKernelError(
                f"No kernel exists for mode '{policy.quantization}' yet: the policy can be named, saved "
                f"and loaded, but no layer can compute with it. Modes with kernels: {ready}."
            )
        return _quantized_plan(policy, scheme, spec, frozen)
    return _float_plan(policy, policy, spec, "")


def _reason_against(scheme: Scheme, spec: LayerSpec) -> str:
    if spec.left_out:
        return spec.left_out
    if spec.kind not in ("linear", "embedding"):
        return f"{spec.layer_type} has no quantized form; it follows the source policy"
    if spec.kind == "embedding" and scheme.trainable:
        return (
            f"an embedding looks up and does not multiply, so '{scheme.name}' has nothing to do; "
            "'float8/weight_only' shrinks it"
        )
    weight = next(tensor for tensor in spec.tensors if tensor.name == "weight")
    if not is_castable_float(weight.dtype):
        return f"its weight is {weight.dtype}, and codes are for floats of at least 16 bits"
    return ""


def _float_plan(asked: DTypePolicy, policy: DTypePolicy, spec: LayerSpec, note: str) -> Plan:
    compute = policy.compute_dtype
    if is_float(compute) and not is_castable_float(compute):
        raise ValueError(
            f"A layer cannot compute in {compute!r} without scales. Use a quantized policy, such "
            "as 'float8_from_float32'."
        )
    autocast = is_float(compute)
    notes = [note, "" if autocast else f"policy {policy.name!r} is not a float: nothing is cast"]
    if spec.kind == "norm" and DTYPES[compute].bits < 32:
        notes.append("computes in float32 inside")
    return Plan(
        path=spec.path,
        asked=asked,
        policy=policy,
        autocast=autocast,
        compute_dtype=compute,
        variable_dtype=policy.variable_dtype,
        accumulator=compute if DTYPES[compute].bits > 32 else "float32",
        storage=tuple(_kept(tensor, policy, autocast) for tensor in spec.tensors),
        kernel=_kernel(spec, "float")[0],
        note="; ".join(filter(None, notes)),
    )


def _quantized_plan(policy: DTypePolicy, scheme: Scheme, spec: LayerSpec, frozen: bool) -> Plan:
    assert scheme.weight_codes is not None
    whole = tuple(range(len(next(t.shape for t in spec.tensors if t.name == "weight"))))
    scale_axes = whole if scheme.scales == "tensor" else spec.contracted_axes
    trainable = scheme.trainable and not frozen
    length = 0
    if scheme.delayed and isinstance(policy, QuantizedFloat8DTypePolicy):
        length = policy.amax_history_length
    storage: list[TensorSpec] = []
    for tensor in spec.tensors:
        if tensor.name != "weight" or trainable:
            storage.append(_kept(tensor, policy, True))
            continue
        shape = tuple(1 if i in scale_axes else n for i, n in enumerate(tensor.shape))
        storage.append(TensorSpec("weight", tensor.shape, scheme.weight_codes))
        storage.append(TensorSpec("weight_scale", shape, "float32"))
    roles = () if not length else ROLES if trainable else ("input",)
    for role in roles:
        storage.append(TensorSpec(f"{role}_scale", (), "float32"))
        storage.append(TensorSpec(f"{role}_amax_history", (length,), "float32"))
    prefix = "rows" if spec.kind == "embedding" else "linear"
    operand = "s8" if scheme.weight_codes == "int8" else "f8"
    weight_only = "w" if scheme.input_codes is None and spec.kind == "linear" else ""
    kernel, note = _kernel(spec, f"{prefix}_{operand}{weight_only}")
    return Plan(
        path=spec.path,
        asked=policy,
        policy=policy,
        autocast=True,
        compute_dtype=policy.compute_dtype,
        variable_dtype=policy.variable_dtype,
        accumulator="int32" if scheme.input_codes == "int8" else "float32",
        weight_codes=scheme.weight_codes,
        input_codes=scheme.input_codes if spec.kind == "linear" else None,
        gradient_codes=scheme.gradient_codes,
        scale_axes=scale_axes,
        delayed=scheme.delayed,
        amax_history_length=length,
        trainable=trainable,
        storage=tuple(storage),
        kernel=kernel,
        note=note,
    )


def _kept(tensor: TensorSpec, policy: DTypePolicy, autocast: bool) -> TensorSpec:
    if autocast and is_castable_float(tensor.dtype):
        return TensorSpec(tensor.name, tensor.shape, policy.variable_dtype)
    return tensor


def _kernel(spec: LayerSpec, operation: str) -> tuple[str, str]:
    for name, kernel, note in spec.kernels:
        if name == operation:
            return kernel, note
    raise NoKernelError(f"{spec.layer_type} on {spec.device} has no kernel for {operation!r}.")

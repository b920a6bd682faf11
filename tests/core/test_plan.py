"""Plans: every decision about a layer, as data."""

import dataclasses

import pytest

from policy_core import DTypePolicy, QuantizedFloat8DTypePolicy, get
from policy_core._plan import LayerSpec, TensorSpec, plan
from policy_core.errors import NoKernelError

KERNELS = tuple(
    (name, f"{name}_test", "a note" if name == "linear_s8" else "")
    for name in (
        "float",
        "rows_s8",
        "rows_f8",
        "linear_s8",
        "linear_s8w",
        "linear_f8",
        "linear_f8w",
    )
)
LINEAR = LayerSpec(
    path="block/dense",
    layer_type="Dense",
    kind="linear",
    tensors=(TensorSpec("weight", (4, 8), "float32"), TensorSpec("bias", (4,), "float32")),
    contracted_axes=(1,),
    kernels=KERNELS,
)
EMBEDDING = dataclasses.replace(
    LINEAR,
    layer_type="Embedding",
    kind="embedding",
    tensors=(TensorSpec("weight", (10, 8), "float32"),),
)
NORM = dataclasses.replace(LINEAR, layer_type="LayerNorm", kind="norm", contracted_axes=())


def storage(policy: str, spec: LayerSpec = LINEAR, frozen: bool = False) -> dict[str, str]:
    made = plan(get(policy), spec, frozen)
    return {t.name: f"{t.dtype}{list(t.shape)}" for t in made.storage}


@pytest.mark.parametrize(
    ("policy", "kernel", "accumulator", "inputs"),
    [
        ("int8_from_float32", "linear_s8_test", "int32", "int8"),
        ("int8/weight_only_from_float32", "linear_s8w_test", "float32", None),
        ("float8_from_float32", "linear_f8_test", "float32", "float8_e4m3fn"),
        ("float8/dynamic_from_float32", "linear_f8_test", "float32", "float8_e4m3fn"),
        ("float8/weight_only_from_float32", "linear_f8w_test", "float32", None),
        ("mixed_bfloat16", "float_test", "float32", None),
        ("float64", "float_test", "float64", None),
    ],
)
def test_linear(policy: str, kernel: str, accumulator: str, inputs: str | None) -> None:
    """Each mode has its kernel, accumulator and input codes."""
    made = plan(get(policy), LINEAR)
    assert (made.kernel, made.accumulator, made.input_codes) == (kernel, accumulator, inputs)
    assert made.asked == made.policy == get(policy)


def test_storage_of_each_form() -> None:
    """Codes and scales for quantized layers; float weight and state for trainable ones."""
    floats = {"weight": "float32[4, 8]", "bias": "float32[4]"}
    codes = {"weight": "int8[4, 8]", "weight_scale": "float32[4, 1]", "bias": "float32[4]"}
    assert storage("float32") == storage("mixed_bfloat16") == floats
    assert storage("bfloat16") == {"weight": "bfloat16[4, 8]", "bias": "bfloat16[4]"}
    assert storage("int8_from_mixed_bfloat16") == codes
    assert storage("int8_from_bfloat16")["bias"] == "bfloat16[4]"
    assert storage("float8/dynamic_from_float32") == floats
    assert storage("float8/dynamic_from_float32", frozen=True)["weight"] == "float8_e4m3fn[4, 8]"
    training = storage("float8_from_float32")
    assert training["weight"] == "float32[4, 8]"
    assert {name for name in training if name.endswith("amax_history")} == {
        "input_amax_history",
        "weight_amax_history",
        "output_grad_amax_history",
    }
    frozen = storage("float8_from_float32", frozen=True)
    assert frozen["weight_scale"] == "float32[1, 1]"
    assert "weight_amax_history" not in frozen
    assert frozen["input_amax_history"] == "float32[1024]"


def test_history_length_comes_from_the_policy() -> None:
    """The policy's amax_history_length is the length of every history."""
    made = plan(QuantizedFloat8DTypePolicy("float8", "float32", 7), LINEAR)
    assert made.amax_history_length == 7
    assert {t.shape for t in made.storage if t.name.endswith("history")} == {(7,)}


@pytest.mark.parametrize(
    ("spec", "policy", "said"),
    [
        (NORM, "int8_from_float32", "LayerNorm has no quantized form"),
        (NORM, "int4/128_from_float32", "LayerNorm has no quantized form"),
        (EMBEDDING, "float8_from_float32", "an embedding looks up and does not multiply"),
        (dataclasses.replace(LINEAR, left_out="because"), "int8_from_float32", "because"),
    ],
)
def test_layers_without_a_quantized_form_follow_the_source(
    spec: LayerSpec, policy: str, said: str
) -> None:
    """They get the source policy, and the plan says why."""
    made = plan(get(policy), spec)
    assert made.asked == get(policy)
    assert made.policy == DTypePolicy("float32")
    assert not made.quantized
    assert said in made.note


@pytest.mark.parametrize("dtype", ["complex64", "int32", "float8_e4m3fn"])
def test_only_floats_have_codes(dtype: str) -> None:
    """A weight that is no float of at least 16 bits stays, and the plan says why."""
    weight = TensorSpec("weight", (4, 8), dtype)
    made = plan(get("int8_from_float32"), dataclasses.replace(LINEAR, tensors=(weight,)))
    assert not made.quantized
    assert made.storage == (weight,)
    assert dtype in made.note


def test_embedding_under_int8() -> None:
    """An embedding's codes have a scale a row, and its input stays integer."""
    made = plan(get("int8_from_float32"), EMBEDDING)
    assert (made.kernel, made.input_codes, made.scale_axes) == ("rows_s8_test", None, (1,))


@pytest.mark.parametrize("mode", ["int4", "int4/32", "gptq/4/128", "awq/4/-1", "ternary"])
def test_modes_without_kernels_say_so(mode: str) -> None:
    """A mode that nothing computes yet is refused by name, with those that work."""
    with pytest.raises(NoKernelError, match="No kernel exists for mode") as raised:
        plan(get(f"{mode}_from_float32"), LINEAR)
    assert mode in str(raised.value)
    assert "int8/weight_only" in str(raised.value)


def test_float8_without_scales_is_refused() -> None:
    """A plain float8 policy would compute on unscaled codes."""
    with pytest.raises(ValueError, match="without scales"):
        plan(get("float8_e5m2"), LINEAR)


def test_integer_policy_casts_nothing() -> None:
    """Under an integer policy a layer runs as it is, and the plan says so."""
    made = plan(get("int32"), LINEAR)
    assert not made.autocast
    assert "nothing is cast" in made.note
    assert [t.dtype for t in made.storage] == ["float32", "float32"]


def test_missing_kernel_is_an_error() -> None:
    """An adapter that names no kernel for an operation cannot fall back unseen."""
    with pytest.raises(NoKernelError, match="no kernel for 'linear_s8'"):
        plan(get("int8_from_float32"), dataclasses.replace(LINEAR, kernels=KERNELS[:1]))


def test_plan_prints_its_decisions() -> None:
    """The text names path, policy, dtypes, axes, kernel and note."""
    assert str(plan(get("int8_from_mixed_bfloat16"), LINEAR)) == (
        "block/dense: int8_from_mixed_bfloat16: int8 x int8 -> int32 -> bfloat16, "
        "a scale over weight axes (1,), by linear_s8_test (a note)"
    )
    assert str(plan(get("mixed_bfloat16"), NORM)) == (
        "block/dense: mixed_bfloat16: bfloat16 over float32 variables, by float_test "
        "(computes in float32 inside)"
    )


def test_plans_are_cached_by_value() -> None:
    """Equal questions have one answer, made once."""
    copy = dataclasses.replace(LINEAR)
    assert plan(get("int8_from_float32"), LINEAR) is plan(get("int8_from_float32"), copy)

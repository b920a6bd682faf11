"""Keras's own policies, maps and quantized layers, in our hands and back."""

import keras
import numpy as np
import pytest

import policy_core as pc
import policy_keras
from policy_core._forms import OUT_IN
from policy_core.errors import AlreadyWrappedError, UnmatchedRuleError
from policy_core.testing import same_bits

RANDOM = np.random.default_rng(0)
K = keras.dtype_policies


def array(tensor):
    return np.asarray(policy_keras.backend.to_numpy(tensor))


POLICIES = [
    keras.DTypePolicy("float32"),
    keras.DTypePolicy("mixed_bfloat16"),
    keras.FloatDTypePolicy("bfloat16"),
    K.QuantizedDTypePolicy("int8", "mixed_bfloat16"),
    K.QuantizedFloat8DTypePolicy("float8", "float32", 7),
    K.Int4DTypePolicy("int4/128", "float32"),
    K.GPTQDTypePolicy("gptq/4/128", "float32"),
    K.AWQDTypePolicy("awq/4/128", "float32"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_policies_convert_both_ways(policy):
    """A policy of Keras's becomes ours of the same name, and comes back equal."""
    ours = policy_keras.from_keras(policy)
    assert isinstance(ours, pc.DTypePolicy)
    assert ours.name == policy.name
    assert ours == pc.get(policy)
    back = policy_keras.to_keras(ours)
    assert type(back) is type(policy)
    assert back == policy
    assert getattr(ours, "amax_history_length", 7) == 7


@pytest.mark.parametrize("default", [None, "mixed_bfloat16"])
def test_maps_convert_both_ways(default):
    """A map keeps its default, or that it has none, its rules, and their order; nothing changes."""
    theirs = K.DTypePolicyMap(default)
    theirs["a/.*"] = "int8_from_float32"
    theirs["b"] = K.QuantizedFloat8DTypePolicy("float8", "float32", 7)
    ours = pc.get(theirs)
    assert isinstance(ours, pc.DTypePolicyMap)
    assert ours["a/x"].name == "int8_from_float32"
    assert ours["b"].amax_history_length == 7
    assert ours["c"].name == (default or "float32")
    back = policy_keras.to_keras(ours)
    assert list(back) == list(theirs)
    assert back["b"] == theirs["b"]
    assert back["c"].name == (default or "float32")
    assert theirs["a/.*"].name == "int8_from_float32"


def test_policies_without_a_counterpart():
    """A mode that Keras has not is refused with what to do."""
    with pytest.raises(ValueError, match=r"Give the policy to policy_core.wrap"):
        policy_keras.to_keras("int8/weight_only_from_float32")
    if not hasattr(K, "TernaryDTypePolicy"):
        with pytest.raises(ValueError, match="no such class"):
            policy_keras.to_keras("ternary_from_float32")
    with pytest.raises(ValueError, match="Keras has no counterpart"):
        policy_keras.to_keras(pc.DTypePolicyMap("float32", {"a": "float8/dynamic_from_float32"}))


def model():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(6, name="first"),
            keras.layers.Dense(5),
            keras.layers.Dense(4, name="head"),
        ],
        name="net",
    )


def asked(wrapped):
    return {row.path: row.asked for row in pc.report(wrapped).rows}


@pytest.mark.parametrize("policy", [K.QuantizedDTypePolicy("int8", "float32"), "int8_from_float32"])
def test_wrap_takes_keras_policies(policy):
    """`wrap` takes a policy object of Keras's."""
    assert set(asked(pc.wrap(model(), policy)).values()) == {"int8_from_float32"}


def test_wrap_takes_keras_maps():
    """The keys of a Keras map are `layer.path`s, as its users know them."""
    made = model()
    rules = K.DTypePolicyMap("float32")
    rules["net/first"] = "int8_from_float32"
    rules["net/h.*"] = "float8_from_float32"
    assert made.layers[0].path == "net/first"
    pc.wrap(made, rules)
    assert asked(made) == {
        "first": "int8_from_float32",
        "1": "float32",
        "head": "float8_from_float32",
    }
    rules["net/nothing"] = "float32"
    with pytest.raises(UnmatchedRuleError, match="net/nothing"):
        pc.wrap(model(), rules)


def test_rules_may_use_names_of_keras():
    """A rule may name a layer by its Keras path or names, letter for letter, and not by pattern."""
    made = model()
    name = made.layers[1].name
    pc.wrap(made, {f"net/{name}": "int8_from_float32"})
    assert asked(made)["1"] == "int8_from_float32"
    made = model()
    pc.wrap(made, {made.layers[1].name: "int8_from_float32", "first": "bfloat16"})
    assert asked(made) == {"first": "bfloat16", "1": "int8_from_float32", "head": "float32"}
    pc.wrap(made := model(), {"(?!head).*": "int8_from_float32"})
    assert asked(made)["head"] == "float32"
    with pytest.raises(UnmatchedRuleError):
        pc.wrap(model(), {"net/.*": "int8_from_float32"})


def test_convert_input():
    """Symbolic tensors and variables are Keras's: floats are cast, symbolically or by value."""
    x = pc.convert_input(keras.Input((3,)), "mixed_bfloat16")
    assert isinstance(x, keras.KerasTensor)
    assert x.dtype == "bfloat16"
    ids = keras.Input((3,), dtype="int32")
    assert pc.convert_input(ids, "mixed_bfloat16") is ids
    variable = keras.Variable(np.ones(3, np.float32))
    assert array(pc.convert_input(variable, "bfloat16")).dtype.name == "bfloat16"
    assert pc.convert_input(variable, "float32") is variable


LAYERS = {
    "dense": lambda: keras.layers.Dense(5, activation="relu"),
    "einsum": lambda: keras.layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
    "einsum-out": lambda: keras.layers.EinsumDense("abcd,cde->abe", (None, 5), bias_axes="e"),
    "einsum-order": lambda: keras.layers.EinsumDense("abc,cde->abed", (None, 3, 2)),
    "embedding": lambda: keras.layers.Embedding(11, 5),
    "reversible": lambda: keras.layers.ReversibleEmbedding(11, 5),
}
INPUTS = {
    "dense": (3, 8),
    "einsum": (3, 4, 8),
    "einsum-out": (3, 4, 2, 6),
    "einsum-order": (3, 4, 8),
    "embedding": None,
    "reversible": None,
}


def built(name):
    layer, shape = LAYERS[name](), INPUTS[name]
    x = RANDOM.integers(0, 11, (2, 3)) if shape is None else RANDOM.standard_normal(shape)
    x = x.astype(np.int32 if shape is None else np.float32)
    layer(x)
    layer.set_weights(
        [RANDOM.standard_normal(w.shape).astype(w.dtype) for w in layer.get_weights()]
    )
    return layer, x


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", ["int8", "int8/weight_only"])
def test_int8_layers_are_taken_over(name, mode):
    """A layer that Keras has quantized keeps its codes; its scale is one over Keras's."""
    layer, x = built(name)
    exact = array(layer(x)).astype(np.float32)
    layer.quantize("int8")
    codes = array(layer._embeddings if hasattr(layer, "_embeddings") else layer._kernel)
    kind = "embeddings" if hasattr(layer, "_embeddings") else "kernel"
    theirs = array(getattr(layer, f"{kind}_scale")).reshape(-1)
    keras_answer = array(layer(x)).astype(np.float32)
    pc.wrap(layer, f"{mode}_from_float32")
    (site,) = policy_keras.backend.walk(layer)
    ours = array(site.tensors["weight"].read())
    form = layer._policy_form
    axes = OUT_IN if form is None else form.axes
    assert same_bits(ours, array(axes.to_file(keras.ops, policy_keras.backend.from_numpy(codes))))
    scale = array(site.tensors["weight_scale"].read()).reshape(-1)
    assert same_bits(scale, np.float32(1) / theirs.astype(np.float32))
    largest = np.abs(exact).max()
    assert np.abs(array(layer(x)).astype(np.float32) - keras_answer).max() < 0.02 * largest
    pc.unwrap(layer)
    assert layer.quantization_mode is None
    assert np.abs(array(layer(x)).astype(np.float32) - exact).max() < 0.05 * largest


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have:UserWarning")  # Keras's quantize
def test_int8_model_from_a_file_is_taken_over(tmp_path):
    """A quantized model from a Keras file is wrapped as it is, and saved as ours."""
    made = model()
    made.quantize("int8")
    made.save(tmp_path / "theirs.keras")
    loaded = keras.models.load_model(tmp_path / "theirs.keras")
    codes = [array(layer._kernel) for layer in loaded.layers]
    pc.wrap(loaded, "int8_from_float32")
    x = RANDOM.standard_normal((3, 8)).astype(np.float32)
    wanted = array(loaded(x))
    for site, kernel in zip(policy_keras.backend.walk(loaded), codes, strict=True):
        assert same_bits(array(site.tensors["weight"].read()), kernel.T)
    loaded.save(tmp_path / "ours.keras")
    again = keras.models.load_model(tmp_path / "ours.keras")
    assert same_bits(array(again(x)), wanted)


def test_quantized_layers_are_never_quantized_again():
    """Codes take their own mode or a float policy, and no other; nothing changes in between."""
    layer, x = built("dense")
    layer.quantize("int8")
    wanted = array(layer(x))
    with pytest.raises(ValueError, match="never quantized again"):
        pc.wrap(layer, "float8_from_float32")
    assert same_bits(array(layer(x)), wanted)
    pc.wrap(layer, "float32")
    assert layer.quantization_mode is None
    assert layer.kernel.shape == (8, 5)
    layer, x = built("dense")
    layer.quantize("int4")
    with pytest.raises(ValueError, match="no kernel here reads"):
        pc.wrap(layer, "int8_from_float32")


@pytest.mark.parametrize("policy", ["int8_from_float32", "float32"])
@pytest.mark.parametrize("case", ["lora", "einsum"])
def test_quantized_layers_that_cannot_be_taken_over(case, policy):
    """Codes with LoRA beside them, or of no plain product, are refused with the reason."""
    lora = case == "lora"
    layer = keras.layers.Dense(4) if lora else keras.layers.EinsumDense("abc,bce->abe", (5, 4))
    layer.build((None, 3) if lora else (None, 5, 3))
    layer.quantize("int8")
    if lora:
        layer.enable_lora(2)
    x = np.ones((2, 3) if lora else (2, 5, 3), np.float32)
    before = policy_keras.backend.to_numpy(layer(x))
    with pytest.raises(ValueError, match=r"cannot be taken over: (LoRA is|the equation)"):
        pc.wrap(layer, policy)
    assert np.array_equal(policy_keras.backend.to_numpy(layer(x)), before)


def test_float8_layers_are_taken_over():
    """A layer that Keras trains in float8 keeps its scales; its histories are newest first."""
    layer = keras.layers.Dense(3)
    net = keras.Sequential([keras.Input((8,)), layer])
    layer.quantize("float8")
    net.compile("sgd", "mse")
    x = RANDOM.standard_normal((32, 8)).astype(np.float32)
    net.fit(x, x[:, :3], batch_size=8, verbose=0, shuffle=False)
    scale = array(layer.inputs_scale)
    kernel = array(layer._kernel)
    net.optimizer = None
    pc.wrap(layer, "float8_from_float32")
    tensors = {n: array(t.read()) for n, t in policy_keras.backend.walk(layer)[0].tensors.items()}
    assert same_bits(tensors["weight"], kernel.T)
    assert same_bits(tensors["input_scale"], scale)
    largest = [np.abs(x[i : i + 8]).max() for i in (24, 16, 8, 0)]
    assert np.array_equal(tensors["input_amax_history"][:4], np.float32(largest))
    assert not tensors["input_amax_history"][4:].any()
    assert np.isfinite(array(layer(x))).all()


def test_wrapping_again_is_settled_as_asked():
    """Another policy for wrapped layers is an error, or kept, or replaced."""
    made = pc.wrap(model(), "int8_from_float32")
    with pytest.raises(AlreadyWrappedError):
        pc.wrap(made, "float8_from_float32")
    pc.wrap(made, "float8_from_float32", on_wrapped="replace")
    assert set(asked(made).values()) == {"float8_from_float32"}
    assert made.layers[0]._kernel.trainable
    pc.wrap(made, "int8_from_mixed_bfloat16", on_wrapped="replace")
    pc.wrap(made, "float32", on_wrapped="keep")
    assert set(asked(made).values()) == {"int8_from_mixed_bfloat16"}


def test_failing_wrap_changes_nothing():
    """A wrap that is refused at the last layer leaves every object and bit as it was."""
    made = model()
    weights = made.get_weights()
    weights[-2][0, 0] = np.nan
    made.set_weights(weights)
    before = [(type(x), x.dtype_policy.name, [id(v) for v in x.variables]) for x in made.layers]
    with pytest.raises(ValueError, match="NaN or an infinity"):
        pc.wrap(made, "int8_from_float32")
    after = [(type(x), x.dtype_policy.name, [id(v) for v in x.variables]) for x in made.layers]
    assert after == before
    assert all(same_bits(a, b) for a, b in zip(made.get_weights(), weights, strict=True))


def test_float_weights_are_freed():
    """After wrapping, nothing keeps a float weight alive, and an int8 model takes 0.3 of the bytes."""
    import gc
    import weakref

    made = keras.Sequential([keras.Input((256,)), *[keras.layers.Dense(256) for _ in range(5)]])
    variables = [weakref.ref(layer._kernel) for layer in made.layers]
    values = [weakref.ref(layer._kernel._value) for layer in made.layers]
    pc.wrap(made, "int8_from_float32")
    gc.collect()
    assert [ref() for ref in variables] == [None] * 5
    assert [ref() for ref in values] == [None] * 5
    assert sum(v.size for v in map(array, made.variables) if v.dtype != np.float32) < 5 * 256 * 300
    found = pc.report(made)
    assert found.bytes_after < 0.3 * found.bytes_before

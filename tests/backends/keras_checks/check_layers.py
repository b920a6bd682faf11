"""Which Keras layers take a policy, and that each computes what its float form computes."""

import keras
import numpy as np
import pytest

import policy_core as pc
import policy_keras
import policy_numpy
from policy_core.errors import LayerError

RANDOM = np.random.default_rng(0)
MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")


def array(tensor):
    return np.asarray(policy_keras.backend.to_numpy(tensor)).astype(np.float32)


def build(layer, *shapes):
    """Gives a layer with weights that are not tiny, called once."""
    layer(*[np.zeros(shape, np.float32) for shape in shapes])
    layer.set_weights(
        [RANDOM.standard_normal(w.shape).astype(w.dtype) for w in layer.get_weights()]
    )
    return layer


def error(y, wanted):
    return np.abs(array(y) - wanted).max() / np.abs(wanted).max()


EINSUMS = [
    ("ab,bc->ac", 8, "c", (3, 6)),
    ("abc,ce->abe", (None, 8), "e", (3, 2, 6)),
    ("...x,xy->...y", 8, "y", (2, 3, 4, 6)),
    ("abc,cde->abde", (None, 2, 4), "de", (3, 2, 6)),
    ("abcd,cde->abe", (None, 5), "e", (3, 2, 4, 6)),
    ("abc,cde->abed", (None, 4, 2), "ed", (3, 2, 6)),
    ("abc,bd->adc", (5, None), "d", (3, 4, 6)),
    ("abc,cde->abde", (None, 2, 4), "e", (3, 2, 6)),
    ("abc,cde->abde", (None, 2, 4), None, (3, 2, 6)),
]


@pytest.mark.parametrize(("equation", "out", "bias", "shape"), EINSUMS)
@pytest.mark.parametrize("mode", ["int8"])
def test_einsum_dense(equation, out, bias, shape, mode):
    """Every equation that is a product of rows computes with codes, its axes where they were."""
    layer = build(keras.layers.EinsumDense(equation, out, bias_axes=bias), shape)
    x = RANDOM.standard_normal(shape).astype(np.float32)
    wanted = array(layer(x))
    pc.wrap(layer, f"{mode}_from_float32")
    assert layer.quantization_mode == mode
    assert layer(x).shape == wanted.shape
    assert error(layer(x), wanted) < 0.1
    kernel = array(layer.kernel)
    pc.unwrap(layer)
    assert error(layer.kernel, kernel) < 1e-6


@pytest.mark.parametrize(
    ("equation", "out", "shape", "said"),
    [
        ("abc,bce->abe", (4, 5), (3, 4, 6), "batch axis in its weight"),
        ("abc,cd->ad", 5, (3, 4, 6), "sums an axis of the input alone"),
    ],
)
def test_einsum_that_is_no_product(equation, out, shape, said):
    """Another equation follows the source policy, and the report says why."""
    layer = build(keras.layers.EinsumDense(equation, out), shape)
    pc.wrap(layer, "int8_from_float32")
    (row,) = pc.report(layer).rows
    assert not row.quantized
    assert said in row.note
    assert row.policy == "float32"


CONVS = [
    keras.layers.Conv1D(5, 3),
    keras.layers.Conv1D(5, 3, padding="causal", dilation_rate=2),
    keras.layers.Conv1D(5, 4, padding="same", strides=2, use_bias=False),
    keras.layers.Conv2D(5, 3, activation="relu"),
    keras.layers.Conv2D(5, (2, 3), padding="same", strides=(1, 2)),
    keras.layers.Conv2D(5, 3, padding="same", dilation_rate=2),
    keras.layers.Conv2D(5, 1),
]


@pytest.mark.parametrize("case", range(len(CONVS)))
def test_convolution(case):
    """A convolution is a product of patches, each a row with a scale of its own."""
    layer, mode = CONVS[case], (*MODES, "int8", "int8")[case]
    shape = (2, 9, 3) if layer.rank == 1 else (2, 9, 8, 3)
    build(layer, shape)
    x = RANDOM.standard_normal(shape).astype(np.float32)
    wanted = array(layer(x))
    pc.wrap(layer, f"{mode}_from_float32")
    y = layer(x)
    assert y.shape == wanted.shape
    assert error(y, wanted) < 0.12
    if mode == "int8":
        kernel = np.moveaxis(array(pc.unwrap(layer).kernel), -1, 0)
        assert kernel.shape[0] == 5


def test_convolution_of_images_of_any_size():
    """A model of images of unknown size takes each, with padding and strides too."""
    image = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(4, 3, strides=2, padding="same")(image)
    model = keras.Model(image, keras.layers.Conv2D(2, 5, strides=3, padding="same")(x))
    images = [RANDOM.standard_normal((2, *size, 3)).astype(np.float32) for size in ((6, 7), (9, 4))]
    wanted = [array(model(each)) for each in images]
    pc.wrap(model, "int8_from_float32")
    for each, before in zip(images, wanted, strict=True):
        y = model.predict(each, verbose=0)
        assert y.shape == before.shape
        assert np.abs(y - before).max() < 0.05 * np.abs(before).max()


def test_grouped_convolution_is_left_out():
    """A convolution with groups follows the source policy, and the report says why."""
    layer = build(keras.layers.Conv1D(4, 3, groups=2), (2, 9, 4))
    pc.wrap(layer, "int8_from_float32")
    assert "2 groups" in pc.report(layer).rows[0].note


@pytest.mark.parametrize("kind", [keras.layers.Embedding, keras.layers.ReversibleEmbedding])
def test_ids_from_the_end(kind):
    """Negative ids count from the end, as they do in Keras's own look-up."""
    layer = build(kind(20, 8), (1, 2))
    assert np.array_equal(array(layer(np.array([[-1, -20]]))), array(layer(np.array([[19, 0]]))))
    pc.wrap(layer, "int8_from_float32")
    assert np.array_equal(array(layer(np.array([[-1, -20]]))), array(layer(np.array([[19, 0]]))))


@pytest.mark.parametrize("kind", ["multi_head", "grouped_query"])
@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_attention(kind, mode):
    """Attention computes with codes in its four projections, by the names that Keras gives them."""
    layer = (
        keras.layers.MultiHeadAttention(2, 4)
        if kind == "multi_head"
        else keras.layers.GroupQueryAttention(4, 4, 2)
    )
    x = RANDOM.standard_normal((2, 5, 8)).astype(np.float32)
    wanted = array(layer(x, x))
    pc.wrap(layer, f"{mode}_from_float32")
    rows = {row.path: row.quantized for row in pc.report(layer).rows}
    assert [path for path, quantized in rows.items() if quantized] == [
        "query",
        "key",
        "value",
        "attention_output",
    ]
    assert error(layer(x, x), wanted) < 0.2


def test_attention_follows_the_source_policy():
    """Attention between quantized projections computes in the source's compute dtype."""
    layer = keras.layers.MultiHeadAttention(2, 4)
    x = RANDOM.standard_normal((2, 5, 8)).astype(np.float32)
    layer(x, x)
    pc.wrap(layer, "int8_from_mixed_bfloat16")
    assert layer.dtype_policy.name == "mixed_bfloat16"
    assert keras.backend.standardize_dtype(layer(x, x).dtype) == "bfloat16"
    pc.unwrap(layer)
    assert layer.dtype_policy.name == "float32"
    assert type(layer) is keras.layers.MultiHeadAttention


def test_int8_dense_is_the_reference_to_the_bit():
    """A Dense with an activation gives the bits of the numpy reference, activation after it."""
    layer = build(keras.layers.Dense(33, activation="relu"), (1, 65))
    kernel, bias = layer.get_weights()
    reference = policy_numpy.Dense(65, 33)
    reference.tensors.update(weight=kernel.T.copy(), bias=bias)
    x = RANDOM.standard_normal((17, 65)).astype(np.float32)
    wanted = np.maximum(pc.wrap(reference, "int8_from_float32")(x), 0)
    y = policy_keras.backend.to_numpy(pc.wrap(layer, "int8_from_float32")(x))
    assert np.array_equal(y, wanted)


class Doubled(keras.layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs)


def test_subclass_that_overrides_call():
    """A Dense with a call of its own is left out, unless someone says how it computes."""
    layer = build(Doubled(4), (1, 8))
    x = RANDOM.standard_normal((3, 8)).astype(np.float32)
    wanted = array(layer(x))
    pc.wrap(layer, "int8_from_float32")
    assert "overrides call" in pc.report(layer).rows[0].note
    assert np.array_equal(array(layer(x)), wanted)

    class Tripled(keras.layers.Dense):
        def call(self, inputs, training=None):
            return 3 * super().call(inputs)

    dense = policy_keras._adapters.adapter_for(keras.layers.Dense)
    adapter = policy_keras.LayerAdapter(
        kind="linear",
        weight="_kernel",
        form=dense.form,
        call=lambda layer, linear, inputs, training=None: 3 * linear(inputs),
    )
    pc.register_layer(Tripled, adapter)
    layer = build(Tripled(4), (1, 8))
    wanted = array(layer(x))
    pc.wrap(layer, "int8_from_float32")
    assert pc.report(layer).rows[0].quantized
    assert error(layer(x), wanted) < 0.05


@pytest.mark.skipif(keras.config.backend() == "torch", reason="Keras has no sparse tensors there")
def test_sparse_inputs():
    """A Dense takes the sparse inputs that it took before, in a model too: same bits as dense."""
    data = keras.Input((8,), sparse=True)
    model = keras.Model(data, keras.layers.Dense(4)(data))
    dense = RANDOM.standard_normal((3, 8)).astype(np.float32) * (RANDOM.random((3, 8)) > 0.5)
    if keras.config.backend() == "jax":
        from jax.experimental.sparse import BCOO

        sparse = BCOO.fromdense(dense)
    else:
        import tensorflow as tf

        sparse = tf.sparse.from_dense(dense)
    wanted = array(model(sparse))
    for policy in ("int8_from_float32", "float8_from_float32", "int8_from_mixed_bfloat16"):
        pc.wrap(model, policy, on_wrapped="replace")
        assert np.array_equal(array(model(sparse)), array(model.layers[-1](dense)))
        assert error(model(sparse), wanted) < 0.1
        model.predict(sparse, verbose=0)


def test_lora():
    """A layer with LoRA is left out and works on; a quantized layer refuses LoRA."""
    layer = build(keras.layers.Dense(4), (1, 8))
    layer.enable_lora(2)
    x = RANDOM.standard_normal((3, 8)).astype(np.float32)
    wanted = array(layer(x))
    pc.wrap(layer, "int8_from_float32")
    assert "LoRA" in pc.report(layer).rows[0].note
    assert np.array_equal(array(layer(x)), wanted)
    other = pc.wrap(build(keras.layers.Dense(4), (1, 8)), "int8_from_float32")
    with pytest.raises(NotImplementedError, match="unwrap it first"):
        other.enable_lora(2)


def test_refusals():
    """A layer without variables, and Keras's own quantize, are refused with what to do."""
    with pytest.raises(ValueError, match="has no variables yet"):
        pc.wrap(keras.layers.Dense(4), "int8_from_float32")
    layer = pc.wrap(build(keras.layers.Dense(4), (1, 8)), "int8_from_float32")
    with pytest.raises(ValueError, match="already quantized"):
        layer.quantize("int8")
    with pytest.raises(AttributeError, match="on_wrapped='replace'"):
        layer.dtype_policy = "float32"
    with pytest.raises(TypeError, match="Expected a model"):
        pc.wrap(None, "int8_from_float32")


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.LayerNormalization(),
        keras.layers.BatchNormalization(),
        keras.layers.GroupNormalization(2),
        keras.layers.RMSNormalization(),
        keras.layers.UnitNormalization(),
    ],
    ids=lambda layer: layer.name,
)
def test_norms_compute_in_float32(layer):
    """Inputs beyond float16's largest give finite outputs under mixed_float16."""
    x = RANDOM.uniform(6e4, 7e4, (4, 8)).astype(np.float32)
    x[:, ::2] *= -1
    layer(np.zeros((4, 8), np.float32))
    pc.wrap(layer, "mixed_float16")
    y = layer(x, training=True) if layer.name.startswith("batch") else layer(x)
    assert keras.backend.standardize_dtype(y.dtype) == "float16"
    assert np.isfinite(array(y)).all() or layer.name.startswith("group")


def test_layer_inside_spectral_normalization(tmp_path):
    """A Dense whose kernel its wrapper writes to is left out, also after it was loaded."""
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    model = keras.Sequential([keras.Input((8,)), dense])
    pc.wrap(model, "int8_from_mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        (row,) = [row for row in pc.report(each).rows if row.layer == "Dense"]
        assert "writes to its kernel" in row.note
        assert not row.quantized
    x = RANDOM.standard_normal((3, 8)).astype(np.float32)
    assert np.array_equal(array(model(x)), array(loaded(x)))


def test_recurrent_layers_follow_the_source():
    """An LSTM has no quantized form: it computes in the source's compute dtype."""
    layer = keras.layers.LSTM(4)
    x = RANDOM.standard_normal((2, 3, 5)).astype(np.float32)
    wanted = array(layer(x))
    pc.wrap(layer, "int8_from_mixed_bfloat16")
    (row,) = pc.report(layer).rows
    assert row.policy == "mixed_bfloat16"
    assert keras.backend.standardize_dtype(layer(x).dtype) == "bfloat16"
    assert error(layer(x), wanted) < 0.05


def test_shared_variable_stays_one():
    """Two layers that share a kernel variable share its codes."""
    first, second = build(keras.layers.Dense(8), (1, 8)), build(keras.layers.Dense(8), (1, 8))
    second._tracker.unlock()
    policy_keras._keras.drop_attribute(second, "_kernel")
    second._kernel = first._kernel
    second._lock_state()
    model = keras.Sequential([first, second])
    model.build((None, 8))
    pc.wrap(model, "int8_from_float32")
    rows = pc.report(model).rows
    assert rows[0].bytes_after > 2 * rows[1].bytes_after
    pc.unwrap(model)
    assert first._kernel is second._kernel
    with pytest.raises(LayerError, match="share one weight"):
        pc.wrap(model, {"0": "int8_from_float32", "1": "float32"})

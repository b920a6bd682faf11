"""ReversibleEmbedding: with one table, and with a second one that is a layer inside."""

import copy

import keras
import numpy as np
import pytest

import policy_core as pc
import policy_keras
import policy_numpy
from policy_core.testing import same_bits

RANDOM = np.random.default_rng(0)
MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
SOURCES = ("float32", "mixed_bfloat16")
IDS = np.array([[0, 3], [10, 7]], np.int32)
X = RANDOM.standard_normal((2, 6)).astype(np.float32)


def array(tensor):
    return np.asarray(policy_keras.backend.to_numpy(tensor)).astype(np.float32)


def error(y, wanted):
    return np.abs(array(y) - wanted).max() / np.abs(wanted).max()


def table(**options):
    layer = keras.layers.ReversibleEmbedding(11, 6, **options)
    layer.build()
    layer.set_weights([RANDOM.standard_normal(w.shape) for w in layer.get_weights()])
    return layer


def untied(**options):
    return table(tie_weights=False, **options)


def answers(layer):
    return array(layer(IDS)), array(layer(X, reverse=True))


def assert_same(layer, wanted):
    assert all(map(np.array_equal, answers(layer), wanted))


def network():
    """Gives a model that looks up and projects back by one layer with two tables."""
    ids = keras.Input((5,), dtype="int32")
    layer = keras.layers.ReversibleEmbedding(11, 6, tie_weights=False, name="table")
    return keras.Model(
        ids, layer(keras.layers.Dense(6, activation="gelu")(layer(ids)), reverse=True)
    )


@keras.saving.register_keras_serializable("policy_core_tests")
class Tower(keras.layers.Layer):
    """A layer as users write them, which uses one with two tables in two places."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.ReversibleEmbedding(11, 6, tie_weights=False)
        self.head = [self.table]

    def build(self, shape):
        self.table.build()

    def call(self, ids):
        return self.head[0](self.table(ids), reverse=True)


def tower():
    return keras.Sequential([keras.Input((5,), dtype="int32"), Tower()])


def rows_of(model):
    return {row.path: (row.asked, row.policy, row.quantized) for row in pc.report(model).rows}


def state_of(model):
    sites = policy_keras.backend.walk(model)
    read = policy_keras.backend.to_numpy
    return {
        f"{s.path}/{n}": np.array(read(tensor)) for s in sites for n, tensor in s.tensors.items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_tied(mode):
    """With one table it looks up and multiplies by one set of codes."""
    layer = table(logit_soft_cap=5.0)
    rows, logits = answers(layer)
    pc.wrap(layer, f"{mode}_from_float32")
    assert len(pc.report(layer).rows) == 1
    assert error(layer(IDS), rows) < 0.08
    assert error(layer(X, reverse=True), logits) < 0.1


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mode", MODES)
def test_untied(mode, source):
    """With two tables it is an embedding, and a product in a layer inside; unwrap gives it back."""
    layer = untied(logit_soft_cap=5.0)
    rows, logits = answers(layer)
    names = [v.name for v in layer.variables]
    pc.wrap(layer, f"{mode}_from_{source}")
    found = rows_of(layer)
    assert list(found) == ["", "reverse"]
    assert found["reverse"][2]
    # An embedding does not multiply: there is nothing that float8 could train.
    assert found[""][2] is (mode not in ("float8", "float8/dynamic"))
    assert error(layer(IDS), rows) < 0.08
    assert error(layer(X, reverse=True), logits) < 0.1
    pc.freeze(layer)
    assert error(layer(X, reverse=True), logits) < 0.1
    pc.unwrap(layer)
    assert type(layer) is keras.layers.ReversibleEmbedding
    assert [v.name for v in layer.variables] == names
    assert not hasattr(layer, "reverse")
    assert not layer._layers
    assert error(layer(X, reverse=True), logits) < 0.1


def test_untied_int8_is_the_reference_to_the_bit():
    """Rows and logits have the bits of the reference's Embedding and Dense."""
    layer = untied()
    first, second = layer.get_weights()
    lookup, dense = policy_numpy.Embedding(11, 6), policy_numpy.Dense(6, 11, bias=False)
    lookup.tensors["weight"], dense.tensors["weight"] = first, second.T.copy()
    for each in (layer, lookup, dense):
        pc.wrap(each, "int8_from_float32")
    assert np.array_equal(array(layer(IDS)), lookup(IDS))
    assert np.array_equal(array(layer(X, reverse=True)), dense(X))


def test_untied_float_is_keras():
    """Under a float policy it computes what Keras computes, to the bit."""
    layer = untied(reverse_dtype="float32", logit_soft_cap=3.0)
    other = keras.layers.ReversibleEmbedding.from_config(
        {**layer.get_config(), "dtype": "mixed_bfloat16"}
    )
    other.build()
    other.set_weights(layer.get_weights())
    wanted = answers(other)
    assert_same(pc.wrap(layer, "mixed_bfloat16"), wanted)
    assert_same(pc.wrap(other, "mixed_bfloat16"), wanted)


@pytest.mark.parametrize("tie", [True, False])
def test_reverse_dtype(tie):
    """`reverse_dtype` is the dtype of the logits, not rounded to the compute dtype before."""
    layer = table(tie_weights=tie, reverse_dtype="float32")
    pc.wrap(layer, "int8_from_mixed_bfloat16")
    logits = layer(X, reverse=True)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    assert not np.array_equal(array(keras.ops.cast(logits, "bfloat16")), array(logits))
    assert keras.backend.standardize_dtype(layer(IDS).dtype) == "bfloat16"


def test_mask():
    """`mask_zero` gives a mask with the rows, and none with the logits."""
    layer = pc.wrap(untied(mask_zero=True), "int8_from_float32")
    rows = layer(IDS)
    assert np.array_equal(array(rows._keras_mask), IDS != 0)
    assert getattr(layer(rows, reverse=True), "_keras_mask", None) is None


def test_rules():
    """A rule for the layer is one for both tables; one for the layer inside comes before it."""
    rules = {"table": "int8_from_float32"}
    found = rows_of(pc.wrap(network(), {**rules, "1": "float32"}))
    assert [found["table"][1], found["table/reverse"][1]] == ["int8_from_float32"] * 2
    found = rows_of(pc.wrap(network(), {**rules, "table/reverse": "float8_from_float32"}))
    assert found["table"][1] == "int8_from_float32"
    assert found["table/reverse"][1] == "float8_from_float32"
    found = rows_of(pc.wrap(network(), {"table/.*": "int8_from_float32"}))
    assert [found["table"][1], found["table/reverse"][1]] == ["float32", "int8_from_float32"]
    theirs = keras.dtype_policies.DTypePolicyMap("float32")
    model = network()
    theirs[model.get_layer("table").path] = keras.DTypePolicy("mixed_bfloat16")
    found = rows_of(pc.wrap(model, theirs))
    assert [found["table"][1], found["table/reverse"][1]] == ["mixed_bfloat16"] * 2


def test_wrapping_again():
    """Each table's policy can be replaced by itself, and the layer inside be unwrapped by itself."""
    layer = untied()
    wanted = answers(layer)
    pc.wrap(layer, "int8_from_float32")
    pc.wrap(layer, {"reverse": "float32"}, on_wrapped="replace")
    assert not any(quantized for _, _, quantized in rows_of(layer).values())
    pc.wrap(layer, "float8_from_float32", on_wrapped="replace")
    pc.unwrap(layer.reverse)
    assert rows_of(layer)["reverse"] == ("", "", False)
    assert error(layer(X, reverse=True), wanted[1]) < 0.05
    pc.wrap(layer.reverse, "int8_from_float32")
    assert error(layer(X, reverse=True), wanted[1]) < 0.05
    pc.unwrap(layer.reverse)
    pc.unwrap(layer)
    assert [v.name for v in layer.variables] == ["embeddings", "reverse_embeddings"]
    assert error(layer(X, reverse=True), wanted[1]) < 0.05


def test_lora_leaves_the_first_table_out():
    """With LoRA the table to look up in stays a float; the other one is quantized."""
    layer = untied()
    layer.enable_lora(2)
    rows, logits = answers(layer)
    pc.wrap(layer, "int8_from_float32")
    first, second = pc.report(layer).rows
    assert "LoRA" in first.note
    assert second.quantized
    assert np.array_equal(array(layer(IDS)), rows)
    assert error(layer(X, reverse=True), logits) < 0.05


@pytest.mark.parametrize("make", [network, tower])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "int8_from_float32", "float8_from_float32"])
def test_files(make, policy, tmp_path):
    """Keras's files, weights files, ours and copies give the same bits, policies and answers."""
    ids = np.arange(10).reshape(2, 5).astype(np.int32)
    model = make()
    model.save_weights(tmp_path / "plain.weights.h5")
    pc.wrap(model, policy)
    wanted = array(model(ids))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "a.weights.h5")
    pc.save(model, tmp_path / "m.safetensors")
    loaded = [
        keras.models.load_model(tmp_path / "model.keras"),
        copy.deepcopy(model),
        pc.load(make(), tmp_path / "m.safetensors"),
    ]
    for name in ("a.weights.h5", "plain.weights.h5"):
        other = pc.wrap(make(), policy)
        other.load_weights(tmp_path / name)
        loaded.append(other)
    ours = state_of(model)
    for each in loaded:
        assert np.array_equal(array(each(ids)), wanted)
        assert rows_of(each) == rows_of(model)
        theirs = state_of(each)
        assert ours.keys() == theirs.keys()
        assert all(same_bits(ours[name], theirs[name]) for name in ours)
    unwrapped = pc.unwrap(loaded[0])
    kinds = {type(layer) for layer in unwrapped._flatten_layers()}
    assert keras.layers.ReversibleEmbedding in kinds
    assert not [kind for kind in kinds if kind.__name__ == "ReverseProjection"]


def test_file_with_a_policy_for_one_table(tmp_path):
    """A file that has a policy for one of two tables of a plain layer is refused, unchanged."""
    pc.save(pc.wrap(untied(), {"reverse": "int8_from_float32"}), tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    entry = b'\\"\\": {\\"policy\\": '
    assert entry in content
    length = int.from_bytes(content[:8], "little")
    other = untied()
    wanted = answers(other)
    start = content.index(entry)
    stop = content.index(b'\\"reverse\\": {', start)
    shorter = content[:start] + b" " * (stop - start) + content[stop:]
    assert int.from_bytes(shorter[:8], "little") == length
    (tmp_path / "m.safetensors").write_bytes(shorter)
    with pytest.raises(ValueError, match="must both have a policy"):
        pc.load(other, tmp_path / "m.safetensors")
    assert_same(other, wanted)


@pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_float32"])
def test_fit(policy):
    """The product trains in float8; layers of codes leave what is trainable beside them to train."""
    ids = RANDOM.integers(0, 11, (32, 5)).astype(np.int32)
    model = pc.wrap(network(), policy)
    before = state_of(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    first = model.evaluate(ids, ids, verbose=0)
    model.fit(ids, ids, batch_size=8, epochs=4, verbose=0)
    assert model.evaluate(ids, ids, verbose=0) < first
    after = state_of(model)
    trains = policy.startswith("float8")
    assert same_bits(before["table/reverse/weight"], after["table/reverse/weight"]) is not trains
    assert same_bits(before["table/weight"], after["table/weight"]) is not trains
    if trains:
        for role in ("input", "weight", "output_grad"):
            assert np.count_nonzero(after[f"table/reverse/{role}_amax_history"]) == 16


@pytest.mark.parametrize("mode", ["int8", "int8/weight_only"])
def test_int8_layer_of_keras_is_taken_over(mode, tmp_path):
    """Codes of both tables of a layer that Keras has quantized are kept, also from a file."""
    model = network()
    exact = array(model(IDS[:, [0, 1, 1, 0, 1]]))
    layer = model.get_layer("table")
    layer.quantize("int8")
    model.save(tmp_path / "theirs.keras")
    for each in (model, keras.models.load_model(tmp_path / "theirs.keras")):
        layer = each.get_layer("table")
        first, second = array(layer._embeddings), array(layer.reverse_embeddings)
        scales = array(layer.embeddings_scale), array(layer.reverse_embeddings_scale)
        pc.wrap(each, f"{mode}_from_float32")
        state = state_of(each)
        assert np.array_equal(state["table/weight"], first)
        assert np.array_equal(state["table/reverse/weight"], second.T)
        for path, theirs in zip(("table", "table/reverse"), scales, strict=True):
            assert np.array_equal(state[f"{path}/weight_scale"][:, 0], np.float32(1) / theirs)
        assert error(each(IDS[:, [0, 1, 1, 0, 1]]), exact) < 0.05
        pc.unwrap(each)
        assert layer.quantization_mode is None
        assert layer.reverse_embeddings.trainable
        assert error(each(IDS[:, [0, 1, 1, 0, 1]]), exact) < 0.05


def test_subclass_that_overrides_call_keeps_both_tables():
    """A subclass with a call of its own is left out whole, and works on."""

    class Halved(keras.layers.ReversibleEmbedding):
        def call(self, inputs, reverse=False):
            return super().call(inputs, reverse=reverse) / 2

    layer = Halved(11, 6, tie_weights=False)
    layer.build()
    wanted = answers(layer)
    pc.wrap(layer, "int8_from_float32")
    (row,) = pc.report(layer).rows
    assert "overrides call" in row.note
    assert_same(layer, wanted)


def test_float_tables_are_freed():
    """After wrapping nothing keeps a float table alive."""
    import gc
    import weakref

    model = tower()
    layer = model.layers[0].table
    variables = [weakref.ref(v) for v in layer.variables]
    values = [weakref.ref(v._value) for v in layer.variables]
    pc.wrap(model, "int8_from_float32")
    gc.collect()
    assert [ref() for ref in variables + values] == [None] * 4

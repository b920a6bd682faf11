"""What `wrap` does to trees of `tf.Module`: paths, variables, ties, functions, refusals."""

import copy
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import policy_core as pc
import policy_tensorflow as pt
from policy_core.testing import same_bits
from policy_tensorflow import _native

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
native_only = pytest.mark.skipif(not _native.available(), reason="the kernels were not built")


class MLP(tf.Module):
    """Layers in a list, one in a dict, and a variable of its own beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [pt.Linear(8, 16), pt.LayerNorm(16)]
        self.heads = {"main": pt.Linear(16, 4)}
        self.shift = tf.Variable(tf.ones(8))

    def __call__(self, x: Any) -> Any:
        x = x + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.heads["main"](x)


class Traced(tf.Module):
    """A model whose call is a tf.function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pt.Linear(8, 4)
        self.python_calls = 0

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def __call__(self, x: Any) -> Any:
        self.python_calls += 1
        return self.inner(x)


class Signed(tf.Module):
    """A variable of its own, and a call that is a tf.function with a signature and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = pt.Linear(8, 4), tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def __call__(self, x: Any) -> Any:
        if x[0, 0] < 0:
            x = -x
        return self.inner(x) * self.gain


class Tied(tf.Module):
    """An embedding whose table multiplies too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = pt.Embedding(10, 8)
        self.head = Head(self.embedding.weight)

    def __call__(self, ids: Any) -> Any:
        return self.head(self.embedding(ids))


class Head(tf.Module):
    """A product with a weight of shape (out, in) that someone else may hold too."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.table = weight

    def __call__(self, x: Any) -> Any:
        return tf.tensordot(x, self.table, [[-1], [1]])


pc.register_layer(Head, pt.LayerAdapter(kind="linear", weight="table"))


class TestWalk:
    """What is a layer, and what it is called."""

    def test_paths_and_reports(self) -> None:
        """Paths go through attributes, lists and dicts; a module's own variables make it a layer."""
        model = pc.wrap(MLP(), "int8_from_mixed_bfloat16")
        rows = {row.path: row for row in pc.report(model).rows}
        assert set(rows) == {"", "layers/0", "layers/1", "heads/main"}
        assert {path for path, row in rows.items() if row.quantized} == {"layers/0", "heads/main"}
        assert rows["layers/1"].policy == "mixed_bfloat16"
        assert isinstance(model, MLP)
        assert model(X).dtype == tf.bfloat16

    def test_rules_reach_lists_and_dicts(self) -> None:
        """A map's patterns match these paths."""
        rules = {"layers/.*": "int8_from_float32", "heads/main": "float8/dynamic_from_float32"}
        model = pc.wrap(MLP(), pc.DTypePolicyMap("float32", rules))
        assert model.heads["main"].dtype_policy.name == "float8/dynamic_from_float32"
        assert model.layers[0].dtype_policy.name == "int8_from_float32"

    def test_kernel_of_a_cpu(self) -> None:
        """The report names the native kernel, and what runs under XLA instead."""
        row = pc.report(pc.wrap(pt.Linear(8, 4), "int8_from_float32")).rows[0]
        if _native.available():
            assert row.kernel.startswith("linear_s8_")
            assert "jit_compile=True" in row.note
        else:
            assert row.kernel == "linear_s8_tensorflow"

    def test_module_that_knows_its_parent(self) -> None:
        """A reference back up the tree is no endless walk."""
        model = MLP()
        model.layers[0].parent = model
        assert len(pc.report(model).rows) == 4

    def test_subclass_that_overrides_call_is_left_out(self) -> None:
        """It may do something else with the product; the report says so, and registering lets it in."""

        class Doubled(pt.Linear):
            def __call__(self, x: Any) -> Any:
                return 2 * super().__call__(x)

        row = pc.report(pc.wrap(Doubled(8, 4), "int8_from_float32")).rows[0]
        assert not row.quantized
        assert "overrides __call__" in row.note

        class Registered(Doubled):
            pass

        pc.register_layer(
            Registered,
            pt.LayerAdapter(
                kind="linear", transposed=True, forward=lambda layer, linear, x: 2 * linear(x)
            ),
        )
        layer = Registered(8, 4)
        wanted = layer(X)
        wrapped = pc.wrap(layer, "int8_from_float32")
        assert pc.report(wrapped).rows[0].quantized
        np.testing.assert_allclose(wrapped(X), wanted, atol=0.1)

    def test_class_that_is_registered_after_it_was_wrapped(self) -> None:
        """A class counts as it is registered now, also if modules of it were wrapped before."""

        class Mean(tf.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mean = tf.Variable(tf.zeros(8))

            def __call__(self, x: Any) -> Any:
                self.mean.assign(tf.reduce_mean(tf.cast(x, tf.float32), 0))
                return x

        with pytest.raises(AttributeError, match="assign"):
            pc.wrap(Mean(), "mixed_bfloat16")(X)
        pc.register_layer(Mean, pt.LayerAdapter(kind="other", kept=("mean",)))
        assert pc.wrap(Mean(), "mixed_bfloat16")(X).dtype == tf.bfloat16

    def test_keras_layers_inside_are_not_passed_over(self) -> None:
        """A layer of Keras in a tf.Module is refused by its path: no policy would reach it."""

        class Layer:
            pass

        Layer.__module__ = "keras.src.layers.layer"
        model = MLP()
        model.extra = Layer()
        with pytest.raises(TypeError, match="'extra' is a layer of Keras"):
            pc.wrap(model, "int8_from_float32")

    @pytest.mark.parametrize(
        ("adapter", "error"),
        [
            ({"kind": "conv"}, "Expected kind"),
            ({"kind": "norm", "transposed": True}, "'transposed' are for kind 'linear'"),
        ],
    )
    def test_bad_adapters_are_refused(self, adapter: Any, error: str) -> None:
        """An adapter that makes no sense is an error where it is made."""
        with pytest.raises(ValueError, match=error):
            pt.LayerAdapter(**adapter)

    def test_register_layer_checks_what_it_gets(self) -> None:
        """Only subclasses of tf.Module, only adapters, and one adapter for each class."""
        adapter = pt.LayerAdapter(kind="other")
        with pytest.raises(TypeError, match=r"subclass of tf\.Module"):
            pt.register_layer(int, adapter)
        with pytest.raises(TypeError, match="LayerAdapter"):
            pt.register_layer(MLP, "linear")
        with pytest.raises(ValueError, match="registered already"):
            pt.register_layer(pt.Linear, adapter)


class TestFloat:
    """Float policies."""

    def test_variables_keep_their_dtype(self) -> None:
        """Under a mixed policy variables, and so gradients, stay float32; results are 16 bits."""
        model = pc.wrap(MLP(), "mixed_bfloat16")
        assert {v.dtype for v in model.trainable_variables} == {tf.float32}
        with tf.GradientTape() as tape:
            y = model(X)
            loss = tf.reduce_sum(y)
        assert y.dtype == tf.bfloat16
        for gradient in tape.gradient(loss, model.trainable_variables):
            assert gradient.dtype == tf.float32

    def test_what_a_layer_reads(self) -> None:
        """In its call a module reads variables, also those in lists and dicts, in the compute dtype."""
        seen = {}

        class Reader(tf.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = tf.Variable([1.0])
                self.many = [tf.Variable([1.0]), tf.Variable([2.0])]
                self.named = {"a": tf.Variable([1.0]), "b/c": tf.Variable([1.0])}
                self.count = tf.Variable(0)
                self.mean = tf.Variable([0.0], trainable=False)

            def __call__(self, x: Any) -> Any:
                seen.update(
                    w=self.w.dtype,
                    many=self.many[1].dtype,
                    named=self.named["a"].dtype,
                    count=self.count.dtype,
                )
                self.mean.assign([5.0])
                return x * self.w

        pt.register_layer(Reader, pt.LayerAdapter(kind="other", kept=("mean",)))
        layer = pc.wrap(Reader(), "mixed_bfloat16")
        layer(X)
        assert [seen[n] for n in ("w", "many", "named")] == [tf.bfloat16] * 3
        assert seen["count"] == tf.int32
        assert layer.mean.numpy() == 5
        assert layer.w.dtype == tf.float32
        pc.wrap(layer, "bfloat16", on_wrapped="replace")
        assert layer.named["b/c"].dtype == layer.many[0].dtype == tf.bfloat16

    def test_variable_dtype_of_a_pure_policy(self) -> None:
        """Under bfloat16 variables become bfloat16, shared ones stay one, and unwrap gives float32."""
        model = Tied()
        pc.wrap(model, "bfloat16")
        assert model.embedding.weight.dtype == tf.bfloat16
        assert model.embedding.weight is model.head.table
        pc.unwrap(model)
        assert model.embedding.weight.dtype == tf.float32
        assert model.embedding.weight is model.head.table

    def test_variables_that_are_no_numbers(self) -> None:
        """A variable of strings beside others stays what it is, in no row's bytes."""
        layer = pt.LayerNorm(4)
        layer.words = tf.Variable(["a", "b"])
        pc.wrap(layer, "bfloat16")
        assert pc.report(layer).bytes_after == 16
        assert layer(tf.ones((1, 4))).dtype == tf.bfloat16
        assert layer.words.dtype == tf.string

    def test_variable_in_a_tuple(self) -> None:
        """A tuple cannot take a variable of another dtype: refused before anything changes."""

        class Holder(tf.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pair = (tf.Variable([1.0]), tf.Variable([2.0]))

            def __call__(self, x: Any) -> Any:
                return x * self.pair[0] + self.pair[1]

        assert pc.wrap(Holder(), "mixed_bfloat16")(X).dtype == tf.bfloat16
        with pytest.raises(ValueError, match="in a tuple"):
            pc.wrap(Holder(), "bfloat16")

    def test_large_values_that_float16_cannot_hold(self) -> None:
        """A variable that would become infinite is refused, and the model stays as it was."""
        layer = pt.Linear(2, 2)
        layer.weight.assign([[1e6, 0], [0, 1]])
        with pytest.raises(ValueError, match="float16 cannot hold"):
            pc.wrap(layer, "float16")
        assert layer.weight.dtype == tf.float32

    def test_threads_read_in_their_own_dtype(self) -> None:
        """Threads that call one model at once do not see each other's casts."""
        layer = pc.wrap(pt.LayerNorm(8), "mixed_float16")
        errors = []

        def call() -> None:
            errors.extend("cast" for _ in range(50) if layer(X).dtype != tf.float16)

        def read() -> None:
            errors.extend("read" for _ in range(200) if layer.weight.dtype != tf.float32)

        threads = [threading.Thread(target=f) for f in (call, call, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


class TestCasting:
    """`convert_input` on TensorFlow's kinds of tensors."""

    def test_ragged_and_sparse_tensors(self) -> None:
        """Values are cast, structure stays; integers pass."""
        ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
        out = pc.convert_input(ragged, "mixed_bfloat16")
        assert isinstance(out, tf.RaggedTensor)
        assert out.dtype == tf.bfloat16
        assert out.row_splits.numpy().tolist() == [0, 2, 3]
        sparse = tf.sparse.from_dense([[0.0, 5.0], [0.0, 0.0]])
        out = pc.convert_input(sparse, "float16")
        assert isinstance(out, tf.SparseTensor)
        assert out.dtype == tf.float16
        assert out.indices.numpy().tolist() == [[0, 1]]
        ids = tf.ragged.constant([[1, 2], [3]])
        assert pc.convert_input(ids, "float16") is ids

    def test_ragged_ids(self) -> None:
        """An embedding that keeps codes looks up ragged ids, as a plain one does."""
        layer = pt.Embedding(10, 4)
        ids = tf.ragged.constant([[1, 2], [], [3]])
        shape = layer(ids).shape
        rows = pc.wrap(layer, "int8_from_float32")(ids)
        assert rows.shape == shape
        assert same_bits(rows.flat_values, layer(tf.constant([1, 2, 3])))
        assert same_bits(tf.function(layer)(ids).flat_values, rows.flat_values)

    def test_variables_and_nests(self) -> None:
        """A variable gives its value where it must be cast; nests keep their structure."""
        variable, ids = tf.Variable([1.0]), tf.constant([2909])
        out = pc.convert_input({"a": [variable, ids], "b": "text", "c": None}, "mixed_bfloat16")
        assert out["a"][0].dtype == tf.bfloat16
        assert out["a"][1] is ids
        assert out["b"] == "text"
        assert pc.convert_input(variable, "float32") is variable

    def test_float8_saturates(self) -> None:
        """A cast into float8 gives the largest value for what is too large, as on every backend."""
        x = tf.constant([1000.0, -1000.0, 464.0, 465.0, 448.0])
        y = pc.backend("tensorflow").convert_input(x, "float8_e4m3fn")
        assert tf.cast(y, tf.float32).numpy().tolist() == [448.0, -448.0, 448.0, 448.0, 448.0]

    def test_numpy_arrays_where_tensorflow_was_chosen(self, monkeypatch: Any) -> None:
        """Under POLICY_BACKEND=tensorflow numpy arrays become tensors; integers stay integers."""
        monkeypatch.setenv("POLICY_BACKEND", "tensorflow")
        out = pc.convert_input({"x": np.ones(2), "ids": np.arange(2)}, "mixed_bfloat16")
        assert out["x"].dtype == tf.bfloat16
        assert out["ids"].dtype == tf.int64

    def test_in_a_function(self) -> None:
        """Casts work on the tensors of a graph."""
        function = tf.function(lambda x: pc.convert_input(x, "mixed_bfloat16"))
        assert function(tf.ones(3)).dtype == tf.bfloat16


class TestFunctions:
    """`tf.function` around and inside of wrapped models."""

    @pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_float32"])
    def test_unknown_batch_is_traced_once(self, policy: str) -> None:
        """Batches of any size, none too, take one trace and give what eager calls give."""
        model = pc.wrap(MLP(), policy)
        function = tf.function(model, input_signature=[tf.TensorSpec([None, 8])])
        for rows in (1, 3, 6, 0):
            np.testing.assert_allclose(function(X[:rows]), model(X[:rows]), rtol=1e-5, atol=1e-6)
        assert function.experimental_get_tracing_count() == 1

    @pytest.mark.parametrize("compiled", [None, True])
    @pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_float32"])
    def test_unknown_rank(self, policy: str, compiled: Any) -> None:
        """Even the rank may be unknown to a graph, in training too."""
        layer = pc.wrap(pt.Linear(8, 4), policy)

        def step(x: Any) -> Any:
            with pt.training(), tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x)
            return y, tape.gradient(y, x)

        spec = tf.TensorSpec(None)
        function = tf.function(step, input_signature=[spec], jit_compile=compiled)
        for shape in [(6, 8), (8,), (2, 3, 8)]:
            y, dx = function(tf.ones(shape))
            assert y.shape == (*shape[:-1], 4)
            assert dx.shape == shape
        if policy.startswith("int8"):
            assert same_bits(function(tf.constant(X))[0], layer(X))

    @pytest.mark.parametrize("policy", ["int8_from_float32", "int8_from_mixed_bfloat16"])
    def test_xla_gives_the_same_bits(self, policy: str) -> None:
        """Under jit_compile=True an int8 layer gives the bits that it gives eagerly."""
        layer = pc.wrap(pt.Linear(8, 4), policy)
        assert same_bits(tf.function(layer, jit_compile=True)(X), layer(X))

    @pytest.mark.parametrize("change", ["wrap", "unwrap", "freeze"])
    def test_traces_do_not_outlive_a_change(self, change: str) -> None:
        """A model's own tf.function is traced anew after wrap, unwrap and freeze."""
        model = Traced()
        if change != "wrap":
            pc.wrap(model, "float8/dynamic_from_float32")
        model(X)
        calls = model.python_calls
        getattr(pc, change)(model, *["int8_from_float32"] if change == "wrap" else [])
        y = model(X)
        assert model.python_calls == calls + 1
        assert same_bits(y, model.inner(tf.constant(X)))

    @pytest.mark.parametrize("policy", ["bfloat16", "int8_from_mixed_bfloat16"])
    def test_call_of_a_module_with_variables(self, policy: str, tmp_path: Any) -> None:
        """A `tf.function` that is a wrapped module's call stays one, with its signature."""
        model = pc.wrap(Signed(), policy)
        y = model(X)
        assert y.dtype == tf.bfloat16
        assert same_bits(y, model(-X))
        tf.saved_model.save(model, str(tmp_path))
        loaded = tf.saved_model.load(str(tmp_path))
        assert same_bits(loaded(X), y)
        assert same_bits(loaded.signatures["serving_default"](tf.constant(X))["output_0"], y)
        assert pc.unwrap(model)(X).dtype == tf.float32

    def test_traced_attribute_is_refused(self) -> None:
        """A traced function that is an attribute cannot be traced anew, and is named."""
        model = MLP()
        model.call = tf.function(lambda x: model(x))
        model.call(X)
        with pytest.raises(ValueError, match=r"MLP\.call is a tf\.function that was traced"):
            pc.wrap(model, "int8_from_float32")
        assert {row.policy for row in pc.report(model).rows} == {""}

    def test_wrapping_while_tracing_is_refused(self) -> None:
        """`wrap` inside a tf.function says so."""

        layer = pt.Linear(2, 2)
        function = tf.function(lambda: pc.wrap(layer, "int8_from_float32"), autograph=False)
        with pytest.raises(ValueError, match=r"outside of any tf\.function"):
            function()

    def test_vectorized_map(self) -> None:
        """`tf.vectorized_map` over a wrapped model gives what a batch gives."""
        model = pc.wrap(MLP(), "int8_from_float32")
        y = tf.vectorized_map(model, tf.constant(X), fallback_to_while_loop=False)
        np.testing.assert_allclose(y, model(X), rtol=1e-5, atol=1e-6)


class TestState:
    """Ties, copies, memory, files."""

    @pytest.mark.parametrize("policy", ["int8_from_float32", "float8/weight_only_from_float32"])
    def test_tied_weights_stay_tied(self, policy: str, tmp_path: Any) -> None:
        """They are quantized once, counted once, saved once, and are one float variable after."""
        model = Tied()
        wanted = model(np.arange(10))
        pc.wrap(model, policy)
        assert model.embedding.weight_codes is model.head.weight_codes
        assert pc.report(model).bytes_before == 10 * 8 * 4
        np.testing.assert_allclose(model(np.arange(10)), wanted, atol=2e-3)
        pc.save(model, tmp_path / "m.safetensors")
        loaded = pc.load(Tied(), tmp_path / "m.safetensors")
        assert loaded.embedding.weight_codes is loaded.head.weight_codes
        assert same_bits(loaded(np.arange(10)), model(np.arange(10)))
        pc.unwrap(model)
        assert model.embedding.weight is model.head.table
        assert model.embedding.weight.trainable

    def test_tie_under_two_policies_is_refused(self) -> None:
        """A policy for only one of two tied layers is an error, and changes nothing."""
        model = Tied()
        with pytest.raises(pc.errors.LayerError, match="share one weight"):
            pc.wrap(model, {"head": "int8_from_float32"})
        assert model.embedding.weight is model.head.table

    def test_tie_in_two_layouts_is_refused(self) -> None:
        """One variable as (in, out) and as (out, in) cannot be codes for both."""
        model = Tied()
        model.head = pt.Weight(model.embedding.weight)
        with pytest.raises(ValueError, match="share one variable"):
            pc.wrap(model, "int8_from_float32")
        assert {row.policy for row in pc.report(model).rows} == {""}
        pc.wrap(model, "mixed_bfloat16")
        assert model.head.weight is model.embedding.weight

    def test_weights_that_someone_holds(self) -> None:
        """A function that was traced before keeps the float weights: a warning says whose."""
        model = MLP()
        function = tf.function(model)
        before = function(X)
        with pytest.warns(UserWarning, match="float weights of 'layers/0', 'heads/main'"):
            pc.wrap(model, "int8_from_float32")
        assert same_bits(function(X), before)

    def test_codes_are_kept_once(self) -> None:
        """A quantized layer has one variable for its codes, and no float weight."""
        layer = pc.wrap(pt.Linear(64, 64), "int8_from_float32")
        names = {v.name.partition(":")[0]: v.dtype for v in layer.variables}
        assert names == {"bias": tf.float32, "weight_codes": tf.uint8, "weight_scale": tf.float32}
        assert [v.dtype for v in layer.trainable_variables] == [tf.float32]
        assert layer.weight.shape == (64, 64)  # made anew for who reads it

    def test_copies_share_nothing(self) -> None:
        """A deep copy has its own codes, and tied ones stay tied in it."""
        model = pc.wrap(Tied(), "int8_from_float32")
        twin = copy.deepcopy(model)
        assert twin.head.weight_codes is twin.embedding.weight_codes
        assert twin.head.weight_codes is not model.head.weight_codes
        assert same_bits(twin(np.arange(10)), model(np.arange(10)))

    def test_float_weights_are_freed_one_by_one(self) -> None:
        """Of a 20-layer model no float weight outlives its turn, and 0.3 of the bytes are left."""

        class Deep(tf.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = [pt.Linear(64, 64, bias=False) for _ in range(20)]

        model = Deep()
        alive = [weakref.ref(layer.weight.handle) for layer in model.layers]
        counts = []
        original = pt._wrap._become

        def become(step: Any, *rest: Any) -> None:
            original(step, *rest)
            counts.append(sum(ref() is not None for ref in alive))

        pt._wrap._become = become
        try:
            pc.wrap(model, "int8_from_float32")
        finally:
            pt._wrap._become = original
        assert counts == list(range(19, -1, -1))
        assert pc.report(model).bytes_after <= 0.31 * pc.report(model).bytes_before

    def test_checkpoints_of_tensorflow(self, tmp_path: Any) -> None:
        """`tf.train.Checkpoint` saves and restores a wrapped model, codes and state included."""
        model, other = (pc.wrap(MLP(), "float8_from_float32") for _ in range(2))
        with pt.training():
            model(X)
        path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
        tf.train.Checkpoint(model=other).restore(path).assert_consumed()
        assert same_bits(other(X), model(X))
        frozen, loaded = pc.freeze(model), pc.freeze(pc.wrap(MLP(), "float8_from_float32"))
        path = tf.train.Checkpoint(model=frozen).save(tmp_path / "frozen")
        tf.train.Checkpoint(model=loaded).restore(path).assert_consumed()
        assert same_bits(loaded(X), frozen(X))

    def test_names_that_the_policy_needs(self) -> None:
        """A module with an attribute of the name of a policy's variable is refused."""
        layer = pt.Linear(8, 4)
        layer.weight_scale = 1
        with pytest.raises(ValueError, match="has an attribute 'weight_scale'"):
            pc.wrap(layer, "int8_from_float32")

    def test_module_without_a_weight_yet(self) -> None:
        """A linear module that makes its variables at the first call must be called first."""

        class Lazy(tf.Module):
            def __call__(self, x: Any) -> Any:
                return x

        pc.register_layer(Lazy, pt.LayerAdapter(kind="linear"))
        with pytest.raises(ValueError, match="Call the model once"):
            pc.wrap(Lazy(), "int8_from_float32")

    @native_only
    def test_call_in_a_forked_child(self) -> None:
        """A process that was forked after a call can call the layer too."""
        # In a process of its own: JAX warns of every fork of one that has imported it.
        code = """
import os
import numpy as np
import tensorflow as tf
import policy_core as pc
import policy_tensorflow as pt
weight = tf.random.stateless_normal((512, 512), (1, 2))
layer = pc.wrap(pt.Weight(weight), "int8_from_float32")
x = tf.ones((64, 512))
wanted = layer(x).numpy()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(layer(x), wanted) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]


class TestOwnCode:
    """`Weight` and `linear`."""

    @pytest.mark.parametrize(
        "policy",
        ["float32", "mixed_bfloat16", "int8_from_float32", "float8_from_float32"],
    )
    def test_linear_follows_its_weights_policy(self, policy: str) -> None:
        """`linear` is a product before, and follows the weight's policy after; the bias is added."""
        weight, bias = pt.Weight(np.eye(8, dtype=np.float32)), np.float32([*range(8)])
        np.testing.assert_array_equal(pt.linear(X, weight, bias), X + bias)
        wrapped = pc.wrap(weight, policy)
        assert wrapped is weight
        y = pt.linear(X, weight, tf.constant(bias))
        assert y.dtype.name == pc.get(policy).compute_dtype
        np.testing.assert_allclose(tf.cast(y, tf.float32), X + bias, atol=0.2)
        assert pt.linear(X, weight).dtype == y.dtype

    def test_plain_variables_are_refused(self) -> None:
        """A variable has no place for a policy."""
        with pytest.raises(TypeError, match=r"Expected a policy_tensorflow\.Weight"):
            pt.linear(X, tf.Variable(np.eye(8, dtype=np.float32)))

    @pytest.mark.parametrize("shape", [(6, 7), ()])
    @pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_float32"])
    def test_wrong_inputs_are_refused(self, policy: str, shape: Any) -> None:
        """An input of another last axis is an error that says which was expected."""
        layer = pc.wrap(pt.Linear(8, 4), policy)
        with pytest.raises(ValueError, match=r"\(\.\.\., 8\)"):
            layer(tf.ones(shape))

"""The part of the contract suite that concerns wrapping: policies, rules, sharing, values."""

from typing import Any

import numpy as np
import pytest

from ._contract_arrays import oracle, same_bits
from ._contract_models import (
    MODES,
    POLICIES,
    Hooks,
    assert_same_state,
    inputs,
    reference_linear,
    weights,
)
from ._policy_map import DTypePolicyMap
from ._report import report
from ._serialization import get
from ._wrap import freeze, wrap
from .errors import AlreadyWrappedError, LayerError, NoKernelError, UnmatchedRuleError

INT8 = tuple(name for name in POLICIES if name.startswith("int8_from"))
ODD_SHAPES = [(m, k, n) for m in (0, 1, 2, 17, 33) for k in (1, 15, 64, 65) for n in (1, 7, 33)]

RULES = (
    ("0", "0", True),
    ("[02]", "2", True),
    (".*", "0", True),
    ("(?!2).*", "2", False),
    ("(?!2).*", "0", True),
    ("1/.*", "1", False),
    ("encoder/.*", "my_encoder/0", False),
    ("attention/query", "attention/query_norm", False),
    ("attention/query", "attention/query/sub", False),
    ("conv2d.*kernel", "my_model/conv2d_1/kernel", False),
    (".*/attn/.*", "block/attn/q", True),
    (r"layers/\d+/linear1", "layers/10/linear1", True),
)
"""(pattern, path, whether it matches): one table for every backend."""


class WrapContract(Hooks):
    """What `wrap` does to every framework's models. See `policy_core.testing`."""

    # Wrapping.

    @pytest.mark.parametrize("policy", POLICIES)
    def test_wrapped_model_follows_its_policy(self, policy: str) -> None:
        """A wrapped model computes in the compute dtype, close to what the float model gives."""
        x = inputs(5)
        before = self.run(self.mlp(), x)
        after = self.run(wrap(self.mlp(), policy), x)
        assert after.dtype.name == get(policy).compute_dtype
        assert after.shape == before.shape
        error = np.abs(after.astype(np.float32) - before).max() / np.abs(before).max()
        assert error < 0.15

    @pytest.mark.parametrize("policy", INT8)
    def test_int8_is_the_reference_to_the_bit(self, policy: str) -> None:
        """An int8 linear layer gives the reference's bits."""
        (weight, bias), _ = weights(3)
        model = wrap(self.sequential([self.linear(weight, bias)]), policy)
        wanted = wrap(oracle().Sequential([reference_linear(weight, bias)]), policy)
        x = inputs(33) * np.float32(10)
        assert same_bits(self.run(model, x), wanted(x))

    @pytest.mark.parametrize("policy", [p for p in POLICIES if "8" in p.split("_from_")[0]])
    @pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (2, 0, 8), (1, 1, 1, 8), (0, 8)])
    def test_rank_is_kept(self, shape: tuple[int, ...], policy: str) -> None:
        """Inputs of any rank, and without rows, keep their leading axes."""
        (weight, bias), _ = weights(0)
        model = wrap(self.sequential([self.linear(weight, bias)]), policy)
        y = self.run(model, np.ones(shape, np.float32))
        assert y.shape == (*shape[:-1], 16)
        assert y.dtype.name == get(policy).compute_dtype

    @pytest.mark.parametrize("mode", MODES)
    def test_odd_sizes(self, mode: str) -> None:
        """Sizes that no vector width divides agree with the reference, with and without bias."""
        for m, k, n in ODD_SHAPES:
            generator = np.random.default_rng(m * 10_000 + k * 100 + n)
            weight = generator.standard_normal((n, k), np.float32)
            bias = generator.standard_normal(n, np.float32) if m % 2 else None
            x = generator.standard_normal((m, k), np.float32)
            policy = f"{mode}_from_float32"
            y = self.run(wrap(self.sequential([self.linear(weight, bias)]), policy), x)
            wanted = wrap(oracle().Sequential([reference_linear(weight, bias)]), policy)(x)
            if mode == "int8":
                assert same_bits(y, wanted), (m, k, n)
            else:
                # Within 1e-6 of the exact sum each, so within 2e-6 of each other.
                bound = 2e-6 * (np.abs(x) @ np.abs(weight).T + 1) * 1.1
                assert (np.abs(y - wanted) <= bound).all(), (m, k, n)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_wrap_is_idempotent(self, policy: str) -> None:
        """Wrapping again under the same policy changes nothing and gives the same model."""
        model = wrap(self.mlp(), policy)
        before = self.state(model)
        again = wrap(model, policy)
        assert again is model
        assert_same_state(self.state(again), before)

    def test_wrap_gives_the_same_object_where_models_are_mutable(self) -> None:
        """`wrap` changes a mutable model in place and leaves an immutable one as it was."""
        model = self.mlp()
        before = self.state(model)
        wrapped = wrap(model, "int8_from_float32")
        assert (wrapped is model) is self.mutable_models
        if not self.mutable_models:
            assert_same_state(self.state(model), before)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_layers_say_what_they_do(self, policy: str) -> None:
        """Every layer's dtype_policy, repr and report row name one policy: asked, or its source."""
        model = wrap(self.mlp(), policy)
        rows = report(model).rows
        source = get(policy).source_policy.name
        assert [row.policy for row in rows] == [policy, source, policy]
        assert [row.asked for row in rows] == [policy] * 3
        for layer, row in zip(self.layers(model), rows, strict=True):
            assert layer.dtype_policy.name == row.policy
            assert row.policy in repr(layer)

    def test_map_gives_each_layer_its_policy(self) -> None:
        """Rules apply by full match of the path, and the default takes what is left."""
        rules = {"0": "int8_from_float32", "[2-9]": "float8/weight_only_from_float32"}
        model = wrap(self.mlp(), DTypePolicyMap("mixed_bfloat16", rules))
        assert [row.policy for row in report(model).rows] == [
            "int8_from_float32",
            "mixed_bfloat16",
            "float8/weight_only_from_float32",
        ]

    @pytest.mark.parametrize(("pattern", "path", "matches"), RULES)
    def test_rules_match_as_the_table_says(self, pattern: str, path: str, matches: bool) -> None:
        """A pattern matches a path wholly or not at all, in every framework alike."""
        policies = DTypePolicyMap("float32", {pattern: "bfloat16"})
        assert (policies[path].name == "bfloat16") is matches

    @pytest.mark.parametrize(
        ("policy", "error", "said"),
        [
            ({"00": "int8_from_float32"}, UnmatchedRuleError, "matches no layer"),
            ("int4/128_from_float32", NoKernelError, "No kernel exists for mode 'int4/128' yet"),
            ("int9_from_float32", ValueError, "Invalid quantization mode"),
            ({"0": "int8_from_float32", ".*0": "float32", "2": "float32"}, None, ""),
            ({".*0": "int8_from_float32", "0.*": "float32"}, ValueError, "matches multiple"),
            ("float8_e4m3fn", ValueError, "without scales"),
        ],
    )
    def test_refused_wrap_changes_nothing(self, policy: Any, error: Any, said: str) -> None:
        """A wrap that raises leaves the model bit for bit as it was."""
        model = self.mlp()
        before = self.state(model)
        if error is None:
            wrap(model, policy)
            return
        with pytest.raises(error, match=said):
            wrap(model, policy)
        assert_same_state(self.state(model), before)
        assert {row.policy for row in report(model).rows} == {""}

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_weight_without_codes_is_refused(self, value: float) -> None:
        """A NaN or an infinity in the last weight is refused before the first layer changes."""
        first, (weight, bias) = weights(0)
        weight = weight.copy()
        weight[1, 2] = value
        model = self.sequential([self.linear(*first), self.linear(weight, bias)])
        before = self.state(model)
        with pytest.raises(ValueError, match="NaN or an infinity") as raised:
            wrap(model, "int8_from_float32")
        assert "'1'" in raised.value.__notes__[0]
        assert_same_state(self.state(model), before)

    def test_policy_conflicts_are_settled_as_asked(self) -> None:
        """Layers that have another policy are an error that lists them, or kept, or replaced."""
        model = wrap(self.mlp(), "int8_from_float32")
        with pytest.raises(AlreadyWrappedError, match="'0' has int8_from_float32"):
            wrap(model, "bfloat16")
        kept = wrap(model, "bfloat16", on_wrapped="keep")
        assert {row.asked for row in report(kept).rows} == {"int8_from_float32"}
        replaced = wrap(kept, "mixed_bfloat16", on_wrapped="replace")
        assert {row.policy for row in report(replaced).rows} == {"mixed_bfloat16"}

    def test_unmatched_rules_can_be_allowed(self) -> None:
        """`on_unmatched` turns the error about a rule without layers into a warning or nothing."""
        rules = {"nowhere/.*": "int8_from_float32"}
        with pytest.warns(UserWarning, match="matches no layer"):
            wrap(self.mlp(), rules, on_unmatched="warn")
        wrap(self.mlp(), rules, on_unmatched="ignore")

    # Shared layers and weights, sizes.

    def test_shared_layer_is_wrapped_once(self) -> None:
        """A layer that is used twice stays one layer, and is counted once."""
        layer = self.linear(np.eye(8, dtype=np.float32), None)
        model = wrap(self.sequential([layer, layer]), "int8_from_float32")
        rows = report(model).rows
        assert len(rows) == 1
        assert "also at 1" in rows[0].note
        assert self.layers(model)[0] is self.layers(model)[1]
        assert rows[0].bytes_before == 8 * 8 * 4

    def test_shared_layer_needs_one_policy(self) -> None:
        """Two policies for two places of one layer are refused."""
        layer = self.linear(np.eye(8, dtype=np.float32), None)
        model = self.sequential([layer, layer])
        with pytest.raises(LayerError, match="must have one policy"):
            wrap(model, {"0": "int8_from_float32", "1": "float32"})

    def test_quantized_model_is_smaller(self) -> None:
        """An int8 model takes at most 0.3 of the float32 bytes, and the report counts them."""
        weight = np.ones((256, 256), np.float32)
        model = self.sequential([self.linear(weight, None) for _ in range(3)])
        model = wrap(model, "int8_from_float32")
        found = report(model)
        assert found.bytes_before == 3 * 256 * 256 * 4
        assert found.bytes_after <= 0.3 * found.bytes_before
        actual = sum(array.nbytes for array in self.state(model).values())
        # A kernel's layout may pad.
        assert actual <= found.bytes_after

    def test_embedding_keeps_a_scale_per_row(self) -> None:
        """An int8 embedding gives each row within half a code of its own scale."""
        table = np.random.default_rng(0).standard_normal((10, 32), np.float32)
        table *= np.float32(10.0) ** np.arange(-5, 5, dtype=np.float32)[:, None]
        model = wrap(self.sequential([self.embedding(table)]), "int8_from_float32")
        y = self.run(model, np.arange(10))
        half = np.abs(table).max(1, keepdims=True) / 127 * 0.5001
        assert (np.abs(y - table) <= half).all()

    def test_norm_computes_in_float32(self) -> None:
        """A norm under mixed_float16 gives finite outputs for inputs near float16's largest."""
        model = wrap(self.sequential([self.norm(64)]), "mixed_float16")
        x = np.random.default_rng(0).uniform(6e4, 6.5e4, (4, 64)).astype(np.float16)
        assert np.isfinite(self.run(model, x).astype(np.float32)).all()

    # Values.

    def test_row_that_is_not_finite_stays_alone(self) -> None:
        """A NaN or an infinity in a row of an int8 layer's input gives NaN there alone."""
        (weight, bias), _ = weights(0)
        model = wrap(self.sequential([self.linear(weight, bias)]), "int8_from_float32")
        x = inputs(4)
        clean = self.run(model, x)
        x[1, 0], x[2, 3] = np.nan, np.inf
        y = self.run(model, x)
        assert np.isnan(y[1:3]).all()
        assert same_bits(y[[0, 3]], clean[[0, 3]])

    @pytest.mark.parametrize("dtype", ["uint8", "int8"])
    @pytest.mark.parametrize("mode", MODES)
    def test_integers_of_one_byte_are_numbers(self, mode: str, dtype: str) -> None:
        """An input of bytes is numbers and not codes: it gives what floats give, frozen too."""
        (weight, bias), _ = weights(0)
        model = wrap(self.sequential([self.linear(weight, bias)]), f"{mode}_from_float32")
        x = np.arange(24, dtype=dtype).reshape(3, 8)
        for each in (model, freeze(model)):
            assert same_bits(self.run(each, x), self.run(each, x.astype(np.float32)))

    @pytest.mark.parametrize("mode", MODES)
    def test_zeros_stay_zeros(self, mode: str) -> None:
        """Zero inputs and zero weights give exact zeros."""
        zeros = self.linear(np.zeros((4, 8), np.float32), None)
        model = wrap(self.sequential([zeros]), f"{mode}_from_float32")
        assert not self.run(model, inputs(3)).any()
        (weight, _), _ = weights(0)
        model = wrap(self.sequential([self.linear(weight, None)]), f"{mode}_from_float32")
        assert not self.run(model, np.zeros((3, 8), np.float32)).any()

    def test_large_sums_do_not_overflow_16_bits(self) -> None:
        """4096 ones times ones is 4096 under a 16-bit policy, not infinity."""
        layer = self.linear(np.ones((8, 4096), np.float32), None)
        model = wrap(self.sequential([layer]), "int8/weight_only_from_mixed_float16")
        assert (self.run(model, np.ones((1, 4096), np.float32)) == 4096).all()

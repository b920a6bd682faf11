"""The part of the contract suite that concerns state: training, freezing, copies, files."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

from ._checkpoint import load, save
from ._contract_arrays import same_bits
from ._contract_models import POLICIES, Hooks, ReferenceHooks, assert_same_state, inputs
from ._report import report
from ._serialization import get
from ._wrap import freeze, unwrap, wrap


class StateContract(Hooks):
    """What becomes of a wrapped model's state. See `policy_core.testing`."""

    # Delayed scaling.

    def test_delayed_scaling_is_the_reference(self) -> None:
        """After the same training calls the state has the reference's bits."""
        model = wrap(self.mlp(), "float8_from_float32")
        wanted = wrap(self.reference_mlp(), "float8_from_float32")
        for step in range(4):
            x = inputs(5, seed=step) * np.float32(10.0**step)
            self.run(model, x, training=True)
            wanted(x, training=True)
        ours, theirs = self.state(model), ReferenceHooks().state(wanted)
        names = [name for name in theirs if name.startswith("0/") and "amax" in name]
        assert len(names) == 3
        for name in [*names, "0/input_scale", "0/weight_scale"]:
            assert same_bits(ours[name], theirs[name]), name

    def test_evaluation_never_moves_the_state(self) -> None:
        """Calls outside training, and training calls without rows, leave every tensor as it is."""
        model = wrap(self.mlp(), "float8_from_float32")
        self.run(model, inputs(5), training=True)
        before = self.state(model)
        self.run(model, inputs(5, seed=1) * np.float32(100))
        self.run(model, np.zeros((0, 8), np.float32), training=True)
        assert_same_state(self.state(model), before)

    def test_bad_step_does_not_poison_the_next(self) -> None:
        """An infinity or a NaN in one training step is not recorded; the next step is finite."""
        model = wrap(self.mlp(), "float8_from_float32")
        self.run(model, inputs(5), training=True)
        for value in (np.inf, np.nan):
            x = inputs(5)
            x[2, 1] = value
            self.run(model, x, training=True)
        state = self.state(model)
        assert np.isfinite(state["0/input_scale"]).all()
        assert np.isfinite(state["0/input_amax_history"]).all()
        assert np.isfinite(self.run(model, inputs(5), training=True)).all()

    def test_first_training_call_is_not_clipped(self) -> None:
        """Inputs up to 1e4 in the first training call are scaled, not cut at 448."""
        layer = self.linear(np.eye(8, dtype=np.float32), None)
        model = wrap(self.sequential([layer]), "float8_from_float32")
        x = inputs(5) * np.float32(1e4)
        y = self.run(model, x, training=True)
        assert np.abs(y - x).max() <= np.abs(x).max() / 16

    # Back, frozen, copied, saved.

    @pytest.mark.parametrize("policy", POLICIES)
    def test_unwrap_gives_plain_layers(self, policy: str) -> None:
        """Unwrapping gives float32 layers again, near the weights that were there."""
        before = self.state(self.mlp())
        model = unwrap(wrap(self.mlp(), policy))
        after = self.state(model)
        assert after.keys() == before.keys()
        for name, array in after.items():
            assert array.dtype == np.float32
            assert np.abs(array - before[name]).max() <= np.abs(before[name]).max() / 16
        assert {row.policy for row in report(model).rows} == {""}

    @pytest.mark.parametrize("policy", POLICIES)
    def test_freeze_keeps_the_answers(self, policy: str) -> None:
        """A frozen model gives the same bits, holds codes alone, and freezing twice is one."""
        model = wrap(self.mlp(), policy)
        self.run(model, inputs(5, seed=7), training=True)
        before = self.run(model, inputs(5))
        frozen = freeze(freeze(model))
        assert same_bits(self.run(frozen, inputs(5)), before)
        if get(policy).quantization is not None:
            assert self.state(frozen)["0/weight"].dtype.itemsize == 1

    @pytest.mark.parametrize("policy", POLICIES)
    def test_copies_and_pickles(self, policy: str) -> None:
        """A deep copy, and a pickle where the framework has it, compute the same bits."""
        model = wrap(self.mlp(), policy)
        wanted = self.run(model, inputs(5))
        assert same_bits(self.run(copy.deepcopy(model), inputs(5)), wanted)
        if self.picklable:
            assert same_bits(self.run(pickle.loads(pickle.dumps(model)), inputs(5)), wanted)

    @pytest.mark.parametrize("frozen", [False, True], ids=["as-wrapped", "frozen"])
    @pytest.mark.parametrize("policy", POLICIES)
    def test_files_round_trip(self, policy: str, frozen: bool, tmp_path: Path) -> None:
        """A saved model loads into a fresh float one: same policies, same bits."""
        model = wrap(self.mlp(), policy)
        self.run(model, inputs(5, seed=7), training=True)
        model = freeze(model) if frozen else model
        save(model, tmp_path / "model.safetensors")
        loaded = load(self.mlp(seed=9), tmp_path / "model.safetensors")
        assert_same_state(self.state(loaded), self.state(model))
        assert [r.asked for r in report(loaded).rows] == [r.asked for r in report(model).rows]
        assert same_bits(self.run(loaded, inputs(5)), self.run(model, inputs(5)))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_files_are_the_same_everywhere(self, policy: str, tmp_path: Path) -> None:
        """The reference loads what this backend saved, and the other way round."""
        ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
        model, reference = wrap(self.mlp(), policy), wrap(self.reference_mlp(), policy)
        save(model, ours)
        save(reference, theirs)
        loaded = load(self.reference_mlp(seed=9), ours)
        assert_same_state(ReferenceHooks().state(loaded), self.state(model))
        back = load(self.mlp(seed=9), theirs)
        assert_same_state(self.state(back), ReferenceHooks().state(reference))

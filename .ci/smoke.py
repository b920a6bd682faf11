"""Use an installed policy-core that has no native kernels; run it from outside the repository."""

import sys
import tempfile
from pathlib import Path

import numpy as np

import policy_core as pc

for framework in ("torch", "jax", "tensorflow", "keras"):
    assert framework not in sys.modules, f"importing policy_core imported {framework}"

import policy_kernels  # noqa: E402  # only after the check of what policy_core imports
import policy_numpy as pn  # noqa: E402


def model() -> pn.Sequential:
    """Two float layers, the same at each call."""
    return pn.Sequential([pn.Dense(8, 16, activation="relu", seed=0), pn.Dense(16, 4, seed=1)])


assert not policy_kernels.available(), policy_kernels.build_info()
reason = policy_kernels.build_info().reason
assert reason is not None
assert "not built" in reason, reason

x = np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32)
expected = np.asarray(model()(x), np.float32)
wrapped = pc.wrap(model(), "int8_from_mixed_bfloat16")
y = np.asarray(wrapped(x), np.float32)
assert y.shape == (5, 4), y.shape
error = np.abs(y - expected).max() / np.abs(expected).max()
assert 0 < error < 0.05, f"expected int8 to be near float32 and not equal, got {error!r}"

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    pc.save(wrapped, path)
    loaded = pc.load(model(), path)
    np.testing.assert_array_equal(np.asarray(loaded(x), np.float32), y)

for framework in ("torch", "jax", "tensorflow", "keras"):
    assert framework not in sys.modules, f"using policy_core imported {framework}"
print(f"smoke: int8 within {error:.3%} of float32 without kernels; {reason}")

"""What `convert_input` costs on a tensor that needs no cast, beside the framework's own no-op."""

import numpy as np
import pytest

import policy_core as pc

X = np.ones(8, np.float32)
POLICY = pc.get("float32")
NEST = {"x": X, "ids": np.arange(3), "deep": [X, (X, None)], "name": "a"}

CALLS = {
    "numpy-astype": lambda: X.astype(np.float32, copy=False),
    "policy": lambda: pc.convert_input(X, POLICY),
    "default-policy": lambda: pc.convert_input(X),
    "policy-name": lambda: pc.convert_input(X, "float32"),
    "method": lambda: POLICY.convert_input(X),
    "nest-of-four": lambda: pc.convert_input(NEST, POLICY),
}


@pytest.mark.benchmark(group="convert_input, nothing to cast")
@pytest.mark.parametrize("name", CALLS)
def test_no_cast(benchmark, name):
    """A tensor in the compute dtype comes back itself."""
    result = benchmark(CALLS[name])
    assert result is X or result is NEST

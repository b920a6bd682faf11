"""What all tests share: one hypothesis profile, and a default policy that no test leaves behind."""

import sys

import hypothesis
import pytest

# The same examples in every run, and no clock that a busy machine could trip.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

for _part in ("arrays", "models", "wrap", "state"):
    pytest.register_assert_rewrite(f"policy_core._contract_{_part}")


@pytest.fixture(autouse=True)
def _default_policy_is_restored():
    yield
    core = sys.modules.get("policy_core")  # the kernels' tests never import it
    if core is not None:
        core.set_dtype_policy("float32")

"""The contract suite that every backend must pass, and hypothesis strategies for policies.

An adapter's tests subclass `BackendContract`, say which backend they are about, and show how its
framework makes and runs layers; pytest then runs every test of the contract against the numpy
reference:

    class TestMyFramework(BackendContract):
        backend_name = "my_framework"

        def linear(self, weight, bias): ...
        def embedding(self, table): ...
        def norm(self, width): ...
        def sequential(self, layers): ...
        def layers(self, model): ...
        def run(self, model, x, training=False): ...

Needs pytest and hypothesis: `pip install 'policy-core[test]'`. For readable failures put
`pytest.register_assert_rewrite("policy_core._contract_arrays", "policy_core._contract_models",
"policy_core._contract_wrap", "policy_core._contract_state")` into a conftest.py.
"""

from hypothesis import strategies as st

from ._contract_arrays import hard_arrays as hard_arrays
from ._contract_arrays import same_bits as same_bits
from ._contract_models import POLICIES as POLICIES
from ._contract_models import ReferenceHooks as _ReferenceHooks
from ._contract_state import StateContract as _StateContract
from ._contract_wrap import RULES as RULES
from ._contract_wrap import WrapContract as _WrapContract
from ._policies import DTypePolicy
from ._policy_map import DTypePolicyMap
from ._quantized_policies import QuantizedFloat8DTypePolicy
from ._serialization import get

__all__ = [
    "POLICIES",
    "RULES",
    "BackendContract",
    "ReferenceContract",
    "float_policies",
    "hard_arrays",
    "paths",
    "policies",
    "policy_maps",
    "same_bits",
]


class BackendContract(_WrapContract, _StateContract):
    """Every test of the contract; a subclass defines the hooks."""


class ReferenceContract(_ReferenceHooks, BackendContract):
    """The contract with the hooks of the numpy backend itself; a subclass named Test… runs it."""

    __test__ = True


def float_policies() -> st.SearchStrategy[DTypePolicy]:
    """Gives a strategy of float policies of at least 16 bits, mixed ones too."""
    names = ("float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16")
    return st.sampled_from([DTypePolicy(name) for name in names])


def policies() -> st.SearchStrategy[DTypePolicy]:
    """Gives a strategy of policies of every kind and mode, but no maps."""
    block = st.one_of(st.just(-1), st.integers(1, 4096))
    modes = st.one_of(
        st.sampled_from(("int8/weight_only", "float8/dynamic", "float8/weight_only")),
        st.sampled_from(("int4", "ternary", "float8")),
        block.map(lambda size: f"int4/{size}"),
        st.tuples(st.sampled_from((2, 3, 4, 8)), block).map(lambda p: f"gptq/{p[0]}/{p[1]}"),
        block.map(lambda size: f"awq/4/{size}"),
    )
    # int8 refuses float16.
    int8_sources = ("float32", "bfloat16", "float64", "mixed_bfloat16")
    return st.one_of(
        float_policies(),
        st.tuples(modes, float_policies()).map(lambda p: get(f"{p[0]}_from_{p[1].name}")),
        st.sampled_from([get(f"int8_from_{name}") for name in int8_sources]),
        st.tuples(float_policies(), st.integers(1, 2**20)).map(
            lambda p: QuantizedFloat8DTypePolicy("float8", p[0].name, p[1])
        ),
    )


def paths() -> st.SearchStrategy[str]:
    """Gives a strategy of layer paths, such as `encoder/0/dense_1`, which match only themselves."""
    part = st.from_regex(r"[a-z][a-z0-9_]{0,8}|[0-9]{1,2}", fullmatch=True)
    return st.lists(part, min_size=1, max_size=4).map("/".join)


def policy_maps() -> st.SearchStrategy[DTypePolicyMap]:
    """Gives a strategy of maps with a default policy and rules for single paths."""
    rules = st.dictionaries(paths(), policies(), max_size=5)
    return st.builds(DTypePolicyMap, policies(), rules)

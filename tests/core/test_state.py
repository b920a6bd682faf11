"""The default policy of the process, and scopes on top of it."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import policy_core as pc


def in_a_thread(function):
    """Gives what a function gives in a fresh thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_the_first_default_is_float32(run_python):
    """A process starts with float32."""
    assert run_python("import policy_core as pc; print(pc.dtype_policy().name)") == "float32\n"


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        pytest.param("mixed_float16", "mixed_float16", id="name"),
        pytest.param("int8_from_mixed_bfloat16", "int8_from_mixed_bfloat16", id="quantized-name"),
        pytest.param(pc.DTypePolicy("bfloat16"), "bfloat16", id="policy"),
        pytest.param(pc.get("float8_from_float32"), "float8_from_float32", id="quantized"),
        pytest.param(pc.serialize(pc.get("float16")), "float16", id="config"),
    ],
)
def test_set_and_scope(policy, name):
    """A name, a policy or a config becomes the default, for good or inside a block."""
    with pc.policy_scope(policy) as scoped:
        assert pc.dtype_policy() is scoped
        assert scoped.name == name
    assert pc.dtype_policy().name == "float32"
    pc.set_dtype_policy(policy)
    assert pc.dtype_policy().name == name


BAD = [
    pytest.param(12345, "Invalid `policy` argument", id="number"),
    pytest.param(None, "Received: policy=None (of type <class 'NoneType'>)", id="none"),
    pytest.param(np.float32, "Invalid `policy` argument", id="dtype"),
    pytest.param(pc.DTypePolicyMap("float32"), "a `DTypePolicy` that is not a map", id="map"),
    pytest.param(pc.serialize(pc.DTypePolicyMap()), "that is not a map", id="map-config"),
    pytest.param("mixed_bfloat15", "Cannot convert 'mixed_bfloat15'", id="name"),
    pytest.param({"class_name": "X"}, "Unknown class 'X'", id="config"),
]


@pytest.mark.parametrize(("policy", "message"), BAD)
def test_what_is_no_default_is_refused(policy, message):
    """What cannot be a default is refused by both functions, and the default stays."""
    pc.set_dtype_policy("bfloat16")
    with pytest.raises(ValueError, match=re.escape(message)):
        pc.set_dtype_policy(policy)
    with pytest.raises(ValueError, match=re.escape(message)), pc.policy_scope(policy):
        pytest.fail("the block must not run")
    assert pc.dtype_policy().name == "bfloat16"


def test_scopes_nest_and_end():
    """The innermost scope counts, and each ends with its block, also by an exception."""

    def fail_inside():
        with pc.policy_scope("bfloat16"):
            assert pc.dtype_policy().name == "bfloat16"
            raise KeyError

    with pc.policy_scope("float16"):
        with pytest.raises(KeyError):
            fail_inside()
        assert pc.dtype_policy().name == "float16"
    assert pc.dtype_policy().name == "float32"


def test_a_scope_lies_on_top_of_the_process():
    """Setting the process default inside a scope shows after it."""
    with pc.policy_scope("float16"):
        pc.set_dtype_policy("bfloat16")
        assert pc.dtype_policy().name == "float16"
    assert pc.dtype_policy().name == "bfloat16"


def test_a_scope_can_be_a_decorator():
    """A decorated function runs in the scope each time."""

    @pc.policy_scope("float16")
    def name():
        return pc.dtype_policy().name

    assert [name(), name(), pc.dtype_policy().name] == ["float16", "float16", "float32"]


def test_threads_see_the_process_default():
    """What one thread sets, a pool of others sees, and what they set, it sees."""
    pc.set_dtype_policy("mixed_bfloat16")
    with ThreadPoolExecutor(4) as pool:
        names = set(pool.map(lambda _: pc.DTypePolicy().name, range(32)))
    assert names == {"mixed_bfloat16"}
    in_a_thread(lambda: pc.set_dtype_policy("float16"))
    assert pc.dtype_policy().name == "float16"


def test_threads_do_not_see_a_scope():
    """A scope is seen only by the thread that opened it, while many are open at once."""
    names = ["float16", "bfloat16", "float64", "mixed_float16"]
    together = threading.Barrier(len(names))

    def scoped(name):
        with pc.policy_scope(name):
            together.wait(timeout=30)
            seen = pc.dtype_policy().name
            together.wait(timeout=30)
        return seen, pc.dtype_policy().name

    with pc.policy_scope("int8_from_float32"), ThreadPoolExecutor(len(names)) as pool:
        seen = list(pool.map(scoped, names))
    assert seen == [(name, "float32") for name in names]


def test_tasks_do_not_see_each_others_scopes():
    """Each asyncio task has its own scope across awaits, and inherits its parent's."""

    async def scoped(name):
        inherited = pc.dtype_policy().name
        with pc.policy_scope(name):
            await asyncio.sleep(0)
            seen = pc.dtype_policy().name
            await asyncio.sleep(0)
        return inherited, seen, pc.dtype_policy().name

    async def main():
        pc.set_dtype_policy("float64")
        outside = await scoped("bfloat16")
        with pc.policy_scope("mixed_float16"):
            inside = await asyncio.gather(*(scoped(n) for n in ("float16", "bfloat16")))
            thread = await asyncio.to_thread(lambda: pc.dtype_policy().name)
        return outside, inside, thread

    outside, inside, thread = asyncio.run(main())
    assert outside == ("float64", "bfloat16", "float64")
    assert inside == [("mixed_float16", name, "mixed_float16") for name in ("float16", "bfloat16")]
    assert thread == "mixed_float16"  # asyncio runs it in the caller's context


@pytest.mark.parametrize("default", ["bfloat16", "int8_from_bfloat16"])
def test_what_a_scope_changes(default):
    """Inside a scope, all that asks for the default policy or its source gets the scope's."""
    policies = pc.DTypePolicyMap()
    with pc.policy_scope(default):
        assert pc.get(None).name == default
        assert pc.DTypePolicy().name == pc.DTypePolicy(None).name == "bfloat16"
        assert pc.QuantizedDTypePolicy("int8").name == "int8_from_bfloat16"
        assert policies["any"].name == default
        assert pc.convert_input(np.zeros(1, np.float32)).dtype.name == "bfloat16"
    assert pc.QuantizedDTypePolicy("int8").name == "int8_from_float32"
    assert policies["any"].name == "float32"

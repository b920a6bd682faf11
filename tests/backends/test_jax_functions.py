"""JAX: raw functions, quantized arrays in pytrees, and loss scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy_core as pc
import policy_jax
import policy_numpy
from policy_core.errors import UnmatchedRuleError
from policy_core.testing import same_bits

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")


def weight_and_inputs(k=24, n=10, m=5):
    generator = np.random.default_rng(0)
    return generator.standard_normal((k, n), np.float32), generator.standard_normal(
        (m, k), np.float32
    )


def reference(weight, policy):
    layer = policy_numpy.Dense(*weight.shape, bias=False)
    layer.tensors["weight"] = np.ascontiguousarray(weight.T)
    return pc.wrap(policy_numpy.Sequential([layer]), policy)


def test_function_is_cast_on_both_sides():
    """A wrapped function computes in the compute dtype; ids, keys and None pass as they are."""

    @jax.jit
    def function(params, ids, key, nothing):
        assert params["w"].dtype == jnp.bfloat16
        assert ids.dtype == jnp.int32
        assert nothing is None
        return params["w"].sum() + jax.random.normal(key, (), jnp.bfloat16), ids

    wrapped = pc.wrap(function, "mixed_bfloat16")
    value, ids = wrapped({"w": jnp.ones(3)}, jnp.arange(3), jax.random.key(0), None)
    assert value.dtype == jnp.bfloat16
    assert ids.dtype == jnp.int32
    assert wrapped.dtype_policy.name == "mixed_bfloat16"
    assert "mixed_bfloat16" in repr(wrapped)
    assert pc.unwrap(wrapped) is function
    assert pc.wrap(wrapped, "mixed_bfloat16") is wrapped


def test_function_under_a_quantized_policy_follows_its_source():
    """A function has no weight to quantize: it follows the source policy, and the report says so."""
    wrapped = pc.wrap(lambda x: x, "int8_from_mixed_bfloat16")
    (row,) = pc.report(wrapped).rows
    assert (row.asked, row.policy) == ("int8_from_mixed_bfloat16", "mixed_bfloat16")
    assert wrapped(jnp.ones(2)).dtype == jnp.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_quantized_array_multiplies_as_the_reference(mode):
    """`x @ w`, dot, einsum and dot_general give the reference's product."""
    weight, x = weight_and_inputs()
    policy = f"{mode}_from_float32"
    w = policy_jax.quantize({"w": jnp.asarray(weight)}, policy)["w"]
    wanted = reference(weight, policy)(x)
    x = jnp.asarray(x)
    for y in (
        x @ w,
        np.asarray(x) @ w,
        policy_jax.dot(x, w),
        policy_jax.einsum("mk,kn->mn", x, w),
        policy_jax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        jax.jit(lambda x, w: x @ w)(x, w),
    ):
        if mode == "int8":
            assert same_bits(y, wanted)
        else:
            np.testing.assert_allclose(y, wanted, atol=2e-6 * np.abs(weight).sum(0).max())
    assert np.abs(w.dequantize() - weight).max() <= np.abs(weight).max() / 16


def test_einsum_over_several_axes():
    """A weight of four axes, two of them summed, multiplies as its dequantized self."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((2, 6, 3, 4), np.float32)
    x = jnp.asarray(generator.standard_normal((6, 5, 2), np.float32))
    w = policy_jax.quantize_array(weight, "int8/weight_only_from_float32", (0, 1))
    y = policy_jax.einsum("bta,abcd->tcd", x, w)
    np.testing.assert_allclose(y, jnp.einsum("bta,abcd->tcd", x, w.dequantize()), rtol=1e-4)
    z = policy_jax.dot_general(x, w, (((0, 2), (1, 0)), ((), ())))
    np.testing.assert_allclose(z, y, rtol=1e-5)


def test_products_that_codes_cannot_give_are_refused():
    """Other axes than those that share scales, batch axes, and w @ x are errors that help."""
    w = policy_jax.quantize_array(jnp.ones((8, 4)), "int8_from_float32")
    with pytest.raises(ValueError, match=r"contracted_axes=\(1,\)"):
        policy_jax.einsum("mn,kn->mk", jnp.ones((2, 4)), w)
    with pytest.raises(ValueError, match="batch axis"):
        policy_jax.einsum("bk,bk->b", jnp.ones((8, 4)), w)
    with pytest.raises(ValueError, match="no batch axes"):
        policy_jax.dot_general(jnp.ones((8, 4)), w, (((1,), (1,)), ((0,), (0,))))
    with pytest.raises(TypeError, match="right operand"):
        w @ jnp.ones(4)
    with pytest.raises(ValueError, match="Expected a quantized policy"):
        policy_jax.quantize_array(jnp.ones((8, 4)), "float32")


def test_rules_go_by_the_place_in_the_tree():
    """Rules match `layers/0/w`; what matches nothing is an error; the rest follows the default."""
    params = {"layers": [{"w": jnp.ones((8, 8)), "b": jnp.zeros(8)} for _ in range(2)]}
    rules = pc.DTypePolicyMap("bfloat16", {"layers/0/w": "int8_from_float32"})
    done = policy_jax.quantize(params, rules)
    assert isinstance(done["layers"][0]["w"], policy_jax.QuantizedArray)
    assert done["layers"][1]["w"].dtype == jnp.bfloat16
    assert params["layers"][0]["w"].dtype == jnp.float32
    with pytest.raises(UnmatchedRuleError, match="layers/0"):
        policy_jax.quantize(params, {"layrs/0/w": "int8_from_float32"})
    rows = pc.report(policy_jax.Parameters(done)).rows
    assert [row.path for row in rows if row.quantized] == ["layers/0/w"]


def test_quantized_tree_goes_through_files(tmp_path):
    """A quantized pytree saves and loads into a float one, and unwraps."""
    weight, x = weight_and_inputs()
    params = policy_jax.quantize({"w": jnp.asarray(weight)}, "int8_from_float32")
    pc.save(policy_jax.Parameters(params), tmp_path / "p.safetensors")
    fresh = policy_jax.Parameters({"w": jnp.zeros(weight.shape)})
    loaded = pc.load(fresh, tmp_path / "p.safetensors").tree
    assert same_bits(jnp.asarray(x) @ loaded["w"], jnp.asarray(x) @ params["w"])
    plain = pc.unwrap(policy_jax.Parameters(params)).tree
    assert plain["w"].shape == weight.shape


def test_training_dot_moves_the_state_and_dot_does_not():
    """State goes in and comes out of training_dot; other products change nothing."""
    weight, x = weight_and_inputs()
    w = policy_jax.quantize({"w": jnp.asarray(weight)}, "float8_from_float32")["w"]
    y, after = jax.jit(policy_jax.training_dot)(jnp.asarray(x), w)
    assert y.shape == (5, 10)
    assert not w.tensors["input_amax_history"].any()
    assert after.tensors["input_amax_history"][0] == np.abs(x).max()
    assert same_bits(after.tensors["input_scale"], np.float32(np.abs(x).max()) / np.float32(448))


def test_optimizer_over_the_documented_partition():
    """Gradients and adam over `trainable` leave codes, scales and states alone."""
    weight, x = weight_and_inputs()
    params = {"a": jnp.asarray(weight), "b": jnp.ones((10, 3)), "bias": jnp.zeros(3)}
    params = policy_jax.quantize(
        params, {"a": "int8_from_float32", "b": "float8/dynamic_from_float32", "bias": "float32"}
    )
    mask = policy_jax.trainable(params)
    assert jax.tree.leaves(mask["a"]) == [False, False]
    assert jax.tree.leaves((mask["b"], mask["bias"])) == [True, True]

    def loss(params):
        return jnp.square(jnp.asarray(x) @ params["a"] @ params["b"] + params["bias"]).mean()

    gradients = jax.grad(loss, allow_int=True)(params)
    optimizer = optax.masked(optax.adam(1e-2), mask)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    after = jax.tree.map(lambda p, u, m: p + u if m else p, params, updates, mask)
    assert same_bits(after["a"].tensors["weight"], params["a"].tensors["weight"])
    assert (after["bias"] != params["bias"]).any()
    assert gradients["a"].tensors["weight"].dtype == jax.dtypes.float0


def test_dot_general_cls_serves_flax():
    """flax layers take `dot_general_cls` and compute in float8; other modes are refused."""
    from flax import linen

    weight, x = weight_and_inputs()
    cls = policy_jax.dot_general_cls("float8/dynamic_from_float32")
    layer = linen.Dense(10, use_bias=False, dot_general_cls=cls)
    params = {"params": {"kernel": jnp.asarray(weight)}}
    wanted = reference(weight, "float8/dynamic_from_float32")(x)
    np.testing.assert_allclose(layer.apply(params, jnp.asarray(x)), wanted, rtol=1e-4, atol=1e-4)
    assert jax.grad(lambda p: layer.apply(p, x).sum())(params)["params"]["kernel"].any()
    with pytest.raises(ValueError, match=r"float8/dynamic"):
        policy_jax.dot_general_cls("int8_from_float32")


def test_loss_scaling_skips_a_bad_step():
    """A loss of 1e5 in float16 overflows: the step is skipped, the scale halves, and recovers."""
    assert pc.DynamicLossScale is policy_jax.DynamicLossScale
    scaling = pc.DynamicLossScale.create(2.0**15, period=2)
    params = {"w": jnp.float16(1)}

    @jax.jit
    def step(params, scaling, target):
        def loss(p):
            return scaling.scale_loss((p["w"] * jnp.float16(target)).astype(jnp.float32))

        gradients = jax.grad(loss)(params)
        finite, after = scaling.update(gradients)
        updated = jax.tree.map(lambda p, g: p - 0 * g, params, scaling.unscale(gradients))
        return scaling.select(finite, updated, params), after

    params, after = step(params, scaling, 6e4)
    assert float(after.scale) == 2.0**14
    assert np.isfinite(params["w"])
    for _ in range(2):
        params, after = step(params, after, 1e-3)
    assert float(after.scale) == 2.0**15
    with pytest.raises(ValueError, match="at least 1"):
        policy_jax.DynamicLossScale.create(0.5)


def test_cast_tree_walks_custom_nodes():
    """cast_tree casts the floats of any registered pytree, and leaves codes as they are."""
    tree = {"q": policy_jax.quantize_array(jnp.ones((8, 4)), "int8_from_float32"), "x": jnp.ones(2)}
    cast = policy_jax.cast_tree(tree, "bfloat16")
    assert cast["x"].dtype == jnp.bfloat16
    assert same_bits(cast["q"].tensors["weight"], tree["q"].tensors["weight"])
    assert cast["q"].tensors["weight_scale"].dtype == jnp.float32


@pytest.mark.parametrize("axes", [(5,), (0, 0), (0, -2), ()])
def test_axes_that_a_weight_lacks_are_refused(axes):
    """Contracted axes must be different axes of the weight."""
    with pytest.raises(ValueError, match="different axes of a weight of shape"):
        policy_jax.quantize_array(jnp.ones((2, 3)), "int8_from_float32", axes)


def test_what_no_product_can_take_says_so():
    """Integer weights, weights and inputs without axes have errors of their own."""
    with pytest.raises(ValueError, match="its weight is int32"):
        policy_jax.quantize_array(jnp.ones((2, 3), jnp.int32), "int8_from_float32")
    with pytest.raises(ValueError, match=r"shape \(\)"):
        policy_jax.quantize_array(jnp.float32(1), "int8_from_float32")
    with pytest.raises(ValueError, match="one axis or more"):
        policy_jax.dot(
            jnp.float32(1), policy_jax.quantize_array(jnp.ones((2, 3)), "int8_from_float32")
        )


def test_contracted_axes_may_come_in_any_order():
    """The order in which contracted axes are given does not matter."""
    w, x = jnp.arange(120.0).reshape(2, 3, 4, 5), jnp.arange(84.0).reshape(7, 3, 4)
    one, other = (policy_jax.quantize_array(w, "int8_from_float32", a) for a in ((1, 2), (-2, 1)))
    equation = "bcd,acde->bae"
    assert (policy_jax.einsum(equation, x, one) == policy_jax.einsum(equation, x, other)).all()


def test_trees_hold_more_than_jax_arrays(tmp_path):
    """numpy's arrays in a tree are weights too; keys, None and text stay as they are."""
    tree = {"w": np.ones((8, 4), np.float32), "key": jax.random.key(0), "none": None, "name": "a"}
    quantized = policy_jax.quantize(tree, "int8_from_float32")
    assert isinstance(quantized["w"], policy_jax.QuantizedArray)
    assert quantized["key"] is tree["key"]
    assert (quantized["none"], quantized["name"]) == (None, "a")
    pc.save(policy_jax.Parameters(quantized), tmp_path / "tree")
    loaded = pc.load(policy_jax.Parameters(tree), tmp_path / "tree").tree
    assert (loaded["w"].dequantize() == quantized["w"].dequantize()).all()

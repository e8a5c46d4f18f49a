"""Evaluation of inlined jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.ops.in_place import addend
from megajax.pipeline.jaxprs import Addend, evaluate, fp32_gradients, resharding


def test_operands_that_were_traced_as_equal_on_all_devices_may_vary():
    """As a constant of a block that the forward pass has stored: `jnp.take` compares its indices with 0."""

    @jax.jit
    def normalised(index):
        return jnp.where(index < 0, index + 4, index) * lax.psum(jnp.int32(1), "pipe")

    def step(x, index):
        traced = jax.make_jaxpr(lambda x, index: x[normalised(index)])(x, np.arange(3, dtype=np.int32))
        return evaluate(traced.jaxpr, traced.consts, [x, index])[0]

    mesh = jax.make_mesh((2,), ("pipe",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(step, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"))
    x, index = jnp.arange(8.0), jnp.array([0, 1, -1, 1, 0, -4], jnp.int32)
    # Each half of x [4], at twice its indices.
    np.testing.assert_array_equal(run(x, index), [0, 2, 3, 6, 4, 4])


def test_a_gradient_that_can_be_added_is_not_computed_before():
    """But one that something else reads, or that is no view of it by its type alone, is."""
    rounded = lambda x: addend(jnp.square, lambda total, place, x: total.at[place].add(x * x), x)  # noqa: E731

    def backward(x):
        one, two = rounded(x).astype(jnp.bfloat16), rounded(x)
        return (one, two, rounded(x).reshape(3, 1)), two.sum()

    x = jnp.array([1.0, 1.01, 3.0])
    for run in (fp32_gradients, jax.jit(lambda f, x: _values(fp32_gradients(f, x)), static_argnums=0)):
        (one, two, three), total = run(backward, x)
        one = one.value() if isinstance(one, Addend) else one
        for value in (one, two, three[:, 0]):
            assert value.dtype == jnp.float32
            np.testing.assert_allclose(value, x * x, rtol=1e-6)
        np.testing.assert_allclose(total, (x * x).sum(), rtol=1e-6)
    (one, two, three), _ = fp32_gradients(backward, x)
    assert isinstance(one, Addend) and not isinstance(two, Addend) and not isinstance(three, Addend)
    np.testing.assert_allclose(one.added_to(jnp.ones((2, 3)), 1), [[1, 1, 1], 1 + x * x], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(backward)(x)[0][1], x * x, rtol=1e-6)


def test_a_sum_of_gradients_that_can_be_added_is_not_computed_before():
    """Each is added in turn; what they read of parts of stacks, they read there if all of them are in one."""

    def add(total, place, stack, at, x):
        return total.at[place].add(stack[at] * x)

    def backward(weight, bias, x):
        return (addend(jnp.multiply, add, weight, x, parts=1) + addend(jnp.multiply, add, bias, x, parts=1),), x

    def read_twice(weight, bias, x):
        one = addend(jnp.multiply, add, weight, x, parts=1)
        return (one + addend(jnp.multiply, add, bias, x, parts=1), one * 2), x

    weights, biases = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    weight, bias, x = weights[1], biases[0], jnp.array([1.0, 2.0, 4.0])
    (total, other), _ = fp32_gradients(read_twice, weight, bias, x)
    assert not isinstance(total, Addend)
    np.testing.assert_allclose(total, (weight + bias) * x)
    np.testing.assert_allclose(other, 2 * weight * x)
    for stacks in ([], [(weight, (weights, 1)), (bias, (biases, 0))]):
        ((total,), _) = fp32_gradients(backward, weight, bias, x, stacks=stacks)
        assert isinstance(total, Addend)
        np.testing.assert_allclose(total.value(), (weight + bias) * x)
        np.testing.assert_allclose(total.added_to(jnp.zeros((2, 3)), 1), [[0, 0, 0], (weight + bias) * x])
    ((total,), _) = fp32_gradients(backward, weight, bias, x, stacks=[(weight, (-weights, 1)), (bias, (biases, 0))])
    np.testing.assert_allclose(total.added_to(jnp.zeros((1, 3)), 0), [(bias - weight) * x])


def _values(tree):
    """With the gradients of all addends."""
    return jax.tree.map(lambda one: one.value() if isinstance(one, Addend) else one, tree)


def test_a_gathered_gradient_is_computed_ahead():
    """What only reshards the last argument is taken from the caller, who computes it by `resharding`."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = P("tensor"), P()

    def backward(weight, dy):
        dy = lax.with_sharding_constraint(dy, split)
        gathered = lax.with_sharding_constraint(dy, whole)
        return (gathered.T @ gathered,), dy + gathered @ weight

    weight, dy = np.eye(3, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)

    def run(weight, dy):
        (ahead,) = resharding(backward, weight, dy)(dy)
        return fp32_gradients(backward, weight, dy, ahead=[2 * ahead])

    with jax.set_mesh(mesh):
        (of_weight,), dx = jax.jit(run)(weight, dy)
    np.testing.assert_array_equal(of_weight, 4 * dy.T @ dy)
    np.testing.assert_array_equal(dx, 3 * dy)

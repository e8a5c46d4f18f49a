"""Ring collectives from `lax.ppermute`, and the matmuls of a tensor-parallel pair with a ring inside.

On a ring of t ranks each sends to the next, t - 1 times, one t-th of the n bytes that meet. A send costs a latency L and
its bytes over the link's bandwidth W, so

    reduce-scatter, all-gather    (t - 1) (L + n / (t W))
    all-reduce, one after other   2 (t - 1) (L + n / (t W)): every rank sends 2 (t - 1) / t of the array

which is the least that any algorithm can send. XLA's own collectives cost as much, but a matmul has to wait for the
whole of them. `column_matmul` and `row_matmul` cut it in t pieces, and work on one while the next is on its way:

    all-gather, then matmul M     (t - 1) (L + n / (t W)) + M
    the two in one ring           M / t + (t - 1) max(L + n / (t W), M / t): as good as hidden once M / t is the larger

The price is matmuls a t-th as tall. 1909.08053 section 3 has the pair, 2205.05198 section 4.2 its collectives.

A ring is a cycle of sends that every rank joins: never use one where only some of a mesh's ranks come by.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.runtime.compat import varying_axes

__all__ = ["all_gather", "all_reduce", "column_matmul", "reduce_scatter", "row_matmul"]

AXIS = "tensor"


def _send(x: jax.Array, axis_name: str) -> jax.Array:
    """x of the rank before."""
    size = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(rank, (rank + 1) % size) for rank in range(size)])


def _part(x: jax.Array, index, size: int, axis: int) -> jax.Array:
    """The `index`-th of `size` equal parts of x along `axis`."""
    length = x.shape[axis] // size
    return lax.dynamic_slice_in_dim(x, index * length, length, axis)


def _put(whole: jax.Array, part: jax.Array, index, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part, index * part.shape[axis], axis)


def _travelling(x: jax.Array, axis_name: str):
    """Yields (rank it is of, x of that rank) for every rank, the own first. The next is under way meanwhile."""
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    for step in range(size):
        following = _send(x, axis_name) if step < size - 1 else x
        yield (rank - step) % size, x
        x = following


def _gathering(total_of, axis_name: str) -> jax.Array:
    """Sum over ranks of `total_of(rank)`, for the rank itself: what is under way takes up each rank's term.

    `total_of(rank)` is called once for each rank; while one term is worked out the sum of the others arrives.
    """
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    total = total_of((rank - 1) % size)
    for step in range(1, size):
        arriving = _send(total, axis_name)
        total = total_of((rank - 1 - step) % size, arriving)
    return total


def all_gather(x: jax.Array, axis_name: str, axis: int = 0) -> jax.Array:
    """All ranks' x, in their order along `axis`: `lax.all_gather(..., tiled=True)`. Call it inside a `shard_map`.

    The result is the same on every rank, but of a type that varies over `axis_name`: a ring cannot prove it.
    """
    size = lax.axis_size(axis_name)
    shape = list(x.shape)
    shape[axis] *= size
    whole = lax.pcast(jnp.zeros(shape, x.dtype), tuple(varying_axes(x)), to="varying")
    for index, part in _travelling(x, axis_name):
        whole = _put(whole, part, index, axis)
    return whole


def reduce_scatter(x: jax.Array, axis_name: str, axis: int = 0) -> jax.Array:
    """The own part along `axis` of the sum of all ranks' x: `lax.psum_scatter(..., tiled=True)`.

    Raises:
      ValueError: the ranks do not divide x along `axis`.
    """
    size = lax.axis_size(axis_name)
    if x.shape[axis] % size:
        raise ValueError(f"axis {axis} of {x.shape} cannot be shared out over the {size} ranks of {axis_name!r}")

    def term(index, arriving=None):
        part = _part(x, index, size, axis)
        return part if arriving is None else arriving + part

    return _gathering(term, axis_name)


def all_reduce(x: jax.Array, axis_name: str) -> jax.Array:
    """The sum of all ranks' x, of any shape: `lax.psum`, but of a type that varies (see `all_gather`)."""
    size = lax.axis_size(axis_name)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
    return all_gather(reduce_scatter(flat, axis_name), axis_name)[: x.size].reshape(x.shape)


# The pair. y is split along the sequence, x and z along what the kernels have split; sums are fp32.


def _gather_matmul(y, kernel):
    """all-gather(y) kernel: [b, s/t, h], [h, ..., o/t, ...] -> [b, s, ..., o/t, ...]."""
    size = lax.axis_size(AXIS)
    whole = None
    for index, part in _travelling(y, AXIS):
        product = jnp.tensordot(part, kernel, axes=1)
        if whole is None:
            shape = (product.shape[0], product.shape[1] * size, *product.shape[2:])
            whole = lax.pcast(jnp.zeros(shape, product.dtype), tuple(varying_axes(product)), to="varying")
        whole = _put(whole, product, index, 1)
    return whole


def _matmul_scatter(x, kernel, contracted, kernel_first=True):
    """reduce-scatter(x kernel): [b, s, *i/t], [*i/t, h] -> [b, s/t, h]; or with a kernel [h, *i/t], by its last axes."""
    size = lax.axis_size(AXIS)
    ours, its = range(2, 2 + contracted), range(kernel.ndim - contracted, kernel.ndim)
    axes = (tuple(ours), tuple(range(contracted) if kernel_first else its))

    def term(index, arriving=None):
        product = jnp.tensordot(_part(x, index, size, 1), kernel, axes, preferred_element_type=jnp.float32)
        return (product if arriving is None else product + arriving.astype(jnp.float32)).astype(x.dtype)

    return _gathering(term, AXIS)


def _weight_gradient(terms, dtype):
    """Sum of a^T b, contracted over samples and sequence, over an iterable of (a [b, s/t, ...], b [b, s/t, ...])."""
    products = (jnp.tensordot(a, b, ((0, 1), (0, 1)), preferred_element_type=jnp.float32) for a, b in terms)
    total = next(products)
    for product in products:
        total = total + product
    return total.astype(dtype)


def _spec(rank: int, axis: int) -> P:
    """Split along `axis` of `rank` over tensor."""
    return P(*(AXIS if index == axis else None for index in range(rank)))


def _map(function, in_specs, out_specs):
    return jax.shard_map(function, axis_names={AXIS}, in_specs=in_specs, out_specs=out_specs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def column_matmul(y: jax.Array, kernel: jax.Array, split: int) -> jax.Array:
    """The pair's first matmul, its input gathered along the sequence on the way; needs a mesh with "tensor" set.

    Backwards, dy is reduce-scattered on the way, and y gathered once more for the kernel's gradient.

    Args:
      y: [b, s, h], split along s over tensor.
      kernel: [h, *o], split over tensor along its axis `split`.
      split: from 1.

    Returns:
      [b, s, *o], split along axis split + 1.
    """
    specs = (_spec(3, 1), _spec(kernel.ndim, split))
    return _map(_gather_matmul, specs, _spec(kernel.ndim + 1, split + 1))(y, kernel)


def _column_forward(y, kernel, split):
    return column_matmul(y, kernel, split), (y, kernel)


def _column_backward(split, residuals, dz):
    y, kernel = residuals
    size = kernel.ndim - 1
    of_y, of_kernel, of_z = _spec(3, 1), _spec(kernel.ndim, split), _spec(kernel.ndim + 1, split + 1)

    def input_gradient(dz, kernel):
        return _matmul_scatter(dz, kernel, size, kernel_first=False)

    def kernel_gradient(y, dz):
        count = lax.axis_size(AXIS)
        terms = ((part, _part(dz, index, count, 1)) for index, part in _travelling(y, AXIS))
        return _weight_gradient(terms, kernel.dtype)

    dy = _map(input_gradient, (of_z, of_kernel), of_y)(dz, kernel)
    return dy, _map(kernel_gradient, (of_y, of_z), of_kernel)(y, dz)


column_matmul.defvjp(_column_forward, _column_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def row_matmul(x: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
    """The pair's second matmul, its sum over tensor reduce-scattered along the sequence on the way.

    Backwards, the result's gradient is gathered on the way, once for both gradients.

    Args:
      x: [b, s, *i], split along its third axis over tensor.
      kernel: [*i, h], split along its first axis.
      contracted: axes in i.

    Returns:
      [b, s, h], split along s; tensor must divide s.
    """
    specs = (_spec(2 + contracted, 2), _spec(kernel.ndim, 0))
    return _map(lambda x, kernel: _matmul_scatter(x, kernel, contracted), specs, _spec(3, 1))(x, kernel)


def _row_forward(x, kernel, contracted):
    return row_matmul(x, kernel, contracted), (x, kernel)


def _row_backward(contracted, residuals, dz):
    x, kernel = residuals
    of_x, of_kernel = _spec(2 + contracted, 2), _spec(kernel.ndim, 0)

    def gradients(x, kernel, dz):
        size, axes, dx, terms = lax.axis_size(AXIS), ((2,), (kernel.ndim - 1,)), jnp.zeros_like(x), []
        for index, part in _travelling(dz, AXIS):
            dx = _put(dx, jnp.tensordot(part, kernel, axes), index, 1)
            terms.append((_part(x, index, size, 1), part))
        return dx, _weight_gradient(terms, kernel.dtype)

    return _map(gradients, (of_x, of_kernel, _spec(3, 1)), (of_x, of_kernel))(x, kernel, dz)


row_matmul.defvjp(_row_forward, _row_backward)

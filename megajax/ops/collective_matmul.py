"""Ring collectives from `lax.ppermute`, and the matmuls of a tensor-parallel pair with a ring inside.

On a ring of t ranks each rank sends to the next one t - 1 times, each time one t-th of the n bytes of the whole array. A
send costs a latency L and its bytes over the link's bandwidth W, so

    reduce-scatter, all-gather    (t - 1) (L + n / (t W))
    all-reduce: both in turn      2 (t - 1) (L + n / (t W)): every rank sends 2 (t - 1) / t of the array

which is the least that any algorithm can send. XLA's own collectives cost the same, but a matmul waits until they are
complete. `column_matmul` and `row_matmul` split the matmul into t pieces and compute one while the next is being sent:

    all-gather, then matmul M     (t - 1) (L + n / (t W)) + M
    both in one ring              M / t + (t - 1) max(L + n / (t W), M / t): hidden if M / t is the larger

The cost is matmuls with a t-th of the rows. The pair is 1909.08053 section 3, its collectives 2205.05198 section 4.2.

A ring is a cycle of sends: all ranks of the mesh must reach it.
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
    """x of the previous rank."""
    size = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(rank, (rank + 1) % size) for rank in range(size)])


def _part(x: jax.Array, index, size: int, axis: int) -> jax.Array:
    """The `index`-th of `size` equal parts of x along `axis`."""
    length = x.shape[axis] // size
    return lax.dynamic_slice_in_dim(x, index * length, length, axis)


def _put(whole: jax.Array, part: jax.Array, index, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part, index * part.shape[axis], axis)


def _received(x: jax.Array, axis_name: str):
    """Yields (rank, x of that rank) for every rank, the own one first. Meanwhile the next x is being sent."""
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    for step in range(size):
        following = _send(x, axis_name) if step < size - 1 else x
        yield (rank - step) % size, x
        x = following


def _joined(parts, size: int, axis: int) -> jax.Array:
    """The parts of `size` ranks, in the ranks' order along `axis`; `parts` yields (rank, part)."""
    whole = None
    for rank, part in parts:
        if whole is None:
            shape = (*part.shape[:axis], part.shape[axis] * size, *part.shape[axis + 1 :])
            whole = lax.pcast(jnp.zeros(shape, part.dtype), tuple(varying_axes(part)), to="varying")
        whole = _put(whole, part, rank, axis)
    return whole


def _ring_sum(total_of, axis_name: str) -> jax.Array:
    """Each rank's sum, over all ranks, of their `total_of(rank)`: a partial sum goes round and every rank adds its term.

    `total_of(rank)` is called once for each rank; while it computes a term the partial sum arrives.
    """
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    total = total_of((rank - 1) % size)
    for step in range(1, size):
        arriving = _send(total, axis_name)
        total = total_of((rank - 1 - step) % size, arriving)
    return total


def all_gather(x: jax.Array, axis_name: str, axis: int = 0) -> jax.Array:
    """All ranks' x, in their order along `axis`: `lax.all_gather(..., tiled=True)`. Call it inside a `shard_map`.

    The result is the same on every rank, but its type varies over `axis_name`: JAX cannot infer that a ring replicates.
    """
    return _joined(_received(x, axis_name), lax.axis_size(axis_name), axis)


def reduce_scatter(x: jax.Array, axis_name: str, axis: int = 0) -> jax.Array:
    """This rank's part along `axis` of the sum of all ranks' x: `lax.psum_scatter(..., tiled=True)`.

    Raises:
      ValueError: the ranks do not divide x along `axis`.
    """
    size = lax.axis_size(axis_name)
    if x.shape[axis] % size:
        raise ValueError(f"axis {axis} of {x.shape} cannot be split over the {size} ranks of {axis_name!r}")

    def term(index, arriving=None):
        part = _part(x, index, size, axis)
        return part if arriving is None else arriving + part

    return _ring_sum(term, axis_name)


def all_reduce(x: jax.Array, axis_name: str) -> jax.Array:
    """The sum of all ranks' x, of any shape: `lax.psum`, but its type varies (see `all_gather`)."""
    size = lax.axis_size(axis_name)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
    return all_gather(reduce_scatter(flat, axis_name), axis_name)[: x.size].reshape(x.shape)


# The pair. y is split along the sequence, x and z along the split axis of the kernels; sums are fp32.


def _gather_matmul(y, kernel):
    """all-gather(y) kernel: [b, s/t, h], [h, ..., o/t, ...] -> [b, s, ..., o/t, ...]."""
    products = ((rank, jnp.tensordot(part, kernel, axes=1)) for rank, part in _received(y, AXIS))
    return _joined(products, lax.axis_size(AXIS), 1)


def _matmul_scatter(x, kernel, contracted, kernel_first=True, after=None):
    """reduce-scatter(x kernel): [b, s, *i/t], [*i/t, h] -> [b, s/t, h]; or with a kernel [h, *i/t], by its last axes.

    `after`: an iterator of arrays, one for each rank's part, whose matmul waits for it.
    """
    size = lax.axis_size(AXIS)
    ours, its = range(2, 2 + contracted), range(kernel.ndim - contracted, kernel.ndim)
    axes = (tuple(ours), tuple(range(contracted) if kernel_first else its))

    def term(index, arriving=None):
        part = _part(x, index, size, 1)
        if after is not None:
            part, _ = lax.optimization_barrier((part, next(after)))
        product = jnp.tensordot(part, kernel, axes, preferred_element_type=jnp.float32)
        if arriving is not None:  # the barrier: XLA would add inside cuBLAS's matmul, which then waits for the send
            product = lax.optimization_barrier(product) + arriving.astype(jnp.float32)
        return product.astype(x.dtype)

    return _ring_sum(term, AXIS)


def _weight_gradient(a, b, dtype):
    """a^T b, contracted over samples and sequence: [b, s, *i], [b, s, *o] -> [*i, *o]."""
    return jnp.tensordot(a, b, ((0, 1), (0, 1)), preferred_element_type=jnp.float32).astype(dtype)


def _spec(rank: int, axis: int) -> P:
    """Split along `axis` of `rank` over tensor."""
    return P(*(AXIS if index == axis else None for index in range(rank)))


def _map(function, in_specs, out_specs):
    return jax.shard_map(function, axis_names={AXIS}, in_specs=in_specs, out_specs=out_specs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def column_matmul(y: jax.Array, kernel: jax.Array, split: int) -> jax.Array:
    """The pair's first matmul, overlapped with the all-gather of its input; needs a mesh with "tensor" set.

    The backward reduce-scatters dy and all-gathers y again for the kernel's gradient, both overlapped with dy's matmuls.

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

    def gradients(y, dz, kernel):
        received = list(_received(y, AXIS))
        # While dy's matmul of one part runs, y's next part is sent.
        dy = _matmul_scatter(dz, kernel, size, kernel_first=False, after=(part for _, part in received))
        return dy, _weight_gradient(_joined(received, lax.axis_size(AXIS), 1), dz, kernel.dtype)

    return _map(gradients, (of_y, of_z, of_kernel), (of_y, of_kernel))(y, dz, kernel)


column_matmul.defvjp(_column_forward, _column_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def row_matmul(x: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
    """The pair's second matmul, overlapped with the reduce-scatter along the sequence of its sum over tensor.

    The backward all-gathers the result's gradient once for both gradients, overlapped with the input's matmuls.

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
        size, received = lax.axis_size(AXIS), list(_received(dz, AXIS))
        products = ((rank, jnp.tensordot(part, kernel, ((2,), (kernel.ndim - 1,)))) for rank, part in received)
        return _joined(products, size, 1), _weight_gradient(x, _joined(received, size, 1), kernel.dtype)

    return _map(gradients, (of_x, of_kernel, _spec(3, 1)), (of_x, of_kernel))(x, kernel, dz)


row_matmul.defvjp(_row_forward, _row_backward)

"""The second half of a gated MLP, with a backward that passes over the gate and the gated value once.

    y = (act(gate) * value) down,    up = (gate, value)

Where a backward computes the activation again, XLA's GPU compiler makes one kernel for it, and another for the gradients of
gate and value, which has results of another size. Each reads both. Here one kernel of Pallas (Triton) does both, and reads
`up` where the forward saved it.

Shapes: b samples, s tokens, n = b s rows, h = hidden, f = feedforward, split over tensor.
"""

import functools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.ops.in_place import of_part
from megajax.ops.linear import GATHERED, RESIDUAL, Constrain, reduce_scattered
from megajax.ops.tensor_shards import TENSOR, on_tensor_shards
from megajax.runtime.compat import pallas, pallas_call, whole_block

__all__ = ["NAME", "gated_down", "gated_gradients"]

Activation = Callable[[jax.Array], jax.Array]
NAME = "gated_gradients"
ROWS, COLUMNS = 8, 512  # of a program's tile


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def gated_down(up: jax.Array, kernel: jax.Array, activation: Activation, constrain: Constrain, interpret: bool = False):
    """From up [b, whole s, 2, f], the gate and the gated value, to [b, split s, h]; computed in fp32 between the matmuls.

    Args:
      up: of any float type, which the result has too.
      kernel: [f, h].
      activation: elementwise, of the gate.
      constrain: see `megajax.ops.linear`.
      interpret: whether to run the kernel in Pallas's interpreter.
    """
    wide = up.astype(jnp.float32)
    active = (activation(wide[..., 0, :]) * wide[..., 1, :]).astype(up.dtype)
    active = constrain(active, "batch", "whole_sequence", "feedforward")
    return reduce_scattered(jnp.tensordot(active, kernel, 1), constrain)


def _backward(activation, constrain, interpret, saved, gradient):
    up, kernel = saved
    gradient = constrain(constrain(gradient, *RESIDUAL), *GATHERED)
    slopes = jnp.tensordot(gradient, kernel, ((2,), (1,)))
    split = P(None, None, TENSOR)
    run = on_tensor_shards(
        partial(gated_gradients, activation=activation, interpret=interpret),
        (P(None, None, None, None, TENSOR), P(), split),
        (P(None, None, None, TENSOR), split),
    )
    of_up, active = of_part(run, up, slopes)
    return of_up, jnp.tensordot(gradient, active, ((0, 1), (0, 1))).T


gated_down.defvjp(lambda up, kernel, *how: (gated_down(up, kernel, *how), (up, kernel)), _backward)


def gated_gradients(
    stack: jax.Array, place: jax.Array, slopes: jax.Array, *, activation: Activation, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The gradient of (gate, value) = stack[place], and act(gate) * value.

    Args:
      stack: [m, b, s, 2, f].
      place: int32.
      slopes: [b, s, f], the gradient of act(gate) * value.
      activation, interpret: see `gated_down`.

    Returns:
      (gradient [b, s, 2, f], activation [b, s, f]).
    """
    *lead, width = slopes.shape
    slopes = slopes.reshape(-1, width)
    stack = stack.reshape(len(stack), len(slopes), 2 * width)
    rows, columns = min(ROWS, _power(len(slopes))), min(COLUMNS, _power(width))
    inputs = [place[None], stack, slopes]
    shapes = [(len(slopes), 2 * width), slopes.shape]
    of_up, active = pallas_call(
        functools.partial(_kernel, activation, rows, columns),
        inputs,
        [whole_block(x.shape) for x in inputs],
        [(shape, slopes.dtype) for shape in shapes],
        [whole_block(shape) for shape in shapes],
        grid=(-(-width // columns), -(-len(slopes) // rows)),
        settings={"warps": 4, "stages": 1, "name": NAME, "interpret": interpret},
    )
    return of_up.reshape(*lead, 2, width), active.reshape(*lead, width)


def _kernel(activation, rows: int, columns: int, place_ref, stack_ref, slopes_ref, of_up_ref, active_ref):
    """One tile [rows, columns]."""
    count, width = slopes_ref.shape
    row, column = pallas().program_id(1) * rows, pallas().program_id(0) * columns
    at = lambda part: (pallas().ds(row, rows), pallas().ds(part * width + column, columns))  # noqa: E731
    within = lambda start, size, stop: start + jnp.arange(size, dtype=jnp.int32) < stop  # noqa: E731
    mask = within(row, rows, count)[:, None] & within(column, columns, width)[None]
    if count % rows == 0 and width % columns == 0:
        mask = None

    def load(ref) -> jax.Array:
        return pallas().load(ref, **({} if mask is None else {"mask": mask, "other": 0.0})).astype(jnp.float32)

    place = place_ref[0]
    gate, value = load(stack_ref.at[(place, *at(0))]), load(stack_ref.at[(place, *at(1))])
    slope = load(slopes_ref.at[at(0)])
    gated, pull = jax.vjp(activation, gate)
    (of_gate,) = pull(slope * value)
    store = lambda ref, x: pallas().store(ref, x.astype(slopes_ref.dtype), mask=mask)  # noqa: E731
    store(of_up_ref.at[at(0)], of_gate)
    store(of_up_ref.at[at(1)], slope * gated)
    store(active_ref.at[at(0)], gated * value)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()

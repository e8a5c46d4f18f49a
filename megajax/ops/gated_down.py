"""The second half of a gated MLP, with a backward that passes over the gate and the gated value once.

    y = (act(gate) * value) down,    up = (gate, value)

Where a backward computes the activation again, XLA's GPU compiler makes one kernel for it, and another for the gradients of
gate and value, which has results of another size. Each reads both. Here one kernel of Pallas (Triton) does both, and reads
`up` where the forward saved it. If the forward keeps the activation, the kernel computes the gradients alone.

Shapes: b samples, s tokens, n = b s rows, h = hidden, f = feedforward, split over tensor.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from megajax.ops.in_place import of_part
from megajax.ops.linear import GATHERED, RESIDUAL, Constrain, reduce_scattered
from megajax.ops.tensor_shards import TENSOR, on_tensor_shards
from megajax.runtime.compat_kernels import pallas, pallas_call, whole_block

__all__ = ["KEPT", "NAME", "gated_down", "gated_gradients"]

Activation = Callable[[jax.Array], jax.Array]
NAME, ROUTED = "gated_gradients", "gated_rows_gradients"  # the second one: of experts' rows
KEPT = "kept_activation"  # for `megajax.models.remat`
ROWS, COLUMNS = 8, 512  # of a program's tile


@dataclasses.dataclass(frozen=True)
class GatedGradients:
    """The function of `of_part` that computes the gradient of (gate, value), and the activation again if it is not `kept`.

    Attributes:
      activation, kept, interpret: see `gated_down`.
    """

    activation: Activation
    kept: bool
    interpret: bool = False
    frees: ClassVar[bool] = True  # nothing later in a backward reads (gate, value)

    def __call__(self, stack, place, slopes) -> tuple[jax.Array, ...]:
        """See `gated_gradients`, on each tensor rank's shards."""
        split = P(None, None, TENSOR)
        local = partial(
            gated_gradients, activation=self.activation, with_activation=not self.kept, interpret=self.interpret
        )
        results = (P(None, None, None, TENSOR), *[split] * (not self.kept))
        return on_tensor_shards(local, (P(None, None, None, None, TENSOR), P(), split), results)(stack, place, slopes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def gated_down(
    up: jax.Array,
    kernel: jax.Array,
    activation: Activation,
    constrain: Constrain,
    interpret: bool = False,
    kept: bool = False,
):
    """From up [b, whole s, 2, f], the gate and the gated value, to [b, split s, h]; computed in fp32 between the matmuls.

    Args:
      up: of any float type, which the result has too.
      kernel: [f, h].
      activation: elementwise, of the gate.
      constrain: see `megajax.ops.linear`.
      interpret: whether to run the kernel in Pallas's interpreter.
      kept: whether the backward has act(gate) * value of the forward, named KEPT, and does not compute it again.
    """
    return _forward(up, kernel, activation, constrain, interpret, kept)[0]


def _forward(up, kernel, activation, constrain, interpret, kept):
    wide = up.astype(jnp.float32)
    active = (activation(wide[..., 0, :]) * wide[..., 1, :]).astype(up.dtype)
    active = constrain(active, "batch", "whole_sequence", "feedforward")
    active = checkpoint_name(active, KEPT) if kept else active
    return reduce_scattered(jnp.tensordot(active, kernel, 1), constrain), (up, kernel, active if kept else None)


def _backward(activation, constrain, interpret, kept, saved, gradient):
    up, kernel, active = saved
    gradient = constrain(constrain(gradient, *RESIDUAL), *GATHERED)
    slopes = jnp.tensordot(gradient, kernel, ((2,), (1,)))
    of_up, *again = of_part(GatedGradients(activation, kept, interpret), up, slopes)
    active = active if kept else again[0]
    return of_up, jnp.tensordot(gradient, active, ((0, 1), (0, 1))).T


gated_down.defvjp(_forward, _backward)


def gated_gradients(
    stack: jax.Array,
    place: jax.Array,
    slopes: jax.Array,
    shares: jax.Array | None = None,
    stop: jax.Array | None = None,
    *,
    activation: Activation,
    with_activation: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """The gradient of (gate, value) = stack[place], and if `with_activation` act(gate) * value.

    With shares, of experts' rows, the activation is share * act(gate) * value; from row `stop` on nothing is computed.

    Args:
      stack: [m, b, s, 2, f], or [m, R, 2, f] of experts' rows.
      place: int32.
      slopes: [b, s, f] or [R, f], the gradient of the activation.
      shares: fp32 [R].
      stop: int32, of rows with shares.
      activation, interpret: see `gated_down`.

    Returns:
      (gradient [b, s, 2, f], activation [b, s, f] or nothing, with shares fp32 [R, n] whose sums over n are their gradient).
    """
    *lead, width = slopes.shape
    slopes = slopes.reshape(-1, width)
    stack = stack.reshape(len(stack), len(slopes), 2 * width)
    rows, columns = min(ROWS, _power(len(slopes))), min(COLUMNS, _power(width))
    routed, grid = shares is not None, (-(-width // columns), -(-len(slopes) // rows))
    inputs = [place[None], stack, slopes, *([shares, stop[None]] if routed else [])]
    shapes = [(len(slopes), 2 * width), *[slopes.shape] * with_activation]
    results = [*((shape, slopes.dtype) for shape in shapes), *[((len(slopes), grid[0]), jnp.float32)] * routed]
    of_up, *found = pallas_call(
        functools.partial(_kernel, activation, rows, columns, routed, with_activation),
        inputs,
        [whole_block(x.shape) for x in inputs],
        results,
        [whole_block(shape) for shape, _ in results],
        grid=grid,
        settings={"warps": 4, "stages": 1, "name": ROUTED if routed else NAME, "interpret": interpret},
    )
    return of_up.reshape(*lead, 2, width), *(x.reshape(*lead, x.shape[-1]) for x in found)


def _kernel(activation, rows: int, columns: int, routed: bool, with_activation: bool, *refs):
    """One tile [rows, columns]; of experts' rows only if it has one before their end."""
    row, part = pallas().program_id(1) * rows, pallas().program_id(0)
    tile = functools.partial(_tile, activation, rows, columns, with_activation, row, part)
    if not routed:
        tile(None, refs)
        return
    (*given, shares_ref, stop_ref), results = refs[:5], refs[5:]
    pallas().when(row < stop_ref[0])(lambda: tile(shares_ref, (*given, *results)))


def _tile(activation, rows: int, columns: int, with_activation: bool, row, part, shares_ref, refs):
    """The tile from a row on, of one part of the columns; see `_kernel`."""
    place_ref, stack_ref, slopes_ref, of_up_ref, *more = refs
    count, width = slopes_ref.shape
    column = part * columns
    at = lambda half: (pallas().ds(row, rows), pallas().ds(half * width + column, columns))  # noqa: E731
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
    active = gated * value
    if shares_ref is not None:
        here = within(row, rows, count)
        share = pallas().load(shares_ref.at[(at(0)[0],)], mask=here, other=0.0)[:, None]
        pallas().store(more[-1].at[(at(0)[0], part)], (slope * active).sum(1), mask=here)
        slope, active = slope * share, active * share
    (of_gate,) = pull(slope * value)
    store = lambda ref, x: pallas().store(ref, x.astype(slopes_ref.dtype), mask=mask)  # noqa: E731
    store(of_up_ref.at[at(0)], of_gate)
    store(of_up_ref.at[at(1)], slope * gated)
    if with_activation:
        store(more[0].at[at(0)], active)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()

"""RMS norm with a backward in one pass: a kernel of Pallas (Triton), where XLA's GPU compiler makes two that read x and dy.

The kernel also adds the gradient of x's other use, the residual, and writes y again, which the gradient of the next weight
needs if the forward did not save it. Both are other equations of a block's backward, which the pipeline finds beside this
one (`megajax.pipeline.norm_equations`).

Shapes: b samples, s tokens, n elements that are normed.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.ops.in_place import of_part
from megajax.ops.norm import norm
from megajax.ops.tensor_shards import TENSOR, on_tensor_shards
from megajax.runtime.compat import Primitive, lower_by, pallas, pallas_call, whole_block

__all__ = ["LARGEST", "NAME", "NORM", "NormGradients", "norm_gradients", "norm_in_one_pass"]

NAME = "norm_gradients"
NORM = Primitive("rms_norm")  # (x, scale) -> y
LARGEST = 8192  # elements of a row, which a program has in registers
PROGRAMS = 256  # at most; each sums the scale's gradient over its rows


@dataclasses.dataclass(frozen=True)
class NormGradients:
    """The function of `of_part` that is the backward of one norm.

    Attributes:
      epsilon: added to the mean of the squares.
      is_split: whether s is split over tensor.
      interpret: whether to run the kernel in Pallas's interpreter.
    """

    epsilon: float
    is_split: bool
    interpret: bool = False

    def __call__(self, stack, place, scale, dy, residual=None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(gradient of x = stack[place], of scale in fp32, y); `residual` [b, s, n] is added to the first one."""
        rows = P(None, TENSOR) if self.is_split else P()
        local = partial(norm_gradients, epsilon=self.epsilon, interpret=self.interpret)
        specs = P(None, *rows), P(), P(), rows, None if residual is None else rows
        run = on_tensor_shards(local, specs, (rows, P(TENSOR) if self.is_split else P(), rows))
        dx, parts, y = run(stack, place, scale, dy, residual)
        return dx, parts.sum(0), y


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def norm_in_one_pass(x: jax.Array, scale: jax.Array, epsilon: float, is_split: bool, interpret: bool = False) -> jax.Array:
    """RMS norm of x [b, s, n], as `megajax.ops.norm.norm`; n at most LARGEST. For other arguments see `NormGradients`."""
    return NORM.bind(x, scale, epsilon=epsilon)


def _backward(epsilon, is_split, interpret, saved, dy):
    x, scale = saved
    dx, of_scale, _ = of_part(NormGradients(epsilon, is_split, interpret), x, scale, dy)
    return dx, of_scale.astype(scale.dtype)


norm_in_one_pass.defvjp(lambda x, scale, *how: (norm_in_one_pass(x, scale, *how), (x, scale)), _backward)


@NORM.def_impl
def _norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    return norm(x, scale, None, False, epsilon)


NORM.def_abstract_eval(lambda x, scale, epsilon: x)
lower_by(NORM, _norm)


def norm_gradients(
    stack: jax.Array,
    place: jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    residual: jax.Array | None = None,
    *,
    epsilon: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of y = norm(x) of x = stack[place], and y.

    Args:
      stack: [m, b, s, n].
      place: int32.
      scale: [n].
      dy: [b, s, n], y's gradient.
      residual: [b, s, n], a gradient that is added to x's before it is rounded; None: nothing is.
      epsilon, interpret: see `NormGradients`.

    Returns:
      (gradient of x [b, s, n], parts [programs, n] of the scale's gradient in fp32, y [b, s, n]).
    """
    shape, dtype = dy.shape, dy.dtype
    stack, dy, residual = (None if a is None else a.reshape(*a.shape[:-3], -1, shape[-1]) for a in (stack, dy, residual))
    rows, width = dy.shape
    programs = max(count for count in range(1, min(PROGRAMS, rows) + 1) if rows % count == 0)
    inputs = [place[None], stack, scale, dy, residual]
    results = [(dy.shape, dtype), ((programs, width), jnp.float32), (dy.shape, dtype)]
    dx, parts, y = pallas_call(
        partial(_kernel, epsilon, rows // programs),
        inputs,
        [None if x is None else whole_block(x.shape) for x in inputs],
        results,
        [whole_block(result) for result, _ in results],
        grid=(programs,),
        settings={"warps": 8 if width <= LARGEST // 2 else 16, "stages": 1, "name": NAME, "interpret": interpret},
    )
    return dx.reshape(shape), parts, y.reshape(shape)


def _kernel(epsilon, count, place_ref, stack_ref, scale_ref, dy_ref, residual_ref, dx_ref, parts_ref, y_ref):
    """The next `count` rows, one after the other."""
    width, place, program = dy_ref.shape[-1], place_ref[0], pallas().program_id(0)
    size = 1 << (width - 1).bit_length()
    columns = pallas().ds(program * 0, size)  # a traced start: of a known one jax refuses a size over the array's
    mask = None if size == width else jnp.arange(size, dtype=jnp.int32) < width

    def load(ref) -> jax.Array:
        return pallas().load(ref, **({} if mask is None else {"mask": mask, "other": 0.0})).astype(jnp.float32)

    store = lambda ref, x: pallas().store(ref, x, mask=mask)  # noqa: E731
    scale = load(scale_ref.at[columns])

    def one(index, total):
        row = program * count + index
        x, dy = load(stack_ref.at[place, row, columns]), load(dy_ref.at[row, columns])
        r = lax.rsqrt((x * x).sum() / width + epsilon)
        g, normed = dy * scale, x * r
        dx = r * (g - normed * ((g * normed).sum() / width))
        if residual_ref is not None:
            dx = dx + load(residual_ref.at[row, columns])
        store(dx_ref.at[row, columns], dx.astype(dx_ref.dtype))
        store(y_ref.at[row, columns], (normed * scale).astype(y_ref.dtype))
        return total + dy * normed

    total = lax.fori_loop(0, count, one, jnp.zeros(size, jnp.float32))
    store(parts_ref.at[program, columns], total)

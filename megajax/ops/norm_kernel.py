"""RMS norm with kernels of Pallas (Triton) that also compute what is beside it in a block, of which they read x anyway.

The backward is one pass, where XLA's GPU compiler makes two kernels that read x and dy. It also adds the gradient of x's
other use, the residual, and writes y again, which the gradient of the next weight needs if the forward did not save it.
The forward's kernel adds x up and writes it to where it is saved. The pipeline finds what is beside a norm, and calls the
kernels (`megajax.pipeline.norm_equations`, `early_stash`).

Shapes: b samples, s tokens, n elements that are normed.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.ops.in_place import of_part
from megajax.ops.norm import norm
from megajax.ops.tensor_shards import TENSOR, on_tensor_shards
from megajax.runtime.compat import Primitive, lower_by
from megajax.runtime.compat_kernels import pallas, pallas_call, whole_block

__all__ = [
    "LARGEST",
    "NAME",
    "NORM",
    "PROGRAMS",
    "SAVING",
    "NormGradients",
    "norm_and_save",
    "norm_gradients",
    "norm_in_one_pass",
    "saved_norm",
]

NAME, SAVING = "norm_gradients", "norm_and_save"
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
def norm_in_one_pass(
    x: jax.Array, scale: jax.Array, epsilon: float, is_split: bool, interpret: bool = False
) -> jax.Array:
    """RMS norm of x [b, s, n], as `megajax.ops.norm.norm`; n at most LARGEST. For other arguments see `NormGradients`."""
    return NORM.bind(x, scale, epsilon=epsilon, is_split=is_split, interpret=interpret)


def _backward(epsilon, is_split, interpret, saved, dy):
    x, scale = saved
    dx, of_scale, _ = of_part(NormGradients(epsilon, is_split, interpret), x, scale, dy)
    return dx, of_scale.astype(scale.dtype)


norm_in_one_pass.defvjp(lambda x, scale, *how: (norm_in_one_pass(x, scale, *how), (x, scale)), _backward)


@NORM.def_impl
def _norm(x: jax.Array, scale: jax.Array, *, epsilon: float, is_split: bool, interpret: bool) -> jax.Array:
    return norm(x, scale, None, False, epsilon)


NORM.def_abstract_eval(lambda x, scale, **how: x)
lower_by(NORM, _norm)


def saved_norm(
    stack: jax.Array,
    place: jax.Array,
    scale: jax.Array,
    *terms: jax.Array,
    before: Sequence[int | None] = (),
    epsilon: float,
    is_split: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`norm_and_save` on each tensor rank's shards; for other arguments see `NormGradients`."""
    rows = P(None, TENSOR) if is_split else P()
    local = partial(norm_and_save, before=before, epsilon=epsilon, interpret=interpret)
    of_terms = (P(None, *rows) if x.ndim == stack.ndim else rows for x in terms)
    specs = (P(None, *rows), P(), P(), *of_terms), (P(None, *rows), rows)
    return on_tensor_shards(local, *specs)(stack, place, scale, *terms)


def norm_and_save(
    stack: jax.Array,
    place: jax.Array,
    scale: jax.Array,
    *terms: jax.Array,
    before: Sequence[int | None] = (),
    epsilon: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(stack with x at stack[place], where it is; the norm of x), x the sum of one or two terms, rounded.

    Args:
      stack: [m, b, s, n].
      place: int32.
      scale: [n].
      terms: [b, s, n]; or another stack [m, b, s, n], of which the term is a part.
      before: for each term None, or how many places before `place` the part is, from 0 to m; () is None for all.
      epsilon, interpret: see `NormGradients`.
    """
    shape, dtype, before = stack.shape[1:], stack.dtype, tuple(before) or (None,) * len(terms)
    whole = stack.reshape(len(stack), -1, shape[-1])
    terms = [x.reshape(*x.shape[:-3], *whole.shape[1:]) for x in terms]
    inputs = [whole, place[None], scale, *terms]
    results = [(whole.shape, dtype), (whole.shape[1:], dtype)]
    programs, settings = _programs(*whole.shape[1:], SAVING, interpret)
    whole, y = pallas_call(
        partial(_saving_kernel, epsilon, before, whole.shape[1] // programs),
        inputs,
        [whole_block(x.shape) for x in inputs],
        results,
        [whole_block(result) for result, _ in results],
        grid=(programs,),
        settings=settings,
        updated=0,
    )
    return whole.reshape(stack.shape), y.reshape(shape)


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
    stack, dy, residual = (
        None if a is None else a.reshape(*a.shape[:-3], -1, shape[-1]) for a in (stack, dy, residual)
    )
    rows, width = dy.shape
    programs, settings = _programs(rows, width, NAME, interpret)
    inputs = [place[None], stack, scale, dy, residual]
    results = [(dy.shape, dtype), ((programs, width), jnp.float32), (dy.shape, dtype)]
    dx, parts, y = pallas_call(
        partial(_kernel, epsilon, rows // programs),
        inputs,
        [None if x is None else whole_block(x.shape) for x in inputs],
        results,
        [whole_block(result) for result, _ in results],
        grid=(programs,),
        settings=settings,
    )
    return dx.reshape(shape), parts, y.reshape(shape)


def _programs(rows: int, width: int, name: str, interpret: bool) -> tuple[int, dict]:
    """How many programs share the rows equally, and the settings of the kernel."""
    programs = max(count for count in range(1, min(PROGRAMS, rows) + 1) if rows % count == 0)
    warps = 8 if width <= LARGEST // 2 else 16
    return programs, {"warps": warps, "stages": 1, "name": name, "interpret": interpret}


def _kernel(epsilon, count, *refs):
    """The next `count` rows, one after the other."""
    place_ref, stack_ref, scale_ref, dy_ref, residual_ref, dx_ref, parts_ref, y_ref = refs
    width, place, program = dy_ref.shape[-1], place_ref[0], pallas().program_id(0)
    columns, load, store = _columns(width, program)
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

    total = lax.fori_loop(0, count, one, jnp.zeros_like(scale))
    store(parts_ref.at[program, columns], total)


def _saving_kernel(epsilon, before, count, _, place_ref, scale_ref, *refs):
    """The next `count` rows, one after the other."""
    *term_refs, stack_ref, y_ref = refs
    width, place, program = y_ref.shape[-1], place_ref[0], pallas().program_id(0)
    columns, load, store = _columns(width, program)
    scale = load(scale_ref.at[columns])
    parts = [
        () if back is None else (lax.rem(place + (ref.shape[0] - back), ref.shape[0]),)
        for ref, back in zip(term_refs, before, strict=True)
    ]

    def one(index, _):
        row = program * count + index
        terms = (load(ref.at[(*part, row, columns)]) for ref, part in zip(term_refs, parts, strict=True))
        x = sum(terms).astype(y_ref.dtype)
        store(stack_ref.at[place, row, columns], x)
        x = x.astype(jnp.float32)
        store(y_ref.at[row, columns], (x * lax.rsqrt((x * x).sum() / width + epsilon) * scale).astype(y_ref.dtype))
        return 0

    lax.fori_loop(0, count, one, 0)


def _columns(width: int, program):
    """All columns of a row as a slice whose size is a power of 2; and what loads them in fp32, and stores them."""
    size = 1 << (width - 1).bit_length()
    columns = pallas().ds(program * 0, size)  # a traced start: of a known one jax refuses a size over the array's
    mask = None if size == width else jnp.arange(size, dtype=jnp.int32) < width

    def load(ref) -> jax.Array:
        return pallas().load(ref, **({} if mask is None else {"mask": mask, "other": 0.0})).astype(jnp.float32)

    return columns, load, lambda ref, x: pallas().store(ref, x, mask=mask)

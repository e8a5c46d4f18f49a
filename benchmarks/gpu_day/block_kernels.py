"""The kernels of a block's norms and gated MLPs on this device: results against numpy in fp64, and rates."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_day.kernels import checked, error, row_of
from benchmarks.gpu_day.programs import Programs, compiled

STACK, PLACE = 3, 1  # parts of a stack, and the one that is read or written
EPSILON = 1e-5
# Samples, tokens, width: a program has several rows; the last are no powers of 2.
NORMS, TINY_NORMS = [(2, 1024, 4096), (1, 512, 8192), (2, 75, 1000)], [(2, 5, 70)]
GATED, TINY_GATED = [(2, 512, 4096), (2, 75, 1000)], [(2, 5, 70)]


def norms(tiny: bool) -> dict:
    """RMS norms: both gradients and the result, and the forward that adds, saves and norms."""
    import jax.numpy as jnp

    from megajax.ops.norm_kernel import norm_and_save, norm_gradients

    programs = Programs()
    how = {"epsilon": EPSILON, "interpret": not programs.on_gpu}

    def backward(stack, scale, dy, residual):
        dx, parts, y = norm_gradients(stack, jnp.int32(PLACE), scale, dy, residual, **how)
        return dx, y, parts.sum(0)

    def forward(stack, scale, *terms):
        return norm_and_save(stack, jnp.int32(PLACE), scale, *terms, **how)

    def cases(dtype, shape) -> Iterator[tuple[str, Callable, list, Callable]]:
        stack, scale, dy, residual = _draw(dtype, (STACK, *shape), shape[-1:], shape, shape)
        yield "gradients", partial(backward, residual=None), [stack, scale, dy], _norm_gradients
        yield "gradients and a residual's", backward, [stack, scale, dy, residual], _norm_gradients
        yield "saved", forward, [stack, scale, dy], partial(_norm_and_save, dtype)
        yield "sum of two, saved", forward, [stack, scale, dy, residual], partial(_norm_and_save, dtype)

    return _compare(programs, cases, TINY_NORMS if tiny else NORMS)


def gated(tiny: bool) -> dict:
    """Gated MLPs: the gradient of gate and value, and the activation; the same of experts' rows, of which some are none."""
    import jax
    import jax.numpy as jnp

    from megajax.ops.gated_down import gated_gradients

    programs = Programs()

    def run(activation, stack, slopes, *rows):
        how = {"activation": activation, "interpret": not programs.on_gpu}
        return gated_gradients(stack, jnp.int32(PLACE), slopes, *rows, **how)

    def of_rows(stack, slopes, shares):
        stop = _rows(shares)
        of_up, active, sums = run(jax.nn.silu, stack, slopes, shares.astype(jnp.float32), jnp.int32(stop))
        return of_up[:stop], active[:stop], sums.sum(1)[:stop]

    def cases(dtype, shape) -> Iterator[tuple[str, Callable, list, Callable]]:
        stack, slopes = _draw(dtype, (STACK, *shape[:-1], 2, shape[-1]), shape)
        for name, activation in {"SiLU": jax.nn.silu, "GELU": jax.nn.gelu}.items():
            yield name, partial(run, activation), [stack, slopes], partial(_gated, ACTIVATIONS[name])
        count = math.prod(shape[:-1])
        rows = _draw(dtype, (STACK, count, 2, shape[-1]), (count, shape[-1]), (count,))
        yield "SiLU of experts' rows", of_rows, rows, _gated_rows

    return _compare(programs, cases, TINY_GATED if tiny else GATED)


def _compare(programs: Programs, cases: Callable, shapes: Sequence[tuple[int, ...]]) -> dict:
    import jax.numpy as jnp

    rows = []
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        for shape in shapes:
            for text, call, arrays, expected in cases(dtype, shape):
                label = f"{text}, {jnp.dtype(dtype).name}, {' x '.join(map(str, shape))}"
                if (found := programs.call(label, call, *arrays)) is not None:
                    wide = [np.float64(a) for a in arrays]
                    worst = max(error(np.float64(x), y) for x, y in zip(found, expected(*wide), strict=True))
                    rows.append(row_of(label, worst, worst, dtype))
    return checked(rows) if programs.rows is None else compiled(programs.rows)


def _draw(dtype, *shapes: tuple[int, ...]) -> list[Any]:
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    return [np.asarray(jnp.asarray(draw.normal(size=shape), dtype)) for shape in shapes]


def _norm_gradients(stack, scale, dy, residual=0.0):
    x = stack[PLACE]
    r = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON)
    normed, g = x * r, dy * scale
    dx = r * (g - normed * (g * normed).mean(-1, keepdims=True))
    return dx + residual, normed * scale, (dy * normed).sum((0, 1))


def _norm_and_save(dtype, stack, scale, *terms):
    x = np.float64(sum(terms).astype(np.float32).astype(dtype))
    whole = stack.copy()
    whole[PLACE] = x
    return whole, x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON) * scale


def _gated(activation: Callable, stack, slopes):
    gate, value = stack[PLACE][..., 0, :], stack[PLACE][..., 1, :]
    active, slope = activation(gate)
    return np.stack([slopes * value * slope, slopes * active], -2), active * value


def _gated_rows(stack, slopes, shares):
    stop = _rows(shares)
    of_up, active = _gated(_silu, stack, slopes * shares[:, None])
    return of_up[:stop], (active * shares[:, None])[:stop], (slopes * active).sum(-1)[:stop]


def _rows(shares) -> int:
    """Of the places of rows, those that have one."""
    return 2 * len(shares) // 3


def _silu(x):
    sigmoid = 1 / (1 + np.exp(-x))
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x):
    """By tanh, which is the default of jax.nn.gelu."""
    inner, slope = 0.7978845608028654 * (x + 0.044715 * x**3), 0.7978845608028654 * (1 + 3 * 0.044715 * x**2)
    t = np.tanh(inner)
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) * slope / 2


ACTIVATIONS = {"SiLU": _silu, "GELU": _gelu}

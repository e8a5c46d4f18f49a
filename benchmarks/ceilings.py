"""Measured peaks of a device: the rate of a large matmul, and of reading and writing memory.

Both run for a second on random numbers: a GPU lowers its clock under load, and less so on zeros.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from megajax.estimate.gpus import DTYPES

SIZES = (4096, 8192, 16384)
WORK = 2e13  # FLOPs of a call: some 30 ms on an H100, so that its launch is negligible
COPIED = 2 << 30
PASSES = 20


def matmul_ceiling(device: jax.Device, precision: str, sizes=SIZES, work: float = WORK, seconds: float = 1.0) -> float:
    """FLOP/s of square matrices of the fastest size."""
    rates = []
    for size in sizes:
        with jax.default_device(device):
            keys = jax.random.split(jax.random.key(0))
            x, w = (jax.random.normal(key, (size, size), DTYPES[precision]) for key in keys)
            w = w / jnp.sqrt(size).astype(w.dtype)  # so that products stay as large as x
        iterations = max(1, round(work / (2 * size**3)))
        chain = jax.jit(lambda x, w, iterations=iterations: lax.fori_loop(0, iterations, lambda _, y: y @ w, x))
        rates.append(2 * size**3 * iterations / mean_seconds(lambda chain=chain, x=x, w=w: chain(x, w), seconds))
    return max(rates)


def copy_ceiling(device: jax.Device, count: int = COPIED, passes: int = PASSES, seconds: float = 1.0) -> float:
    """Bytes/s, read and written, of adding a number to an array of `count` bytes."""
    with jax.default_device(device):
        x = jax.random.normal(jax.random.key(0), (count // 4,), jnp.float32)
    # Each pass depends on its number, or the compiler could add all of them at once.
    chain = jax.jit(lambda x: lax.fori_loop(0, passes, lambda i, y: y + i.astype(y.dtype), x))
    return 2 * count * passes / mean_seconds(lambda: chain(x), seconds)


def mean_seconds(call: Callable[[], jax.Array], seconds: float) -> float:
    """The average time of a call, over at least `seconds` seconds, after a first call that compiles."""
    jax.block_until_ready(call())
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or not calls:
        jax.block_until_ready(call())
        calls += 1
    return (time.perf_counter() - start) / calls

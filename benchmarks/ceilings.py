"""Measured peak of a device: the rate of a large matmul.

It runs for a second on random numbers: a GPU lowers its clock under load, and less so on zeros.
"""

import jax
import jax.numpy as jnp
from jax import lax

from megajax.estimate.gpus import DTYPES
from megajax.plan.measure import mean_seconds

SIZES = (4096, 8192, 16384)
WORK = 2e13  # FLOPs of a call: some 30 ms on an H100, so that its launch is negligible


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

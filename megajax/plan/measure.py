"""Measures the rates of the devices there are: matmuls by shape, copies, attention, and collectives by size.

Everything runs on random numbers: a GPU lowers its clock under load, and less so on zeros. A call is timed from the host and
long enough that its launch is negligible: it repeats small products and collectives.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.estimate.gpus import DTYPES
from megajax.estimate.hlo import SENT
from megajax.estimate.measured import COLLECTIVES
from megajax.ops.attention import Kernel

WORK = 2e12  # FLOPs of a call: 3 ms on an H100
CEILING_SIZES = (4096, 8192, 16384)
MOST_PRODUCTS = 64  # of a call
COPIED = 2 << 30  # bytes
PASSES = 20  # over an array, of a call
REPEATS = 16  # of a collective, in a call
CALLS = 5  # of each program with collectives, of which the median counts


def matmul_rate(
    device: jax.Device, dtype: jnp.dtype, shape: tuple[int, int, int], work: float = WORK, seconds: float = 0.2
) -> float:
    """FLOP/s of a linear layer in training: a product [rows, inner] [inner, columns], and both of its gradients.

    The three have the same FLOPs. A call runs layers one after the other, each with weights of its own.
    """
    rows, inner, columns = shape
    flops = 6 * rows * inner * columns
    count = min(MOST_PRODUCTS, max(1, math.ceil(work / flops)))
    with jax.default_device(device):
        arrays = layers(dtype, shape, count)
    call = jax.jit(layer_products)
    return count * flops / mean_seconds(lambda: call(*arrays), seconds)


def layers(dtype: jnp.dtype, shape: tuple[int, int, int], count: int) -> tuple[jax.Array, list[jax.Array]]:
    """Random x [rows, inner], and weights [inner, columns] of `count` layers: the arguments of `layer_products`."""
    rows, inner, columns = shape
    scale = (columns * (columns + inner)) ** -0.25  # of the weights, so that x keeps its size
    keys = jax.random.split(jax.random.key(0), count + 1)
    x = jax.random.normal(keys[0], (rows, inner), dtype)
    return x, [(scale * jax.random.normal(key, (inner, columns))).astype(dtype) for key in keys[1:]]


def layer_products(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """The products of linear layers, one after the other: forward and both gradients."""
    gradients = []
    for w in weights:
        y = x @ w
        gradients.append(x.T @ y)
        x = y @ w.T
    return x, gradients


def matmul_ceiling(
    device: jax.Device, precision: str, sizes=CEILING_SIZES, work: float = 10 * WORK, seconds: float = 1.0
) -> float:
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


def copy_rate(device: jax.Device, count: int = COPIED, passes: int = PASSES, seconds: float = 1.0) -> float:
    """Bytes/s, read and written, of adding a number to an array of `count` bytes."""
    with jax.default_device(device):
        x = jax.random.normal(jax.random.key(0), (count // 4,), jnp.float32)
    chain = jax.jit(partial(copies, passes=passes))
    return 2 * count * passes / mean_seconds(lambda: chain(x), seconds)


def copies(x: jax.Array, passes: int = PASSES) -> jax.Array:
    """Adds a number to an array, `passes` times; it depends on the pass, or the compiler could add all of them at once."""
    return lax.fori_loop(0, passes, lambda i, y: y + i.astype(y.dtype), x)


def attention_rates(
    device: jax.Device,
    dtype: jnp.dtype,
    kernel: Kernel,
    products: float,
    shape: tuple[int, int, int, int],
    seconds: float = 0.2,
) -> tuple[float, float]:
    """FLOP/s of causal attention's forward and of its backward, of the scores that are not hidden.

    Args:
      products: matmuls of the backward, relative to the forward's two.
      shape: samples, tokens, heads and head dimension.
      seconds: how long each is measured.
    """
    samples, tokens, heads, size = shape
    with jax.default_device(device):
        query, key, value, gradient = (
            jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)
        )
    forward = jax.jit(lambda *arrays: kernel.forward(*arrays, True, None))
    backward = jax.jit(lambda *arrays: kernel.backward(*arrays, True, None))
    output, statistics = forward(query, key, value)
    arrays = (query, key, value, output, statistics, gradient)
    flops = 4 * samples * heads * size * tokens**2 / 2  # as the estimates count them
    return (
        flops / mean_seconds(lambda: forward(query, key, value), seconds),
        products * flops / mean_seconds(lambda: backward(*arrays), seconds),
    )


def collective_times(
    devices: Sequence[jax.Device], host_size: int, axis: str, sizes: Sequence[int], repeats: int = REPEATS
) -> dict[str, list[tuple[float, float]]]:
    """(bytes sent by a device, seconds) of each kind of collective and size.

    All devices take part at once: on the axis "host" in one group for each host, on the axis "network" in groups with one
    device of each host, so that every adapter is used.

    Args:
      devices: of all processes, host by host.
      host_size: devices of a host.
      axis: "host" or "network".
      sizes: bytes of the whole array of an all-gather, a reduce-scatter or an all-reduce; of a ppermute of what is sent.
      repeats: how often a call runs the collective.
    """
    grid = np.array(devices, dtype=object).reshape(-1, host_size)
    mesh = Mesh(grid, ("network", "host"))
    group = mesh.shape[axis]
    times: dict[str, list[tuple[float, float]]] = {}
    for field, kind in COLLECTIVES.items():
        for size in sizes:
            count = max(1, size // 4 // group) * group
            received = count // group if field == "reduce_scatter" else count
            x, call = _repeated(mesh, axis, field, count, repeats)
            seconds = _median_seconds(lambda call=call, x=x: call(x)) / repeats
            times.setdefault(field, []).append((SENT[kind](group) * 4 * received, seconds))
    return times


def _repeated(mesh: Mesh, axis: str, field: str, count: int, repeats: int) -> tuple[jax.Array, Callable]:
    """An array, and a program that runs a collective of `count` floats on it `repeats` times, one after the other."""
    shape, call = repeated_collective(mesh, axis, field, count, repeats)
    values = np.random.default_rng(0).standard_normal(shape.shape[0] // mesh.size, np.float32)
    return jax.make_array_from_callback(shape.shape, shape.sharding, lambda _: values), call


def repeated_collective(
    mesh: Mesh, axis: str, field: str, count: int, repeats: int
) -> tuple[jax.ShapeDtypeStruct, Callable]:
    """`_repeated` without the array: its shape."""
    group = mesh.shape[axis]
    ring = [(rank, (rank + 1) % group) for rank in range(group)]
    one = {
        "all_gather": lambda x: lax.all_gather(x, axis, tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, axis, tiled=True),
        "all_reduce": lambda x: lax.pmax(x, axis),  # its result is the next operand: a sum would grow
        "ppermute": lambda x: lax.ppermute(x, axis, ring),
    }[field]
    each = count // group if field == "all_gather" else count

    def body(_, state):
        x, last = state
        x, _ = lax.optimization_barrier((x, last))  # starts after the last one
        y = one(x)
        return y if field == "all_reduce" else x, y[:1]  # XLA reduces in place, and would copy an operand that stays

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names), check_vma=False)
    def call(x):
        return lax.fori_loop(0, repeats, body, (x, x[:1]))[1]

    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.ShapeDtypeStruct((each * mesh.size,), np.float32, sharding=sharding), call


def mean_seconds(call: Callable[[], jax.Array], seconds: float) -> float:
    """The average time of a call, over at least `seconds` seconds, after a first call that compiles."""
    jax.block_until_ready(call())
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or not calls:
        jax.block_until_ready(call())
        calls += 1
    return (time.perf_counter() - start) / calls


def _median_seconds(call: Callable[[], jax.Array]) -> float:
    """The median time of as many calls on every process, after a first one that compiles and connects them."""
    jax.block_until_ready(call())
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)

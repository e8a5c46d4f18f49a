"""Rates of the device by implementation: megajax's kernels, and tokamax's and PyTorch's where they are installed."""

import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.gpu_day.implementations import timed_attention, timed_grouped
from benchmarks.gpu_day.outcomes import NotAvailable
from benchmarks.gpu_day.programs import Programs, compiled, target
from megajax.estimate.measured import COLLECTIVES
from megajax.plan import calibrate
from megajax.plan.measure import (
    REPEATS,
    collective_times,
    copies,
    copy_rate,
    layer_products,
    layers,
    matmul_rate,
    mean_seconds,
    repeated_collective,
)

TORCH = pathlib.Path(__file__).parents[1] / "peers" / "torch_rates.py"
SECONDS = 0.2
# (rows, inner, columns) of a transformer's linear layers, at 8,192 tokens of a microbatch.
MATMULS = [(8192, width, wider * width) for width in (1600, 2048, 4096, 8192) for wider in (1, 3, 4)]
TINY_MATMULS = [(64, 64, 128)]
# Samples, tokens, heads, heads of keys, head size.
ATTENTIONS = [(8, 2048, 32, 32, 128), (8, 1024, 25, 25, 64), (1, 8192, 32, 8, 128)]
TINY_ATTENTIONS = [(1, 128, 2, 1, 64)]
# Rows, inner, columns, groups: Mixtral's and Qwen3-30B-A3B's experts.
GROUPED = [(16384, 4096, 14336, 8), (65536, 2048, 768, 128)]
TINY_GROUPED = [(256, 64, 128, 4)]
WINDOW = 1024
# Rows and width of a norm, and of a gated MLP's activation: Llama 3 8B's widths, and so many rows that a call takes longer
# than it takes to launch.
BLOCKS = {"norm": [(65536, 4096), (32768, 8192)], "gated": [(32768, 14336), (65536, 7168)]}
TINY_BLOCKS = {"norm": [(16, 64)], "gated": [(16, 64)]}


def matmul(tiny: bool) -> dict[str, Any]:
    """TFLOP/s of a linear layer's three products, forward and both gradients, in bf16."""
    programs, shapes = Programs(), TINY_MATMULS if tiny else MATMULS
    peers = _torch("matmul", shapes, programs)
    rows = []
    for shape, peer in zip(shapes, peers, strict=True):
        label = " x ".join(map(str, shape))
        if programs.rows is not None:
            programs.call(label, layer_products, *programs.inputs(lambda shape=shape: layers(jnp.bfloat16, shape, 1)))
            continue
        rate = matmul_rate(programs.device, jnp.bfloat16, shape, 1e6 if tiny else 2e12, SECONDS)
        rows.append({"label": label, "values": {"jax": rate / 1e12, "PyTorch": peer}})
    return _answer("TFLOP/s", rows, programs)


def attention(tiny: bool) -> dict[str, Any]:
    """TFLOP/s of causal attention, forward and backward, of the scores that are not hidden, in bf16."""
    programs, shapes = Programs(), TINY_ATTENTIONS if tiny else ATTENTIONS
    peers = _torch("attention", shapes, programs)
    rows = []
    for shape, peer in zip(shapes, peers, strict=True):
        for window in (None, WINDOW):
            if window and (tiny or shape[1] <= window):
                continue
            text = "{} x {} tokens, {} heads, {} of keys, of {}".format(*shape)
            text += f", window {window}" if window else ""
            calls = timed_attention(programs.device, window)
            values = {
                name: _attention_rates(programs, f"{name}: {text}", call, shape, window) for name, call in calls.items()
            }
            values |= {} if window else {"PyTorch": peer or [None, None]}
            for place, direction in enumerate(("forward", "backward")):
                rates = {name: pair[place] for name, pair in values.items()}
                rows.append({"label": f"{text}, {direction}", "values": rates})
    return _answer("TFLOP/s", rows, programs)


def _attention_rates(programs: Programs, label: str, call: Callable, shape, window) -> list[float | None]:
    """TFLOP/s of the forward and of the backward, whose time is that of both less the forward's."""
    samples, tokens, heads, groups, size = shape

    def draw():
        keys = jax.random.split(jax.random.key(0), 4)
        return [
            jax.random.normal(key, (samples, tokens, count, size), jnp.bfloat16)
            for key, count in zip(keys, (heads, groups, groups, heads), strict=True)
        ]

    arrays, seen = programs.inputs(draw), tokens * (tokens + 1) / 2
    if window:
        seen -= (tokens - window) * (tokens - window + 1) / 2
    flops = 4 * samples * heads * size * seen / 1e12
    forward = programs.seconds(f"{label}, forward", call, *arrays[:3], least=SECONDS)
    both = programs.seconds(f"{label}, both", call, *arrays, least=SECONDS)
    if forward is None or both is None:
        return [None, None]
    return [flops / forward, 2.5 * flops / (both - forward) if both > forward else None]  # noise of small sizes


def grouped(tiny: bool) -> dict[str, Any]:
    """TFLOP/s of the grouped matmuls of experts, with rows spread evenly, in bf16."""
    programs, rows = Programs(), []
    for count, into, out, groups in TINY_GROUPED if tiny else GROUPED:

        def draw(count=count, into=into, out=out, groups=groups):
            keys = jax.random.split(jax.random.key(0), 3)
            shapes = (count, into), (groups, into, out), (count, out)
            arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
            return *arrays, jnp.full(groups, count // groups, jnp.int32)

        arrays, flops = programs.inputs(draw), 2 * count * into * out / 1e12
        for direction, calls in timed_grouped(programs.device).items():
            label = f"{count} x {into} x {out}, {groups} groups, {direction}"
            seconds = {
                name: programs.seconds(f"{name}: {label}", call, *arrays, least=SECONDS) for name, call in calls.items()
            }
            rows.append({"label": label, "values": {name: one and flops / one for name, one in seconds.items()}})
    return _answer("TFLOP/s", rows, programs)


def blocks(tiny: bool) -> dict[str, Any]:
    """GB/s of kernels of a block's norms and gated MLPs, of the bytes that they must read and write, in bf16."""
    from megajax.ops.gated_down import gated_gradients
    from megajax.ops.norm import norm
    from megajax.ops.norm_kernel import norm_and_save, norm_gradients

    programs, rows, dtype = Programs(), [], jnp.bfloat16
    interpret, chosen = not programs.on_gpu, TINY_BLOCKS if tiny else BLOCKS

    plain = lambda x, scale: norm(x, scale, None, False, 1e-5)  # noqa: E731

    def gate(up):
        wide = up.astype(jnp.float32)
        return (jax.nn.silu(wide[..., 0, :]) * wide[..., 1, :]).astype(dtype)

    def xla_norm(stack, scale, dy):
        y, pull = jax.vjp(plain, stack[0], scale)
        dx, of_scale = pull(dy)
        return dx + dy, of_scale, y

    def xla_gated(stack, slopes):
        active, pull = jax.vjp(gate, stack[0])
        return *pull(slopes), active

    place = jnp.int32(0)
    how = {"epsilon": 1e-5, "interpret": interpret}
    calls = {
        # x, dy and the residual are read, dx and y written.
        "norm's gradients": (
            "norm",
            5,
            xla_norm,
            lambda stack, scale, dy: norm_gradients(stack, place, scale, dy, dy, **how),
        ),
        "sum, saved and normed": (
            "norm",
            4,
            lambda stack, scale, dy: (stack.at[0].set(stack[0] + dy), plain(stack[0] + dy, scale)),
            lambda stack, scale, dy: norm_and_save(stack, place, scale, stack[0], dy, **how),
        ),
        # Gate, value and slopes are read, both gradients and the activation written.
        "gated gradients": (
            "gated",
            6,
            xla_gated,
            lambda stack, slopes: gated_gradients(stack, place, slopes, activation=jax.nn.silu, interpret=interpret),
        ),
    }
    for text, (kind, passes, xla, kernel) in calls.items():
        for count, width in chosen[kind]:
            shape = (1, count, width)
            shapes = [(1, *shape), shape[2:], shape] if kind == "norm" else [(1, 1, count, 2, width), shape]

            def draw(shapes=shapes):
                keys = jax.random.split(jax.random.key(0), len(shapes))
                return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]

            arrays, label = programs.inputs(draw), f"{text}, {count} x {width}"
            values = {}
            for name, call in {"megajax's Pallas": kernel, "XLA": xla}.items():
                seconds = programs.seconds(f"{name}: {label}", call, *arrays, least=SECONDS)
                values[name] = seconds and passes * 2 * count * width / seconds / 1e9
            rows.append({"label": label, "values": values})
    return _answer("GB/s", rows, programs)


def bandwidth(tiny: bool) -> dict[str, Any]:
    """GB/s of a copy within the device, of one to and from the host, and of collectives if there are several devices."""
    programs, size = Programs(), 1 << (20 if tiny else 30)
    devices = programs.devices
    if programs.rows is not None:
        programs.call("copy within the device", copies, programs.inputs(lambda: jnp.zeros(size // 4, jnp.float32)))
        mesh = Mesh(np.array(devices, object).reshape(1, -1), ("network", "host"))
        for field in COLLECTIVES if len(devices) > 1 else ():
            shape, call = repeated_collective(mesh, "host", field, size // 4, REPEATS)
            programs.call(field, call, shape)
        return compiled(programs.rows)
    here = np.ones(size // 4, np.float32)
    there = jax.device_put(here, devices[0])
    rows = [
        ("within the device, read and written", copy_rate(devices[0], size, seconds=SECONDS)),
        ("host to device", size / mean_seconds(lambda: jax.device_put(here, devices[0]), SECONDS)),
        ("device to host", size / mean_seconds(lambda: np.asarray(there + 0), SECONDS)),
    ]
    if len(devices) > 1:
        for kind, points in collective_times(devices, len(devices), "host", [size // 4]).items():
            rows.append((f"{kind}, sent by a device", points[0][0] / points[0][1]))
    return {"unit": "GB/s", "rows": [{"label": name, "values": {"jax": rate / 1e9}} for name, rate in rows]}


def calibration(tiny: bool) -> dict[str, Any]:
    """The table [measured] that `megajax.plan --calibrate` writes into a cluster's file, as text."""
    if target() is not None:
        raise NotAvailable("its programs are those of the other rates")
    devices = Programs().devices
    sizes = calibrate.SMALL if tiny else calibrate.FULL
    return {"table": calibrate.measure(devices, len(devices), "bf16", sizes), "rows": []}


def _answer(unit: str, rows: list[dict[str, Any]], programs: Programs) -> dict[str, Any]:
    return {"unit": unit, "rows": rows} if programs.rows is None else compiled(programs.rows)


def _torch(kind: str, shapes: list, programs: Programs) -> list:
    """PyTorch's rates for the shapes, from a process of its own; None for each without torch."""
    if importlib.util.find_spec("torch") is None or programs.rows is not None or not programs.on_gpu:
        return [None] * len(shapes)
    request = json.dumps({"kind": kind, "shapes": shapes})
    done = subprocess.run([sys.executable, str(TORCH)], input=request, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else [None] * len(shapes)

"""Rates of the device by implementation: megajax's kernels, and tokamax's and PyTorch's where they are installed."""

import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu_day.devices import start

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


def matmul(tiny: bool) -> dict[str, Any]:
    """TFLOP/s of a linear layer's three products, forward and both gradients, in bf16."""
    import jax.numpy as jnp

    device = start()
    from megajax.plan.measure import matmul_rate

    shapes = TINY_MATMULS if tiny else MATMULS
    peers = _torch("matmul", shapes, device)
    rows = []
    for shape, peer in zip(shapes, peers, strict=True):
        rate = matmul_rate(device, jnp.bfloat16, shape, 1e6 if tiny else 2e12, SECONDS)
        rows.append({"label": " x ".join(map(str, shape)), "values": {"jax": rate / 1e12, "PyTorch": peer}})
    return {"unit": "TFLOP/s", "rows": rows}


def attention(tiny: bool) -> dict[str, Any]:
    """TFLOP/s of causal attention, forward and backward, of the scores that are not hidden, in bf16."""
    import jax.numpy as jnp

    device = start()
    from megajax.ops.attention import CUDNN, INTERPRETED, cudnn_kernel, tokamax_kernel, with_window

    on_gpu = device.platform == "gpu"
    shapes = TINY_ATTENTIONS if tiny else ATTENTIONS
    peers = _torch("attention", shapes, device)
    rows = []
    for shape, peer in zip(shapes, peers, strict=True):
        for window in (None, WINDOW):
            if window and (tiny or shape[1] <= window):
                continue
            calls = {} if on_gpu else {"tokamax": _of_kernel(with_window(INTERPRETED, window))}
            calls |= {"cudnn": _of_kernel(cudnn_kernel(window) if window else CUDNN)} if on_gpu else {}
            if on_gpu and importlib.util.find_spec("tokamax"):
                calls["tokamax"] = _of_kernel(with_window(tokamax_kernel(device), window))
                calls["tokamax, its own backward"] = _of_tokamax(window)
            values = {name: _attention_rates(call, shape, window, jnp.bfloat16) for name, call in calls.items()}
            values |= {} if window else {"PyTorch": peer or [None, None]}
            text = "{} x {} tokens, {} heads, {} of keys, of {}".format(*shape) + (
                f", window {window}" if window else ""
            )
            for place, direction in enumerate(("forward", "backward")):
                rates = {name: pair[place] for name, pair in values.items()}
                rows.append({"label": f"{text}, {direction}", "values": rates})
    return {"unit": "TFLOP/s", "rows": rows}


def _of_kernel(kernel) -> Callable:
    """(query, key, value) -> the output, and the backward as a function of its gradient."""

    def both(query, key, value):
        output, statistics = kernel.forward(query, key, value, True, None)
        return output, partial(kernel.backward, query, key, value, output, statistics)

    return lambda q, k, v, gradient=None: _apply(both(q, k, v), gradient, (True, None))


def _apply(pair, gradient, more=()):
    output, backward = pair
    return output if gradient is None else backward(gradient, *more)


def _of_tokamax(window: int | None) -> Callable:
    import jax
    import tokamax

    size = {"local_window_size": (window - 1, 0)} if window else {}
    call = partial(tokamax.dot_product_attention, is_causal=True, implementation="mosaic", **size)
    return lambda q, k, v, gradient=None: _apply(jax.vjp(call, q, k, v), gradient)


def _attention_rates(call: Callable, shape, window, dtype) -> list[float | None]:
    """TFLOP/s of the forward and of the backward, whose time is that of both less the forward's."""
    import jax

    samples, tokens, heads, groups, size = shape
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, count: jax.random.normal(key, (samples, tokens, count, size), dtype)  # noqa: E731
    query, key, value, gradient = map(draw, keys, (heads, groups, groups, heads))
    seen = tokens * (tokens + 1) / 2
    if window:
        seen -= (tokens - window) * (tokens - window + 1) / 2
    flops = 4 * samples * heads * size * seen / 1e12
    forward = _seconds(jax.jit(call), query, key, value)
    both = _seconds(jax.jit(lambda q, k, v, g: (call(q, k, v), call(q, k, v, g))), query, key, value, gradient)
    if forward is None or both is None:
        return [None, None]
    return [flops / forward, 2.5 * flops / max(both - forward, 1e-9)]


def grouped(tiny: bool) -> dict[str, Any]:
    """TFLOP/s of the grouped matmuls of experts, with rows spread evenly, in bf16."""
    import jax
    import jax.numpy as jnp

    device = start()
    from megajax.ops.grouped_matmul import INTERPRETED, PALLAS, XLA

    on_gpu = device.platform == "gpu"
    kernels = {"pallas": PALLAS if on_gpu else INTERPRETED, "xla": XLA}
    rows = []
    for count, into, out, groups in TINY_GROUPED if tiny else GROUPED:
        keys = jax.random.split(jax.random.key(0), 3)
        draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)  # noqa: E731
        x, w, slopes = draw(keys[0], count, into), draw(keys[1], groups, into, out), draw(keys[2], count, out)
        sizes, flops = jnp.full(groups, count // groups, jnp.int32), 2 * count * into * out / 1e12
        calls = {
            "product": {name: (kernel.product, x, w, sizes) for name, kernel in kernels.items()},
            "product, transposed": {
                name: (partial(kernel.product, transposed=True), slopes, w, sizes) for name, kernel in kernels.items()
            },
            "gradient": {name: (kernel.gradient, x, slopes, sizes) for name, kernel in kernels.items()},
        }
        if on_gpu and importlib.util.find_spec("tokamax"):
            for name, call in _ragged_of_tokamax().items():
                calls[name]["tokamax"] = call, x, w, sizes, slopes
        calls["product"]["one matmul of all rows"] = jnp.matmul, x, w[0]
        for name, of in calls.items():
            seconds = {kernel: _seconds(jax.jit(call), *arrays) for kernel, (call, *arrays) in of.items()}
            rates = {kernel: one and flops / one for kernel, one in seconds.items()}
            rows.append({"label": f"{count} x {into} x {out}, {groups} groups, {name}", "values": rates})
    return {"unit": "TFLOP/s", "rows": rows}


def _ragged_of_tokamax() -> dict[str, Callable]:
    """tokamax's product and its two gradients, as functions of (rows, kernels, sizes, slopes)."""
    import jax
    import jax.numpy as jnp
    import tokamax

    ragged = partial(tokamax.ragged_dot, implementation="mosaic")

    def gradient(place, rows, kernels, sizes, slopes):
        return jax.vjp(lambda x, w: ragged(x, w, sizes, preferred_element_type=jnp.bfloat16), rows, kernels)[1](slopes)[
            place
        ]

    return {
        "product": lambda rows, kernels, sizes, _: ragged(rows, kernels, sizes),
        "product, transposed": partial(gradient, 0),
        "gradient": partial(gradient, 1),
    }


def bandwidth(tiny: bool) -> dict[str, Any]:
    """GB/s of a copy within the device, of one to and from the host, and of collectives if there are several devices."""
    import jax
    import numpy as np

    device = start()
    from megajax.plan.measure import collective_times, copy_rate

    size = 1 << (20 if tiny else 30)
    here = np.ones(size // 4, np.float32)
    there = jax.device_put(here, device)
    rows = [
        ("within the device, read and written", copy_rate(device, size, seconds=SECONDS)),
        ("host to device", size / _seconds(lambda: jax.device_put(here, device))),
        ("device to host", size / _seconds(lambda: np.asarray(there + 0))),
    ]
    devices = jax.devices()
    if len(devices) > 1:
        for kind, points in collective_times(devices, len(devices), "host", [size // 4]).items():
            rows.append((f"{kind}, sent by a device", points[0][0] / points[0][1]))
    return {"unit": "GB/s", "rows": [{"label": name, "values": {"jax": rate / 1e9}} for name, rate in rows]}


def _seconds(call: Callable, *arrays) -> float | None:
    """The average time of a call; None if this device cannot run it."""
    from megajax.plan.measure import mean_seconds

    try:
        return mean_seconds(lambda: call(*arrays), SECONDS)
    except Exception as error:  # a kernel that is not for this device says so in many ways
        print(f"{call}: {type(error).__name__}: {error}"[:500], file=sys.stderr)
        return None


def _torch(kind: str, shapes: list, device) -> list:
    """PyTorch's rates for the shapes, from a process of its own; None for each without torch."""
    if importlib.util.find_spec("torch") is None or device.platform != "gpu":
        return [None] * len(shapes)
    request = json.dumps({"kind": kind, "shapes": shapes})
    done = subprocess.run([sys.executable, str(TORCH)], input=request, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else [None] * len(shapes)

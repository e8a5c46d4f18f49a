"""The implementations of attention and grouped matmuls, by name: megajax's by the values of its options, and tokamax's."""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.gpu_day.outcomes import NotAvailable
from megajax.ops import attention, grouped_matmul
from megajax.ops.attention import Kernel
from megajax.ops.attention_choice import cudnn_installed
from megajax.ops.grouped_matmul import GroupedKernel

# By the values of --attention. A Pallas kernel for GPUs runs in its interpreter on other devices.
ATTENTION: Mapping[str, Callable[[bool], Kernel]] = {
    "xla": lambda _: attention.XLA,
    "cudnn": lambda on_gpu: attention.CUDNN if _has_cudnn(on_gpu) else None,
    "pallas": lambda on_gpu: attention.PALLAS if on_gpu else attention.INTERPRETED,
}
GROUPED: Mapping[str, Callable[[bool], GroupedKernel]] = {
    "xla": lambda _: grouped_matmul.XLA,
    "pallas": lambda on_gpu: grouped_matmul.PALLAS if on_gpu else grouped_matmul.INTERPRETED,
}


def attention_kernel(name: str, on_gpu: bool, window: int | None = None) -> Kernel:
    """The kernel of a name; raises NotAvailable if this machine lacks it."""
    kernel = ATTENTION[name](on_gpu)
    return attention.cudnn_kernel(window) if name == "cudnn" and window else attention.with_window(kernel, window)


def timed_attention(on_gpu: bool, window: int | None) -> dict[str, Callable]:
    """Fused attention by name: (query, key, value, gradient) -> the output, or with a gradient those of the three."""
    calls = {}
    for name in ATTENTION:
        if name == "xla" or (name == "cudnn" and not on_gpu):
            continue  # XLA's stores all scores
        calls[name] = _of_kernel(attention_kernel(name, on_gpu, window))
    if _has_tokamax(on_gpu) and "tokamax" not in calls:
        calls["tokamax"] = _of_tokamax(window)
    return calls


def _has_cudnn(on_gpu: bool) -> bool:
    if not (on_gpu and cudnn_installed()):
        raise NotAvailable("cuDNN is not installed" if on_gpu else "cuDNN's kernels need an NVIDIA GPU")
    return True


def _has_tokamax(on_gpu: bool) -> bool:
    return on_gpu and importlib.util.find_spec("tokamax") is not None


def _of_kernel(kernel: Kernel) -> Callable:
    def call(query, key, value, gradient=None):
        output, statistics = kernel.forward(query, key, value, True, None)
        if gradient is None:
            return output
        return output, kernel.backward(query, key, value, output, statistics, gradient, True, None)

    return call


def _of_tokamax(window: int | None) -> Callable:
    import jax
    import tokamax

    size = {"local_window_size": (window - 1, 0)} if window else {}
    forward = partial(tokamax.dot_product_attention, is_causal=True, implementation="mosaic", **size)

    def call(query, key, value, gradient=None):
        if gradient is None:
            return forward(query, key, value)
        output, backward = jax.vjp(forward, query, key, value)
        return output, backward(gradient)

    return call


def timed_grouped(on_gpu: bool) -> dict[str, dict[str, Callable]]:
    """By direction and name: functions of (rows, kernels, slopes, sizes)."""
    kernels = {name: make(on_gpu) for name, make in GROUPED.items()}
    found = {
        "product": {name: _product(kernel) for name, kernel in kernels.items()},
        "product, transposed": {name: _transposed(kernel) for name, kernel in kernels.items()},
        "gradient": {name: _gradient(kernel) for name, kernel in kernels.items()},
    }
    if _has_tokamax(on_gpu) and "tokamax" not in kernels:
        for direction, call in _ragged_of_tokamax().items():
            found[direction]["tokamax"] = call
    found["product"]["one matmul of all rows"] = lambda rows, kernels, slopes, sizes: rows @ kernels[0]
    return found


def _product(kernel: GroupedKernel) -> Callable:
    return lambda rows, kernels, slopes, sizes: kernel.product(rows, kernels, sizes)


def _transposed(kernel: GroupedKernel) -> Callable:
    return lambda rows, kernels, slopes, sizes: kernel.product(slopes, kernels, sizes, transposed=True)


def _gradient(kernel: GroupedKernel) -> Callable:
    return lambda rows, kernels, slopes, sizes: kernel.gradient(rows, slopes, sizes)


def _ragged_of_tokamax() -> dict[str, Callable]:
    import jax
    import jax.numpy as jnp
    import tokamax

    ragged = partial(tokamax.ragged_dot, implementation="mosaic")

    def gradient(place, rows, kernels, slopes, sizes):
        product = lambda x, w: ragged(x, w, sizes, preferred_element_type=jnp.bfloat16)  # noqa: E731
        return jax.vjp(product, rows, kernels)[1](slopes)[place]

    return {
        "product": lambda rows, kernels, slopes, sizes: ragged(rows, kernels, sizes),
        "product, transposed": partial(gradient, 0),
        "gradient": partial(gradient, 1),
    }

"""The implementations of attention and grouped matmuls, by name: megajax's by the values of its options, and tokamax's."""

from collections.abc import Callable, Mapping
from functools import partial

import jax

from benchmarks.gpu_day.outcomes import NotAvailable
from megajax.ops import attention_kernels, grouped_matmul
from megajax.ops.attention import Kernel
from megajax.ops.attention_choice import cudnn_installed
from megajax.ops.grouped_matmul import GroupedKernel
from megajax.ops.tokamax_kernels import generation, grouped_product
from megajax.runtime.compat_kernels import tokamax_compiles_for, tokamax_installed

# By the values of --attention. On other devices than GPUs the kernels of Pallas run in its interpreter.
ATTENTION: Mapping[str, Callable[[jax.Device], Kernel]] = {
    "xla": lambda _: attention_kernels.XLA,
    "cudnn": lambda device: attention_kernels.CUDNN if _has_cudnn(device) else None,
    "tokamax": lambda device: _tokamax_kernel(device) if _is_gpu(device) else attention_kernels.INTERPRETED,
}
GROUPED: Mapping[str, Callable[[jax.Device], GroupedKernel]] = {
    "xla": lambda _: grouped_matmul.XLA,
    "pallas": lambda device: grouped_matmul.PALLAS if _is_gpu(device) else grouped_matmul.INTERPRETED,
}

# Of NVIDIA's GPUs for which tokamax has grouped matmuls in Mosaic that compile (`megajax.ops.tokamax_kernels`).
GENERATIONS = {"product": (9, 10), "product, transposed": (9, 10), "gradient": (9,)}


def attention_kernel(name: str, device: jax.Device, window: int | None = None) -> Kernel:
    """The kernel of a name; raises NotAvailable if this machine lacks it."""
    kernel = ATTENTION[name](device)
    if name == "cudnn" and window:
        return attention_kernels.cudnn_kernel(window)
    return attention_kernels.with_window(kernel, window)


def timed_attention(device: jax.Device, window: int | None) -> dict[str, Callable]:
    """Fused attention by name: (query, key, value, gradient) -> the output, or with a gradient those of the three."""
    calls = {}
    for name in ATTENTION:
        if name == "xla" or (name == "cudnn" and not _is_gpu(device)):
            continue  # XLA's stores all scores
        calls[name] = _of_kernel(attention_kernel(name, device, window))
    if _has_tokamax(device):
        calls["tokamax, its own backward"] = _of_tokamax(device, window)
    return calls


def _has_cudnn(device: jax.Device) -> bool:
    if not (_is_gpu(device) and cudnn_installed()):
        raise NotAvailable("cuDNN is not installed" if _is_gpu(device) else "cuDNN's kernels need an NVIDIA GPU")
    return True


def _is_gpu(device: jax.Device) -> bool:
    """Whether it is a GPU, or one of a topology that programs are compiled for."""
    return device.platform in ("gpu", "cuda")


def _tokamax_kernel(device: jax.Device) -> Kernel:
    if not tokamax_installed():
        raise NotAvailable("tokamax is not installed")
    return attention_kernels.tokamax_kernel(device)


def _has_tokamax(device: jax.Device) -> bool:
    return _is_gpu(device) and tokamax_installed()


def _of_kernel(kernel: Kernel) -> Callable:
    def call(query, key, value, gradient=None):
        output, statistics = kernel.forward(query, key, value, True, None)
        if gradient is None:
            return output
        return output, kernel.backward(query, key, value, output, statistics, gradient, True, None)

    return call


def _of_tokamax(device: jax.Device, window: int | None) -> Callable:
    import tokamax

    size = {"local_window_size": (window - 1, 0)} if window else {}
    forward = partial(tokamax.dot_product_attention, is_causal=True, implementation="mosaic", **size)

    def call(query, key, value, gradient=None):
        with tokamax_compiles_for(device):
            if gradient is None:
                return forward(query, key, value)
            output, backward = jax.vjp(forward, query, key, value)
            return output, backward(gradient)

    return call


def timed_grouped(device: jax.Device) -> dict[str, dict[str, Callable]]:
    """By direction and name: functions of (rows, kernels, slopes, sizes)."""
    kernels = {name: make(device) for name, make in GROUPED.items()}
    found = {
        "product": {name: _product(kernel) for name, kernel in kernels.items()},
        "product, transposed": {name: _transposed(kernel) for name, kernel in kernels.items()},
        "gradient": {name: _gradient(kernel) for name, kernel in kernels.items()},
    }
    if _has_tokamax(device) and "tokamax" not in kernels:
        for direction, call in _ragged_of_tokamax(device).items():
            found[direction]["tokamax"] = call
    if (kernel := grouped_matmul.kernel_for(device)).eight_bits:
        in_8_bits = kernel.in_8_bits()
        found["product"]["pallas, fp8"], found["product, transposed"]["pallas, fp8"] = (
            _product(in_8_bits),
            _transposed(in_8_bits),
        )
    found["product"]["one matmul of all rows"] = lambda rows, kernels, slopes, sizes: rows @ kernels[0]
    return found


def _product(kernel: GroupedKernel) -> Callable:
    return lambda rows, kernels, slopes, sizes: kernel.product(rows, kernels, sizes)


def _transposed(kernel: GroupedKernel) -> Callable:
    return lambda rows, kernels, slopes, sizes: kernel.product(slopes, kernels, sizes, transposed=True)


def _gradient(kernel: GroupedKernel) -> Callable:
    return lambda rows, kernels, slopes, sizes: kernel.gradient(rows, slopes, sizes)


def _ragged_of_tokamax(device: jax.Device) -> dict[str, Callable]:
    """By direction, those that it has for this generation of GPUs."""
    import jax.numpy as jnp
    import tokamax

    def product(transposed, rows, kernels, slopes, sizes):
        return grouped_product(device, slopes if transposed else rows, kernels, sizes, transposed=transposed)

    def gradient(rows, kernels, slopes, sizes):
        of = partial(tokamax.ragged_dot, preferred_element_type=jnp.bfloat16, implementation="mosaic")
        with tokamax_compiles_for(device):
            return jax.vjp(lambda kernels: of(rows, kernels, sizes), kernels)[1](slopes)[0]

    calls = {"product": partial(product, False), "product, transposed": partial(product, True), "gradient": gradient}
    return {name: call for name, call in calls.items() if generation(device) in GENERATIONS[name]}

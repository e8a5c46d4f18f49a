"""Times of the attention kernels on this machine's first device, and their differences from a softmax in fp32.

python -m benchmarks.attention [--samples 1] [--sequence-length 8192] [--heads 32] [--kv-heads 8] [--head-size 128]
    [--documents 8] [--sliding-window 1024] [--seconds 1]

For causal attention, for samples of several documents, and for a sliding window: each kernel's forward, and forward and
backward, in milliseconds, and the TFLOP/s of the scores that are not hidden (two matmuls forward, five backward). The
differences are of the output and of the gradients, relative to their largest element, for at most 2,048 tokens.

On a device that is not an NVIDIA GPU, "tokamax" is XLA's forward and Pallas's backward in its interpreter, and times mean
nothing.
"""

import functools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.options import Parser
from megajax.ops.attention import INTERPRETED, XLA, Kernel, cudnn_kernel, tokamax_kernel, with_window
from megajax.ops.attention_choice import cudnn_installed
from megajax.plan.measure import mean_seconds
from megajax.runtime.compat import tokamax_installed
from megajax.schedules.arguments import number, whole
from megajax.schedules.errors import command

CHECKED = 2048  # tokens of the comparison with XLA's attention in fp32, which stores all scores


@command
def main(arguments: Sequence[str] | None) -> None:
    """Prints one line for each mask and kernel."""
    parser = Parser(description=__doc__)
    sizes = {"samples": 1, "sequence-length": 8192, "heads": 32, "kv-heads": 8, "head-size": 128, "documents": 8}
    for name, size in (sizes | {"sliding-window": 1024}).items():
        parser.add_argument(f"--{name}", type=whole(), default=size, metavar="COUNT", help=f"(default: {size})")
    parser.add_argument("--seconds", type=number(), default=1.0, help="to measure each for (default: 1)")
    options = parser.parse_args(arguments)
    gpu, length = jax.devices()[0].platform == "gpu", options.sequence_length
    dtype = jnp.bfloat16 if gpu else jnp.float32
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {vars(options)}")
    print("mask       kernel   forward  both, ms  TFLOP/s forward, both   differences: output, gradients")
    for mask in ("causal", "documents", "window"):
        for name, kernel in _kernels(mask, options.sliding_window, gpu).items():
            visible = (np.arange(length) - _first(options, length, mask) + 1).sum()
            pairs, inputs = visible * options.heads * options.head_size, _inputs(options, length, mask, dtype)
            programs = jax.jit(functools.partial(_forward, kernel)), jax.jit(functools.partial(_both, kernel))
            forward, both = (mean_seconds(functools.partial(run, *inputs), options.seconds) for run in programs)
            rates = 4 * pairs / forward / 1e12, 14 * pairs / both / 1e12
            output, gradients = _differences(kernel, options, mask, dtype)
            print(
                f"{mask:<10} {name:<7} {forward * 1e3:>8.2f} {both * 1e3:>9.2f} {rates[0]:>15.0f} {rates[1]:>5.0f}"
                f" {output:>18.1e} {gradients:>10.1e}"
            )


def _kernels(mask: str, window: int, gpu: bool) -> dict[str, Kernel]:
    """The kernels of this device that have the mask, by the value of --attention."""
    size = window if mask == "window" else None
    kernels = {}
    if tokamax_installed() or not gpu:
        kernels["tokamax"] = with_window(tokamax_kernel(jax.devices()[0]) if gpu else INTERPRETED, size)
    if gpu and cudnn_installed() and mask != "documents":
        kernels["cudnn"] = cudnn_kernel(size)
    return kernels


def _inputs(options, length: int, mask: str, dtype) -> tuple[jax.Array | None, ...]:
    """Random queries, keys, values and gradient of the output; and the starts of the tokens' documents, or None."""
    shape = lambda heads: (options.samples, length, heads, options.head_size)  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    arrays = [jax.random.normal(key, shape(count), dtype) for key, count in zip(keys, heads, strict=True)]
    return *arrays, jnp.asarray(_first(options, length, mask)) if mask == "documents" else None


def _first(options, length: int, mask: str) -> np.ndarray:
    """The first key that each query sees, int32 [samples, length]; documents have random lengths."""
    if mask == "window":
        return np.tile(np.maximum(np.arange(length) - options.sliding_window + 1, 0), (options.samples, 1))
    random = np.random.default_rng(0)
    begins = np.zeros((options.samples, length), np.int32)
    for row in begins if mask == "documents" else ():
        row[random.choice(length, min(options.documents, length) - 1, replace=False)] = 1
    return np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1).astype(np.int32)


def _forward(kernel: Kernel, query, key, value, gradient, first):
    return kernel.forward(query, key, value, True, first)


def _both(kernel: Kernel, query, key, value, gradient, first):
    output, statistics = _forward(kernel, query, key, value, gradient, first)
    return output, *kernel.backward(query, key, value, output, statistics, gradient, True, first)


def _differences(kernel: Kernel, options, mask: str, dtype) -> tuple[float, float]:
    """The largest differences of the output and of the gradients from XLA's kernel in fp32."""
    *arrays, first = _inputs(options, min(options.sequence_length, CHECKED), mask, dtype)
    reference = with_window(XLA, options.sliding_window if mask == "window" else None)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *arguments: _both(reference, *arguments))(*(a.astype("float32") for a in arrays), first)
    got = jax.jit(lambda *arguments: _both(kernel, *arguments))(*arrays, first)
    errors = [float(jnp.abs(x.astype("float32") - y).max() / jnp.abs(y).max()) for x, y in zip(got, want, strict=True)]
    return errors[0], max(errors[1:])


if __name__ == "__main__":
    sys.exit(main())

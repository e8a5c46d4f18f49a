"""Times of the attention kernels on this machine's first device, and their differences from a softmax in fp32.

python -m benchmarks.attention [--samples 1] [--sequence-length 8192] [--heads 32] [--kv-heads 8] [--head-size 128]
    [--documents 8] [--sliding-window 1024] [--seconds 1]
python -m benchmarks.attention --compile-only h100-80gb [--sequence-length 8192]

For causal attention, for samples of several documents, and for a sliding window: each kernel's forward, and forward and
backward, in milliseconds, and the TFLOP/s of the scores that are not hidden (two matmuls forward, five backward). The
differences are of the output and of the gradients, relative to their largest element, for at most 2,048 tokens.

With --compile-only nothing is run: steps of Llama 3 8B's first 8 layers on eight GPUs of this kind are compiled, with
tokens that attend to their own document or to all before them. Of the program of one GPU: temporaries, peak, and TFLOP of
attention's kernels on half of the square of scores, as what documents hide and kernels skip is not in the program. XLA's
attention is among the matmuls, on the whole square.

On a device that is not an NVIDIA GPU, "tokamax" is XLA's forward and Pallas's backward in its interpreter, and times mean
nothing.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import DataConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.options import Parser
from megajax.estimate.gpus import Gpu, find_gpu
from megajax.estimate.hlo import read
from megajax.estimate.program_account import account_of
from megajax.ops.attention import Kernel
from megajax.ops.attention_choice import cudnn_installed
from megajax.ops.attention_kernels import INTERPRETED, XLA, cudnn_kernel, tokamax_kernel, with_window
from megajax.plan.compiler import compile_for, compiler_versions
from megajax.plan.measure import mean_seconds
from megajax.runtime.compat_kernels import tokamax_installed
from megajax.schedules.arguments import number, plain_text, whole
from megajax.schedules.errors import command

LAYERS, LAYOUT = 8, {"pipe": 2, "tensor": 2, "data": 2}  # of the steps that are compiled
CHECKED = 2048  # tokens of the comparison with XLA's attention in fp32, which stores all scores


@command
def main(arguments: Sequence[str] | None) -> None:
    """Prints one line for each mask and kernel."""
    parser = Parser(description=__doc__)
    sizes = {"samples": 1, "sequence-length": 8192, "heads": 32, "kv-heads": 8, "head-size": 128, "documents": 8}
    for name, size in (sizes | {"sliding-window": 1024}).items():
        parser.add_argument(f"--{name}", type=whole(), default=size, metavar="COUNT", help=f"(default: {size})")
    parser.add_argument(
        "--compile-only", metavar="GPU", type=plain_text, help="compile steps for this GPU, e.g. h100-80gb"
    )
    parser.add_argument("--seconds", type=number(), default=1.0, help="to measure each for (default: 1)")
    options = parser.parse_args(arguments)
    if options.compile_only:
        return compile_steps(find_gpu(options.compile_only), options.sequence_length)
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


def compile_steps(gpu: Gpu, length: int) -> None:
    """Prints a line for the step with each attention."""
    model = dataclasses.replace(preset("llama3-8b"), layers=LAYERS, sequence_length=length)
    data = DataConfig(reset_position_ids=True, reset_attention_mask=True)
    print(f"{gpu.name}, {compiler_versions()}, {LAYERS} layers, {length} tokens, {LAYOUT}")
    print("mask       kernel   temporaries, peak, GB  TFLOP of attention, of matmuls  custom calls")
    for mask, name in (("documents", "xla"), ("documents", "tokamax"), ("causal", "tokamax"), ("causal", "cudnn")):
        train = TrainConfig(global_batch_size=2 * LAYOUT["data"], precision="bf16")
        run = RunConfig(
            model, ParallelConfig(attention=name, **LAYOUT), train, data if mask == "documents" else DataConfig()
        )
        result = compile_for(run, gpu)
        module, memory = read(result["hlo"]), result["memory"]
        flops = account_of(run, gpu, result["hlo"]).account.flops
        kernels = {
            kernel: round(count) for kernel, count in module.kernels.items() if not kernel.startswith("__cublas")
        }
        print(
            f"{mask:<10} {name:<7} {memory['temp'] / 1e9:>12.2f} {memory['peak'] / 1e9:>8.2f} "
            f"{flops.get('attention', 0) / 1e12:>18.1f} {flops['matmul'] / 1e12:>11.1f}  {kernels}"
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

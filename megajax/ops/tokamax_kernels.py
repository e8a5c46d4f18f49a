"""tokamax's kernels of attention and of grouped matmuls, by generation of NVIDIA's GPUs.

tokamax (github.com/openxla/tokamax, by the authors of Pallas) has a kernel in Mosaic, or in Triton, for each of these:

| compute capability | attention forward | its backward | grouped product | gradient of its kernels |
|---|---|---|---|---|
| 8 (A100), 12 | Triton | none without a mask of s x s | Mosaic (8 only) | none in Mosaic |
| 9 (H100) | Mosaic | Mosaic | Mosaic | Mosaic |
| 10 (B200) | Mosaic | Mosaic | Mosaic | none in Mosaic |

What is used of it, and why (TFLOP/s in bf16, measured on an H200, docs/gpus.md, or published in tokamax's tuned
configurations for H100s and B200s, version 0.0.17):

* Attention's forward everywhere: with documents 181 to the 111 of the kernel that megajax had.
* Attention's backward on H100s and B200s if `first` hides nothing. It does not skip the tiles that `first` hides: with 8
  documents forward and backward reach 33, with megajax's backward, which skips them, 169.
* The grouped product on B200s: 1,230 to 220 of Triton's. On H100s megajax's reaches 563 (8 experts of 4,096 x 14,336) and
  332 (128 of 2,048 x 768); tokamax's 308 and 213, and tuned 370 to 480 for similar shapes, 270 to 400 transposed, with a
  transposed copy of all kernels in memory (0.9 GB of Mixtral's 8).
* The gradient of the kernels nowhere: on H100s 207 to megajax's 454 (tuned at most 117), and it cannot be added to an array.

jax's interpreter of Mosaic does not run these kernels (jax 0.12.0.1: no `wgmma` of registers, no `inline_mgpu`, no copy
without a barrier). So on CPU devices this module takes tokamax's own reference in XLA, through the same calls.
"""

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.flash_attention import HIDDEN_SCORE
from megajax.runtime.compat_kernels import tokamax, tokamax_compiles_for

__all__ = ["attention_backward", "attention_forward", "generation", "grouped_product", "has_backward", "has_product"]

MOSAIC, TRITON, REFERENCE = "mosaic_gpu", "triton", "xla"  # of tokamax's implementations
FASTEST_PRODUCT = 10  # the generation of GPUs on which its grouped product is the fastest


def generation(device: jax.Device) -> int | None:
    """The major number of the compute capability of an NVIDIA GPU from A100s on; None of any other device."""
    capability = getattr(device, "compute_capability", "")
    known = device.platform == "gpu" and capability.replace(".", "").isdigit()
    return int(float(capability)) if known and float(capability) >= 8 else None


def has_backward(device: jax.Device, head_size: int) -> bool:
    """Whether `attention_backward` runs on this device; on B200s heads of 256 do not fit in its shared memory."""
    return device.platform == "cpu" or generation(device) == 9 or (generation(device) == 10 and head_size <= 128)


def has_product(device: jax.Device) -> bool:
    """Whether `grouped_product` is the fastest on this device."""
    return generation(device) == FASTEST_PRODUCT


def _without_axes(*arrays: jax.Array | None) -> list[jax.Array | None]:
    """The arrays without the manual axes over which they vary: Mosaic's kernels for B200s refuse them.

    In a `shard_map` that does not check them, only arguments have any. XLA removes these operations.
    """
    return [x if x is None else lax.squeeze(lax.expand_dims(x, (0,)), (0,)) for x in arrays]


def attention_forward(
    device: jax.Device, query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, first: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(output, statistics), see `megajax.ops.attention.Kernel`; `device`: one of the mesh's."""
    implementation = MOSAIC if generation(device) in (9, 10) else TRITON if device.platform == "gpu" else REFERENCE
    query, key, value, first = _without_axes(query, key, value, first)
    with tokamax_compiles_for(device), jax.named_scope("flash_attention_forward"):
        mask = tokamax().Mask(is_causal=causal, k_start=None if first is None else first[:, None])
        attend = tokamax().attention[implementation]
        output, (largest, total) = attend(query, key, value, mask=mask, return_residuals=True)
    statistics = largest + jnp.log(total)
    if causal or first is None:  # a query sees itself, or all
        return output, statistics
    none = first >= key.shape[1]
    output = jnp.where(none[..., None, None], jnp.zeros((), output.dtype), output)
    return output, jnp.where(none[:, None], HIDDEN_SCORE, statistics)


def attention_backward(
    device: jax.Device,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    statistics: jax.Array,
    gradient: jax.Array,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, see `megajax.ops.attention.Kernel`, if `first` hides nothing.

    Output and statistics may be those of more keys, on GPUs; tokamax's reference takes those of these keys only.
    """
    arrays = _without_axes(query, key, value, output, statistics, gradient)
    query, key, value, output, statistics, gradient = arrays
    with tokamax_compiles_for(device), jax.named_scope("flash_attention_backward"):
        attend = tokamax().attention[REFERENCE if device.platform == "cpu" else MOSAIC]
        bound = attend.bind(query, key, value, mask=tokamax().Mask(is_causal=causal))
        settings = {name: value for name, value in bound.kwargs.items() if name != "return_residuals"}
        backward = attend.vjp or tokamax().AttentionBackward()
        # The largest score and the sum of exponentials, of which only largest + log(sum) counts.
        softmax = statistics, jnp.ones_like(statistics)
        gradients = backward(softmax, output, gradient, *bound.args, **settings)
    return gradients["q"], gradients["k"], gradients["v"]


def grouped_product(
    device: jax.Device, rows: jax.Array, kernels: jax.Array, sizes: jax.Array, transposed: bool = False, place=None
) -> jax.Array:
    """Multiplies each row with its group's kernel, see `megajax.ops.grouped_matmul.GroupedKernel`."""
    kernels = kernels if place is None else lax.dynamic_index_in_dim(kernels, place, 0, keepdims=False)
    rows, kernels, sizes = _without_axes(rows, kernels, sizes)
    with tokamax_compiles_for(device), jax.named_scope("grouped_matmul_product"):
        multiply = tokamax().ragged_dot[REFERENCE if device.platform == "cpu" else MOSAIC]
        dimensions = tokamax().transposed_kernels if transposed else tokamax().kernels
        result = multiply(rows, kernels, group_sizes=sizes, ragged_dot_dimension_numbers=dimensions)
    grouped = lax.iota(jnp.int32, len(rows)) < sizes.sum()
    # tokamax leaves rows of no group as they were.
    return jnp.where(grouped[:, None], result, jnp.zeros((), result.dtype))

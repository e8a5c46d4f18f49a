"""Every private or moving API of kernels that megajax uses: of jax's cuDNN, Pallas and tokamax; `compat.py` has the others.

When a new jax or tokamax breaks megajax, these two files have to be adapted; tests/runtime/test_compat.py has a test for
each entry.
"""

import contextlib
import functools
import importlib.util
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from megajax.runtime.compat import lower_by

__all__ = [
    "cudnn_attention_backward",
    "cudnn_attention_forward",
    "cudnn_version",
    "pallas",
    "pallas_call",
    "pallas_compiles_for",
    "tokamax",
    "tokamax_compiles_for",
    "tokamax_installed",
    "whole_block",
]

# cuDNN's flash attention. `jax.nn.dot_product_attention` has no entry for the backward alone, and queries the process's own
# devices for what they support, not the mesh's, which may be of a topology that is only compiled for.


def cudnn_attention_forward(query, key, value, causal: bool, window: int | None = None) -> tuple[jax.Array, jax.Array]:
    """(output [b, s, a, d], fp32 logsumexp [b, a, s]) of query [b, s, a, d], key and value [b, t, g, d].

    `causal` hides the keys after each query, and `window` those further back than the window - 1 before it.
    """
    cudnn, absent, score_mod, settings = _cudnn_arguments(query, causal, window)
    return tuple(
        cudnn._dot_product_attention_fwd_impl(query, key, value, *absent, *score_mod, is_training=True, **settings)
    )


def cudnn_attention_backward(
    query, key, value, output, logsumexp, gradient, causal: bool, window: int | None = None
) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value, from the forward's results and the output's gradient."""
    cudnn, absent, score_mod, settings = _cudnn_arguments(query, causal, window)
    results = (logsumexp, output, gradient)
    return tuple(cudnn._dot_product_attention_bwd_impl(query, key, value, *absent, *results, *score_mod, **settings))


def _cudnn_arguments(query, causal: bool, window: int | None):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    settings = dict(
        scale=query.shape[-1] ** -0.5,
        seed=42,  # of dropout, which is off
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, and no gradient of one
        mask_type=cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    absent = [jnp.zeros(0, query.dtype)] * 7  # bias, sequence lengths, offsets, page tables
    score_mod: tuple = ()
    if jax.__version_info__ >= (0, 12):  # a function of the scores, and its arguments
        score_mod, settings["score_mod"] = ((),), None
    return cudnn, absent, score_mod, settings


def cudnn_version() -> int | None:
    """The version of the cuDNN library on this machine, as cuDNN numbers it; None if there is none. Needs no GPU."""
    from jax._src.lib import cuda_versions

    try:
        return cuda_versions.cudnn_get_version() if cuda_versions is not None else None
    except RuntimeError:
        return None


@functools.cache
def pallas() -> types.SimpleNamespace:
    """What kernels for GPUs need of Pallas; it is imported when the first kernel is traced."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return types.SimpleNamespace(
        BlockSpec=pallas.BlockSpec,
        dot_in_8_bits=lambda *tiles: _dot_in_8_bits().bind(*tiles),
        ds=pallas.ds,
        load=triton.load,
        program_id=pallas.program_id,
        store=triton.store,
        when=pallas.when,
    )


@functools.cache
def _dot_in_8_bits() -> Primitive:
    """start [m, n] + x [m, k] y [k, n], in fp32, of tiles of 8-bit floats, for Triton.

    Triton converts them to 16 bits on H100s, whose tensor cores add 8-bit products with fewer bits than fp32 has, unless it
    is told how many of these may be added; `jnp.dot` in a kernel of Pallas does not (jax 0.12).
    """
    from jax._src.lib.triton import dialect
    from jax._src.pallas.triton import lowering

    dot = Primitive("dot_in_8_bits")
    dot.def_abstract_eval(lambda x, y, start: start)
    lowering.register_lowering(dot)(lambda _, *tiles: dialect.dot(*tiles, max_num_imprecise_acc=2**30))
    lower_by(dot, lambda x, y, start: start + jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32)))
    return dot


def whole_block(shape: tuple[int, ...]) -> Any:
    """The block that is the whole array: a kernel's programs choose their parts by what they read when they run."""
    return pallas().BlockSpec(shape, lambda *_: (0,) * len(shape))


def pallas_call(
    kernel: Callable,
    inputs: Sequence,
    in_specs: Sequence,
    results: Sequence,
    out_specs: Sequence,
    *,
    grid: tuple[int, ...],
    settings: dict[str, Any],
    updated: int | None = None,
) -> tuple[jax.Array, ...]:
    """Runs a Pallas-Triton kernel; inside `jax.shard_map` with check_vma=False.

    Args:
      kernel: (reference of each input, reference of each result) -> None.
      inputs: arrays, or None, for which the kernel gets None.
      in_specs: a BlockSpec for each of them.
      results: (shape, type) of each result.
      out_specs: a BlockSpec for each of them.
      grid: numbers of programs.
      settings: name, warps, stages (of a loop, whose loads run ahead), and interpret: whether to run in Pallas's
        interpreter, which any device has.
      updated: which input the first result is in place of, so that what the kernel does not write stays.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    if settings["interpret"]:
        # Without the check new values have no manual axes; the interpreter's inputs may have none.
        inputs = [x if x is None else jax.lax.add(x, jnp.zeros((), x.dtype)) for x in inputs]
    return pallas.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec if x is not None else None for x, spec in zip(inputs, in_specs, strict=True)],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results],
        out_specs=out_specs,
        compiler_params=triton.CompilerParams(num_warps=settings["warps"], num_stages=settings["stages"]),
        input_output_aliases={} if updated is None else {updated: 0},
        interpret=settings["interpret"],
        name=settings["name"],
    )(*inputs)


@contextlib.contextmanager
def pallas_compiles_for(device: jax.Device) -> Iterator[None]:
    """In this context Pallas's kernels are compiled for this device, which may belong to a topology without devices.

    jax asks its default device for the compute capability of a kind of GPU whose name it does not know, such as an L40S.
    """
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:  # an older jax asks for none
        yield
        return
    capability = getattr(device, "compute_capability", "")
    with mock.patch.object(gpu_info, "_get_device_arch_name", lambda kind: capability, create=True):
        yield


# tokamax's kernels. Its public functions return no softmax statistics, have no mask of documents and no backward of its own.


def tokamax_installed() -> bool:
    """Whether tokamax is installed, which needs Python 3.12 and jax 0.11.1; it is not imported (2 s)."""
    return importlib.util.find_spec("tokamax") is not None


@functools.cache
def tokamax() -> types.SimpleNamespace:
    """Its operations by implementation, `attention` and `ragged_dot`; masks; and what they are called with."""
    from tokamax._src.ops.attention import api, base
    from tokamax._src.ops.ragged_dot import api as ragged_api
    from tokamax._src.ops.ragged_dot import base as ragged_base

    return types.SimpleNamespace(
        attention=api.IMPLEMENTATIONS,
        AttentionBackward=base.DotProductAttentionVjp,
        Mask=base.Mask,
        ragged_dot=ragged_api.IMPLEMENTATIONS,
        kernels=ragged_base.DEFAULT_RAGGED_DOT_DIM_NUMS,
        transposed_kernels=ragged_base.TRANS_RHS_RAGGED_DOT_DIM_NUMS,
    )


@contextlib.contextmanager
def tokamax_compiles_for(device: jax.Device) -> Iterator[None]:
    """In this context tokamax's operations are traced for this device, which may belong to a topology without devices.

    They ask jax's default device for its compute capability and number of cores. On other devices than GPUs nothing is
    changed. Messages of sizes for which tokamax has no tuned configuration are not logged.
    """
    if device.platform != "gpu":
        yield
        return
    from jax.extend import backend
    from tokamax import config

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with mock.patch.object(backend, "get_default_device", lambda: device), config.cross_compile(True):
            yield
    finally:
        logger.setLevel(level)

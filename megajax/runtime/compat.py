"""Every private or moving jax API that megajax uses, and nothing else.

Private: modules below `jax._src`, and the fields of objects whose layout jax does not document. Moving: `jax.experimental`
and `jax.extend`. When a new jax breaks megajax, this file has to be adapted; tests/runtime/test_compat.py has a test for
each entry and names the jax versions on which it passed.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jaxlib
from jax._src import compiler, distributed, xla_bridge
from jax._src.lib import hlo
from jax.experimental import multihost_utils, topologies
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import source_info_util
from jax.extend.core import Literal, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

__all__ = [
    "COORDINATION_SERVICE",
    "MAKE_CPU_CLIENT",
    "PLUGIN_LOGGER",
    "PROFILE_OPTION",
    "Literal",
    "Primitive",
    "broken_host_offload",
    "call_after_compilation",
    "compiled_text",
    "coordination_service",
    "cudnn_attention_backward",
    "cudnn_attention_forward",
    "cudnn_version",
    "devices_started",
    "initialize_distributed",
    "jaxlib_version",
    "jaxpr_as_fun",
    "lower_by",
    "manual_axes",
    "multihost_utils",
    "pallas",
    "pallas_call",
    "pallas_compiles_for",
    "rebuild_vjp",
    "set_xla_metadata",
    "tokamax",
    "tokamax_compiles_for",
    "tokamax_installed",
    "topologies",
    "traced_where",
    "updates_in_place",
    "varying_axes",
    "vjp_residuals",
]

Tree = Any
PLUGIN_LOGGER = "jax._src.xla_bridge"  # logs a traceback when an installed CUDA plugin finds no GPU
# A program that reads XLA_FLAGS and ends: XLA exits with an error message on an unknown flag.
MAKE_CPU_CLIENT = "import jaxlib.xla_client; jaxlib.xla_client.make_cpu_client()"

JAX_FILES = os.path.dirname(jax.__file__) + os.sep

# The compiler option of jax for a profile of XLA's latency hiding scheduler, a ProfiledInstructionsProto, binary or as text.
# With JAX_ENABLE_PGLE=true jax replaces it by what it has measured.
PROFILE_OPTION = "fdo_profile"

# Module and function that start jax's coordination service; the module does not import jax.
COORDINATION_SERVICE = ("jaxlib._jax", "get_distributed_runtime_service")
COORDINATION_CLIENT = "get_distributed_runtime_client"


def vjp_residuals(vjp: Any) -> Tree:
    """The residuals of the function returned by `jax.vjp`, without the arguments at which it was differentiated."""
    return vjp.opaque_residuals


def rebuild_vjp(template: Any, residuals: Tree, arguments: tuple) -> Any:
    """The function that `jax.vjp` returned, rebuilt from its residuals and arguments.

    Args:
      template: a function returned by `jax.vjp` (or its `jax.eval_shape`) for arguments of the same shapes.
      residuals: as `vjp_residuals` of the original.
      arguments: as given to the original `jax.vjp`.

    `args_res` holds, for each leaf of the arguments, the leaf itself if the backward reads it and else a marker object.
    It is a flat tuple in jax 0.10 and 0.11, and has the arguments' own structure, dictionaries included, in 0.12.
    """

    def is_leaf(node):
        return not isinstance(node, list | tuple | dict)

    entries, structure = jax.tree.flatten(template.args_res, is_leaf=is_leaf)
    leaves = [
        leaf if hasattr(entry, "shape") else entry
        for entry, leaf in zip(entries, jax.tree.leaves(arguments), strict=True)
    ]
    return dataclasses.replace(template, args_res=jax.tree.unflatten(structure, leaves), opaque_residuals=residuals)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which x may differ, inside a `jax.shard_map`."""
    return jax.typeof(x).mat.varying


def vary_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """x, marked as varying over these manual mesh axes too, inside a `jax.shard_map`."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def traced_where(eqn) -> contextlib.AbstractContextManager:
    """While an equation of a jaxpr is evaluated again: its operations keep the lines of the code that it was traced from.

    In the body of a call of jax's own (`jnp.roll` is jitted), whose lines jax traces apart, these are the call's.
    """
    traceback = eqn.source_info.traceback
    if traceback is None or all(frame.file_name.startswith(JAX_FILES) for frame in traceback.frames):
        return contextlib.nullcontext()
    return source_info_util.user_context(traceback, name_stack=source_info_util.current_name_stack())


def lower_by(primitive: Primitive, function: Callable) -> None:
    """Compiles a primitive as `function(*operands, **params)`."""
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=primitive.multiple_results))


def manual_axes() -> tuple[str, ...]:
    """The mesh axes over which the surrounding `jax.shard_map`s are manual; none outside of them."""
    return jax.sharding.get_abstract_mesh().manual_axes


def coordination_service():
    """jax's record of the processes of this run, with `client` (None in a run of one process), `process_id`,
    `num_processes` and `coordinator_address`. Unlike `jax.process_index`, reading it does not start the devices.
    """
    return distributed.global_state


def initialize_distributed(
    start_service: Callable[..., Any], find_service: Callable[[str, int], str], *place: Any, **settings: Any
) -> None:
    """`jax.distributed.initialize`, with a coordination service that `start_service` starts on process 0.

    Args:
      start_service: takes the arguments of COORDINATION_SERVICE, and returns an object with a method `shutdown`.
      find_service: (coordinator's address, number of this process) -> the service's address; called before this process
        connects to it.
      place, settings: as for `jax.distributed.initialize`.
    """
    original = getattr(distributed._jax, COORDINATION_CLIENT)

    def make_client(address: str, process: int, **options):
        return original(find_service(address, process), process, **options)

    with (
        mock.patch.object(distributed._jax, COORDINATION_SERVICE[1], start_service),
        mock.patch.object(distributed._jax, COORDINATION_CLIENT, make_client),
    ):
        jax.distributed.initialize(*place, **settings)


def call_after_compilation(callback: Callable[[str, Sequence[int]], None]) -> None:
    """From now on, calls `callback(program's name, its processes)` after each compilation or hit of the compilation cache.

    Only for programs whose devices belong to several processes; the call precedes the program's first execution, and is
    made in the thread that needs the program.
    """
    original = compiler.compile_or_get_cached

    @functools.wraps(original)
    def compile_and_call(backend, computation, devices, *others, **settings):
        executable = original(backend, computation, devices, *others, **settings)
        processes = sorted({device.process_index for device in devices.flat})
        if len(processes) > 1:
            callback(str(computation.operation.attributes["sym_name"]).strip('"'), processes)
        return executable

    compiler.compile_or_get_cached = compile_and_call


def compiled_text(compiled: jax.stages.Compiled) -> str:
    """The HLO of a compiled program with all elements of its constants; `as_text` omits those of the larger ones."""
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    return "\n\n".join(module.to_string(options) for module in compiled.runtime_executable().hlo_modules())


def devices_started() -> bool:
    """Whether jax has started its devices in this process, which also takes most of a GPU's memory."""
    return xla_bridge.backends_are_initialized()


def jaxlib_version() -> tuple[int, ...]:
    """The installed jaxlib's version, (0, 12, 0, 1) for 0.12.0.1."""
    return tuple(int(part) for part in jaxlib.__version__.split(".") if part.isdecimal())


def updates_in_place(device: jax.Device) -> bool:
    """Whether XLA's matmuls, for this device, read and update slices of larger arrays, and conditionals copy no array.

    With cuBLAS's matmuls (`--xla_gpu_enable_triton_gemm=false`).
    """
    return device.platform == "gpu" and jaxlib_version() >= (0, 12)


def broken_host_offload() -> bool:
    """Whether this jaxlib returns wrong values for arrays offloaded to host memory on GPUs (openxla/xla#46231)."""
    return jaxlib_version() == (0, 11, 0)


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

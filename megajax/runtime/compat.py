"""Every private or moving jax API that megajax uses, but for those of kernels (`compat_kernels.py`), and nothing else.

Private: modules below `jax._src`, and the fields of objects whose layout jax does not document. Moving: `jax.experimental`
and `jax.extend`. When a new jax breaks megajax, these two files have to be adapted; tests/runtime/test_compat.py has a
test for each entry and names the jax versions on which it passed.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import jax
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
    "devices_started",
    "initialize_distributed",
    "jaxlib_version",
    "jaxpr_as_fun",
    "lower_by",
    "manual_axes",
    "multihost_utils",
    "rebuild_vjp",
    "set_xla_metadata",
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

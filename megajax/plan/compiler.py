"""Compiles a run's training step for a GPU cluster on a machine without a GPU, in a child process.

XLA's GPU compiler needs no GPU, only a description of one: all of it runs, down to machine code, including the partitioner,
the scheduler and buffer assignment. It aborts the process on some programs, hence the child process. Nothing is autotuned
and nothing is run: memory and communication are those of a real run, times are unknown.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import pickle
import pkgutil
import re
import runpy
import subprocess
import sys
import tempfile
import time
from typing import Any

from megajax.config import ConfigError, RunConfig
from megajax.estimate.gpus import Gpu
from megajax.runtime.xla_flags import gpu_flags
from megajax.schedules.registry import import_user_files

MISSING_PLUGIN = (
    "XLA's CUDA compiler is not installed; it needs no GPU and no driver: pip install 'megajax[dryrun]' "
    "(that is jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, 223 MB)"
)
CHILD = "import sys; from megajax.plan.compiler import compile_in_child as f; f(sys.argv[1], sys.argv[2:])"
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


class CompilerError(RuntimeError):
    """The compiler refused the program or crashed; the message has its last lines."""


class CompilerTimeout(CompilerError):
    """The compiler was stopped, which says nothing about the program."""


def has_compiler() -> bool:
    """Whether XLA's CUDA plugin is installed, for CUDA 12 or 13."""
    return any(importlib.util.find_spec(name) for name in PLUGINS)


def check_vendor(gpu: Gpu) -> None:
    """Raises ConfigError if nothing can be compiled for this GPU, whether a compiler is installed or not."""
    if gpu.compute_capability is None:
        raise ConfigError(f"gpu = {gpu.name} is not NVIDIA's, whose GPUs alone are compiled for: pass --model-only.")


def installed_versions(*packages: str) -> dict[str, str]:
    """The versions of those of the packages that are installed, by name."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compiler_versions() -> dict[str, str]:
    """The versions of what compiles here, for files of results: jax, jaxlib and the CUDA plugins that are installed."""
    return installed_versions("jax", "jaxlib", *(name.replace("_", "-") for name in PLUGINS))


def compile_for(
    run: RunConfig,
    gpu: Gpu,
    timeout: float = 900,
    training: str = "megajax.train.step.make_training",
    training_flags: bool = True,
) -> dict[str, Any]:
    """Compiles the step of `run` for a cluster of this GPU and reads the result.

    The XLA flags are those that a training run sets on GPUs; the user's --xla_gpu flags in XLA_FLAGS override them. The
    child process imports `run.imports` first, and the running script if the model's configuration is defined there.

    Args:
      timeout: seconds.
      training: the full name of a function (run, mesh) -> an object with `step_shapes`, `compile_train_step` and
        `state_sharding` as `megajax.train.step.Training` has them: to compare with another step.
      training_flags: False: XLA's defaults, instead of the flags of a training run.

    Returns:
      "memory": bytes on one device by XLA's names (argument, output, alias, temp, peak); "arguments": bytes of the
      parameters, the optimizer state (with the average of the weights) and the batch; "buffers": the largest
      temporaries, [bytes, shape] each; "hlo": the compiled program as text, with its constants; "seconds": of the
      compilation.

    Raises:
      ConfigError: the compiler is not installed, or the GPU is not NVIDIA's.
      CompilerError: it failed; CompilerTimeout: it took longer than `timeout` seconds.
    """
    check_vendor(gpu)
    if not has_compiler():
        raise ConfigError(MISSING_PLUGIN + ".")
    with tempfile.TemporaryDirectory() as folder:
        request = pathlib.Path(folder, "request.pickle")
        # A child process finds a class that is defined in the running script only there.
        in_script = type(run.model).__module__ == "__main__"
        script = getattr(sys.modules["__main__"], "__file__", None) if in_script else None
        fields = {"run": pickle.dumps(run), "gpu": gpu, "script": script, "training": training}
        request.write_bytes(pickle.dumps(fields))
        users_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_gpu")]
        flags = gpu_flags(" ".join(users_flags))[0] if training_flags else " ".join(users_flags)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",  # otherwise the CUDA plugin looks for a driver and complains
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.* {flags}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-c", CHILD, str(request), *run.imports]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CompilerTimeout(f"the compiler took longer than {timeout:.0f} s and was stopped") from None
        answer = pathlib.Path(folder, "answer.json")
        if done.returncode or not answer.exists():
            messages = [line for line in done.stderr.splitlines() if line.strip()][-3:]
            how = f"aborted (signal {-done.returncode})" if done.returncode < 0 else "failed"
            raise CompilerError(f"the compiler {how}: " + " / ".join(messages))
        result = json.loads(answer.read_text())
        if "refused" in result:
            raise CompilerError(result["refused"])
        return result | {
            "buffers": _largest_buffers(pathlib.Path(folder)),
            "hlo": pathlib.Path(folder, "hlo").read_text(),
        }


def _largest_buffers(folder: pathlib.Path) -> list[tuple[int, str]]:
    """(bytes, shapes) of the temporaries, largest first, from XLA's own report, which omits the smallest few percent."""
    reports = sorted(folder.glob("*train_step*gpu*memory-usage-report.txt"))
    if not reports:
        return []
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    rows = []
    tables = reports[0].read_text().split("cumulative_size;")
    for line in max(tables, key=lambda table: table.count(";")).splitlines()[2:]:
        fields = line.split(";")
        if len(fields) != 5:
            break
        number, unit = re.match(r"\s*([\d.]+)(\w+)", fields[1]).groups()
        rows.append((int(float(number) * units[unit]), fields[4].strip()))
    return rows


def target_config(gpu: Gpu) -> str:
    """XLA's GpuTargetConfigProto of an NVIDIA GPU, as text."""
    major, minor = gpu.compute_capability
    threads = 2048 if minor == 0 else 1536  # a multiprocessor's; minor versions are chips without HBM
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {gpu.shared_memory} threads_per_core_limit: {threads} core_count: {gpu.cores}
      fpus_per_core: {64 if (major, minor) == (8, 0) else 128} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
      block_dim_limit_z: 65535 memory_bandwidth: {int(gpu.memory_bandwidth)} l2_cache_size: {gpu.cache}
      clock_rate_ghz: {gpu.clock} device_memory_size: {gpu.memory}
      shared_memory_per_block_optin: {gpu.shared_memory - 1024}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
    device_description_str: "{gpu.device_kind}" """


def compile_in_child(file: str, imports: list[str]) -> None:
    """The child process: compiles the request in `file` and writes answer.json and hlo to the same folder."""
    import jax

    from megajax.runtime.compat import compiled_text, topologies
    from megajax.runtime.compat_kernels import pallas_compiles_for
    from megajax.runtime.mesh import make_mesh

    request = pathlib.Path(file)
    request_fields = pickle.loads(request.read_bytes())
    import_user_files(imports)
    if request_fields["script"]:
        vars(sys.modules["__main__"]).update(runpy.run_path(request_fields["script"], run_name="__mp_main__"))
    run, gpu = pickle.loads(request_fields["run"]), request_fields["gpu"]
    hosts = -(-run.parallel.devices // gpu.host_size)
    start = time.perf_counter()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology=f"1x{hosts}x{gpu.host_size}"
    )
    training = pkgutil.resolve_name(request_fields["training"])(run, make_mesh(run.parallel, topology.devices))
    state, batch = training.step_shapes()
    try:
        with pallas_compiles_for(topology.devices[0]):
            compiled = training.compile_train_step(state, batch)
    except ConfigError as error:  # its collectives would deadlock
        request.with_name("answer.json").write_text(json.dumps({"refused": str(error)}))
        return
    analysis = compiled.memory_analysis()
    memory = {name: getattr(analysis, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    memory["peak"] = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]

    def local(shapes, shardings):
        pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
        return sum(math.prod(named.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, named in pairs)

    sharding = training.state_sharding
    arguments = {
        "weights": local(state.params, sharding.params),
        "optimizer": local((state.optimizer_state, state.ema), (sharding.optimizer_state, sharding.ema)),
    }
    arguments["batch"] = memory["argument"] - sum(arguments.values())
    request.with_name("hlo").write_text(compiled_text(compiled))
    answer = {"memory": memory, "arguments": arguments, "seconds": time.perf_counter() - start}
    request.with_name("answer.json").write_text(json.dumps(answer))

"""The meshes of a run on fewer or more hosts: `data` changes, and with it nothing that the run computes.

The global batch and the order of the samples do not depend on `data`. So a layout is legal if `data` divides the global
batch into whole microbatches, and the schedule takes that number of microbatches.
"""

import importlib
from collections.abc import Mapping, Sequence

from megajax.config import ConfigError
from megajax.config.cli import Experiment, Request, parse
from megajax.config.parallel import DEFAULT_CPU_DEVICES, MESH_AXES
from megajax.runtime.gpu_environment import VISIBLE, visible_gpus


def read_request(module: str, arguments: Sequence[str]) -> Request:
    """The training command's configuration.

    Raises:
      ConfigError, ScheduleError: the module has no `EXPERIMENT`, or the command line is wrong.
    """
    try:
        experiment = getattr(importlib.import_module(module), "EXPERIMENT", None)
    except ImportError as error:
        raise ConfigError(f"cannot import {module}: {error}; pass the module of an experiment after --") from None
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{module} has no EXPERIMENT, so its mesh cannot be adapted: see experiments/gpt3.py")
    return parse(arguments, experiment)


def devices_per_process(request: Request, processes: int, per_node: int, environment: Mapping[str, str]) -> int:
    """Devices of each process; on the CPU without `--devices`, those that the run needs in all are divided.

    Args:
      processes: of the whole run, at most.
      per_node: processes on this host, which share its GPUs.
    """
    kind, _, number = (request.devices or "").partition(":")
    if kind == "cpu":
        return int(number) if number.isdecimal() and int(number) else 1
    if gpus := visible_gpus(environment):
        if len(gpus) % per_node:
            raise ConfigError(
                f"processes_per_node = {per_node} does not divide the {len(gpus)} GPUs of this host: pass "
                "--processes-per-node 1"
            )
        return len(gpus) // per_node
    return -(-(request.devices_needed or DEFAULT_CPU_DEVICES) // processes)


def processes_per_node(request: Request, environment: Mapping[str, str]) -> int:
    """One process for each of this host's GPUs; one on the CPU.

    A process that drives several GPUs of a run on several hosts was seen to hang though its collectives were in order
    (NVIDIA/nccl#1772), and JAX-Toolbox advises against it where cudaFree, which waits for all of a process's GPUs, can come
    between the launches of a collective.
    """
    on_cpu = (request.devices or "").partition(":")[0] == "cpu"
    return 1 if on_cpu else max(1, len(visible_gpus(environment)))


def layouts(request: Request, least: int, most: int, per_node: int) -> dict[int, list[str]]:
    """By number of nodes, the words of the command line for the mesh; only the legal numbers from `least` to `most`.

    `pipe`, `tensor` and `context` are those of the run on `most` nodes; a `data` that was passed is not exceeded.

    Args:
      per_node: devices of each node.

    Raises:
      ConfigError: no number is legal; the message is that of the largest.
    """
    run = request.run(most * per_node, "fp32")
    found, problem = {}, None
    for nodes in range(most, least - 1, -1):
        try:
            if words := _layout(request, run, nodes * per_node):
                found[nodes] = words
        except ConfigError as error:
            problem = problem or error
    if not found:
        raise problem or ConfigError(
            f"no mesh for {least} to {most} nodes of {per_node} devices: data * pipe * tensor must be all of them; pass "
            "other --nodes or degrees"
        )
    return found


def _layout(request: Request, run, devices: int) -> list[str] | None:
    parallel = run.parallel
    replica = parallel.context * parallel.pipe * parallel.tensor
    data = devices // replica
    if devices % replica or data == 0 or ("data" in request.passed and data > request.passed["data"]):
        return None
    changed = run.with_layout(data=data)
    changed.validate(devices)
    return [word for name in MESH_AXES for word in (f"--{name}", str(getattr(changed.parallel, name)))]


def gpus_of(index: int, per_node: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that gives a host's process number `index` its share of the GPUs."""
    gpus = visible_gpus(environment)
    if per_node == 1 or not gpus:
        return {}
    share = len(gpus) // per_node
    return {VISIBLE: ",".join(gpus[index * share : (index + 1) * share])}

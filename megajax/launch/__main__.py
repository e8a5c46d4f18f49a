"""python -m megajax.launch --nodes 2:4 -- experiments.gpt3 --run-dir /shared/run ...

Exit codes: 0 the training has ended, or this node has left after saving; 2 a user's mistake; 3 too many failures, or too few
nodes for too long.
"""

import dataclasses
import hashlib
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence

from megajax.checkpoint.directory import complete_steps
from megajax.checkpoint.mirror import with_local_config
from megajax.checkpoint.object_store import Path, is_remote, place
from megajax.config import ConfigError
from megajax.config.cli import Request
from megajax.config.output import MEMORY_VARIABLE
from megajax.launch.agent import Agent
from megajax.launch.elastic import devices_per_process, gpus_of, layouts, processes_per_node, read_request
from megajax.launch.options import Options, read_options
from megajax.launch.rendezvous import Generation
from megajax.runtime.gpu_environment import visible_gpus
from megajax.schedules.errors import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent of this host; returns its exit code."""

    def command() -> int:
        options = read_options(sys.argv[1:] if arguments is None else arguments)
        sys.path.insert(0, os.getcwd())
        request = read_request(options.module, with_local_config(options.arguments))
        if request.output.run_dir is None:
            raise ConfigError("the launcher needs a directory that all hosts share: pass --run-dir DIR")
        return supervise(options, request)

    return exit_code(command)


def supervise(options: Options, request: Request) -> int:
    """Prepares the directories and the commands, and runs the agent."""
    per_node = options.processes_per_node or processes_per_node(request, os.environ)
    options = dataclasses.replace(options, processes_per_node=per_node)
    devices = devices_per_process(request, options.most * per_node, per_node, os.environ)
    legal = layouts(request, options.least, options.most, per_node * devices)
    run = place(request.output.run_dir)
    if is_remote(run) and options.rendezvous is None:
        raise ConfigError(
            f"run_dir = {run} is in an object store, through which the agents of the hosts cannot agree: pass --rendezvous "
            "DIR, a directory that all hosts share (of a single host, any), before the --"
        )
    files = pathlib.Path(options.rendezvous).absolute() if options.rendezvous else run / "launch"
    memory = memory_directory(run)
    on_cpu = request.devices is None and not visible_gpus(os.environ)

    def commands(generation: Generation, first: int) -> dict[int, tuple[list[str], dict[str, str]]]:
        words = [sys.executable, "-m", options.module, *options.arguments, *generation.arguments]
        words += ["--devices", f"cpu:{devices}"] if on_cpu else []
        found = {}
        for index in range(per_node):
            place = placement(generation, first + index, len(generation.members) * per_node)
            environment = worker_environment(os.environ, files, memory) | gpus_of(index, per_node, os.environ)
            found[first + index] = [*words, *place], environment
        return found

    def resume() -> list[str]:
        """The first start does as it is told; the later ones resume from the newest checkpoint."""
        try:
            later = complete_steps(run / "checkpoints") or request.output.resume == "no"
        except OSError:  # of an object store: the processes ask it again
            later = True
        return ["--resume", "auto"] if later else []

    try:
        agent = Agent(options, files, legal, commands, resume)
    except OSError as error:
        flag = "--rendezvous" if options.rendezvous else "--run-dir"
        problem = f"cannot write {files}: {error.strerror}; give {flag} a directory that all hosts share"
        raise ConfigError(problem) from error
    try:
        return agent.run()
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def placement(generation: Generation, rank: int, processes: int) -> list[str]:
    """The options of a process about the others."""
    if processes == 1:
        return ["--launcher", "single"]
    found = {"launcher": "flags", "coordinator": generation.coordinator, "processes": processes, "process-id": rank}
    return [word for name, value in found.items() for word in (f"--{name}", str(value))]


def worker_environment(environment: Mapping[str, str], files: pathlib.Path, memory: pathlib.Path) -> dict[str, str]:
    """The environment of a training process: compiled programs are kept, so that a restart need not compile them."""
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(files / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        MEMORY_VARIABLE: str(memory),
    }
    return defaults | dict(environment)


def memory_directory(run: Path) -> pathlib.Path:
    """A directory in this host's memory, of this run and agent; removes those of agents that have died."""
    prefix = f"megajax-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}-"
    for old in pathlib.Path("/dev/shm").glob(f"{prefix}*"):
        if not pathlib.Path(f"/proc/{old.name.removeprefix(prefix)}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return pathlib.Path("/dev/shm") / f"{prefix}{os.getpid()}"


if __name__ == "__main__":
    sys.exit(main())

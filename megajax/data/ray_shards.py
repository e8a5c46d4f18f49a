"""Shards of preprocessing as tasks of a Ray cluster, each a command of its own on the hosts that Ray chooses."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

from megajax.config import ConfigError

__all__ = ["run_shards"]

RETRIES = 3  # of a task whose host is lost


def run_shards(words: Sequence[str], count: int, workers: int) -> None:
    """Runs a command of preprocessing once for each shard, and prints their lines in order.

    The cluster is that of RAY_ADDRESS, or the one of this host; without any, Ray starts one on this host. Hosts must see the
    same files at the same paths.

    Args:
      words: of the command, with --ray.
      count: of the shards.
      workers: cores of a task.

    Raises:
      ConfigError: the library is not installed, there is no such cluster, or a shard failed: the first of them.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--ray needs the library ray ({error}): pip install ray") from None
    rest = _without(words, "--ray")
    try:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    except Exception as error:  # of several types
        raise ConfigError(f"--ray: there is no cluster to use: {' '.join(str(error).split())}") from None
    try:
        run = ray.remote(num_cpus=workers, max_retries=RETRIES)(_run_shard)
        tasks = [run.remote([*rest, "--shard", f"{index}/{count}"], os.getcwd(), sys.path) for index in range(count)]
        failed = []
        for index, task in enumerate(tasks):
            try:
                code, out, error = ray.get(task)
            except Exception as lost:  # the task's process or host, after its retries
                code, out, error = 1, "", " ".join(str(lost).split())
            print(out, end="", flush=True)
            print(error if code == 0 else "", end="", file=sys.stderr, flush=True)
            if code:
                reason = (
                    re.sub(r"^error: ", "", error.strip().splitlines()[-1]) if error.strip() else f"exit code {code}"
                )
                failed.append(f"shard {index} of {count}: {reason}")
    finally:
        ray.shutdown()
    if failed:
        more = f" (and {len(failed) - 1} more shards failed)" if len(failed) > 1 else ""
        raise ConfigError(f"{failed[0]}{more}; the same command makes only these again")


def _run_shard(words: Sequence[str], folder: str, path: Sequence[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the command."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(part or folder for part in path)}
    command = [sys.executable, "-m", "megajax.data.preprocess", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def _without(words: Sequence[str], option: str) -> list[str]:
    """A command line without an option and its value."""
    found = list(words)
    while place := next((at + 1 for at, word in enumerate(found) if word.partition("=")[0] == option), 0):
        del found[place - 1 : place + ("=" not in found[place - 1])]
    return found

"""Where a case's programs run: on this machine's devices, or, compiled only, for a GPU that this machine does not have."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.gpu_day.outcomes import DEVICES, TARGET, Refused
from benchmarks.mfu import describe_device
from megajax.estimate.gpus import Gpu, find_gpu
from megajax.plan.compiler import target_config
from megajax.plan.measure import mean_seconds
from megajax.runtime.mesh import start_devices


def target() -> tuple[Gpu, int] | None:
    """The GPU that cases are compiled for, and how many; None: they run."""
    name, _, count = os.environ.get(TARGET, "").partition(":")
    return (find_gpu(name), int(count)) if name else None


def described(spec: str | None) -> dict[str, Any]:
    """The machine's devices; jax starts on them."""
    return describe_device(start_devices(spec))


class Programs:
    """Runs programs, or compiles them.

    Attributes:
      devices: all; the first runs programs of one.
      on_gpu: whether they are GPUs.
      rows: of the programs compiled so far: label, seconds, peak_gigabytes and problem, of which the last is None or the
        others are; None if programs run.
    """

    def __init__(self):
        """Starts jax as a training run does, if programs run."""
        self.rows: list[dict[str, Any]] | None = None
        if (found := target()) is None:
            self.devices: Sequence[Any] = start_devices(os.environ.get(DEVICES))
        else:
            from megajax.runtime.compat import topologies

            gpu, count = found
            self.rows, topology = [], f"1x1x{count}"
            config = target_config(gpu)
            self.devices = topologies.get_topology_desc(
                platform="cuda", target_config=config, topology=topology
            ).devices
        self.device, self.on_gpu = self.devices[0], self.devices[0].platform in ("gpu", "cuda")

    def inputs(self, build: Callable[[], Any]) -> Any:
        """What `build` returns; if programs are only compiled, its shapes."""
        return jax.jit(build)() if self.rows is None else jax.eval_shape(build)

    def call(self, label: str, function: Callable, *arrays) -> Any:
        """What the jitted function returns; None if it was compiled and not run."""
        if self.rows is None:
            return jax.jit(function)(*arrays)
        return self._compile(label, function, arrays)

    def seconds(self, label: str, function: Callable, *arrays, least: float) -> float | None:
        """The average time of a call, over at least `least` seconds; None if this device cannot run it, or none runs."""
        if self.rows is not None:
            return self._compile(label, function, arrays)
        call = jax.jit(function)
        try:
            return mean_seconds(lambda: call(*arrays), least)
        except Exception as error:  # a kernel that is not for this device says so in many ways
            print(f"{label}: {type(error).__name__}: {error}"[:500], file=sys.stderr)
            return None

    def _compile(self, label: str, function: Callable, arrays: Sequence[Any]) -> None:
        mesh = Mesh(np.array([self.device], object), ("device",))  # of which Pallas reads what it compiles for
        sharded = any(isinstance(x, jax.ShapeDtypeStruct) and x.sharding for x in jax.tree.leaves(arrays))
        whole = NamedSharding(mesh, PartitionSpec())
        of = lambda x: x if sharded else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)  # noqa: E731
        shapes = jax.tree.map(of, arrays)
        start = time.perf_counter()
        row = {"label": label, "seconds": None, "peak_gigabytes": None, "predicted_milliseconds": None, "problem": None}
        try:
            with nullcontext() if sharded else jax.set_mesh(mesh):
                analysis = jax.jit(function).lower(*shapes).compile().memory_analysis()
        except Exception as error:  # the compiler's refusals are of many kinds
            row["problem"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        else:
            sizes = (getattr(analysis, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
            row["peak_gigabytes"] = (sum(sizes) - analysis.alias_size_in_bytes) / 1e9
        self.rows.append(row | {"seconds": time.perf_counter() - start})


def compiled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a case that was only compiled; raises Refused if the compiler refuses one of its programs."""
    problems = [f"{row['label']}: {row['problem']}" for row in rows if row["problem"]]
    if problems:
        raise Refused(f"{len(problems)} of {len(rows)} programs do not compile: {problems[0]}", {"rows": rows})
    return {"rows": rows}

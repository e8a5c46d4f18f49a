"""Finds the slow process of a run in which all run in lockstep.

Every process takes the same time for a step: a slow one makes the others wait in the next collective. So each measures
what it does without the others: its host's wait for data, and a matmul on each of its devices, timed while no step
runs. They publish these times through jax's coordination service, and process 0 names the slow one.

The dispatch of a step is not measured. On GPUs it may return only when the step has almost ended, because the host
waits for values that the device computes. It then includes the wait for the other processes: it is equally long on all
of them, and shorter on a process whose data are late.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megajax.runtime.exchange import put, read

FACTOR = 1.5  # times the median from which a process is called slow
NOTICEABLE = 0.05  # share of a step by which its host must be slower than the median's
SIZES = {"cpu": (256, jnp.float32), "gpu": (4096, jnp.bfloat16)}  # of the probe's matrices: about 1 ms


@dataclasses.dataclass(frozen=True)
class HostTimes:
    """What a process took by itself, in seconds.

    Attributes:
      step: after which it was measured.
      data: its host's wait for a batch, the mean of the steps since the last measurement.
      probe: of the probe on its slowest device.
      device: id of that device.
      host: the process's host.
    """

    step: int
    data: float
    probe: float
    device: int
    host: str


class Stragglers:
    """Measures this process and, on process 0, names the slow ones."""

    def __init__(self, devices: Sequence[jax.Device], host: str):
        """Prepares the probe; it is compiled at the first measurement.

        Args:
          devices: of this process.
          host: its name.
        """
        self._host = host
        size, dtype = SIZES.get(devices[0].platform, SIZES["gpu"])
        self._inputs = [jax.device_put(jnp.ones((size, size), dtype), device) for device in devices]
        self._matmul = jax.jit(lambda x: x @ x)
        self._reset()

    def _reset(self) -> None:
        self._steps, self._data, self._since = 0, 0.0, time.perf_counter()

    def add_data(self, seconds: float) -> None:
        """Counts the host's wait for one batch."""
        self._steps, self._data = self._steps + 1, self._data + seconds

    def measure(self, step: int) -> list[str]:
        """Publishes this process's times since the last call; returns messages on process 0. Waits for no other process.

        Process 0 reads the times that the others have published by then: of this step or of the measurement before it.
        """
        steps, now = max(1, self._steps), time.perf_counter()
        step_seconds = (now - self._since) / steps
        probes = [self._probe(x) for x in self._inputs]
        slowest = max(range(len(probes)), key=probes.__getitem__)
        device = next(iter(self._inputs[slowest].devices())).id
        times = HostTimes(step, self._data / steps, probes[slowest], device, self._host)
        put("times", json.dumps(dataclasses.asdict(times)))
        self._reset()
        if jax.process_index() != 0 or jax.process_count() == 1:
            return []
        found = {process: HostTimes(**json.loads(text)) for process, text in read("times").items()}
        return slow_processes(found | {0: times}, step, step_seconds)

    def _probe(self, x: jax.Array) -> float:
        """The shortest of three; the first measurement also compiles."""
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            self._matmul(x).block_until_ready()
            taken.append(time.perf_counter() - start)
        return min(taken)


def slow_processes(times: Mapping[int, HostTimes], step: int, step_seconds: float) -> list[str]:
    """One line for each process that is slower than the median of all by FACTOR.

    A host's time counts only where the excess is noticeable in a step, a matmul's always: it is a sample of all of them.

    Args:
      times: by process.
      step: the current one.
      step_seconds: of a step, on all processes.
    """
    lines = []
    if len(times) < 2:
        return lines
    kinds: dict[str, tuple[str, float]] = {
        "probe": ("a matmul on its device {device} takes", 0.0),
        "data": ("waiting for data takes its host", NOTICEABLE * step_seconds),
    }
    for kind, (what, excess) in kinds.items():
        median: Any = statistics.median_low(getattr(own, kind) for own in times.values())
        for process, own in times.items():
            value = getattr(own, kind)
            if value > FACTOR * median and value - median > excess:
                lines.append(
                    f"warning: step {step}: process {process} on {own.host} is slow: {what.format(device=own.device)} "
                    f"{1e3 * value:.2f} ms, the median of {len(times)} processes is {1e3 * median:.2f} ms"
                )
    return lines

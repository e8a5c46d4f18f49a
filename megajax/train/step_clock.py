"""The time of each step on the devices.

It cannot be told from the time at which the host reads a step's metrics. On GPUs, `Training.train_step` may return only
when its step has almost ended: XLA's runtime waits on the host for the predicates of the program's conditionals and
loops. The loop dispatches step N + 1 before it reads the metrics of step N, so it reads them about one step late,
except where nothing is dispatched ahead. So a thread waits for the metrics of each step, while the main thread
dispatches the next one. Both wait without Python's global interpreter lock.

The thread belongs to an executor and is not a daemon thread: a daemon thread that is inside jax when the interpreter
shuts down aborts the process (exit code 134). After an error, the end of the process therefore waits for the step that
is running, as jax does on CPUs anyway. If that step hangs, the watchdog ends the process: its threads run until then.
"""

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax


class StepClock:
    """Times the steps of a run; used as `with StepClock() as clock`."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, "step clock")  # started by the first step
        self._end = 0.0  # of the last step that has ended

    def __enter__(self) -> "StepClock":
        return self

    def __exit__(self, *exception) -> None:
        # Waits for nothing: after an error a step may be running, or hang. The thread ends with that step.
        self._thread.shutdown(wait=False, cancel_futures=True)

    def watch(self, metrics: Mapping[str, jax.Array], dispatched: float) -> Future[float]:
        """The seconds of a step, once it has ended: from the end of the step before it, or from its dispatch if later.

        If the step fails, its end is that failure, and `jax.device_get(metrics)` raises the error.

        Args:
          metrics: of the step; steps are watched in the order in which they were dispatched.
          dispatched: `time.perf_counter()` before its dispatch.
        """
        return self._thread.submit(self._time, metrics, dispatched)

    def _time(self, metrics: Mapping[str, jax.Array], dispatched: float) -> float:
        with contextlib.suppress(Exception):  # whoever reads the metrics gets the same error
            jax.block_until_ready(dict(metrics))
        start, self._end = max(dispatched, self._end), time.perf_counter()
        return self._end - start

"""When a run stops before its end: a signal, or time is up. All processes stop after the same step."""

import signal
import time

import jax
import numpy as np

from megajax.runtime.compat import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what SLURM and Kubernetes send before they kill


class Stop:
    """Collects reasons to stop; used as `with Stop(...) as stop`, in the main thread. A step is never interrupted."""

    def __init__(self, minutes: float | None = None, started: float | None = None):
        """A run without a reason to stop yet.

        Args:
          minutes: how long the run may take.
          started: `time.monotonic()` when it began; now, if None.
        """
        self._deadline = None
        if minutes is not None:
            self._deadline = (time.monotonic() if started is None else started) + 60 * minutes
        self._minutes, self._signal, self._previous = minutes, 0, {}
        self.reason: str | None = None

    def __enter__(self) -> "Stop":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number, frame) -> None:
        self._signal = int(number)

    def agreed(self) -> str | None:
        """The reason for all processes to stop now, None to go on. To be called by all of them after the same step.

        One process's signal stops them all; with several processes this is a sum over them, a small one.
        """
        out_of_time = self._deadline is not None and time.monotonic() >= self._deadline
        code = self._signal or (-1 if out_of_time else 0)
        if jax.process_count() > 1:
            codes = multihost_utils.process_allgather(np.int32(code))
            code = int(codes[np.argmax(np.abs(codes))])
        if code > 0:
            self.reason = f"{signal.Signals(code).name} received"
        elif code < 0:
            self.reason = f"--exit-after-minutes {self._minutes:g} are over"
        return self.reason

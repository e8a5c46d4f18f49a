"""Stops a run before its last step, at a signal or at its time limit. All processes stop after the same step.

Several processes agree through jax's coordination service, in a separate thread, so a step costs neither a collective nor
a transfer to the host. A process that has a reason to stop publishes it. Every process's thread sees it within
a second, publishes the step that its main thread has reached, and waits at a barrier for the others; while it does, the main
thread does not start another step. The run stops after the step that follows the latest of these: no process has
started it, and all of them will.

Python runs a signal's handler in the main thread, which may wait in C++ for the end of a step or of a compilation. So a
thread reads the signals from the descriptor of `signal.set_wakeup_fd`: a second Ctrl-C ends the process at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time

from megajax.runtime.compat import coordination_service

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SLURM and Kubernetes send them before they kill
REQUEST, REACHED = "megajax/stop/request", "megajax/stop/reached"
RECEIVED = " received"  # the end of a reason that is a signal
EXIT_INTERRUPTED = 130  # after Ctrl-C, without a save
INTERVAL = 1.0  # seconds between two reads of the coordination service


class Preemption:
    """Collects reasons to stop; used as `with Preemption(...) as preemption`, in the main thread.

    A step is never interrupted.
    """

    def __init__(self, minutes: float | None = None, started: float | None = None, interrupt: bool = False):
        """Starts without a reason to stop.

        Args:
          minutes: time limit of the run; None: no limit.
          started: `time.monotonic()` at the start of the run; None: now.
          interrupt: whether the first Ctrl-C (SIGINT) is such a reason, and the second ends the process at once; False:
            Python's KeyboardInterrupt.
        """
        self._signals = (*SIGNALS, signal.SIGINT) if interrupt else SIGNALS
        self._interrupts, self._pipe, self._wakeup = 0, (), -1
        self._deadline = None
        if minutes is not None:
            self._deadline = (time.monotonic() if started is None else started) + 60 * minutes
        self._minutes, self._signal, self._previous = minutes, 0, {}
        self.reason: str | None = None  # why the run stopped; None while it runs
        joined = coordination_service()  # jax.process_count() would start the devices
        self._client, self._id, self._count = joined.client, joined.process_id, joined.num_processes
        self._agreement = threading.Lock()  # held by the thread while the processes agree on the step
        self._reached, self._last, self._agreed_reason = 0, None, None
        self._closed = threading.Event()

    def __enter__(self) -> "Preemption":
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, args=self._pipe[:1], daemon=True, name="signals").start()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._receive)
        if self._count > 1:
            threading.Thread(target=self._poll, daemon=True, name="preemption").start()
        return self

    def __exit__(self, *exception) -> None:
        self._closed.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe[1])  # ends the thread

    def _read_signals(self, pipe: int) -> None:
        """The thread that receives the signals while the main thread waits."""
        while received := os.read(pipe, 1):
            number = received[0]
            if number not in self._signals:
                continue
            self._receive(number, None)
            self._interrupts += number == signal.SIGINT
            if number == signal.SIGINT and self._interrupts == 1:
                print("\nCtrl-C: the run stops after this step and saves; Ctrl-C again stops at once", file=sys.stderr)
            elif number == signal.SIGINT:
                print("\nstopped without saving", file=sys.stderr, flush=True)
                os._exit(EXIT_INTERRUPTED)
        os.close(pipe)

    def _receive(self, number, frame) -> None:
        self._signal = int(number)

    def _own_reason(self) -> str | None:
        """This process's reason to stop."""
        if self._signal:
            return signal.Signals(self._signal).name + RECEIVED
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"--exit-after-minutes {self._minutes:g} are over"
        return None

    def after(self, step: int) -> str | None:
        """Why the run must stop after `step`; None: it continues.

        Every process calls it once for each step, after the step's dispatch and before that of the next.
        """
        if self._count == 1:
            self.reason = self._own_reason()
            return self.reason
        with self._agreement:
            self._reached = step
            if self._last is not None and step >= self._last:
                self.reason = self._agreed_reason
        return self.reason

    def _poll(self) -> None:
        """The thread: publishes this process's reason, looks for any process's, and agrees on the last step."""
        published = False
        while not self._closed.wait(INTERVAL):
            with contextlib.suppress(Exception):  # not found, or process 0 is gone, which is the watchdog's business
                if not published and (reason := self._own_reason()):
                    self._client.key_value_set(REQUEST, reason, allow_overwrite=True)
                    published = True
                self._client.key_value_try_get(REQUEST)
                self._agree()
                return

    def _agree(self) -> None:
        with self._agreement:
            self._client.key_value_set(f"{REACHED}/{self._id}", str(self._reached), allow_overwrite=True)
            self._client.wait_at_barrier(REACHED, 1000 * 3600)
            # A process publishes its reason before it arrives at the barrier: all read the same one here.
            self._agreed_reason = self._client.key_value_try_get(REQUEST)
            self._last = 1 + max(int(step) for _, step in self._client.key_value_dir_get(f"{REACHED}/"))


def ignore_signals() -> None:
    """For a process that has stopped and saved: the signal that another process received first must not kill it now."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_signal(reason: str | None) -> bool:
    """Whether a run's reason to stop is a signal to one of its processes."""
    return reason is not None and reason.endswith(RECEIVED)

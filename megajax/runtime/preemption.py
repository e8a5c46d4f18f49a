"""Stops a run before its last step: at a signal, at its time limit, or when a callback asks for it.

All processes stop after the same step, and save after the same one where a callback asks for a checkpoint (`agreement`).

Python runs a signal's handler in the main thread, which may wait in C++ for the end of a step or of a compilation. So a
thread reads the signals from the descriptor of `signal.set_wakeup_fd`: a second Ctrl-C ends the process at once.
"""

import os
import signal
import sys
import threading
import time

from megajax.runtime.agreement import Agreement

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SLURM and Kubernetes send them before they kill
RECEIVED = " received"  # the end of a reason that is a signal
SAVE = "save"  # a request of `Agreement` that is no reason to stop
EXIT_INTERRUPTED = 130  # after Ctrl-C, without a save


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
        self.save_due = False  # whether a checkpoint was asked for that is saved after the step of the last `after`
        self._stop: str | None = None
        self._save = False
        self._agreement = Agreement("stop", self._own_request, repeats=lambda text: text == SAVE)

    def __enter__(self) -> "Preemption":
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, args=self._pipe[:1], daemon=True, name="signals").start()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._receive)
        self._agreement.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._agreement.__exit__(*exception)
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
        return self._stop

    def _own_request(self) -> str | None:
        return self._own_reason() or (SAVE if self._save else None)

    def stop(self, reason: str) -> None:
        """Stops the run, as a signal does. Any thread of any process may call it."""
        self._stop = self._stop or reason

    def save(self) -> None:
        """Asks for a checkpoint, as soon as all processes can save one of the same step."""
        self._save = True

    def after(self, step: int) -> str | None:
        """Why the run must stop after `step`; None: it continues.

        Every process calls it once for each step, after the step's dispatch and before that of the next.
        """
        request = self._agreement.after(step)
        self.save_due = request == SAVE
        if self.save_due:
            self._save = False
        self.reason = None if self.save_due else request
        return self.reason


def ignore_signals() -> None:
    """For a process that has stopped and saved: the signal that another process received first must not kill it now."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_signal(reason: str | None) -> bool:
    """Whether a run's reason to stop is a signal to one of its processes."""
    return reason is not None and reason.endswith(RECEIVED)

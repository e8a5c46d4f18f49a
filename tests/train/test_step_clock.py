"""The clock of steps: threads, errors, the end of the process. test_blocking_dispatch.py tests the times in a run."""

import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.runtime.distributed import EXIT_PEER
from megajax.train.step_clock import StepClock
from tests.train.front_door import ROOT


class Running:
    """An array of a step that runs until the test ends it."""

    def __init__(self):
        self.ended = threading.Event()

    def block_until_ready(self):
        assert self.ended.wait(60)
        return self


def clock_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("step clock")]


def test_a_step_is_timed_when_it_ends():
    """From the end of the step before it, or from its dispatch."""
    steps, start = [Running() for _ in range(3)], time.perf_counter()
    with StepClock() as clock:
        first, second = (clock.watch({"loss": step}, start) for step in steps[:2])
        assert not (first.done() or second.done())
        steps[0].ended.set()
        assert 0 < first.result(60) <= time.perf_counter() - start and not second.done()
        steps[1].ended.set()
        second.result(60)
        assert 0 < first.result() + second.result() <= time.perf_counter() - start
        later = time.perf_counter()
        third = clock.watch({"loss": steps[2]}, later)
        steps[2].ended.set()
        assert 0 < third.result(60) <= time.perf_counter() - later


def test_leaving_the_clock_waits_for_no_step_and_leaves_no_thread():
    earlier, step = clock_threads(), Running()
    with StepClock() as clock:
        running, queued = clock.watch({"loss": step}, 0.0), clock.watch({"loss": Running()}, 0.0)
    assert not running.done() and queued.cancelled()
    (thread,) = [thread for thread in clock_threads() if thread not in earlier]
    step.ended.set()
    thread.join(60)
    assert not thread.is_alive() and running.done()


class Failed:
    """An array of a step that has failed."""

    def block_until_ready(self):
        raise RuntimeError("the device is broken")

    __array__ = block_until_ready


def test_the_error_of_a_step_is_left_to_the_reader_of_its_metrics(monkeypatch):
    unhandled = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    deleted = jnp.float32(1)
    deleted.delete()
    with StepClock() as clock:
        for array, words in ((Failed(), "the device is broken"), (deleted, "deleted")):
            assert clock.watch({"loss": array}, 0.0).result(60) > 0
            with pytest.raises(RuntimeError, match=words):
                jax.device_get({"loss": array})
        assert clock.watch({"loss": np.float32(2)}, 0.0).result(60) > 0  # the thread is alive
    assert unhandled == []


STEP = """
import jax, jax.numpy as jnp
from megajax.train.step_clock import StepClock

step = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x @ x), x).sum())
x = jnp.ones((500, 500))
step(x, 1)
with StepClock() as clock:
    clock.watch({"loss": step(x, 200)}, 0.0)
    raise KeyError("an error")
"""

HANGS = """
import threading
from megajax.runtime.watchdog import Watchdog
from megajax.train.step_clock import StepClock

class Hangs:
    def block_until_ready(self):
        threading.Event().wait()

watchdog = Watchdog(0.5, lambda text: print(text, flush=True))
watchdog.enter(3)
with StepClock() as clock:
    clock.watch({"loss": Hangs()}, 0.0)
    raise KeyError("an error")
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [(STEP, 1, "KeyError: 'an error'"), (HANGS, EXIT_PEER, "step 3 has not ended")],
    ids=["a step runs", "a step hangs"],
)
def test_a_process_that_fails_during_a_step_ends(code, exit_code, words):
    """It waits for the step, and does not abort; a hang is the watchdog's."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == exit_code, done.stderr
    assert words in done.stdout + done.stderr

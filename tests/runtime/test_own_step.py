"""The watchdog of a run of one process: a step that never ends."""

import threading

import pytest

from megajax.runtime import watchdog as watchdogs
from megajax.runtime.distributed import EXIT_PEER
from megajax.runtime.watchdog import Watchdog, main_thread_frames


@pytest.fixture
def made(monkeypatch):
    """Makes watchdogs whose threads do nothing."""
    monkeypatch.setattr(Watchdog, "_check_own_step", lambda self: None)
    return lambda timeout: Watchdog(timeout, print)


def begin(watchdog, seconds: float, step: int, suspended: bool = False):
    """The work before `step` has taken this long."""
    watchdog._entered -= seconds
    (watchdog.suspend if suspended else watchdog.enter)(step)


def after(watchdog, seconds: float) -> str | None:
    return watchdog._own_verdict(watchdog._entered + seconds)


def test_a_step_that_never_ends_is_found_by_the_thread(monkeypatch):
    ended, said = threading.Event(), []

    def leave(self, code):
        said.append(code)
        self.close()
        ended.set()

    monkeypatch.setattr(Watchdog, "_leave", leave)
    watchdog = Watchdog(0.2, said.append)
    watchdog._slowest = 0.01
    watchdog.enter(7)
    assert ended.wait(20)
    assert said[0].startswith(
        "error: step 7 has not ended for 0 s: a device, a collective or the data hangs (the main thr"
    )
    assert f"{threading.__file__}:" in said[0] and "--peer-timeout" in said[0] and said[1] == EXIT_PEER


def test_work_without_a_time_limit_is_not(made):
    """Compilation, a checkpoint, and all commands that take no steps."""
    watchdog = made(10)
    assert after(watchdog, 1e6) is None
    watchdog.suspend(3)
    assert after(watchdog, 1e6) is None


def test_slow_steps_may_take_longer(made):
    """Some machines take ten minutes a step: five times the slowest so far, or the first one with its compilation."""
    watchdog = made(300)
    begin(watchdog, 0, 1, suspended=True)
    begin(watchdog, 700, 2)  # compiled and executed
    assert after(watchdog, 3499) is None and "a step may take 3500 s" in after(watchdog, 3501)
    begin(watchdog, 20, 3)  # now steps are known
    assert after(watchdog, 299) is None and "step 3 has not ended for 301 s" in after(watchdog, 301)
    begin(watchdog, 100, 4)
    assert after(watchdog, 499) is None and after(watchdog, 501)
    begin(watchdog, 5, 4, suspended=True)
    begin(watchdog, 9000, 5)  # a save is no step
    assert after(watchdog, 501)


def test_a_dispatch_has_the_limit_of_a_step(made):
    """Of a GPU, where it takes a step; and of a CPU, where it takes no time, and is not taken for a step."""
    watchdog = made(10)
    begin(watchdog, 0, 1, suspended=True)
    watchdog._entered -= 700  # the first step, with its compilation
    watchdog.dispatch(2)
    assert after(watchdog, 3499) is None and "step 2 has not ended for 3501 s" in after(watchdog, 3501)
    begin(watchdog, 0.1, 1, suspended=True)
    watchdog.dispatch(3)
    begin(watchdog, 0.1, 2)
    assert after(watchdog, 3499) is None and "step 2 has not ended for 3501 s" in after(watchdog, 3501)
    watchdog._entered -= 30
    watchdog.dispatch(4)  # counts from the end of step 2
    assert "step 4 has not ended for 3501 s" in watchdog._own_verdict(watchdog._entered + 3501)
    begin(watchdog, 30, 3)
    assert after(watchdog, 299) is None and after(watchdog, 301)


def test_a_person_in_a_debugger_is_waited_for(made, monkeypatch):
    watchdog = made(1)
    watchdog.enter(1)
    watchdog._first = 0.0
    assert after(watchdog, 100)
    monkeypatch.setattr(watchdogs, "main_thread_frames", lambda: [("cmd", "cmd.py:1"), ("pdb", "pdb.py:2")])
    assert after(watchdog, 100) is None


def test_a_process_that_was_stopped_has_more_time(monkeypatch):
    """Ctrl-Z for an hour: the clock went on, the step did not."""
    watchdog = Watchdog(1e-9, print)  # its thread
    watchdog.close()
    watchdog = Watchdog.__new__(Watchdog)
    clock = iter([0.0, 3600.0, 3601.0])
    watchdog.interval, watchdog._entered, asked = 1.0, 0.0, []
    watchdog._closed = type("Closed", (), {"wait": staticmethod(lambda seconds: len(asked) == 2)})
    monkeypatch.setattr(watchdogs.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(watchdog, "_own_verdict", lambda now: asked.append(now - watchdog._entered))
    watchdog._check_own_step()
    assert asked == [0.0, 1.0]


def test_the_main_threads_place_is_known():
    found = main_thread_frames()
    assert any(place.startswith(__file__) for _, place in found)
    assert found[0][0] == watchdogs.__name__

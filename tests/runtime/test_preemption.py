"""Reasons to stop, in this process; tests/checkpoint/test_kill.py has the front door."""

import os
import signal

import pytest

from megajax.checkpoint import manager
from megajax.data.loader import RampedLoader
from megajax.runtime.preemption import SIGNALS, Stop
from tests import small
from tests.train import runs

RUN = {"mesh": (1, 1, 1), "schedule": "1f1b", "steps": 9}


@pytest.fixture(scope="module")
def training():
    return small.training_of(runs.make_run(**RUN))


class Signalling(RampedLoader):
    """Sends this process a signal while it makes the batch of the fourth step."""

    number = signal.SIGUSR1

    def batch(self, consumed_samples):
        if consumed_samples == 3 * small.BATCH:
            os.kill(os.getpid(), self.number)
        return super().batch(consumed_samples)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_the_run_after_the_step(tmp_path, training, number):
    loader = Signalling(runs.loader_of(training.run), training.run)
    loader.number = number
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop() as stop:
        result = runs.go(training.run, tmp_path, training=training, stop=stop, loader=loader)
    assert stop.reason == f"{number.name} received"
    assert f"step 4: {number.name} received: saving and leaving" in result.text
    assert len(result.rows) == 4 and manager.complete_steps(tmp_path / "checkpoints") == [4]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_time_is_up(tmp_path, training):
    with Stop(minutes=1e-6) as stop:
        result = runs.go(training.run, tmp_path, training=training, stop=stop)
    assert "step 1: --exit-after-minutes 1e-06 are over: saving and leaving" in result.text
    assert manager.complete_steps(tmp_path / "checkpoints") == [1]


def test_a_run_that_ends_has_no_reason(tmp_path, training):
    with Stop(minutes=10) as stop:
        result = runs.go(training.run, tmp_path, training=training, stop=stop)
    assert stop.reason is None and len(result.rows) == 9
    assert manager.complete_steps(tmp_path / "checkpoints") == [9]

"""Preemption in this process; tests/checkpoint/test_kill.py tests it on the command."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from megajax.checkpoint.directory import complete_steps
from megajax.data.ramp import RampedLoader
from megajax.runtime import agreement, preemption
from megajax.runtime.preemption import SIGNALS, Preemption
from tests import small
from tests.train import runs
from tests.train.front_door import ROOT

MODEL = dataclasses.replace(small.MODEL, layers=2)
RUN = {"mesh": (1, 1, 1), "schedule": "interleaved_1f1b", "recompute": "full", "steps": 9, "model": MODEL}


@pytest.fixture(scope="module")
def training():
    return small.training_of(runs.make_run(**RUN))


class Signalling(RampedLoader):
    """Sends this process a signal while it prepares the batch of the fourth step."""

    number = signal.SIGUSR1

    def batch(self, consumed_samples):
        if consumed_samples == 3 * small.BATCH:
            os.kill(os.getpid(), self.number)
        return super().batch(consumed_samples)


@pytest.mark.parametrize("number", (*SIGNALS, signal.SIGINT), ids=lambda number: number.name)
def test_a_signal_ends_the_run_after_the_current_step(tmp_path, training, number):
    loader = Signalling(runs.loader_of(training.run), training.run)
    loader.number = number
    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)]
    with Preemption(interrupt=True) as stop:
        result = runs.go(training.run, tmp_path, training=training, stop=stop, loader=loader)
    assert stop.reason == f"{number.name} received"
    assert f"step 4: {number.name} received: saving a checkpoint and stopping" in result.text
    assert len(result.rows) == 4 and complete_steps(tmp_path / "checkpoints") == [4]
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)] == before


def test_a_second_ctrl_c_ends_the_process():
    code = (
        "import os, signal, time, threading\nfrom megajax.runtime.preemption import Preemption\n"
        "with Preemption(interrupt=True):\n"
        "    send = lambda: [(time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT)) for _ in range(2)]\n"
        "    threading.Thread(target=send).start()\n"
        "    time.sleep(60)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 130 and "\nCtrl-C: the run stops after this step" in run.stderr
    assert run.stderr.endswith("stopped without saving\n")


def test_ctrl_c_raises_where_there_is_nothing_to_save(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt), Preemption():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_the_time_limit_ends_the_run(tmp_path, training):
    with Preemption(minutes=1e-6) as stop:
        result = runs.go(training.run, tmp_path, training=training, stop=stop)
    assert "step 1: --exit-after-minutes 1e-06 are over: saving a checkpoint and stopping" in result.text
    assert complete_steps(tmp_path / "checkpoints") == [1]


def test_a_run_that_ends_has_no_reason(tmp_path, training):
    with Preemption(minutes=10) as stop:
        result = runs.go(training.run, tmp_path, training=training, stop=stop)
    assert stop.reason is None and len(result.rows) == 9
    assert complete_steps(tmp_path / "checkpoints") == [9]


class Service:
    """jax's coordination service, for threads in place of processes."""

    def __init__(self, count: int):
        self.values, self.lock, self.barrier = {}, threading.Lock(), threading.Barrier(count)

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.lock:
            assert allow_overwrite or key not in self.values
            self.values[key] = value

    def key_value_try_get(self, key):
        with self.lock:
            if key not in self.values:
                raise RuntimeError(f"NOT_FOUND: {key}")
            return self.values[key]

    def key_value_dir_get(self, prefix):
        with self.lock:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def wait_at_barrier(self, name, timeout_in_ms):
        self.barrier.wait(30)


@pytest.mark.parametrize("signalled", [(0,), (2,), (0, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_processes_agree_on_the_step_after_which_they_stop(monkeypatch, signalled, seed):
    """Three loops that dispatch a step ahead; a step's metrics arrive when all processes have dispatched it."""
    count, delays = 3, random.Random(seed)
    service, collectives, stopped = Service(count), [threading.Barrier(count) for _ in range(5000)], {}
    joined = {"client": service, "num_processes": count}
    monkeypatch.setattr(agreement, "INTERVAL", 0.01)

    def process(number: int) -> None:
        monkeypatch.setattr(
            agreement, "coordination_service", lambda: types.SimpleNamespace(process_id=number, **joined)
        )
        stop = Preemption()
        created.release()
        threading.Thread(target=stop._agreement.poll, daemon=True).start()
        for step in range(1, 5000):
            if number in signalled and step == 10 + number:
                stop._receive(signal.SIGTERM, None)
            reason = stop.after(step)
            if step > 1 and not reason:
                collectives[step - 1].wait(30)  # the metrics of the step before
            time.sleep(0.002 * delays.random())
            if reason:
                stopped[number] = step, reason
                return

    created, threads = threading.Semaphore(0), []
    for number in range(count):
        threads.append(threading.Thread(target=process, args=(number,)))
        threads[-1].start()
        created.acquire()
    for thread in threads:
        thread.join(60)
    assert len(stopped) == count and len(set(stopped.values())) == 1, stopped
    step, reason = stopped[0]
    assert step >= 10 and reason == "SIGTERM received"


def test_without_a_stop_no_device_or_service_is_called(monkeypatch):
    """With several processes, only the thread calls the service; `after` does not."""
    calls = []
    service = types.SimpleNamespace(client=calls, process_id=0, num_processes=4)
    monkeypatch.setattr(agreement, "coordination_service", lambda: service)
    monkeypatch.setattr("jax.process_count", lambda: pytest.fail("jax was called"))
    stop = Preemption(minutes=10)
    assert [stop.after(step) for step in range(1, 100)] == [None] * 99


def test_a_signal_after_the_stop_kills_nobody():
    """Another process was told first; this one has saved, and ends."""
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        preemption.ignore_signals()
        for number in SIGNALS:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)

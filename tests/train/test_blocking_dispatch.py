"""The loop where dispatching a step waits for the device, as on GPUs, and where it does not: times, and the watchdog.

Time is simulated. Each thread has its own clock. Waiting for an array sets it to the time at which the array is ready.
"""

import dataclasses
import io
import statistics
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.data.loader import Loader, TokenSamples
from megajax.runtime.watchdog import Watchdog
from megajax.train import compilations, loop, step_clock
from megajax.train.goodput import Goodput
from megajax.train.logging import RunLog
from megajax.train.loop import TrainerHooks, train
from megajax.train.validation import Scores
from tests.train.front_door import Run, rows

MODEL = ModelConfig(layers=1, hidden=4, heads=1, vocabulary=50, sequence_length=4)
BATCH, STEPS = 4, 10
COMPILATION, HOST, EVALUATION, SAVE = 30.0, 0.001, 5.0, 3.0  # seconds


class Clocks(threading.local):
    """A clock for each thread."""

    now = 100.0

    def reach(self, time: float) -> None:
        self.now = max(self.now, time)


@dataclasses.dataclass
class Computed:
    """An array that the device has computed at `ready`."""

    value: float
    ready: float
    clocks: Clocks

    def block_until_ready(self) -> "Computed":
        self.clocks.reach(self.ready)
        return self

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.block_until_ready().value)


class Training:
    """Steps of a device that executes one at a time; step n takes `seconds(n)`.

    Attributes:
      blocks: whether `train_step` returns when the step has almost ended, else at once.
      dispatched: called with each step's number while it is dispatched.
    """

    takes_hold = True

    def __init__(self, run: RunConfig, clocks: Clocks, blocks: bool, skipped: tuple[int, ...] = ()):
        self.run, self.clocks, self.blocks, self.skipped = run, clocks, blocks, skipped
        self.free, self.compiled, self.dispatched = 0.0, False, lambda number: None

    def seconds(self, number: int) -> float:
        return 0.2 + 0.01 * number

    def init_state(self):
        return SimpleNamespace(params=None)

    def refilled(self, state, batch, consumed_samples):
        return state

    def stored(self, state):
        return None, state

    def train_step(self, state, batch, hold):
        number = int(batch["sample"].ravel()[0]) // BATCH + 1
        self.dispatched(number)
        if not self.compiled:
            self.compiled = True
            self.clocks.reach(self.clocks.now + COMPILATION)
            jax.monitoring.record_event_duration_secs(compilations.COMPILED, COMPILATION)
        self.clocks.reach(self.clocks.now + HOST)
        self.free = max(self.free, self.clocks.now) + self.seconds(number)
        if self.blocks:
            self.clocks.reach(self.free - HOST)
        metrics = {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "loss_scale": 1.0}
        metrics["skipped"] = int(number in self.skipped)
        return state, {name: Computed(value, self.free, self.clocks) for name, value in metrics.items()}


class EveryThird:
    """An evaluation after every third step."""

    def __init__(self, clocks):
        self.clocks = clocks

    def due(self, step):
        return step % 3 == 0

    def run(self, state, step):
        self.clocks.reach(self.clocks.now + EVALUATION)
        return Scores((), {})


class EveryFourth:
    """`Checkpoints` that save after every fourth step."""

    output, failed = SimpleNamespace(save_every=4), False

    def __init__(self, clocks):
        self.clocks, self.completed = clocks, []

    def save(self, layout, state, progress):
        self.clocks.reach(self.clocks.now + SAVE)
        return []

    def poll(self):
        return []

    wait = poll


class Records(list):
    """A sink of `RunLog` in memory."""

    file, write = SimpleNamespace(problem=None, close=lambda: None), list.append


@pytest.fixture(params=[True, False], ids=["a dispatch waits", "a dispatch returns at once"])
def blocks(request):
    return request.param


@pytest.fixture
def clocks(monkeypatch):
    found = Clocks()
    for module in (loop, step_clock, compilations):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


def make_training(clocks: Clocks, blocks: bool, skipped: tuple[int, ...] = ()) -> Training:
    settings = {"global_batch_size": BATCH, "steps": STEPS, "warmup_steps": 0, "precision": "fp32"}
    settings |= {"validation_batches": 0, "nonfinite": "skip"}
    return Training(RunConfig(MODEL, ParallelConfig(), TrainConfig(**settings)), clocks, blocks, skipped)


def run_loop(training: Training, goodput: Goodput | None = None, **hooks) -> list[dict]:
    """The records of a run."""
    batches = Loader(TokenSamples(np.arange(4 * 100 + 1) % 50, 4, 0), BATCH, training.run.microbatches)
    records = Records()
    with RunLog(STEPS, console=Console(file=io.StringIO()), sinks=[records]) as log:
        explain = lambda *step: "because the test says so"  # noqa: E731
        hooks = TrainerHooks(**hooks)
        train(training, batches, {}, log, None, hooks=hooks, goodput=goodput, explain=explain)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return records


@pytest.mark.parametrize("interrupted", [False, True], ids=["only steps", "evaluations and saves"])
def test_a_steps_time_is_the_devices(clocks, blocks, interrupted):
    """Also where no step is dispatched ahead: before evaluations and saves, and at the end."""
    training = make_training(clocks, blocks)
    hooks = {"evaluations": (EveryThird(clocks),), "checkpoints": EveryFourth(clocks)} if interrupted else {}
    records = run_loop(training, **hooks)
    compilation = {1: COMPILATION}
    expected = [training.seconds(number) + compilation.get(number, 0.0) for number in range(1, STEPS + 1)]
    assert [record["step_seconds"] for record in records] == pytest.approx(expected, abs=3 * HOST)
    rates = [record["tokens_per_second"] * record["step_seconds"] for record in records[1:]]
    assert records[0]["tokens_per_second"] is None and rates == pytest.approx([BATCH * 4] * (STEPS - 1))


def test_the_time_of_a_step_that_is_dispatched_again_is_that_of_its_second_execution(clocks, blocks):
    """After a skipped step, the devices have executed the next one without an update."""
    training = make_training(clocks, blocks, skipped=(5,))
    records = run_loop(training)
    expected = [training.seconds(number) for number in range(2, STEPS + 1)]
    assert [record["step_seconds"] for record in records[1:]] == pytest.approx(expected, abs=3 * HOST)


def test_the_first_step_is_not_counted_as_compilation(clocks, blocks):
    training, goodput = make_training(clocks, blocks), Goodput(clock=lambda: clocks.now)
    run_loop(training, goodput, evaluations=(EveryThird(clocks),))
    found = {name: seconds for name, seconds in goodput.seconds.items() if seconds > 0.05}
    steps = sum(training.seconds(number) for number in range(1, STEPS + 1))
    expected = {"steps": steps, "compiling": COMPILATION, "validation": 4 * EVALUATION}
    assert found == pytest.approx(expected, abs=STEPS * 3 * HOST)


def test_a_dispatch_has_a_time_limit(clocks, blocks, monkeypatch):
    """A collective that hangs may do so in the dispatch. Only compilation has no limit, and what is between steps."""
    monkeypatch.setattr(Watchdog, "_check_own_step", lambda self: None)
    training, watchdog, found = make_training(clocks, blocks), Watchdog(100, print), []
    training.dispatched = lambda number: found.append((number, watchdog._own_verdict(watchdog._entered + 1e6)))
    run_loop(training, evaluations=(EveryThird(clocks),), checkpoints=EveryFourth(clocks), watchdog=watchdog)
    assert [number for number, _ in found] == list(range(1, STEPS + 1)) and found[0][1] is None
    assert all(verdict.startswith(f"step {number} has not ended") for number, verdict in found[1:])


class HostTimes:
    """`Checks`, and their `Stragglers`, that record what is measured of the host."""

    every = STEPS

    def __init__(self):
        self.stragglers, self.seconds = self, []

    def __getattr__(self, name):
        return lambda seconds: self.seconds.append((name, seconds))

    def run(self, state, step):
        return []


def test_the_wait_in_a_dispatch_is_not_taken_for_the_hosts_own_time(clocks, blocks):
    """It includes the wait for other processes: one whose data are late waits least, and the others would look slow."""
    checks = HostTimes()
    run_loop(make_training(clocks, blocks), checks=checks)
    assert checks.seconds == [("add_data", 0.0)] * STEPS


class Killed(Exception):
    """An error in the main thread."""


def test_an_error_waits_for_no_step(clocks, blocks):
    """As when a collective of the running step hangs. And no thread is left when that step ends."""
    training, earlier, ended = make_training(clocks, blocks), threading.enumerate(), threading.Event()

    class Hangs(Computed):
        def block_until_ready(self):
            assert ended.wait(60)
            return self

    usual = training.train_step

    def train_step(state, batch, hold):
        state, metrics = usual(state, batch, hold)
        if int(batch["sample"].ravel()[0]) == 2 * BATCH:
            metrics["loss"] = Hangs(1.0, 0.0, clocks)
        return state, metrics

    def fail(step):
        if step == 3:
            raise Killed

    training.train_step = train_step
    with pytest.raises(Killed):
        run_loop(training, preemption=SimpleNamespace(after=fail))
    ended.set()
    for thread in threading.enumerate():
        if thread not in earlier:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.slow
def test_times_of_a_run_whose_dispatch_waits(tmp_path):
    """In real time, on a CPU without asynchronous dispatch. Nothing is dispatched ahead before the saves."""
    setting = tmp_path / "synchronous.py"
    setting.write_text('import jax\n\njax.config.update("jax_cpu_enable_async_dispatch", False)\n')
    run = Run(
        tmp_path,
        "--data 1 --devices cpu:1 --steps 12 --save-every 4 --hidden 128 --sequence-length 128 --global-batch-size 16 "
        f"--import {setting} --run-dir {tmp_path}/run",
    )
    assert run.wait() == 0, run.err
    seconds = [row["step_seconds"] for row in rows(tmp_path / "run")][1:]
    print([f"{1e3 * one:.0f} ms" for one in seconds])
    assert len(seconds) == 11 and min(seconds) > statistics.median(seconds) / 4

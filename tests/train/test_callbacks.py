"""Callbacks: what they are given and when, what they may ask for, and what their errors do."""

import pathlib
import random
import re
import threading
import time
import types

import jax
import pytest

from megajax import Callback
from megajax.checkpoint.directory import complete_steps
from megajax.config import ConfigError, OutputConfig
from megajax.runtime import agreement
from megajax.runtime.preemption import Preemption
from megajax.train import trainer as trainer_module
from megajax.train.callbacks import EVENTS, Callbacks, check_callbacks
from megajax.train.sinks import read_steps
from megajax.train.trainer import Trainer
from megajax.train.validation import Scores
from tests import small
from tests.runtime.test_distributed import ONE_DEVICE, free_port
from tests.runtime.test_preemption import Service
from tests.train.front_door import SMALL, Command
from tests.train.test_loop import Evaluated, MeanTraining, Records, run_loop
from tests.train.test_trainer import Batches, make_run


class Watcher(Callback):
    """Keeps all calls, and does at each what a test wants."""

    def __init__(self, **does):
        self.calls, self.does = [], does

    def _called(self, name, control, *arguments):
        self.calls.append((name, *arguments))
        if name in self.does:
            self.does[name](control, *arguments)

    def names(self) -> list:
        return [(name, *(a["step"] if isinstance(a, dict) else a for a in rest[:1])) for name, *rest in self.calls]


for event in EVENTS:
    setattr(
        Watcher,
        event,
        lambda self, control, *arguments, event=event, **named: self._called(
            event, control, *arguments, *named.values()
        ),
    )


class Fixed:
    """An evaluation after every third step."""

    def due(self, step):
        return step % 3 == 0

    def run(self, state, step):
        return Scores((), {"own": 1.0})


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Trainers of one run have the same compiled step."""
    make, made = trainer_module.make_training, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "make_training", lambda run, *args: made.setdefault(run, make(run, *args)))
        yield


def trainer(callbacks, directory=None, **output):
    run = make_run()
    output = OutputConfig(run_dir=directory and str(directory), tensorboard=False, **output)
    return Trainer(run, data=Batches(run), output=output, callbacks=callbacks, devices=jax.devices()[:1])


def test_the_loop_calls_after_the_dispatch_of_the_next_step_with_the_record_of_the_log():
    """Records have numbers of the host, and an evaluation's values where there was one."""
    watcher, sink = Watcher(), Records()
    events = watcher.calls
    training, *_ = run_loop(
        hooks={"callbacks": Callbacks([watcher]), "evaluations": (Evaluated([]),)}, sinks=[sink], validation_batches=0
    )
    assert events[0] == ("on_start", 0)
    steps = [record for name, record in events if name == "on_step"]
    validated = {record["step"]: record for name, record in events if name == "on_validation"}
    assert [record["step"] for record in steps] == list(range(1, 11)) and list(validated) == [3, 6, 9, 10]
    assert [validated.get(record["step"], record) for record in steps] == sink.records
    assert validated[10]["own/mean"] == sink.records[9]["own/mean"]
    values = [value for record in (*steps, *validated.values()) for value in record.values()]
    assert {type(value) for value in values} <= {int, float, type(None)}
    assert watcher.names()[-3:] == [("on_validation", 9), ("on_step", 10), ("on_validation", 10)]


def test_a_step_is_dispatched_before_a_callback_of_the_last_one_is_called(monkeypatch):
    dispatched, seen, train_step = [], [], MeanTraining.train_step

    def counted(training, state, batch, hold):
        dispatched.append(len(dispatched) + 1)
        return train_step(training, state, batch, hold)

    monkeypatch.setattr(MeanTraining, "train_step", counted)
    watcher = Watcher(on_step=lambda control, record: seen.append((record["step"], dispatched[-1])))
    run_loop(hooks={"callbacks": Callbacks([watcher])}, validation_batches=0)
    assert seen == [*((step, step + 1) for step in range(1, 10)), (10, 10)]


def test_a_record_is_a_copy():
    def spoil(control, record):
        record.clear()

    sink = Records()
    run_loop(hooks={"callbacks": Callbacks([Watcher(on_step=spoil), Watcher(on_step=spoil)])}, sinks=[sink])
    assert all("loss" in record for record in sink.records)


@pytest.mark.slow
def test_a_run_calls_in_this_order_and_resumes(tmp_path):
    watcher = Watcher()
    result = trainer([watcher], tmp_path, save_every=4).fit()
    names = watcher.names()
    assert names[0] == ("on_start", 0) and names[-1] == ("on_end", result)
    assert [call for call in names if call[0] == "on_step"] == [("on_step", step) for step in range(1, 7)]
    saves = [call[1:] for call in watcher.calls if call[0] == "on_save"]
    assert saves == [(step, tmp_path / "checkpoints" / f"step_{step:08d}") for step in (4, 6)]
    assert all((path / "state").is_dir() for _, path in saves)
    assert names.index(("on_save", 6)) > names.index(("on_step", 5))
    last = [record for name, record, *_ in watcher.calls if name == "on_step"][-1]
    logged = read_steps(tmp_path / "log.jsonl")[-1]
    assert all(logged[name] == value for name, value in last.items())
    again = Watcher()
    trainer([again], tmp_path, resume="auto").fit()
    assert [name for name, *_ in again.calls] == ["on_start", "on_end"] and again.calls[0] == ("on_start", 6)
    assert again.calls[1][1].metrics["step"] == 6


def test_a_callback_stops_and_saves(tmp_path):
    """Both happen after the next step, which runs already."""

    def ask(control, record):
        if record["step"] == 1:
            control.save()
        if record["step"] == 3:
            control.stop("the loss is low")
            assert control.is_first and control.run_dir == tmp_path
            control.message("a line of a callback")

    watcher = Watcher(on_step=ask)
    result = trainer([watcher], tmp_path).fit()
    assert result.stopped == "the loss is low" and result.metrics["step"] == 4
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    assert watcher.names()[-1] == ("on_end", result)
    text = (tmp_path / "logs" / "process_0.log").read_text()
    assert "a line of a callback" in text and "step 4: the loss is low: saving a checkpoint and stopping" in text


def test_a_save_without_a_directory_is_an_error():
    with pytest.raises(ConfigError, match="a callback asks for a checkpoint.*run_dir"):
        trainer([Watcher(on_step=lambda control, record: control.save())]).fit()


@pytest.mark.parametrize("where", ["on_start", "on_step", "on_validation", "on_save", "on_end"])
def test_an_exception_ends_the_run_and_loses_no_checkpoint(tmp_path, where):
    def fail(control, *arguments):
        raise KeyError("mine")

    watcher, other = Watcher(**{where: fail}, on_exception=fail), Watcher()
    with pytest.raises(KeyError, match="mine"):
        trainer([watcher, other], tmp_path, save_every=1).fit(evaluations=[Fixed()])
    for one in (watcher, other):
        assert one.calls[-1][0] == "on_exception" and isinstance(one.calls[-1][1], KeyError)
    first = next(call for call in watcher.names() if call[0] == where)
    step = {"on_start": 0, "on_end": 6}.get(where, first[1])
    saved = complete_steps(tmp_path / "checkpoints")
    assert (saved[-1] if saved else 0) >= step
    assert "Watcher.on_exception: KeyError: 'mine'" in (tmp_path / "logs" / "process_0.log").read_text()


def test_an_error_of_the_run_reaches_callbacks_with_the_record_before_it(tmp_path):
    class Broken(Batches):
        def batch(self, consumed_samples):
            if consumed_samples >= 3 * small.BATCH:
                raise OSError("no file")
            return super().batch(consumed_samples)

    run, watcher = make_run(), Watcher()
    with pytest.raises(OSError, match="no file"):
        Trainer(run, data=Broken(run), callbacks=[watcher], devices=jax.devices()[:1]).fit()
    assert watcher.calls[-1][0] == "on_exception" and "on_end" not in dict(watcher.names())


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (
            type("Late", (), {"on_step_end": lambda self, control, record: None})(),
            "on_step_end, .*did you mean on_step",
        ),
        (type("Empty", (), {})(), "has none of on_start, on_step"),
        (Watcher, r"the class Watcher: pass an object, Watcher\(\)"),
        (type("Short", (), {"on_step": lambda self, record: None})(), r"called as on_step\(control, record\)"),
        (print, "has none of"),
    ],
)
def test_what_would_never_be_called_is_refused(callback, said):
    with pytest.raises(ConfigError, match=said):
        check_callbacks([callback])


def test_any_object_with_one_of_the_methods_will_do():
    seen = []
    one = types.SimpleNamespace(on_step=lambda control, record: seen.append(record["step"]))
    check_callbacks([one, Callback()])
    run_loop(hooks={"callbacks": Callbacks([one, Callback()])}, validation_batches=0)
    assert seen == list(range(1, 11))


def test_the_example_of_the_docs(capsys):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "megajax.Callback" in code]
    space = {}
    exec(code, space)
    asked = []
    control = types.SimpleNamespace(is_first=True, save=lambda: asked.append("save"), stop=asked.append)
    example = space["StopEarly"]()
    check_callbacks([example])
    for norm, loss in ((1.0, 3.0), (101.0, 2.4)):
        example.on_step(control, {"grad_norm": norm})
        example.on_validation(control, {"validation/loss": loss})
    assert asked == ["save", "the validation loss is low enough"] and "validation 2.4" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_processes_save_after_the_same_steps_and_stop_after_one(monkeypatch, seed):
    """Three loops that dispatch a step ahead; process 1 asks for two checkpoints, process 2 for one and for a stop."""
    count, delays, done = 3, random.Random(seed), {}
    service, collectives = Service(count), [threading.Barrier(count) for _ in range(5000)]
    monkeypatch.setattr(agreement, "INTERVAL", 0.01)

    def process(number: int) -> None:
        joined = types.SimpleNamespace(process_id=number, client=service, num_processes=count)
        monkeypatch.setattr(agreement, "coordination_service", lambda: joined)
        stop, saved = Preemption(), []
        created.release()
        threading.Thread(target=stop._agreement.poll, daemon=True).start()
        for step in range(1, 5000):
            if (number, step) in ((1, 10), (1, 400), (2, 200)):
                stop.save()
            if (number, step) == (2, 600):
                stop.stop("enough")
            reason = stop.after(step)
            saved += [step] if stop.save_due else []
            if step > 1 and not reason:
                collectives[step - 1].wait(30)
            time.sleep(0.001 * delays.random())
            if reason:
                done[number] = step, reason, saved
                return

    created, threads = threading.Semaphore(0), []
    for number in range(count):
        threads.append(threading.Thread(target=process, args=(number,)))
        threads[-1].start()
        created.acquire()
    for thread in threads:
        thread.join(60)
    assert len(done) == count and done[0] == done[1] == done[2], done
    step, reason, saved = done[0]
    assert reason == "enough" and step >= 600 and len(saved) == 3
    assert 10 <= saved[0] and 200 <= saved[1] and 400 <= saved[2] <= step


@pytest.mark.slow
def test_two_processes_save_and_stop_when_one_of_them_asks(tmp_path):
    """Both have the checkpoint of one step, and end after one step, which is saved too."""
    flags = (
        f"{SMALL} {ONE_DEVICE.format(2)} --steps 100000 --run-dir {tmp_path}/run --coordinator 127.0.0.1:{free_port()}"
    )
    words = [*flags.split(), "--processes", "2", "--process-id"]
    found = [Command(tmp_path, ["tests.train.asking", *words, str(i)], f"process_{i}") for i in range(2)]
    assert [run.wait() for run in found] == [0, 0], [run.err for run in found]
    saved = complete_steps(tmp_path / "run" / "checkpoints")
    assert len(saved) == 2 and 6 <= saved[0] < saved[1]
    for index, run in enumerate(found):
        told = [f"process {index} was told of step {step}" for step in saved]
        assert [line for line in run.out.splitlines() if "told" in line] == told
        assert f"process {index} ends: process 1 has enough" in run.out

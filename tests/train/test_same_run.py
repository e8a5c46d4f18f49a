"""Processes of one run with other options or other data: none of them trains. Two threads stand for two processes."""

import dataclasses
import threading
import types

import numpy as np
import pytest

from megajax import DataConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config import ConfigError
from megajax.data.loader import Loader, TokenSamples
from megajax.runtime import exchange
from megajax.train import same_run
from megajax.train.same_run import fingerprint, require_same_batch, require_same_run
from tests.train.runs import Letters

RUN = RunConfig(preset("tiny"), ParallelConfig(data=2), TrainConfig(global_batch_size=8))
OUTPUT = OutputConfig(run_dir="run")
TOKENS = np.random.default_rng(0).integers(0, 50, 100_001)


class Service:
    """jax's coordination service, for threads."""

    def __init__(self, processes: int):
        self.values, self.barrier, self.is_there = {}, threading.Barrier(processes), threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.is_there:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.is_there.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.is_there:
            self.is_there.wait_for(lambda: key in self.values, 10)
            return self.values[key]

    def wait_at_barrier(self, name, milliseconds):
        self.barrier.wait(10)

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


def compare(monkeypatch, *processes, call=require_same_run) -> list[str | None]:
    """What each process is told; a process is the arguments of `call`."""
    service, own, found = Service(len(processes)), threading.local(), [None] * len(processes)
    for module in (exchange, same_run):
        monkeypatch.setattr(module, "coordination_service", lambda: own.service)
    monkeypatch.setattr(same_run, "_comparisons", types.SimpleNamespace(__next__=None))
    monkeypatch.setattr(same_run, "next", lambda _: 0, raising=False)

    def work(index, arguments):
        own.service = types.SimpleNamespace(client=service, process_id=index)
        try:
            call(*arguments)
        except ConfigError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def loaders(tokens=TOKENS, **changes):
    return {"training": Loader(TokenSamples(tokens, 16, changes.get("seed", 0)), 8, 4)}


def process(run=RUN, output=OUTPUT, data=None, kinds=None):
    return run, output, data or loaders(), Letters(), kinds or {}


def test_equal_processes_train(monkeypatch):
    assert compare(monkeypatch, process(), process(), process()) == [None] * 3


CHANGES = [
    ("train", {"seed": 2, "learning_rate": 0.5}, "--seed is 2 in process 1, and 1234 in process 0"),
    ("parallel", {"schedule": "gpipe"}, "--schedule is gpipe in process 1"),
    ("model", {"dropout": 0.1}, "--dropout is 0.1 in process 1"),
    ("data", {"eod_mask_loss": True}, "--eod-mask-loss is True in process 1"),
]


@pytest.mark.parametrize(("part", "change", "message"), CHANGES)
def test_another_option_is_named_in_all_processes(monkeypatch, part, change, message):
    other = dataclasses.replace(RUN, **{part: dataclasses.replace(getattr(RUN, part), **change)})
    found = compare(monkeypatch, process(), process(run=other), process())
    assert len(set(found)) == 1 and message.partition(",")[0] in found[0] and "run the same command" in found[0]


def test_other_files_and_own_classes_are_named(monkeypatch):
    found = compare(monkeypatch, process(), process(output=OutputConfig(run_dir="run", save_every=5)))
    assert all("--save-every is 5 in process 1, and 1000 in process 0" in text for text in found)
    found = compare(
        monkeypatch, process(kinds={"the batches' class": "a.A"}), process(kinds={"the batches' class": "a.B"})
    )
    assert all("the batches' class is a.B in process 1" in text for text in found)


def test_one_other_token_of_a_text_is_found(monkeypatch):
    """Also where no sample that is looked at has it."""
    changed = TOKENS.copy()
    changed[54_321] += 1
    found = compare(monkeypatch, process(), process(data=loaders(changed)))
    assert all("the training data (their fingerprint) is 6250 samples, " in text for text in found)
    assert fingerprint(loaders(seed=1)["training"]) != fingerprint(loaders(seed=2)["training"])


def test_hosts_may_have_copies_of_the_data_at_other_places(monkeypatch):
    """Their content is compared."""
    runs = [
        dataclasses.replace(RUN, data=DataConfig(text=f"/local{host}/a.txt", data_cache=f"/c{host}")) for host in "12"
    ]
    outputs = [OutputConfig(run_dir="run", log_jsonl=f"/local{host}/log") for host in "12"]
    assert compare(monkeypatch, *(process(*both) for both in zip(runs, outputs, strict=True))) == [None, None]


def test_a_run_of_one_process_reads_nothing(monkeypatch):
    monkeypatch.setattr(same_run, "fingerprint", None)
    require_same_run(*process())


def test_first_batches_of_a_users_source_that_differ(monkeypatch):
    one, other = ({"tokens": np.random.default_rng(seed).integers(0, 50, (2, 4, 8))} for seed in (1, 2))
    assert compare(monkeypatch, (one,), (one,), call=require_same_batch) == [None, None]
    found = compare(monkeypatch, (one,), (other,), call=require_same_batch)
    assert all("the first batch of the data" in text and "in process 1" in text for text in found)

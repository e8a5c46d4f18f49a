"""Samples of the user's as batches: every source gives the same batches, ends in one line, and continues from its state."""

import copy
import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data.source_state import decode, encode
from megajax.data.user_samples import Samples, UserSamples, gives_batches
from tests import small
from tests.train import runs

LENGTH = 8
SHAPES = {name: jax.ShapeDtypeStruct((LENGTH,), np.int32) for name in ("tokens", "labels")}
SHAPES |= {"sample": jax.ShapeDtypeStruct((), np.uint32)}


def make_run(steps=6, **train):
    model = dataclasses.replace(small.MODEL, layers=2, hidden=16, sequence_length=LENGTH)
    settings = {"steps": steps, "warmup_steps": 1, "log_every": 1, "validation_batches": 1, "validation_every": 3}
    return runs.make_run((1, 1, 1), model=model, train=settings | train)


RUN = make_run()
COUNT = RUN.total_samples


def samples(count=COUNT):
    """A list of samples."""
    return [
        {"tokens": np.arange(LENGTH) + n % 20, "labels": (np.arange(LENGTH) + n % 20 + 1).tolist()}
        for n in range(count)
    ]


def chunks(size, count=COUNT):
    """Batches as of a DataLoader, the last one smaller."""
    whole = samples(count)
    parts = [whole[start : start + size] for start in range(0, count, size)]
    return [{name: np.stack([one[name] for one in part]) for name in part[0]} for part in parts]


class Counter:
    """An iterator with a state of its own, `get_state` and `set_state`."""

    def __init__(self, items):
        self.items, self.at = items, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def get_state(self):
        return {"at": self.at, 3: (b"x", np.arange(2))}

    def set_state(self, state):
        assert state[3][0] == b"x" and state[3][1].tolist() == [0, 1]
        self.at = state["at"]


SOURCES = {
    "a list": lambda: samples(),
    "a generator": lambda: (one for one in samples()),
    "a function": lambda: lambda: iter(samples()),
    "batches of 3": lambda: (one for one in chunks(3)),
    "a list of batches": lambda: chunks(5),
    "an iterator with a state": lambda: Counter(samples()),
    "batches with a state": lambda: Counter(chunks(7)),
}


def batches(source, run=RUN, start=0, **settings):
    found, consumed = [], start
    made = source if isinstance(source, UserSamples) else UserSamples(Samples(source, **settings), run, SHAPES)
    while consumed < run.total_samples:
        found.append(made.batch(consumed))
        consumed += run.train.global_batch_size
    return found


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_batches(name):
    each = RUN.parallel.microbatch_size * RUN.parallel.data
    whole = {key: np.stack([one[key] for one in samples()]) for key in ("tokens", "labels")}
    found = batches(SOURCES[name]())
    for step, batch in enumerate(found):
        rows = slice(step * small.BATCH, (step + 1) * small.BATCH)
        for key, array in whole.items():
            np.testing.assert_array_equal(batch[key], array[rows].reshape(-1, each, LENGTH))
        assert batch["sample"].reshape(-1).tolist() == list(range(COUNT))[rows]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_source_continues_after_any_step(name, epochs):
    """With a state from it, and without one by reading again; the state is that of the step, not of what was read ahead."""
    run = make_run(6 * epochs)
    make = SOURCES[name]
    if epochs > 1 and not isinstance(make(), list) and not callable(make()):
        with pytest.raises(ConfigError, match=f"ended after {COUNT} samples, and.*an iterator is read once"):
            batches(make(), run, epochs=None)
        return
    whole = batches(make(), run, epochs=epochs)
    for step in range(1, 6 * epochs):
        first = UserSamples(Samples(make(), epochs=epochs), run, SHAPES)
        for ahead in range(min(step + 2, 6 * epochs)):
            first.batch(ahead * small.BATCH)
        stored = first.state(step * small.BATCH)
        assert (stored is not None) == ("state" in name)
        second = UserSamples(Samples(make(), epochs=epochs), run, SHAPES)
        lines = second.restore(step * small.BATCH, stored)
        assert len(lines) == (first.length is None)
        assert not lines or ("read again and dropped" in lines[0]) == (stored is None)
        assert_same(batches(second, run, step * small.BATCH), whole[step:])


def test_functions_of_the_users_for_the_state():
    class Source:
        def __init__(self):
            self.at = 0

        def __iter__(self):
            while self.at < COUNT:
                self.at += 1
                yield samples()[self.at - 1]

    source, other = Source(), Source()
    one = UserSamples(Samples(source, data_state=(lambda: [source.at], lambda state: None)), RUN, SHAPES)
    whole = batches(one)
    functions = (lambda: [other.at], lambda state: setattr(other, "at", state[0]))
    two = UserSamples(Samples(other, data_state=functions), RUN, SHAPES)
    assert one.state(COUNT - small.BATCH) is not None and one.state(0) is None
    two.restore(COUNT - small.BATCH, one.state(COUNT - small.BATCH))
    assert_same(batches(two, start=COUNT - small.BATCH), whole[-1:])


WRONG = {  # what is passed: the message
    "fewer": (
        lambda: samples(10),
        "data ended after 10 samples, and the run needs 96: pass data=Samples\\(data, epochs=None",
    ),
    "fewer, iterated": (lambda: (one for one in samples(30)), "data ended after 30 samples, and the run needs 96"),
    "fewer, in batches": (lambda: (one for one in chunks(7, 20)), "data ended after 20 samples"),
    "none": (lambda: [], "data has no samples"),
    "none, iterated": (lambda: iter([]), "data gave no samples"),
    "a dictionary": (lambda: samples()[0], "data is a dict: pass samples"),
    "a number": (lambda: 5, "data is a int, which gives no samples"),
    "a text": (lambda: "corpus", "data is a str: pass samples"),
    "tuples": (
        lambda: [(one["tokens"], one["labels"]) for one in samples()],
        r"data\[0\] is a tuple: give dictionaries",
    ),
    "nothing known": (
        lambda: [{"input_ids": [1, 2]}] * COUNT,
        "has input_ids, and the model reads tokens, labels, sample",
    ),
    "another length": (
        lambda: [{"tokens": np.arange(9)}] * COUNT,
        r"of shape \[9\] a sample; the model takes \[8\]",
    ),
    "a number each": (lambda: [{"tokens": 3}] * COUNT, r"'tokens' of shape \[\]; a sample of the model's has \[8\]"),
    "text in it": (lambda: [samples()[0] | {"text": "a"}] * COUNT, r"data\[0\]\['text'\] holds text"),
    "ragged": (lambda: [{"tokens": [[1, 2], [3]]}] * COUNT, r"data\[0\]\['tokens'\] is no array"),
    "None": (lambda: [None] * COUNT, r"data\[0\] is a NoneType"),
    "of two lengths": (
        lambda: [one | {"mask": np.ones(n % 2 + 1)} for n, one in enumerate(samples())],
        r"samples of a batch have 'mask' of shapes \[1\] and \[2\]",
    ),
    "of other arrays": (
        lambda: [one | ({"mask": 1} if n == 3 else {}) for n, one in enumerate(samples())],
        "some samples have 'mask', others do not",
    ),
    "of other counts": (
        lambda: iter([{"tokens": np.zeros((3, 8), int), "labels": np.zeros((2, 8), int)}]),
        "arrays of different numbers of samples",
    ),
    "no rows": (lambda: iter([{"tokens": np.zeros((0, 8), int)}]), "has no samples"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_is_one_line(name):
    make, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as error:
        batches(make())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "Samples.epochs=0. must be a whole number of at least 1, or None"),
        ({"data_state": (1, 2)}, "data_state is two functions"),
        (
            {"data_state": (lambda: object(), print)},
            "the state of data has a object, which is not stored in a checkpoint",
        ),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        batches(iter(samples()), **settings)


def test_a_state_that_is_of_other_data():
    one = UserSamples(Samples(Counter(samples())), RUN, SHAPES)
    one.batch(0)
    for source, stored, message in (
        (iter(samples()), one.state(16), "no function to set"),
        (Counter([]), "{", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            UserSamples(Samples(source), RUN, SHAPES).restore(16, stored)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(VALUES)
def test_a_state_is_stored_and_read(value):
    assert decode(encode(value, "data"), "data") == value


def test_batches_and_samples_are_told_apart():
    class Dataset(list):
        def batch(self, batch_size, drop_remainder=False):
            raise AssertionError

    class Both(list):
        def batch(self, consumed):
            return {}

    assert gives_batches(runs.loader_of(RUN)) and gives_batches(Both())
    assert not gives_batches(Dataset()) and not gives_batches([]) and not gives_batches(copy.copy)

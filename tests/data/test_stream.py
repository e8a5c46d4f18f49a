"""--stream: the windows of a plain loop, mixed and shuffled; after a stop at any place the same samples from there on."""

import dataclasses
import gzip
import json
import random

import jax
import numpy as np
import pytest

from megajax.config import ConfigError, DataConfig, ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.data import read_file
from megajax.data.recipe import Recipe
from megajax.data.source import open_data
from megajax.data.sources import Wanted
from megajax.data.stream import StreamSamples, parse_stream, parse_weights
from megajax.data.tokenizers import load_tokenizer
from megajax.train.trainer import Trainer

LENGTH = 16
TEXTS = [f"Document {number} " * (1 + number * 7 % 23) for number in range(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files of JSON lines, one of them compressed, and a table."""
    made = tmp_path_factory.mktemp("stream")
    for number, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.jsonl")):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[number * 100 : number * 100 + 100])
        (made / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    (made / "d.csv").write_text("text\n" + "\n".join(TEXTS[300:]))
    return made


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few documents, which a stop is in the middle of."""
    for module in ("read_file", "rows"):
        monkeypatch.setattr(f"megajax.data.{module}.PART", 3000)
    monkeypatch.setattr(read_file, "HEAD", 3000)


def stream(words, weights=(), shuffle=0, workers=0, length=LENGTH, seed=1, kept=64, key="text"):
    sources, first = parse_stream(list(map(str, words)), Wanted((key,)), seed)
    weights = [(0, first), *parse_weights(weights, len(sources))]
    return StreamSamples(sources, weights, length, seed, Recipe("byte"), workers, shuffle, kept)


def windows(samples, count, start=0):
    try:
        return np.stack([samples.window(number) for number in range(start, start + count)])
    finally:
        samples.close()


def plain_loop(files, count, length=LENGTH):
    """The ids of files one after another, without end, cut into windows."""
    tokenizer = load_tokenizer("byte")
    ids = np.concatenate(
        [[*tokenizer.encode(text), tokenizer.end_of_document] for texts in files for text in texts if text]
    )
    ids = np.tile(ids, 1 + (count * length + 1) // len(ids))
    return np.stack([ids[n * length : n * length + length + 1] for n in range(count)])


def test_a_stream_is_the_windows_of_a_plain_loop(folder):
    """Of one file over several epochs; and of several files, in one of their orders in each epoch."""
    for name, texts in (("a.jsonl", TEXTS[:100]), ("d.csv", TEXTS[300:])):
        count = 3 * sum(len(text) + 1 for text in texts) // LENGTH
        np.testing.assert_array_equal(windows(stream([folder / name]), count), plain_loop([texts], count))
    parts = {name: TEXTS[number * 100 : number * 100 + 100] for number, name in enumerate("abc")}
    whole = sum(len(text) + 1 for text in TEXTS[:300])
    found = windows(stream([folder / "*.jsonl*"]), 3 * whole // LENGTH)
    ids = np.concatenate([found[:, :-1].reshape(-1), found[-1:, -1]])
    orders = set()
    for epoch in range(2):
        own = ids[epoch * whole : (epoch + 1) * whole]
        order = next(
            order
            for order in ("abc", "acb", "bac", "bca", "cab", "cba")
            if np.array_equal(plain_loop([parts[name] for name in order], 1, whole - 1)[0], own)
        )
        orders.add(order)
    assert orders


def test_the_log_says_where_a_stream_is(folder):
    samples = stream([0.5, folder / "*.jsonl*", 0.5, folder / "d.csv"])
    assert samples.progress(64) == []  # nothing is read yet
    windows(samples, 130)
    [line] = samples.progress(128)
    assert line.startswith(f"stream    {128 * LENGTH:,} tokens drawn; {folder}/*.jsonl*: epoch ")
    assert "of 3, line " in line and f"; {folder}/d.csv: epoch " in line and "file 1 of 1, line " in line


def test_sources_are_mixed_by_their_weights(folder):
    words = [0.75, folder / "a.jsonl", 0.25, folder / "d.csv"]
    found = windows(stream(words, ["400:0,1", "600:1,1"]), 800)
    counts = [0, 0]
    texts = (TEXTS[:100], TEXTS[300:])
    own = [plain_loop([one], 800) for one in texts]
    shares = []
    for number, window in enumerate(found):
        source = next(source for source in (0, 1) if np.array_equal(window, own[source][counts[source]]))
        counts[source] += 1
        if number + 1 in (400, 600, 800):
            shares.append(counts[0])
    assert shares == [300, 300, 400]


def test_a_shuffle_is_of_groups(folder):
    plain = windows(stream([folder / "a.jsonl"]), 200)
    for seed in (1, 2):
        found = windows(stream([folder / "a.jsonl"], shuffle=50, seed=seed), 200)
        assert not np.array_equal(found, plain)
        for group in range(0, 200, 50):
            assert sorted(map(bytes, found[group : group + 50])) == sorted(map(bytes, plain[group : group + 50]))


MIXES = [
    (["a.jsonl"], [], 0),
    (["*.jsonl*"], [], 40),
    (["0.6", "*.jsonl*", "0.4", "d.csv"], ["250:0.1,0.9"], 37),
]


@pytest.mark.parametrize("mix", MIXES, ids=["one", "shuffled", "mixed"])
def test_a_stream_continues_at_random_places_with_other_workers(mix, folder):
    """Killed at a random sample and restored, also with another number of samples in a batch: the same from there on."""
    words, weights, shuffle = mix
    words = [word if word[0] == "0" else folder / word for word in words]
    whole = windows(stream(words, weights, shuffle), 900)
    dice = random.Random(5)
    for trial in range(8):
        stop, ahead = dice.randrange(1, 700), dice.randrange(0, 60)
        first = stream(words, weights, shuffle)
        windows(first, stop + ahead)
        stored = first.state(stop)
        second = stream(words, weights, shuffle, workers=2 * (trial == 0))
        (line,) = second.restore(stop, stored)
        assert line.startswith(f"resume    the stream continues at sample {stop:,}")
        np.testing.assert_array_equal(windows(second, 150, stop), whole[stop : stop + 150])


def test_samples_are_asked_for_again(folder):
    """A batch on other devices reads the same samples; one that is long gone is read from the newest state before it."""
    samples = stream([folder / "*.jsonl*"], shuffle=32, kept=64)
    try:
        first = [samples.window(number).tolist() for number in range(300)]
        for number in (299, 250, 240, 3, 299, 5):
            assert samples.window(number).tolist() == first[number]
    finally:
        samples.close()


def test_without_a_state_a_stream_is_read_again(folder):
    whole = windows(stream([folder / "a.jsonl"]), 300)
    samples = stream([folder / "a.jsonl"])
    assert "200 samples are read again" in samples.restore(200, None)[0]
    np.testing.assert_array_equal(windows(samples, 100, 200), whole[200:])


def changed(folder, change):
    """The error of a stream that is restored after `change`."""
    words = [folder / "a.jsonl", folder / "c.jsonl"]
    first = stream(words, shuffle=20)
    windows(first, 300)
    stored = first.state(240)
    settings = {"shuffle": 20} | (change(folder) or {})
    with pytest.raises(ConfigError) as error:
        second = stream(settings.pop("words", words), **settings)
        second.restore(240, settings.get("stored", stored))
        windows(second, 100, 240)
    assert "\n" not in str(error.value)
    return str(error.value)


CHANGES = {
    "had --shuffle-samples 20, and this run has 30": lambda folder: {"shuffle": 30},
    "had --sequence-length 16, and this run has 8": lambda folder: {"length": 8},
    "had files in its sources: [2], and this run has [1]": lambda folder: {"words": [folder / "a.jsonl"]},
    "had sources: 1, and this run has 2": lambda folder: {"words": [1, folder / "a.jsonl", 1, folder / "c.jsonl"]},
    "is not what the stream of the checkpoint read": lambda folder: [
        (folder / name).write_text(json.dumps({"text": "x" * 5000}) + "\n") for name in ("a.jsonl", "c.jsonl")
    ][:0],
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_stream_does_not_continue(message, folder, tmp_path):
    for name in ("a.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert message in changed(tmp_path, CHANGES[message])


WRONG = {  # the words of --stream, with settings: the message
    "{0}/none.jsonl": "cannot read",
    "{0}/*.parquet": "no file has such a name",
    "0.5 {0}/a.jsonl": None,
    "0.5 {0}/a.jsonl {0}/c.jsonl 1 {0}/a.jsonl": None,
    "{0}/a.jsonl 0.5 {0}/c.jsonl": "it has no weight, and others have",
    "1 {0}/a.jsonl 0.5": "the weight 0.5 has no source after it",
    "-1 {0}/a.jsonl 2 {0}/c.jsonl": "must be numbers of at least 0, and one above 0",
    "0 {0}/a.jsonl": "one above 0",
    "nan {0}/a.jsonl": "must be numbers of at least 0, and one above 0",
    "{0}/empty.jsonl": "there is no document with text in it",
    "{0}/words.jsonl": "there is no document with text in it",
    "{0}/table.csv": "has no column 'text' (columns: 'id', 'body'); pass --text-key id",
    "{0}/cut.jsonl.gz": "is truncated or damaged",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_streams_are_one_line(words, folder, tmp_path):
    for name in ("a.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "words.jsonl").write_text("no JSON\n" * 30)
    (tmp_path / "table.csv").write_text("id,body\n1,a\n")
    (tmp_path / "cut.jsonl.gz").write_bytes((folder / "b.jsonl.gz").read_bytes()[:-20])
    run = lambda: windows(stream(words.format(tmp_path).split()), 2000)  # noqa: E731
    if WRONG[words] is None:
        run()
        return
    with pytest.raises(ConfigError) as error:
        run()
    assert WRONG[words] in str(error.value) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("5", "give SAMPLES:WEIGHT"),
        ("x:1,2", "give SAMPLES:WEIGHT"),
        ("5:1", "it has 1 weight for 2 sources"),
        ("5:0,0", "weights must be"),
        ("5:1,2 4:1,1", "must grow"),
        ("5:1,", "give SAMPLES:WEIGHT"),
    ],
)
def test_wrong_weights_are_one_line(word, message):
    with pytest.raises(ConfigError, match=message):
        parse_weights(word.split(), 2)


def test_a_worker_that_dies_is_named(folder):
    samples = stream([folder / "a.jsonl"], workers=1)
    try:
        samples.window(0)
        for process in samples._workers._processes:
            process.kill()
        with pytest.raises(ConfigError, match="a process that tokenizes the stream ended.*fewer --stream-workers"):
            for number in range(5000):
                samples.window(number)
    finally:
        samples.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stream": ("a",), "text": "b"}, "--text and --stream exclude one another"),
        ({"stream": ("a",), "train_data_path": ("b",)}, "exclude one another"),
        ({"stream_weights": ("1:1",)}, "--stream-weights belongs to a stream"),
        ({"stream_split": "train"}, "--stream-split belongs to a stream"),
        ({"stream": ("s3:/bucket/a",)}, "is in an object store"),
        ({"stream": ("a",), "stream_workers": -1}, "stream_workers = -1"),
        ({"stream": ("a",), "shuffle_samples": -1}, "shuffle_samples = -1"),
    ],
)
def test_wrong_options_are_one_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings).validate()


def test_a_stream_has_validation_data_of_its_own():
    DataConfig(stream=("s3://bucket/*.parquet",), valid_data_path=("a",)).validate()


def make_run(folder, mesh=(1, 1), batch=8, ramp=(), **data) -> RunConfig:
    """A run on a stream: 12 batches, on `mesh` (data, pipe)."""
    train = TrainConfig(
        global_batch_size=batch, steps=12, batch_ramp=ramp, validation_batches=0, precision="fp32", warmup_steps=1
    )
    model = ModelConfig(name="test", layers=2, hidden=16, heads=2, vocabulary=257, sequence_length=LENGTH)
    words = ("0.5", str(folder / "*.jsonl*"), "0.5", str(folder / "d.csv"))
    settings = {"stream": words, "tokenizer": "byte", "shuffle_samples": 20, "stream_workers": 0} | data
    parallel = ParallelConfig(data=mesh[0], pipe=mesh[1], tensor=1, microbatch_size=2, schedule="1f1b")
    return RunConfig(model, parallel, train, DataConfig(**settings))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"mesh": (4, 1), "stream_workers": 1}),
        ({"mesh": (2, 1)}, {"batch": 32}),
        ({"ramp": (4, 4, 24)}, {"ramp": (4, 4, 24), "mesh": (2, 1)}),
        ({"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True},) * 2,
    ],
    ids=["layout", "batch", "ramp", "documents"],
)
def test_the_batches_of_a_run_go_on_on_another_layout(first, second, folder):
    """The samples by their numbers: the same on any layout, with any batch, from where a checkpoint was."""

    def read(run, start, stored=None):
        batches = open_data(run).batches
        try:
            if stored:
                batches.restore(start, stored)
            found, consumed = {}, start
            while consumed < 96:
                batch = batches.batch(consumed)
                for place in np.ndindex(batch["sample"].shape):
                    found[int(batch["sample"][place])] = {name: array[place].tolist() for name, array in batch.items()}
                consumed += batches.at(consumed).global_batch_size
                states[consumed] = batches.state(consumed)
            return found
        finally:
            batches.close()

    states: dict[int, str] = {}
    whole = read(make_run(folder, **first), 0)
    assert ("document" in whole[0]) == bool(first.get("reset_attention_mask"))
    for start in (32, 64):
        rest = read(make_run(folder, **second), start, states[start])
        assert min(rest) == start and all(rest[number] == whole[number] for number in rest if number < 96)


@pytest.mark.slow
def test_a_run_on_a_stream_is_stopped_and_goes_on_on_another_layout(folder, tmp_path, capsys):
    whole = Trainer(make_run(folder), devices=jax.devices()[:1]).fit()
    output = OutputConfig(run_dir=str(tmp_path), exit_after_minutes=1e-6, tensorboard=False)
    assert Trainer(make_run(folder), output=output, devices=jax.devices()[:1]).fit().metrics["step"] == 1
    output = dataclasses.replace(output, exit_after_minutes=None, resume="auto")
    rest = Trainer(make_run(folder, (2, 2), stream_workers=2), output=output, devices=jax.devices()[:4]).fit()
    assert "the stream continues at sample 8" in capsys.readouterr().out
    assert rest.metrics["step"] == 12
    assert rest.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)

"""GPT samples compared with the concatenated documents; the cached index; blends and --data-path."""

import concurrent.futures
import multiprocessing
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data.blending import Blend, BlendedSamples, blend_order, exhaustive_order, split_bounds
from megajax.data.gpt_samples import GPTSamples
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.loader import Loader, TokenSamples
from megajax.data.sample_indices import cached_arrays


def write(prefix, documents) -> IndexedDataset:
    with IndexedWriter(prefix, np.uint16, overwrite=True) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def whole(dataset, samples=None, length=4, seed=0, **more) -> GPTSamples:
    return GPTSamples(dataset, (0, len(dataset)), samples, length, seed, **more)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 30), st.integers(0, 9))
def test_samples_tile_the_shuffled_documents(tmp_path_factory, lengths, length, samples, seed):
    """In unshuffled order, the samples are the concatenated documents of each epoch, overlapping by one token."""
    if sum(lengths) <= length:
        return
    numbers = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    ours = whole(write(tmp_path_factory.mktemp("pair") / "a", numbers), samples, length, seed)
    assert ours.count >= samples
    stream = np.concatenate([numbers[i] for i in ours.index.document])
    epochs = len(ours.index.document) // len(lengths)
    assert sorted(stream.tolist()) == sorted(np.tile(np.arange(sum(lengths)), epochs).tolist())
    windows = {int(place): ours.window(i).tolist() for i, place in enumerate(ours.index.shuffle)}
    assert [windows[i] for i in range(ours.count)] == [
        stream[i * length : i * length + length + 1].tolist() for i in range(ours.count)
    ]


def test_an_index_by_hand(tmp_path):
    """Documents of 5, 3, 7 and 4 tokens in the order 2, 0, 3, 1, in samples of 4."""
    from megajax.data.sample_indices import _sample_starts

    index = _sample_starts(np.array([5, 3, 7, 4], np.int32), np.array([2, 0, 3, 1], np.int32), 0, 4, 4)
    assert index.tolist() == [[0, 0], [0, 4], [1, 1], [2, 0], [3, 0]]


def test_missing_samples_and_short_datasets_are_refused(tmp_path):
    dataset = write(tmp_path / "a", [[1] * 9])
    samples = whole(dataset)
    assert samples.count == 2
    for index in (-1, 2):
        with pytest.raises(ConfigError, match="needs sample"):
            samples.window(index)
    with pytest.raises(
        ConfigError, match=r"a, sequences 0 to 1: a split has 9 tokens, a sample needs 10, and a blend with"
    ):
        whole(dataset, length=9)


def test_the_cached_index_is_found_by_content(tmp_path):
    first = whole(write(tmp_path / "a", [[1, 2, 3], [4, 5, 6]]))
    (entry,) = [path for path in (tmp_path / "index_cache").iterdir() if path.is_dir()]
    before = entry.stat().st_mtime_ns
    (tmp_path / "elsewhere").mkdir()
    for ending in ("bin", "idx"):
        (tmp_path / f"a.{ending}").rename(tmp_path / f"elsewhere/b.{ending}")
    again = whole(IndexedDataset(tmp_path / "elsewhere/b"), cache=tmp_path / "index_cache")
    assert entry.stat().st_mtime_ns == before and again.window(0).tolist() == first.window(0).tolist()
    other = whole(write(tmp_path / "a", [[1, 2], [3, 4, 5, 6, 7]]))
    assert other.index.sample.tolist() != first.index.sample.tolist()
    assert len([path for path in (tmp_path / "index_cache").iterdir() if path.is_dir()]) == 2


@pytest.mark.parametrize("place", [34, 54])
@pytest.mark.parametrize("cached", [False, True])
def test_a_damaged_dataset_is_refused_with_and_without_a_cached_index(tmp_path, cached, place):
    dataset = write(tmp_path / "a", [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    if cached:
        whole(dataset)
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[place] ^= 4  # the length of the first sequence, or the offset of the second
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"a\.idx, byte 54: offsets\[1\] is [26]"):
        whole(IndexedDataset(tmp_path / "a"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_a_damaged_cache_is_built_again(tmp_path, capsys, damage):
    dataset = write(tmp_path / "a", [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10]])
    windows = [whole(dataset).window(i).tolist() for i in range(2)]
    (entry,) = [path for path in (tmp_path / "index_cache").iterdir() if path.is_dir()]
    names = {path.name for path in entry.iterdir()}
    assert names == {"checksum", "description.json", "document.npy", "sample.npy", "shuffle.npy"}
    for name in sorted(names):
        raw = (entry / name).read_bytes()
        (entry / name).unlink()
        changed = {"flip": raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:], "truncate": raw[: len(raw) // 2], "empty": b""}
        if damage in changed:
            (entry / name).write_bytes(changed[damage])
        again = whole(dataset)
        assert [again.window(i).tolist() for i in range(2)] == windows
        assert (entry / name).read_bytes() == raw
        assert re.fullmatch(r"the cached sample index .* is built again\n", capsys.readouterr().err)
    assert [path for path in (tmp_path / "index_cache").iterdir() if path.is_dir()] == [entry]


def test_ids_beyond_int32_are_refused_with_their_place(tmp_path):
    for dtype, token, legal in ((np.int64, 2**31, 2**31 - 1), (np.int64, -(2**31) - 1, 5), (np.int64, 2**32 + 5, 5)):
        with IndexedWriter(tmp_path / "a", dtype, overwrite=True) as writer:
            for document in ([1, 2, 3, legal], [4, 5, token]):
                writer.add_document(document)
        samples = whole(IndexedDataset(tmp_path / "a"), length=6)
        message = rf"a\.bin, byte 48: token id {token} \(the file's token 6\); ids must be 0 to 2147483647"
        with pytest.raises(ConfigError, match=message):
            samples.window(0)
        good = GPTSamples(IndexedDataset(tmp_path / "a"), (0, 1), 1, 3, 0)
        assert good.window(0).tolist() == [1, 2, 3, legal] and good.window(0).dtype == np.int32


def test_ids_outside_the_vocabulary_are_refused_with_their_place(tmp_path):
    """Of the tokens 1 to 20 in documents of 5, token 17 has number 16 in the file, whatever the order."""
    dataset = write(tmp_path / "a", np.arange(1, 21).reshape(4, 5))
    loader = Loader(BlendedSamples([whole(dataset, length=3)], [1.0], 6), 6, 1, vocabulary=17)
    with pytest.raises(
        ConfigError, match=r"a\.bin, byte 32: token id 17 \(the file's token 16\), but the model has ids 0 to"
    ):
        loader.batch(0)
    text = Loader(TokenSamples(np.array([3, 1, 4, 1, 5, 9, 2, 6]), 7, None), 1, 1, vocabulary=9)
    with pytest.raises(ConfigError, match="the text's token 5: token id 9, but the model has ids 0 to 8"):
        text.batch(0)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="pass --data-cache DIR"):
        whole(write(tmp_path / "a", [[1] * 9]), cache=tmp_path / "file")


def _build_slowly(folder: str) -> int:
    def build():
        import time

        with open(f"{folder}/built", "a") as log:
            log.write("x")
        time.sleep(0.5)
        return {"array": np.arange(5)}

    return int(cached_arrays(f"{folder}/cache", {"a": 1}, [np.arange(3)], build)["array"].sum())


def test_one_process_builds_while_others_wait(tmp_path):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(3, context) as pool:
        assert list(pool.map(_build_slowly, [str(tmp_path)] * 3)) == [10] * 3
    assert (tmp_path / "built").read_text() == "x"


def _greedy(weights, size, limits=None):
    """Megatron's sequential loop."""
    counts, order = [0] * len(weights), []
    for i in range(size):
        behind = [
            w * max(i, 1) - c if limits is None or c < limits[d] else -np.inf
            for d, (w, c) in enumerate(zip(weights, counts, strict=True))
        ]
        drawn = behind.index(max(behind))
        order.append((drawn, counts[drawn]))
        counts[drawn] += 1
    return order


@settings(max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 9), st.floats(1e-3, 1)), min_size=1, max_size=12), st.integers(1, 4000))
def test_the_order_equals_the_sequential_loop(weights, size):
    weights = (np.array(weights, float) / np.sum(np.array(weights, float))).tolist()
    dataset, sample = blend_order(np.array(weights), size)
    assert list(zip(dataset.tolist(), sample.tolist(), strict=True)) == _greedy(weights, size)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_an_exhaustive_blend_equals_the_sequential_loop(sizes):
    dataset, sample = exhaustive_order(np.array(sizes))
    weights = [size / float(sum(sizes)) for size in sizes]
    assert list(zip(dataset.tolist(), sample.tolist(), strict=True)) == _greedy(weights, sum(sizes), sizes)


def test_wrong_estimates_change_no_result(monkeypatch):
    """The estimated counts affect the time only."""
    weights = np.array([0.5, 0.3, 0.2])
    right = blend_order(weights, 3000)
    monkeypatch.setattr("megajax.data.blending._rounded", lambda w, draws: np.outer(draws, [0, 0, 1.0]))
    monkeypatch.setattr("megajax.data.blending.RUN_UP", 0)
    for ours, wanted in zip(blend_order(weights, 3000), right, strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_an_order_by_hand():
    """Worked out by hand: of equal datasets, the first is drawn."""
    assert blend_order(np.array([0.5, 0.25, 0.25]), 8)[0].tolist() == [0, 1, 2, 0, 0, 1, 2, 0]


def test_a_blend_with_too_few_samples_is_refused(tmp_path):
    """The error is raised before training and names the dataset."""
    parts = [whole(write(tmp_path / name, [[1] * 41])) for name in "ab"]
    with pytest.raises(ConfigError, match=r"draws 15 samples from .*/a, which has 10.*lower weight"):
        BlendedSamples(parts, [0.75, 0.25], 20)


def test_a_blend_is_parsed():
    assert Blend.parse(["a"]) == Blend(("a",), None)
    assert Blend.parse(["a", "b"]) == Blend(("a", "b"), None)
    assert Blend.parse(["a", "b", "c"]) == Blend(("a", "b", "c"), None)
    assert Blend.parse(["3", "a", "1e0", "b"]) == Blend(("a", "b"), (3.0, 1.0))
    for words, message in {
        ("1", "a", "b", "c"): "expected a weight instead of 'b'",
        ("1", "a", "b"): "must alternate",
        ("0", "a", "1", "b"): "weight 0; weights must be above 0",
        ("nan", "a"): "weight nan",
    }.items():
        with pytest.raises(ConfigError, match=message):
            Blend.parse(words)


def test_a_split_is_parsed():
    assert split_bounds("1") == [(0, 1.0), None, None]
    assert split_bounds("0,1") == [None, (0.0, 1.0), None]
    assert [part[1] for part in split_bounds("2,1,1")] == [0.5, 0.75, 1.0]
    for text in ("", "a", "1,2,3,4", "0,0", "-1,2", "nan"):
        with pytest.raises(ConfigError, match="--split 969,30,1"):
            split_bounds(text)


def test_an_empty_split_is_an_error(tmp_path):
    """megatron-core 0.16.1 counts epochs in an infinite loop."""
    write(tmp_path / "a", [[1] * 9] * 3)
    with pytest.raises(ConfigError, match="sequences 3 to 3: a split has 0 tokens"):
        Blend.parse([str(pathlib.Path(tmp_path / "a"))]).samples(split_bounds("999,1")[1], 1, 4, 0)

"""Pairs in an object store, on fsspec's file system in memory: read by ranges, and kept on this machine."""

import time

import fsspec
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data import remote_pair
from megajax.data.gpt_samples import GPTSamples
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.remote_pair import BLOCK, CachedFile
from megajax.schedules import paths

SYSTEM = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def no_thread(monkeypatch):
    monkeypatch.setattr(CachedFile, "_fill", lambda self: None)
    monkeypatch.setattr(remote_pair, "is_store", lambda name: name.startswith("memory://"))
    monkeypatch.setattr(remote_pair.time, "sleep", lambda seconds: None)


@pytest.fixture
def read(monkeypatch):
    """The ranges that the store is asked for."""
    found, original = [], type(SYSTEM).cat_file

    def cat_file(name, start=None, end=None, **named):
        found.append((start, end))
        return original(SYSTEM, name, start=start, end=end, **named)

    monkeypatch.setattr(SYSTEM, "cat_file", cat_file)
    return found


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_blocks_are_read_once_and_what_is_damaged_or_replaced_again(tmp_path, read):
    url, data = "memory://bucket/blocks.bin", content(3 * BLOCK + 100)
    SYSTEM.pipe_file("/bucket/blocks.bin", data)
    file = CachedFile(url, tmp_path, lazy=True)
    assert file.read(10, 20).tobytes() == data[10:20] and read == [(0, BLOCK)]
    assert file.read(BLOCK - 5, BLOCK + 5).tobytes() == data[BLOCK - 5 : BLOCK + 5] and read[1:] == [(BLOCK, 2 * BLOCK)]
    assert file.read(0, 2 * BLOCK).tobytes() == data[: 2 * BLOCK] and len(read) == 2
    other = CachedFile(url, tmp_path, lazy=True)  # of another process
    assert other.read(0, len(data)).tobytes() == data and read[2:] == [(2 * BLOCK, 3 * BLOCK), (3 * BLOCK, len(data))]
    (copy,) = tmp_path.glob("*.part")
    with open(copy, "r+b") as opened:
        opened.seek(BLOCK + 7)
        opened.write(bytes([data[BLOCK + 7] ^ 1]))
    assert CachedFile(url, tmp_path).read(0, len(data)).tobytes() == data and read[4:] == [(BLOCK, 2 * BLOCK)]
    time.sleep(0.01)
    SYSTEM.pipe_file("/bucket/blocks.bin", later := content(3 * BLOCK + 100, seed=1))
    assert CachedFile(url, tmp_path).read(0, len(later)).tobytes() == later


def test_a_part_of_the_answer_and_a_store_that_is_away_are_no_data(tmp_path, monkeypatch):
    SYSTEM.pipe_file("/bucket/half.bin", data := content(1000))
    file = CachedFile("memory://bucket/half.bin", tmp_path)
    answers = [data[:500], OSError("the connection was lost"), data]

    def cat_file(*arguments, **named):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(SYSTEM, "cat_file", cat_file)
    assert file.read(0, 1000).tobytes() == data
    answers[:] = [OSError("the connection was lost")]
    with pytest.raises(
        ConfigError, match="cannot read memory://bucket/half.bin: OSError: the connection was lost; pass"
    ):
        CachedFile("memory://bucket/half.bin", tmp_path / "other").read(0, 10)


def test_a_copy_without_room_is_refused(tmp_path, monkeypatch):
    SYSTEM.pipe_file("/bucket/large.bin", content(1000))
    usage = remote_pair.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(remote_pair.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ConfigError, match="GB are free: pass --data-cache a folder with room, or copy the pair"):
        CachedFile("memory://bucket/large.bin", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match="cannot keep memory://bucket/large.bin in .*file/a: Not a directory; pass --data-"
    ):
        CachedFile("memory://bucket/large.bin", tmp_path / "file" / "a")


def test_a_pair_has_the_samples_that_it_has_on_a_disk(tmp_path):
    chance = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        for length in chance.integers(1, 300, 50):
            writer.add_document(chance.integers(0, 60000, length))
    for end in ("bin", "idx"):
        SYSTEM.pipe_file(f"/bucket/pair.{end}", (tmp_path / f"pair.{end}").read_bytes())
    near, far = IndexedDataset(tmp_path / "pair"), IndexedDataset("memory://bucket/pair", cache=tmp_path / "cache")
    far.check()
    assert far.dtype == near.dtype and len(far.tokens) == len(near.tokens) and far.cache_folder == tmp_path / "cache"
    mask = near.tokens > 50000
    for key in (slice(None), slice(3, 40, 7), slice(-5, None), 9, -1, np.array([[4, 2], [-1, 0]]), mask):
        np.testing.assert_array_equal(far.tokens[key], near.tokens[key])
    here, there = (GPTSamples(one, (0, 50), 40, 16, 1234, tmp_path / name) for one, name in ((near, "a"), (far, "b")))
    assert all((here.window(number) == there.window(number)).all() for number in range(40))
    for end, message in (("none", "there is no such file"), ("pair.bin", "there is no such file")):
        with pytest.raises(ConfigError, match=f"cannot read memory://bucket/{end}.idx: {message}"):
            IndexedDataset(f"memory://bucket/{end}", cache=tmp_path / "cache")
    SYSTEM.pipe_file("/bucket/pair.bin", (tmp_path / "pair.bin").read_bytes()[:-2])
    with pytest.raises(
        ConfigError, match="memory://bucket/pair.bin, byte .*: it is truncated, or the two files are not a"
    ):
        IndexedDataset("memory://bucket/pair", cache=tmp_path / "cache")


SIGNED = "https://bucket.s3.amazonaws.com/a.jsonl?X-Amz-Signature=SECRET"


def test_places_and_names_of_pairs(capsys):
    for word in ("0.3", "books=s3://bucket/a", "gs://bucket/a", "a/b"):
        assert paths.named_store_path(word) == word
    for word in ("books=s3:/bucket/a", "books=s3://key:SECRET@bucket/a", "s3://bucket"):
        with pytest.raises(Exception, match="pass s3://") as caught:
            paths.named_store_path(word)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(Exception, match="has a signature in its query") as caught:
        paths.source_path(SIGNED)
    assert "SECRET" not in str(caught.value)

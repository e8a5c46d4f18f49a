"""Pairs that are copied to an object store, on fsspec's file system in memory; tests/stores has servers, with faults."""

import pathlib
import uuid

import fsspec
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data import preprocess, stored_pairs
from megajax.data.indexed import IndexedWriter
from megajax.data.stored_pairs import PairPlaces


@pytest.fixture
def prefixes(monkeypatch):
    monkeypatch.setattr(stored_pairs, "is_store", lambda place: place.startswith("memory://"))
    folder = uuid.uuid4().hex
    return [f"memory://{folder}/a", f"memory://{folder}/b"]


def write(prefixes, overwrite: bool = False, ids: int = 3) -> pathlib.Path:
    with PairPlaces(prefixes, overwrite) as places:
        for prefix in places.local:
            with IndexedWriter(prefix, np.uint16) as writer:
                writer.add_document(np.arange(ids))
        places.copy()
    return pathlib.Path(places.local[0]).parent


def stored(prefix: str) -> dict[str, bytes]:
    system = fsspec.filesystem("memory")
    return {
        name.rpartition("/")[2]: system.cat_file(name) for name in system.ls(prefix.rpartition("/")[0], detail=False)
    }


def test_the_index_is_copied_last_and_deleted_first(prefixes, monkeypatch):
    system, order = fsspec.filesystem("memory"), []

    def noted(name, work):
        return lambda *words: (order.append((name, words[-1].rpartition(".")[2])), work(*words))

    for name in ("put_file", "rm_file"):
        monkeypatch.setattr(system, name, noted(name, getattr(system, name)))
    assert not write(prefixes).exists()
    probed = order.pop(0)
    assert probed == ("rm_file", "unfinished")
    assert order == [("rm_file", "idx"), ("put_file", "bin"), ("put_file", "json"), ("put_file", "idx")] * 2
    assert set(stored(prefixes[0])) == {f"{name}.{end}" for name in "ab" for end in ("bin", "idx", "sums.json")}
    before = stored(prefixes[0])
    with pytest.raises(ConfigError, match=r"/a.bin already exists: pass --overwrite to replace it, or another --out"):
        write(prefixes)
    write(prefixes, overwrite=True, ids=9)
    assert len(stored(prefixes[0])["a.bin"]) == 18 != len(before["a.bin"])


def test_a_store_that_cannot_be_written_is_refused_at_once(prefixes, monkeypatch):
    def refuse(*words):
        raise PermissionError

    monkeypatch.setattr(fsspec.filesystem("memory"), "pipe_file", refuse)
    with pytest.raises(ConfigError, match="cannot write memory:.*/a.unfinished: permission denied"):
        PairPlaces(prefixes, False)


@pytest.mark.parametrize("fault", ["fails", "cuts", "changes"])
def test_a_store_that_fails_leaves_no_pair_and_the_files_here(prefixes, monkeypatch, fault):
    def put_file(local, name):
        content = pathlib.Path(local).read_bytes()
        if fault == "fails":
            raise ConnectionError("the store is away")
        system.pipe_file(name, content[:-1] + b"" if fault == "cuts" else content[:-1] + b"\xff")

    system = fsspec.filesystem("memory")
    monkeypatch.setattr(system, "put_file", put_file)
    message = {
        "fails": "the store is away",
        "cuts": "it has 5 of the 6 bytes",
        "changes": "its bytes from 0 on are not",
    }
    with pytest.raises(
        ConfigError, match=f"cannot write memory:.*a.bin: .*{message[fault]}.*; the pair is in /"
    ) as error:
        write(prefixes)
    kept = pathlib.Path(str(error.value).partition("the pair is in ")[2].partition(":")[0])
    assert {path.name for path in kept.iterdir()} == {
        f"{name}.{end}" for name in "ab" for end in ("bin", "idx", "sums.json")
    }
    assert not any(name.endswith(".idx") for name in (stored(prefixes[0]) if fault != "fails" else {}))


def test_what_does_not_combine_is_refused(capsys):
    for words, message in (
        (
            "--out s3://bucket/a --shard 0/2",
            "is in an object store, to which one process writes: pass --shard and --ray a",
        ),
        ("--out gs://bucket/a --ray 2", "is in an object store, to which one process writes: pass --shard and --ray a"),
        ("--out s3://bucket", "names no folder in its bucket: pass s3://bucket/FOLDER"),
        ("--out s3://user:secret@bucket/a", "has credentials or a query in it, which would be logged"),
        ("--out az://bucket/a", "is in a store that megajax does not read or write"),
        ("merge --input a --out s3://bucket/a", "is in an object store or a remote file system"),
    ):
        command = (
            words.split() if words.startswith("merge") else ["--input", "a", "--tokenizer", "byte", *words.split()]
        )
        assert preprocess.main(command) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and "secret" not in error, error

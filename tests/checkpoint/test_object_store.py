"""A run's files in an object store, on fsspec's file system in memory. tests/stores has servers, with faults."""

import errno
import json
import logging
import pathlib
import time
import uuid

import fsspec
import pytest
import upath

from megajax.checkpoint import checksums, mirror, object_store, store_drivers, store_folders, store_lock
from megajax.checkpoint.directory import COMMITTED, NAME, PROBE, choose, complete_steps
from megajax.checkpoint.mirror import Mirror, fetch
from megajax.checkpoint.run_files import refuse_foreign
from megajax.checkpoint.store_lock import StoreLock, _Lease
from megajax.config import ConfigError
from megajax.data.remote import store_settings
from megajax.train.goodput import read_lines

FAST = {"lease": 0.6, "heartbeat": 0.1}


@pytest.fixture
def folder():
    """An empty folder of a store."""
    return upath.UPath(f"memory://bucket/{uuid.uuid4().hex}")


@pytest.fixture
def away(monkeypatch):
    """Has the store fail every request until it is called with False."""
    system = fsspec.filesystem("memory")

    def fail(*arguments, **named):
        raise ConnectionError(errno.ECONNREFUSED, "cannot connect to the store")

    def set_away(is_away: bool) -> None:
        for name in ("ls", "find", "info", "cat_file", "pipe_file", "rm_file", "rm", "put_file"):
            monkeypatch.setattr(system, name, fail) if is_away else monkeypatch.undo()

    return set_away


def save(folder, step: int, committed: bool = True) -> None:
    for name in ("state/d/1", "meta/metadata", *([COMMITTED] if committed else [])):
        object_store.write(folder / NAME.format(step) / name, name.encode())


def test_a_checkpoint_is_complete_with_the_object_that_is_written_last(folder):
    assert complete_steps(folder) == []
    for step in (3, 12, 7):
        save(folder, step, committed=step != 12)
    object_store.write(folder / "step_5" / COMMITTED, b"")
    assert complete_steps(folder) == [3, 7]
    store_folders.make_writable(folder)
    kept = {NAME.format(3), NAME.format(7), "step_5", PROBE}
    assert {path.name for path in object_store.children(folder)} == kept
    store_folders.delete(folder / NAME.format(3))
    store_folders.move(folder / NAME.format(7), folder / "step_00000007.set-aside-1")
    assert complete_steps(folder) == []
    assert set(object_store.files_below(folder / "step_00000007.set-aside-1")) == {
        "state/d/1",
        "meta/metadata",
        COMMITTED,
    }


def test_resuming_from_a_store_that_does_not_answer_is_refused(folder, away):
    save(folder, 4)
    assert choose(folder, "auto")[0] == folder / NAME.format(4)
    with pytest.raises(ConfigError, match="has checkpoints already .steps 4."):
        choose(folder, "no")
    with pytest.raises(ConfigError, match="no checkpoint of step 5 in memory://"):
        choose(folder, "5")
    away(True)
    for resume in ("no", "auto", "4"):
        with pytest.raises(ConfigError, match="cannot read memory://.*: cannot connect to the store"):
            choose(folder, resume)


def test_a_folder_with_the_files_of_others_is_refused(folder):
    object_store.write(folder / "model.safetensors", b"")
    with pytest.raises(ConfigError, match="holds a Hugging Face model"):
        refuse_foreign(folder)
    object_store.write(folder / "config.toml", b"[parallel]\n")
    refuse_foreign(folder)


def test_a_lock_is_refused_while_its_holder_lives_and_free_after_it(folder):
    first, again = StoreLock(folder, **FAST), StoreLock(folder, **FAST)
    with pytest.raises(ConfigError, match="is in use by process .*: wait until it has ended"):
        _Lease(folder, **FAST)
    first.release()
    with pytest.raises(ConfigError, match="is in use by"):
        _Lease(folder, **FAST)
    again.release()
    _Lease(folder, **FAST).release()
    assert [path.name for path in object_store.children(folder / store_lock.NAME)] == ["00000002"]


def test_a_lock_that_is_not_refreshed_is_taken_over_and_its_holder_stops(folder, monkeypatch):
    suspended = _Lease(folder, lease=0.3, heartbeat=60)
    later = _Lease(folder, lease=0.3, heartbeat=0.05)
    suspended.refresh()
    with pytest.raises(ConfigError, match="It took over because this process was suspended"):
        suspended.require()
    suspended.release()  # and so leaves the lock alone
    with pytest.raises(ConfigError, match="is in use by"):
        _Lease(folder, lease=0.3, heartbeat=0.05)
    later.release()
    monkeypatch.setattr(store_lock, "_is_dead", lambda holder: True)
    object_store.write(folder / store_lock.NAME / "00000003", json.dumps({"pid": 1}).encode())
    start = time.monotonic()
    _Lease(folder, lease=60, heartbeat=0.05).release()
    assert time.monotonic() - start < 5


def test_a_lock_that_vanishes_is_written_again(folder, away):
    made = []
    lock = StoreLock(folder, recreate=lambda: made.append(1), lease=0.4, heartbeat=0.05)
    away(True)
    time.sleep(0.3)
    assert lock.check(now=True) == [] and not made
    with pytest.raises(OSError, match="cannot connect"):
        lock.require()
    away(False)
    object_store.remove_tree(folder)
    lock.require()
    assert ["has vanished and is created again" in line for line in lock.check()] == [True] and made == [1]
    assert lock.check() == []
    lock.release()


def test_a_store_without_conditions_and_one_that_cannot_be_written_are_refused(folder, monkeypatch, away):
    system = fsspec.filesystem("memory")
    write = type(system).pipe_file
    monkeypatch.setattr(system, "pipe_file", lambda path, data, mode="overwrite": write(system, path, data))
    with pytest.raises(ConfigError, match="overwrites an object that was to be created only if there is none"):
        StoreLock(folder)
    away(True)
    with pytest.raises(
        ConfigError, match="cannot lock the run directory memory://.*: cannot connect to the store; pass"
    ):
        StoreLock(folder)


def everything(name: str) -> bool:
    return True


def test_files_are_copied_in_parts_and_read_joined(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(mirror, "PART", 100)
    lines = [json.dumps({"event": "start", "time": 1.0, "step": step}) + "\n" for step in range(20)]
    copies = Mirror(folder, everything, interval=60)
    log = copies.local / "goodput.jsonl"
    for count in (1, 7, 20):
        log.write_text("".join(lines[:count]))
        (copies.local / "tensorboard").mkdir(exist_ok=True)
        (copies.local / "tensorboard" / "events").write_bytes(b"x" * 10 * count)
        (copies.local / "config.tmp").write_text("unfinished")
        copies._copy_once()
    assert copies.close() == [] and not copies.local.exists()
    names = set(object_store.files_below(folder))
    assert {"goodput.jsonl", "goodput.jsonl.part-00001", "tensorboard/events"} < names and "config.tmp" not in names
    fetch(folder, tmp_path, everything)
    assert (tmp_path / "goodput.jsonl").read_text() == "".join(lines) and len(
        read_lines(tmp_path / "goodput.jsonl")
    ) == 20
    assert (tmp_path / "tensorboard" / "events").read_bytes() == b"x" * 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["goodput.jsonl", "tensorboard"]

    later = Mirror(
        folder, lambda name: name == "goodput.jsonl", interval=60
    )  # as a resumed run, which drops later lines
    assert [path.name for path in later.local.iterdir()] == ["goodput.jsonl"]
    (later.local / "goodput.jsonl").write_text(lines[0])
    assert later.close() == []
    assert set(object_store.files_below(folder)) == {"goodput.jsonl", "tensorboard/events"}
    assert object_store.read(folder / "goodput.jsonl").decode() == lines[0]


def test_logs_are_copied_when_asked_and_what_vanishes_here_stays_in_the_store(folder, away):
    copies = Mirror(folder, everything, interval=60)
    for name in ("log.jsonl", "logs/process_0.log", "config.toml"):
        (copies.local / name).parent.mkdir(exist_ok=True)
        (copies.local / name).write_text("1\n")
    copies.copy_logs()
    assert set(object_store.files_below(folder)) == {"log.jsonl", "logs/process_0.log"}
    copies._copy_once()
    (copies.local / "config.toml").unlink()
    (copies.local / "log.jsonl").write_text("1\n2\n")
    away(True)
    with pytest.raises(OSError, match="cannot connect to the store"):
        copies.copy_logs()
    away(False)
    copies.copy_logs()
    assert object_store.read(folder / "log.jsonl") == b"1\n2\n" and copies.close() == []
    assert set(object_store.files_below(folder)) == {"log.jsonl", "logs/process_0.log", "config.toml"}


def test_files_are_kept_while_the_store_is_away_and_copied_when_it_is_back(folder, away):
    copies = Mirror(folder, everything, interval=60)
    log = copies.local / "log.jsonl"
    log.write_text("1\n")
    copies._copy_once()
    away(True)
    log.write_text("1\n2\n")
    copies._copy_once()
    copies._copy_once()
    said = copies.messages()
    assert len(said) == 1 and "cannot be written: cannot connect to the store; the training continues" in said[0]
    assert copies.messages() == []
    left = copies.close(attempts=1)
    assert len(left) == 1 and f"the logs of this run are in {copies.local}" in left[0] and log.exists()
    away(False)
    copies._copy_once()
    assert copies.messages() == [f"{folder} can be written again, and has all logs"]
    assert object_store.read(folder / "log.jsonl") == b"1\n2\n"


def test_a_missing_library_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("builtins.__import__", _without_upath(__import__))
    with pytest.raises(ConfigError, match="s3://bucket/run is in an object store .*: pip install 'megajax.stores.'"):
        object_store.place("s3://bucket/run")
    assert object_store.place("runs") == pathlib.Path("runs").absolute()


def _without_upath(original):
    def load(name, *arguments, **named):
        if name in ("upath", "s3fs"):
            raise ImportError(f"No module named {name!r}")
        return original(name, *arguments, **named)

    return load


@pytest.mark.parametrize(("mode", "content"), [("w", "é\n"), ("wb", b"\x00\xff")])
def test_the_small_files_of_orbax_are_written_whole(folder, monkeypatch, away, mode, content):
    monkeypatch.setattr(store_drivers, "place", lambda path: folder / path.rpartition("/")[2])
    with store_drivers._open(None, "s3://bucket/a", mode) as file:
        file.write(content)
        assert not object_store.exists(folder / "a")
    assert object_store.read(folder / "a") == (content.encode() if mode == "w" else content)
    away(True)
    with pytest.raises(OSError, match="cannot connect"), store_drivers._open(None, "gs://bucket/b", mode) as file:
        file.write(content)
    assert store_drivers._open(lambda *words: words, "s3://bucket/a", "rb") == ("s3://bucket/a", "rb")
    assert store_drivers._open(lambda *words: words, "/a/b", mode) == ("/a/b", mode)


@pytest.mark.parametrize(("before", "after"), [(logging.NOTSET, logging.CRITICAL), (logging.DEBUG, logging.DEBUG)])
def test_errors_that_are_raised_have_no_traceback_in_the_log(monkeypatch, before, after):
    logger = logging.getLogger("gcsfs")
    monkeypatch.setattr(logger, "level", before)
    store_settings("gs://bucket/a")
    assert logger.level == after


def test_the_drivers_of_arrays_are_those_of_their_places(monkeypatch):
    monkeypatch.delenv("TENSORSTORE_GCS_BACKEND", raising=False)
    found = store_drivers.kvstore("gs://bucket/runs/a")
    assert {name: found[name] for name in ("driver", "bucket", "path")} == {
        **{"driver": "gcs", "bucket": "bucket", "path": "runs/a"}
    }
    assert [store_drivers._normalized(path) for path in ("s3://b//x/", "gs:/b/x", "/a//b/", "/a/s3:/b")] == [
        *("s3://b/x", "gs://b/x", "/a/b", "/a/s3:/b")
    ]
    assert store_drivers.orbax_path(pathlib.Path("/a/b")) == pathlib.Path("/a/b")


def test_a_file_that_another_process_renames_meanwhile_is_left_out(tmp_path, monkeypatch):
    """As tensorstore's files, which have another name until they are complete."""
    (tmp_path / "file").write_bytes(b"abc")
    walk = lambda path: iter([(str(path), [], ["file", "file.__lock"])])  # noqa: E731
    monkeypatch.setattr("os.walk", walk)
    assert object_store.files_below(tmp_path) == {"file": 3}


def test_checksums_of_own_files_need_none_of_another_process(tmp_path):
    for process in (0, 1):
        (tmp_path / f"state/ocdbt.process_{process}/d").mkdir(parents=True)
        (tmp_path / f"state/ocdbt.process_{process}/d/file").write_bytes(b"abc")
    own, listed = checksums.write_own(tmp_path, 0)
    assert own == tmp_path / "state/ocdbt.process_0/d/file"
    assert json.loads(listed.read_text()) == {"state/ocdbt.process_0/d/file": [3, 891568578]}

"""Power loss: everything in a checkpoint is forced to the disk before its directory has the final name."""

import os
import pathlib
import stat

import pytest

from megajax.checkpoint import checksums, durable
from megajax.checkpoint.directory import NAME
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.config import OutputConfig
from tests import small


def test_every_file_and_directory_is_synced_before_the_final_name(tmp_path, monkeypatch):
    """Content is synced after its last change, then its directory; then the name is given and its directory synced."""
    calls, fsync, rename = [], os.fsync, pathlib.Path.rename

    def recorded_fsync(descriptor):
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        status = os.fstat(descriptor)
        calls.append(("fsync", path, status.st_mtime_ns, stat.S_ISDIR(status.st_mode)))
        fsync(descriptor)

    def recorded_rename(path, to):
        calls.append(("rename", path, pathlib.Path(to)))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(pathlib.Path, "rename", recorded_rename)
    target, state = small.small_state()
    checkpoints = Checkpoints(tmp_path, OutputConfig(max_to_keep=1), {})
    for step in (1, 2):
        checkpoints.save(target, state, Progress(step=step))
        checkpoints.wait()
    checkpoints.close()
    for step in (1, 2):
        final = tmp_path / NAME.format(step)
        unfinished = final.with_name(final.name + ".unfinished")
        place = calls.index(("rename", unfinished, final))
        synced = {path: (time, order) for order, (kind, path, time, *_) in enumerate(calls[:place]) if kind == "fsync"}
        assert ("fsync", tmp_path) == calls[place + 1][:2]  # the name itself, before an older checkpoint is deleted
        if step == 1:
            deleted = next(order for order, call in enumerate(calls) if call[1] == final and call[0] == "rename")
            assert deleted > place + 1
            continue
        everything = [final, *final.rglob("*")]
        assert len(everything) > 12
        for path in everything:
            before = unfinished / path.relative_to(final)
            time, order = synced[before]
            assert time == path.stat().st_mtime_ns, f"{path} was changed after it was synced"
            if path != final:
                assert order < synced[before.parent][1]


def test_a_file_that_cannot_be_synced_fails_the_save(tmp_path, monkeypatch):
    """The disk reports here that it could not store what was written before."""

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    target, state = small.small_state()
    checkpoints = Checkpoints(tmp_path, OutputConfig(), {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        checkpoints.save(target, state, Progress(step=1))
        (message,) = checkpoints.wait()
    assert "step 1: checkpoint NOT saved" in message and "Input/output error" in message
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(target, state, Progress(step=1))
    assert "step 1: checkpoint saved" in checkpoints.close()[0]
    assert checksums.problems(tmp_path / "step_00000001") == []


def test_a_missing_file_cannot_be_synced(tmp_path):
    with pytest.raises(FileNotFoundError):
        durable.sync(tmp_path / "missing")

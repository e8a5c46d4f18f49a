"""The lock of a run directory is looked at before the processes join."""

import pytest

from megajax.checkpoint import early_lock
from megajax.checkpoint.early_lock import EarlyLock
from megajax.checkpoint.lock import NAME, DirectoryLock
from megajax.config import ConfigError


def test_a_run_directory_in_use_is_refused_when_the_processes_have_joined(tmp_path, monkeypatch):
    """tests/checkpoint/test_lock.py has the lock of another process."""

    def held(directory):
        raise ConfigError(f"run directory {directory} is in use by process 4711 on node1")

    monkeypatch.setattr(early_lock, "DirectoryLock", held)
    (tmp_path / NAME).touch()
    with EarlyLock(str(tmp_path)) as early, pytest.raises(ConfigError, match="is in use by process 4711"):
        early.require()


@pytest.mark.parametrize("name", [None, "new"])
def test_a_directory_without_a_lock_is_not_touched(tmp_path, name):
    with EarlyLock(name and str(tmp_path / name)) as early:
        early.require()
    assert not (tmp_path / "new").exists()


def test_an_early_lock_is_that_of_the_run(tmp_path):
    first = DirectoryLock(tmp_path)  # so that there is a lock to look at
    with EarlyLock(str(tmp_path)) as early:
        early.require()
        first.release()
        DirectoryLock(tmp_path).release()
        assert (tmp_path / NAME).exists()
    assert not (tmp_path / NAME).exists()


def test_an_empty_lock_is_taken_over(tmp_path):
    """A full disk leaves it so; it was refused for ever as that of another process."""
    (tmp_path / NAME).touch()
    lock = DirectoryLock(tmp_path, lease=0.3, heartbeat=0.05)
    assert (tmp_path / NAME).stat().st_size > 0 and len(list(tmp_path.iterdir())) == 1
    lock.release()

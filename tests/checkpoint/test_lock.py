"""The lock of a run directory: refused while its holder lives, taken over when it is dead or suspended."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from megajax.checkpoint.lock import NAME, DirectoryLock
from megajax.config import ConfigError

LEASE = 120.0  # seconds: longer than a loaded machine delays a refresh
ROOT = pathlib.Path(__file__).parents[2]
HOLD = """
import sys, time
from megajax.checkpoint.lock import DirectoryLock
from megajax.config import ConfigError
try:
    lock = DirectoryLock(sys.argv[1], lease=float(sys.argv[2]), heartbeat=0.1)
    print("locked", flush=True)
    while True:
        time.sleep(0.05)
        for text in lock.check():
            print(text, flush=True)
except ConfigError as error:
    print(error, flush=True)
"""


class Holder:
    """Another process that takes a directory's lock and holds it."""

    def __init__(self, directory, lease: float = LEASE):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(directory), str(lease)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.first = self.process.stdout.readline().strip()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


@pytest.fixture
def holder(tmp_path, request):
    """Holds the lock of tmp_path; the parameter is its lease."""
    found = Holder(tmp_path, getattr(request, "param", LEASE))
    assert found.first == "locked"
    yield found
    found.kill()


def take(directory, lease: float = LEASE, heartbeat: float = 0.1) -> DirectoryLock:
    """Takes the lock."""
    return DirectoryLock(directory, lease=lease, heartbeat=heartbeat)


def from_another_host(directory) -> None:
    """Makes the lock look as if its holder ran on another host."""
    path = pathlib.Path(directory) / NAME
    lines = [line if not line.startswith("host=") else "host=node2" for line in path.read_text().splitlines()]
    with open(path, "r+") as file:  # the same file, which its holder refreshes
        file.write("".join(f"{line}\n" for line in lines))
        file.truncate()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_second_process_is_refused_and_told_who_holds_the_lock(tmp_path, holder, elsewhere):
    host = os.uname().nodename
    if elsewhere:
        from_another_host(tmp_path)
        host = "node2"
    with pytest.raises(ConfigError) as error:
        take(tmp_path)
    assert f"run directory {tmp_path} is in use by process {holder.process.pid} on {host}: " in str(error.value)
    assert "another --run-dir" in str(error.value) and "\n" not in str(error.value)


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path, holder):
    holder.kill()
    assert (tmp_path / NAME).exists()
    start = time.monotonic()
    lock = take(tmp_path)
    assert time.monotonic() - start < LEASE / 2
    assert Holder(tmp_path).first.startswith(f"run directory {tmp_path} is in use by process {os.getpid()} on ")
    lock.release()
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("holder", [1.0], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lock_that_is_not_refreshed_is_taken_over_after_the_lease(tmp_path, holder, number):
    """The holder was killed or is suspended on another host. When it is continued, it ends and names the new holder."""
    from_another_host(tmp_path)
    holder.process.send_signal(number)
    # A signal takes effect a little later, and until then the holder refreshes its lock.
    os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    start = time.monotonic()
    lock = take(
        tmp_path, lease=1.0, heartbeat=0.5
    )  # it gives up five heartbeats after the lease, also on a busy machine
    assert time.monotonic() - start > 0.9
    if number == signal.SIGSTOP:
        holder.process.send_signal(signal.SIGCONT)
        line = holder.process.stdout.readline()
        assert f"in use by process {os.getpid()} on " in line and "this process was suspended" in line
    assert lock.check(now=True) == []
    lock.release()


def test_one_process_takes_its_lock_twice(tmp_path):
    first, second = take(tmp_path), take(tmp_path)
    first.release()
    assert (tmp_path / NAME).exists() and second.check(now=True) == []
    second.release()
    assert not (tmp_path / NAME).exists()


def test_a_vanished_directory_is_created_again_and_reported(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    lock = DirectoryLock(directory, lambda: (directory / "config.toml").write_text(""), LEASE, 0.1)
    shutil.rmtree(directory)
    (text,) = lock.check(now=True)
    assert f"the run directory {directory} has vanished and is created again" in text
    assert lock.check(now=True) == [] and (directory / "config.toml").exists()
    (directory / NAME).unlink()
    (text,) = lock.check(now=True)
    assert f"{directory / NAME} was removed or could not be refreshed" in text
    (directory / NAME).write_text("damaged")
    (text,) = lock.check(now=True)
    assert "created again" in text and lock.check(now=True) == []
    lock.release()


def test_a_directory_that_cannot_be_locked_is_refused(tmp_path):
    (tmp_path / NAME).mkdir()
    with pytest.raises(ConfigError, match="cannot lock the run directory|in use by another process"):
        take(tmp_path)

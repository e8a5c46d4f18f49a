"""Other users and programs around a run's replicated state."""

import os
import socket
import stat
import threading

import pytest

from megajax.checkpoint import memory_hosts, peer
from megajax.checkpoint.memory_hosts import memory_directory
from megajax.checkpoint.peer import STRANGERS, PartServer, PeerClient
from megajax.config import ConfigError
from megajax.config.output import MEMORY_VARIABLE


def test_connections_without_the_token_are_bounded(tmp_path):
    """They also keep no other host out."""
    (tmp_path / "own").mkdir()
    part = tmp_path / "own" / "step_00000005.0-a.0-of-1"
    part.mkdir()
    (part / "data").write_bytes(b"state")
    before, server = threading.active_count(), PartServer(tmp_path, "token", "127.0.0.1")
    host, _, port = server.address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(4 * STRANGERS)]
    client = PeerClient(server.address, "token")
    assert client.read(f"own/{part.name}/data") == b"state"
    more = [socket.create_connection((host, int(port))) for _ in range(2 * STRANGERS)]
    assert client.read(f"own/{part.name}/data", 1, 3) == b"ta"  # a connection with the token stays
    closed = [one for one in strangers if _is_closed(one)]
    assert len(closed) >= 3 * STRANGERS and threading.active_count() - before < 3 * STRANGERS
    with pytest.raises(OSError, match="403"):
        PeerClient(server.address, "guess").read(f"own/{part.name}/data")
    for one in (*strangers, *more):
        one.close()
    client.close()
    server.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_silent_connection_ends_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(peer._Handler, "timeout", 0.1)
    server = PartServer(tmp_path, "token", "127.0.0.1")
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as silent:
        assert silent.recv(1) == b""
    server.close()


@pytest.fixture
def base(tmp_path, monkeypatch):
    found = tmp_path / "memory"
    monkeypatch.setenv(MEMORY_VARIABLE, str(found))
    return found


def test_a_memory_directory_of_ones_own_is_made(base, tmp_path):
    root = memory_directory(tmp_path / "run")
    assert root.parent == base and stat.S_IMODE(root.stat().st_mode) == 0o700
    assert memory_directory(tmp_path / "run") == root


def test_a_public_directory_must_be_sticky(base, tmp_path):
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(ConfigError, match=f"memory can be written by everybody: set {MEMORY_VARIABLE}"):
        memory_directory(tmp_path / "run")
    base.chmod(0o1777)  # as /dev/shm
    assert memory_directory(tmp_path / "run").is_dir()


@pytest.mark.parametrize("level", ["base", "root", "folder"])
def test_a_directory_of_another_user_is_refused(base, tmp_path, monkeypatch, level):
    root = memory_directory(tmp_path / "run")
    path = {"base": base, "root": root, "folder": root / "own"}[level]
    if os.getuid() == 0 and level != "base":
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(memory_hosts.os, "getuid", lambda: 12345)  # then all of it is another user's
    with pytest.raises(ConfigError, match="belongs to another user"):
        memory_directory(tmp_path / "run")


def test_a_link_in_place_of_the_directory_is_refused(base, tmp_path):
    root = memory_directory(tmp_path / "run")
    root.rename(base / "elsewhere")
    root.symlink_to(base / "elsewhere")
    with pytest.raises(ConfigError, match="is no directory"):
        memory_directory(tmp_path / "run")

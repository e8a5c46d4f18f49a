"""A disk that a test fills."""

import contextlib
import os
import pathlib
import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system with 1.5 MB; needs the right to mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: pathlib.Path) -> None:
    """Writes until there is no room."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass

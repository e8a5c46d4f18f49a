"""Lines of libraries that say nothing are dropped: gloo's, and nothing else; jax's traceback without a GPU."""

import logging
import os
import subprocess
import sys

import pytest

from megajax.config import ConfigError
from megajax.runtime import mesh
from megajax.runtime.compat import PLUGIN_LOGGER
from megajax.runtime.gloo_output import kept

CONNECTED = b"[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
MIXED = [
    b"[Gloo] Rank [Gloo] Rank 10 is connected to  is connected to 3 peer ranks. \n",
    b"3 peer ranks. Expected number of connected peer ranks is : 3\n",
    b"Expected number of connected peer ranks is : 1\n",
    b"3\n",
    b"\n",
]
OTHERS = [
    b"[Gloo] Rank 0 is connected to 2 peer ranks. Expected number of connected peer ranks is : 3\n",
    b"[Gloo] Rank 1 lost its connection to 127.0.0.1: connection reset by peer\n",
    b"NCCL INFO Bootstrap: Using eth0\n",
    b"\n",
    b"12\n",
    b"the end, without a newline",
]


def test_lines_of_success_are_dropped_and_all_others_kept():
    assert list(kept([CONNECTED, *MIXED])) == []
    assert list(kept(OTHERS)) == OTHERS
    assert list(kept([OTHERS[2], CONNECTED, *MIXED, OTHERS[2], *OTHERS])) == [OTHERS[2], OTHERS[2], *OTHERS]


def test_a_process_prints_all_but_those_lines():
    """Of native code too, in order, with its exit code, also when it aborts."""
    program = f"""
import os, sys
from megajax.runtime.gloo_output import without_gloo_lines
print("before")
with without_gloo_lines():
    print("inside", sys.stdout.encoding, flush=True)
    os.write(1, {CONNECTED!r} * 3 + b"native\\n")
    print("still inside")
print("after")
with without_gloo_lines():
    os.write(1, b"last words\\n")
    os.abort()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"}
    )
    assert done.returncode == -6
    lines = done.stdout.decode().split("\n")
    assert sorted(lines) == sorted(["before", "inside utf-8", "native", "still inside", "after", "last words", ""])
    assert lines[0] == "before" and lines.index("after") > lines.index("still inside")


def test_without_a_gpu_the_traceback_of_jax_is_not_printed(monkeypatch, capfd):
    """An installed plugin that finds no GPU logs one before `--devices gpu` is refused."""

    def devices(kind):
        try:
            raise RuntimeError("no CUDA-capable device")
        except RuntimeError:
            logging.getLogger(PLUGIN_LOGGER).exception("Jax plugin configuration error: Exception when calling")
            raise

    monkeypatch.setattr(mesh, "_has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(mesh, "add_gpu_flags", lambda: None)
    monkeypatch.setattr(mesh, "set_gpu_environment", lambda: None)
    monkeypatch.setattr(mesh.jax, "devices", devices)
    with pytest.raises(ConfigError, match="jax finds no GPU"):
        mesh.start_devices("gpu")
    assert capfd.readouterr().err == ""

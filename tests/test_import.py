"""`import megajax` is fast, and its names are imported on first use."""

import importlib
import subprocess
import sys

import pytest

import megajax


def test_importing_megajax_imports_neither_jax_nor_numpy():
    """Its own time is a small multiple of an empty module's: in one process, so that a busy machine slows down both."""
    code = """
import sys, time
start = time.perf_counter()
import megajax
taken = time.perf_counter() - start
heavy = [name for name in ("jax", "numpy", "optax", "orbax", "rich", "megajax.config") if name in sys.modules]
megajax.ModelConfig
print(heavy, "jax" in sys.modules, taken)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heavy, after_config, taken = done.stdout.rsplit(maxsplit=2)
    assert (heavy, after_config) == ("[]", "False")
    assert float(taken) < 0.1


@pytest.mark.parametrize("name", megajax.__all__)
def test_every_exported_name_exists(name):
    module = importlib.import_module(megajax._MODULES[name])
    assert getattr(megajax, name) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trianer'.*Trainer"):
        _ = megajax.Trianer

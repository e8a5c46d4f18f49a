"""`import megajax` is fast, and its names are imported on first use."""

import importlib
import subprocess
import sys

import pytest

import megajax


def test_importing_megajax_imports_neither_jax_nor_numpy():
    """Nothing but the package itself and importlib, which is in the standard library."""
    code = """
import importlib, sys
before = set(sys.modules)
import megajax
new = sorted(set(sys.modules) - before)
megajax.ModelConfig
print(new, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["['megajax']", "False"]


@pytest.mark.parametrize("name", megajax.__all__)
def test_every_exported_name_exists(name):
    module = importlib.import_module(megajax._MODULES[name])
    assert getattr(megajax, name) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trianer'.*Trainer"):
        _ = megajax.Trianer

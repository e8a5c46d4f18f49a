"""The lines of docs/training.md that read a checkpoint without megajax, in a process with one device."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from megajax.checkpoint import layout
from megajax.checkpoint.directory import NAME
from megajax.checkpoint.metadata import Progress
from megajax.config import DataConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.train.trainer import Trainer
from tests import small

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.slow
def test_the_lines_of_the_docs_read_what_eight_devices_saved(tmp_path):
    """Interleaved on data 2 x pipe 2 x tensor 2 with ZeRO-1; a leaf of the blocks, of the tables and of the moments."""
    parallel = ParallelConfig(data=2, pipe=2, tensor=2, chunks=2, zero=1)
    train = TrainConfig(steps=1, global_batch_size=4, warmup_steps=1, precision="fp32")
    run = RunConfig(dataclasses.replace(small.MODEL, vocabulary=257), parallel, train, DataConfig(tokenizer="byte"))
    trainer = Trainer(run, output=OutputConfig(run_dir=str(tmp_path), save_every=1, tensorboard=False))
    state = small.random_state(trainer.training)
    trainer.directory.checkpoints.save(trainer.training.state_layout, state, Progress(step=1, samples=4))
    trainer.directory.close()

    code = re.search(r"```python\n(import jax, numpy as np, orbax.*?)```", PAGE.read_text(), re.DOTALL)[1]
    saved = tmp_path / "checkpoints" / NAME.format(1) / "state"
    code = re.sub(r'path = "[^"]*"', f"path = {str(saved)!r}", code)
    code += f"""
assert jax.device_count() == 1
flat = {{jax.tree_util.keystr(p, simple=True, separator="/"): a for p, a in jax.tree.leaves_with_path(state)}}
np.savez({str(tmp_path / "read.npz")!r}, **flat)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = (
        np.load(tmp_path / "read.npz"),
        layout.to_canonical(state, trainer.training.where),
    )
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], np.asarray(array), err_msg=name)

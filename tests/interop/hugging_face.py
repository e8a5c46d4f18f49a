"""Helpers of the tests of interop: the golden directories, and logits of a run on any layout."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np

from megajax.checkpoint import reader
from megajax.checkpoint.directory import NAME
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.interop.hugging_face import __main__ as hugging_face
from megajax.interop.hugging_face.config import read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.safetensors import open_tensors
from megajax.ops.ring_attention import zigzag
from megajax.runtime.mesh import make_mesh
from megajax.train.step import Training, make_training
from tests.interop.make_golden import GOLDEN, LENGTH, tokens

SPARSE = ("mixtral", "qwen3_moe", "olmoe")
MIXED = "qwen3_moe_mixed"  # dense layers between sparse ones
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", *SPARSE, MIXED)


def convert(*words: str | pathlib.Path) -> int:
    """The command's exit code."""
    return hugging_face.main([str(word) for word in words])


def golden(family: str) -> pathlib.Path:
    """The directory of a golden model."""
    return GOLDEN / family


def copy_of(family: str, to: pathlib.Path) -> pathlib.Path:
    """A copy of a golden directory, to be damaged."""
    return pathlib.Path(shutil.copytree(golden(family), to / family))


def change_config(directory: pathlib.Path, **keys) -> None:
    """Sets keys of config.json; None removes one."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def model_of(family: str) -> ModelConfig:
    """The golden model with the sequence of the golden logits."""
    return dataclasses.replace(read_config(golden(family))[1], sequence_length=LENGTH, dropout=0.0)


def training_of(model: ModelConfig, **layout) -> Training:
    """A run of one sample a microbatch, fp32."""
    parallel = ParallelConfig(**{"schedule": "1f1b"} | layout)
    batch = parallel.data * 2 * parallel.pipe
    run = RunConfig(model, parallel, TrainConfig(precision="fp32", global_batch_size=batch, steps=100))
    run.validate()
    return make_training(run, make_mesh(run.parallel))


def round_trip(source: pathlib.Path, to: pathlib.Path) -> tuple[dict, dict]:
    """Imports `source` and exports it: in fp32, without the imported config.json (to/out), and in bf16, imported again.

    Tensors are compared bit for bit. Returns config.json of the source and of an export with the imported one.
    """
    assert convert("import", source, "--run-dir", to / "run") == 0
    assert convert("export", to / "run", "--out", to / "same", "--max-shard-size", "20KB") == 0
    (to / "run" / "hugging_face" / "config.json").unlink()
    for out, kind in (("out", "fp32"), ("bf16", "bf16")):
        assert convert("export", to / "run", "--out", to / out, "--dtype", kind) == 0
        before, after = open_tensors(source), open_tensors(to / out)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            rows, found = tensor.rows(0, tensor.shape[0]), after[name].rows(0, tensor.shape[0])
            assert found.tobytes() == rows.astype(found.dtype).tobytes(), name
    assert convert("import", to / "bf16", "--run-dir", to / "again") == 0
    assert convert("export", to / "again", "--out", to / "last") == 0
    first, last = (to / out / "model.safetensors" for out in ("bf16", "last"))
    assert first.read_bytes() == last.read_bytes()
    return tuple(json.loads((folder / "config.json").read_text()) for folder in (source, to / "same"))


def logits_of(training: Training, params) -> np.ndarray:
    """fp32 [2, LENGTH, vocabulary] of the golden tokens, through the run's pipeline."""
    model, functions = training.evaluation()
    parallel, ids = training.run.parallel, tokens()
    ids = np.pad(ids, ((0, -len(ids) % parallel.data), (0, 0)), mode="edge")  # every replica needs a sample
    batch = {"tokens": ids[None].astype(np.int32), "sample": np.zeros((1, len(ids)), np.uint32)}

    def run(params, batch):
        collect = lambda shared, y, microbatch: model.logits(shared, y)  # noqa: E731
        return training.forward(functions, collect, params, batch)[0, ..., : model.vocabulary]

    with jax.set_mesh(training.mesh):
        rows = np.asarray(jax.jit(run)(params, training.place(batch)))  # [data context samples, LENGTH / context, ...]
    by_rank = rows.reshape(parallel.data, parallel.context, -1, *rows.shape[1:]).swapaxes(1, 2)
    order = zigzag(LENGTH, parallel.context).ravel().argsort()
    return by_rank.reshape(len(ids), LENGTH, -1)[: len(tokens()), order]


@functools.cache
def wanted_logits(family: str) -> np.ndarray:
    """Those of transformers."""
    return np.load(golden(family) / "logits.npy")


def initial(family: str, **layout) -> tuple[Training, object]:
    """A run on a layout, and the parameters that it reads from the golden directory."""
    training = training_of(model_of(family), **layout)
    return training, initial_params(str(golden(family)), training)


def restored(run_dir: pathlib.Path, training: Training, step: int = 0):
    """The state of a run directory's checkpoint."""
    path = run_dir / "checkpoints" / NAME.format(step)
    tokenizer = reader.read_meta(path)["tokenizer"]
    return reader.load(path, training.run, training.state_layout, tokenizer)[0]


def leaves(tree) -> list[np.ndarray]:
    """All leaves as numpy."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]

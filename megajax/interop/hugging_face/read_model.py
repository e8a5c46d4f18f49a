"""Imports a Hugging Face directory, or a GGUF file, as a run directory whose checkpoint of step 0 has its weights.

RUN/config.toml                  the model, its tokenizer, and fine-tuning's options
    checkpoints/step_00000000/   the weights, and a fresh optimizer state
    hugging_face/                config.json and generation_config.json, from which an export makes its own
    tokenizer/                   the tokenizer's files, which an export copies
"""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import layout
from megajax.checkpoint.directory import NAME
from megajax.checkpoint.metadata import FORMAT, Progress, run_meta
from megajax.checkpoint.run_files import copy_model, copy_tokenizer, tokenizer_copy
from megajax.checkpoint.streamed import Part, StreamedLeaf, streaming_handler
from megajax.checkpoint.writer import on_all_processes, write
from megajax.config import BertConfig, ConfigError, DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.lora import base_model
from megajax.config.stored_paths import store_paths
from megajax.config.toml import HEADER, toml_text
from megajax.data.hugging_face import model_files
from megajax.data.source import tokenizer_of_model
from megajax.data.tokenizers import load_tokenizer
from megajax.interop.gguf.config import config_keys
from megajax.interop.gguf.file import GGUFFile, open_gguf
from megajax.interop.gguf.tokenizer import missing_tokenizer, write_tokenizer
from megajax.interop.hugging_face.adapters import read_adapters
from megajax.interop.hugging_face.config import read_config, tokenizer_options
from megajax.interop.hugging_face.quantized import open_weights
from megajax.interop.hugging_face.weights import Tensor, Weights, load_params, missing_heads, model_pieces, regions
from megajax.interop.output_file import replace_directory
from megajax.pipeline.trained import merge, only_trained, split
from megajax.runtime.mesh import make_mesh
from megajax.train.precision import make_loss_scale
from megajax.train.step import Training, make_training

__all__ = ["Source", "import_run", "initial_params", "write_run"]

FINE_TUNING = {"learning_rate": 2e-5, "minimum_learning_rate": 2e-6, "steps": 1000}


@dataclasses.dataclass(frozen=True)
class Source:
    """The model that `write_run` imports.

    Attributes:
      path: of the directory or file, for messages.
      family: of `hugging_face.tensors.TABLES`.
      model: its configuration; the sequence length is the longest that it has.
      tensors: by the family's names.
      files: config.json and generation_config.json, as far as there are any.
    """

    path: pathlib.Path
    family: str
    model: ModelConfig
    tensors: Mapping[str, Tensor]
    files: Sequence[pathlib.Path]


def initial_params(directory: str, training: Training) -> Any:
    """The parameters of `--init-from DIR` on the run's devices: `Trainer(initial_params=...)` calls it.

    Raises:
      ConfigError: the directory is damaged, or of another model than the run's.
    """
    path, model = pathlib.Path(directory), training.run.model
    family, stored = read_config(path)
    _with_length(stored, model.sequence_length)
    target = training.state_layout
    target = dataclasses.replace(target, shapes=target.shapes.params, shardings=target.shardings.params)
    mask = jax.tree_util.tree_map_with_path(lambda path, _: "/lora/" in layout.name_of(path), target.shapes)
    shapes, shardings = (split(tree, mask)[1] for tree in (target.shapes, target.shardings))
    missing = missing_heads(path, family.name, list(layout.named(shapes)))
    if missing and jax.process_index() == 0:
        print(f"{directory} has no {' and no '.join(missing)}: initialized from --seed")
    heads = _fresh_heads(training, missing) if missing else None
    target = dataclasses.replace(target, shapes=shapes, shardings=shardings)
    params = load_params(path, family.name, base_model(model), target, heads, as_stored=True)
    if not model.lora:
        return params
    if training.run.train.init_adapters is None:
        return merge(_fresh_adapters(training, mask), params)
    shapes, shardings = (only_trained(tree, mask) for tree in (training.state_shapes.params, training.params_sharding))
    target = dataclasses.replace(target, shapes=shapes, shardings=shardings)
    directory = pathlib.Path(training.run.train.init_adapters)
    return merge(read_adapters(directory, family.name, model, target), params)


def _fresh_adapters(training: Training, mask: Any) -> Any:
    """The adapters as a training from scratch initializes them; `mask`: which of the parameters they are."""
    with jax.set_mesh(training.mesh):
        adapters = lambda tree: only_trained(tree, mask)  # noqa: E731
        return jax.jit(lambda: adapters(training.fresh_params()), out_shardings=adapters(training.params_sharding))()


def _fresh_heads(training: Training, names: Sequence[str]) -> dict[str, jax.Array]:
    """Leaves of the head by name, as a training from scratch initializes them."""
    with jax.set_mesh(training.mesh):
        head = jax.jit(
            lambda: training.fresh_params()["shared"]["head"], out_shardings=training.params_sharding["shared"]["head"]
        )()
    leaves = layout.named({"shared": {"head": head}})
    return {name: leaves[name] for name in names}


def import_run(
    source: pathlib.Path,
    run_dir: pathlib.Path,
    sequence_length: int | None = None,
    tokenizer: str | None = None,
    end_of_document: str | None = None,
    mtp_num_layers: int = 0,
) -> RunConfig:
    """Writes the run directory; nothing of it is there before it is complete. All processes call it.

    Args:
      source: directory of a Hugging Face model, or a GGUF file.
      run_dir: to write; it must not exist, or be empty.
      sequence_length: of the run; None: the longest that the model has.
      tokenizer: name or file; None: the directory's.
      end_of_document: token that ends documents; None: the directory's, or the tokenizer's usual one.
      mtp_num_layers: modules of multi-token prediction that are imported, the first ones of those that there are.

    Raises:
      ConfigError: the source is damaged or of a model that megajax does not have, or the run cannot be written.
    """
    with _directory_of(source, tokenizer) as (directory, file):
        family, model = read_config(directory)  # before the tensors: without it, a directory is no model's
        model = dataclasses.replace(model, mtp_num_layers=mtp_num_layers) if mtp_num_layers else model
        tensors = open_weights(directory) if file is None else file.tensors
        found = tokenizer_options(directory)
        data = DataConfig(
            tokenizer=tokenizer or found.get("tokenizer", ""),
            end_of_document=end_of_document or (None if tokenizer else found.get("end_of_document")),
        )
        if not data.tokenizer:
            raise ConfigError(
                f"{directory} has no tokenizer, such as tokenizer.json, without which its ids have no meaning: pass "
                "--tokenizer NAME|FILE"
            )
        files = model_files(directory)
        return write_run(Source(source, family.name, model, tensors, files), run_dir, data, sequence_length)


@contextlib.contextmanager
def _directory_of(source: pathlib.Path, tokenizer: str | None) -> Iterator[tuple[pathlib.Path, GGUFFile | None]]:
    """A directory with config.json and the tokenizer's files; that of a GGUF file, which is given too, is temporary."""
    if source.suffix.lower() != ".gguf":
        yield source, None
        return
    file = open_gguf(source)
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary) / source.stem
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config_keys(file), indent=2) + "\n", encoding="utf-8")
        write_tokenizer(file.metadata, source, directory)
        if not (tokenizer or tokenizer_options(directory)):
            raise missing_tokenizer(file.metadata, source)
        yield directory, file


def write_run(source: Source, run_dir: pathlib.Path, data: DataConfig, sequence_length: int | None = None) -> RunConfig:
    """Writes the run directory of a model; nothing of it is there before it is complete. All processes call it.

    Args:
      source: the model.
      run_dir: to write; it must not exist, or be empty.
      data: with the tokenizer, of whose files the run uses a copy.
      sequence_length: of the run; None: the model's.

    Raises:
      ConfigError: a tensor is missing, left over or of another shape, the tokenizer is not the model's, or the run cannot be
        written.
    """
    family, model = source.family, source.model
    if sequence_length is not None:
        model = _with_length(model, sequence_length)
    read = load_tokenizer(data.tokenizer, data.end_of_document)
    copied = tokenizer_copy(data.tokenizer, read.files, run_dir.absolute())
    data = dataclasses.replace(data, tokenizer=copied)
    run = RunConfig(model, ParallelConfig(schedule="1f1b"), TrainConfig(**FINE_TUNING), data)
    run.validate()
    read = tokenizer_of_model(run, read)
    training = make_training(run, make_mesh(run.parallel, jax.local_devices()[:1]))
    leaves, where = layout.named(training.state_shapes), training.where
    of_params = [name.removeprefix("params/") for name in leaves if name.startswith("params/")]
    weights = Weights(source.path, source.tensors, family, model, of_params)
    own = layout.named({"loss_scale": make_loss_scale(run.train)})
    arrays = {
        name: _streamed(
            name, layout.canonical_shape(name, leaf.shape, where), leaf.dtype, weights, family, own.get(name)
        )
        for name, leaf in leaves.items()
    }
    meta = run_meta(run, read)
    meta |= {"format": FORMAT, "progress": dataclasses.asdict(Progress()), "time": time.time()}
    meta["tokenizer"] |= {"name": data.tokenizer}
    with replace_directory(run_dir, "--run-dir") as unfinished:
        checkpoints = unfinished / "checkpoints"
        on_all_processes("import/checkpoints", lambda: checkpoints.mkdir(exist_ok=True))
        write(checkpoints / NAME.format(0), layout.nest(arrays), meta, "import", streaming_handler())
        on_all_processes("import/files", lambda: _write_files(run, source, read.files, unfinished, run_dir))
    return run


def _with_length(model: ModelConfig, length: int) -> ModelConfig:
    if model.positions == "learned" and length > model.sequence_length:
        raise ConfigError(
            f"sequence_length = {length}, but the model's table has {model.sequence_length} positions: pass "
            f"--sequence-length {model.sequence_length} or less"
        )
    return dataclasses.replace(model, sequence_length=length)


def _streamed(name: str, shape: tuple[int, ...], dtype, weights: Weights, family: str, value) -> StreamedLeaf:
    """A leaf of the state: read, or given, or zero."""
    parameter = next((name.partition(part)[2] for part in ("params/", "/mu/", "/nu/") if part in name), "")
    if parameter:
        chunk, boxes = regions(shape, model_pieces(family, parameter, weights.model))
    else:
        chunk, boxes = shape, [tuple(slice(0, size) for size in shape)]

    def parts() -> Iterator[Part]:
        for box in boxes[jax.process_index() :: jax.process_count()]:
            if name.startswith("params/"):
                yield box, weights.region(parameter, box, shape)
            elif value is not None:
                yield box, np.asarray(value)
            else:
                yield box, np.zeros([one.stop - one.start for one in box], dtype)

    return StreamedLeaf(shape, np.dtype(dtype), chunk, parts)


def _write_files(
    run: RunConfig, source: Source, tokenizer: Sequence[pathlib.Path], unfinished: pathlib.Path, final: pathlib.Path
) -> None:
    """config.toml and the files of the model and of its tokenizer, by process 0."""
    if jax.process_index() != 0:
        return
    copy_model(source.files, unfinished)
    copy_tokenizer(tokenizer, unfinished)
    model, train = dataclasses.asdict(run.model), dataclasses.asdict(run.train)
    # the preset's name is in the options, the devices choose the precision, and the others follow from FINE_TUNING's
    for table, names in ((model, ("name",)), (train, ("precision", "minimum_learning_rate", "warmup_steps"))):
        for name in names:
            del table[name]
    tables = {
        "model": model,
        "train": train,
        "data": store_paths(dataclasses.asdict(run.data), final.absolute()),
        "output": {"run_dir": "."},
        "options": {"model": "bert-tiny" if isinstance(run.model, BertConfig) else "tiny", "new_tokens": 0},
    }
    path = unfinished / "config.toml"
    path.write_text(toml_text(tables, HEADER.format(path=final / "config.toml")), encoding="utf-8")

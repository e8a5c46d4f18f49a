"""Exports a checkpoint as a directory of Hugging Face, with all that it needs to generate and to chat.

config.json, safetensors, and generation_config.json of the model that the run has started from; the run's tokenizer with its
chat template, or one that megajax has built in, as files that transformers reads.
"""

import dataclasses
import itertools
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from megajax.checkpoint import layout, reader
from megajax.checkpoint.directory import NAME, steps_of
from megajax.checkpoint.mirror import local_files
from megajax.checkpoint.object_store import Path
from megajax.checkpoint.run_files import MODEL, TOKENIZER
from megajax.checkpoint.writer import on_all_processes
from megajax.config import (
    BertConfig,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    padded_vocabulary,
)
from megajax.config.lora import base_model
from megajax.data.hugging_face import has_settings, model_files, tokenizer_files
from megajax.data.tokenizer_files import has_tokenizer
from megajax.data.tokenizers import (
    TOKENIZERS,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)
from megajax.interop.hugging_face.adapters import RunLeaves, export_adapters
from megajax.interop.hugging_face.config import check_written, family_of_model, merge_config, read_json
from megajax.interop.hugging_face.tensors import (
    Piece,
    axis_sizes,
    first_row,
    from_leaf,
    lead_axis,
    rows_of,
    stacked_axes,
    tensor_shape,
)
from megajax.interop.hugging_face.weights import PART_BYTES, grid, model_pieces, stacked_indices, tensor_names
from megajax.interop.output_file import replace_directory
from megajax.interop.safetensors import Shards
from megajax.models.context import model_shapes
from megajax.models.interface import model_class

__all__ = ["DTYPES", "export_run"]

# Special tokens of BERT's and GPT-2's vocabularies, by their names in tokenizer_config.json.
USUAL_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
DTYPES = {
    "fp32": ("float32", np.dtype(np.float32)),
    "bf16": ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
    "fp16": ("float16", np.dtype(np.float16)),
}


def export_run(
    run_dir: Path,
    out: pathlib.Path,
    step: int | None = None,
    dtype: str | None = None,
    largest: int = 5 * 10**9,
    ema: bool = False,
    peft: bool = False,
) -> dict[str, str]:
    """Writes the directory; nothing of it is there before it is complete. All processes call it.

    Adapters are added to the weights that they are for; with `peft` they are written alone (`adapters.py`).

    Args:
      run_dir: whose checkpoint to export.
      out: to write; it must not exist, or be empty.
      step: of the checkpoint; None: the newest.
      dtype: of DTYPES; None: that of the config.json that the run has started from, or fp32.
      largest: bytes of a shard.
      ema: writes the averaged weights; frozen ones, which have no average, as they are.
      peft: writes the adapters as PEFT's files.

    Returns:
      "step", "family", "dtype" and "files", for the command's message.

    Raises:
      ConfigError: there is no such checkpoint, it is damaged or of a model that no family computes, `out` cannot be
        written, or a weight is beyond the range of fp16.
    """
    path = _checkpoint(run_dir, step)
    adapted = _model(path)
    model, base = base_model(adapted), reader.read_meta(path)["config"]["train"].get("init_from")
    run_dir = local_files(run_dir)
    imported = run_dir / MODEL / "config.json"
    original = read_json(imported) if imported.is_file() else {}
    family, keys = family_of_model(model, original.get("model_type"))
    dtype = dtype or _usual_dtype(original)
    name, numpy_dtype = DTYPES[dtype]
    reader.verify(path)
    leaves = RunLeaves(path, adapted, base, ema)
    if peft:
        count = export_adapters(leaves, family.name, base, out)
        return {"step": path.name, "family": family.name, "dtype": "fp32", "files": "1", "tensors": str(count)}
    tokenizer = _tokenizer(run_dir, reader.read_meta(path)["tokenizer"]["name"], needed=not original)
    shapes, sizes = _leaves(leaves, model), axis_sizes(model)
    leaves.use_base(list(shapes))
    pieces, tensors = {leaf: _pieces(family.name, leaf, model) for leaf in shapes}, {}
    for piece in itertools.chain(*pieces.values()):
        tensors |= dict.fromkeys(tensor_names(piece, sizes), tensor_shape(piece, sizes))
    written = merge_config(original, keys | ({} if original else _ends(tokenizer)), name)
    check_written(written, family, model)
    with replace_directory(out, "--out") as unfinished:
        shards = Shards(unfinished, tensors, numpy_dtype, largest)
        on_all_processes("export/create", lambda: shards.create() if jax.process_index() == 0 else None)

        def write_own() -> None:
            for number, (leaf, box) in enumerate(_boxes(leaves, shapes, pieces, sizes)):
                if number % jax.process_count() == jax.process_index():
                    _write_box(shards, leaves.region(leaf, box, shapes[leaf]), pieces[leaf], box, sizes)

        on_all_processes("export/tensors", write_own)
        if jax.process_index() == 0:
            (unfinished / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
            _write_tokenizer(run_dir, unfinished, tokenizer)
    files = len({tensor.path for tensor in shards.tensors.values()})
    return {"step": path.name, "family": family.name, "dtype": dtype, "files": str(files)}


def _pieces(family: str, leaf: str, model: ModelConfig) -> tuple[Piece, ...]:
    """The tensors of a leaf; each module of multi-token prediction has copies of embedding and head, as DeepSeek's files."""
    pieces, names = model_pieces(family, leaf, model), {"shared/embedding/tokens": ["embed_tokens.weight"]}
    head = "embedding/tokens" if model.tied_embeddings else "head/vocabulary"
    names.setdefault(f"shared/{head}", []).append("shared_head.head.weight")
    layers = range(model.layers, model.layers + model.mtp_num_layers)
    copies = [pieces[0]._replace(tensor=f"model.layers.{n}.{name}") for n in layers for name in names.get(leaf, ())]
    return (*pieces, *copies)


def _tokenizer_folder(run_dir: pathlib.Path) -> pathlib.Path:
    """The folder of a run with the tokenizer that it was trained with."""
    return run_dir / (TOKENIZER if (run_dir / TOKENIZER).is_dir() else MODEL)


def _tokenizer(run_dir: pathlib.Path, name: str, needed: bool) -> Tokenizer | None:
    """The tokenizer of a run; None if it has none, or if it is a directory of Hugging Face and not `needed`."""
    if name in TOKENIZERS:
        return load_tokenizer(name)
    folder = _tokenizer_folder(run_dir)
    file = folder / pathlib.Path(name).name
    if has_settings(folder) and has_tokenizer(folder):
        return load_tokenizer(str(folder)) if needed else None
    return load_tokenizer(str(file)) if file.is_file() else None


def _ends(tokenizer: Tokenizer | None) -> dict[str, int]:
    """The keys of config.json which say how texts begin and end."""
    if tokenizer is None:
        return {}
    begin = {} if tokenizer.beginning is None else {"bos_token_id": tokenizer.beginning}
    return begin | {"eos_token_id": tokenizer.end_of_document}


def _write_tokenizer(run_dir: pathlib.Path, out: pathlib.Path, tokenizer: Tokenizer | None) -> None:
    """The tokenizer's files with the chat template, and generation_config.json."""
    folder, has_own = _tokenizer_folder(run_dir), tokenizer is None or tokenizer.hugging_face is not None
    for path in tokenizer_files(folder) if has_own else ():
        if path.name == "config.json":
            continue
        copy = out / path.relative_to(folder.absolute())
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    for path in model_files(run_dir / MODEL):
        if path.name != "config.json":
            shutil.copyfile(path, out / path.name)
    if isinstance(tokenizer, SentencePieceTokenizer):
        is_llamas = _keeps_texts(tokenizer)
        shutil.copyfile(tokenizer.name, out / ("tokenizer.model" if is_llamas else "other.tokenizer.model"))
        if is_llamas:
            _write_settings(out, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": bool(tokenizer.start)})
    elif isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.hugging_face is None:
        inner = tokenizer.inner
        inner.save(str(out / "tokenizer.json"))
        text = {"eos_token": inner.id_to_token(tokenizer.end_of_document)}
        text |= {name: token for name, token in USUAL_TOKENS.items() if inner.token_to_id(token) is not None}
        _write_settings(out, {"tokenizer_class": "PreTrainedTokenizerFast"} | text)


def _keeps_texts(tokenizer: SentencePieceTokenizer) -> bool:
    """Whether a model normalizes nothing, as Llama's; transformers would give other ids for another one."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.inner.serialized_model_proto())
    spec = model.normalizer_spec
    return not spec.precompiled_charsmap and not spec.remove_extra_whitespaces and spec.add_dummy_prefix


def _write_settings(out: pathlib.Path, settings: dict[str, Any]) -> None:
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _checkpoint(run_dir: Path, step: int | None) -> Path:
    directory = run_dir / "checkpoints"
    steps = steps_of(directory)
    if not steps:
        raise ConfigError(f"{run_dir} has no checkpoint: give the --run-dir of a run")
    if step is not None and step not in steps:
        shown = ", ".join(map(str, steps[-5:]))
        raise ConfigError(f"{run_dir} has no checkpoint of step {step}: pass --step with one of {shown}")
    return (directory / NAME.format(steps[-1] if step is None else step)).absolute()


def _model(path: pathlib.Path) -> ModelConfig:
    """The model of a checkpoint; fields that are newer than it have their defaults."""
    stored = reader.read_meta(path)["config"]["model"]
    kind = BertConfig if "token_types" in stored else ModelConfig
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = next((name for name in stored if name not in known), None)
    if unknown:
        raise ConfigError(f"{path} is of a model with {unknown}, not of a ModelConfig: only those can be exported")
    try:
        model = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()})
        model.validate()
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path} does not store a legal model: {error}") from None
    return model


def _usual_dtype(original: dict) -> str:
    name = original.get("dtype") or original.get("torch_dtype")
    return next((ours for ours, (theirs, _) in DTYPES.items() if theirs == name), "fp32")


def _leaves(leaves: RunLeaves, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, as the checkpoint stores them; of one that is not in it, as the model has it.

    Raises:
      ConfigError: one is of another shape.
    """
    run = RunConfig(model, ParallelConfig(), TrainConfig())
    wanted = layout.named(jax.eval_shape(model_shapes(run, model_class(model)).init, jax.random.key(0)))
    rows, found = padded_vocabulary(model.vocabulary, 1), {}
    for name, leaf in wanted.items():
        shape = leaves.stored.get(name, leaf.shape)
        padded = leaf.shape[0] == rows and shape[1:] == leaf.shape[1:] and shape[0] >= model.vocabulary
        if shape != leaf.shape and not padded:
            raise ConfigError(
                f"checkpoint {leaves.path}: {leaves.stored_name(name)} has shape {shape}, and its model's has {leaf.shape}"
            )
        found[name] = shape
    return found


def _boxes(leaves: RunLeaves, shapes, pieces_of_leaves, sizes) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Regions of all leaves that are read at once: whole stored chunks, and at most PART_BYTES where chunks are smaller.

    A region is whole but for layers, experts and its first piece's leading axis, so that it has whole rows of the tensors.
    """
    for name, shape in shapes.items():
        pieces = pieces_of_leaves[name]
        if not pieces:
            continue
        first = stacked_axes(pieces[0])
        axis = first + lead_axis(pieces[0])
        stored = leaves.chunk(name, shape, first)
        step = [*map(min, shape[:first], stored), *shape[first:]]
        last = list(shape)
        last[axis] = min(shape[axis], sizes[pieces[0].theirs[0]])  # without the vocabulary's padding
        row = 4 * int(np.prod(step)) // shape[axis]
        step[axis] = min(last[axis], -(-max(1, PART_BYTES // max(1, row)) // stored[axis]) * stored[axis])
        for box in grid(last, step):
            yield name, box


def _write_box(shards: Shards, values, pieces: tuple[Piece, ...], box: tuple[slice, ...], sizes) -> None:
    for piece in pieces:
        first = stacked_axes(piece)
        start = first_row(piece, sizes) + box[first + lead_axis(piece)].start * rows_of(piece, sizes)
        for place, index in stacked_indices(box[:first], piece.absent):
            rows = from_leaf(piece, values[place], sizes)
            if shards.dtype == np.float16 and np.abs(rows).max(initial=0) > np.finfo(np.float16).max:
                raise ConfigError(f"{piece.name(index)} has weights beyond the range of fp16: pass --dtype bf16")
            shards.write(piece.name(index), start, rows)

"""Adapters (`config.lora`) out of a run: merged into the weights of an export, or as PEFT's files; and these into a run.

adapter_config.json           rank, alpha, and the modules that have adapters
adapter_model.safetensors     base_model.model.MODULE.lora_A.weight [rank, inputs] and .lora_B.weight [outputs, rank], fp32

A run that starts with --init-from keeps only what it trains in its checkpoints. Its other weights are read again where they
are from (`RunLeaves`).
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import layout, reader
from megajax.checkpoint.layout import StateLayout
from megajax.checkpoint.shapes import NO_AVERAGE
from megajax.checkpoint.streamed import open_leaf
from megajax.checkpoint.writer import on_all_processes
from megajax.config import BertConfig, ConfigError, ModelConfig
from megajax.config.lora import ROW, TARGETS, base_model, lora_scale, part_range, parts_of
from megajax.data.hub import local_directory
from megajax.interop.hugging_face.config import read_config, read_json
from megajax.interop.hugging_face.quantized import open_weights
from megajax.interop.hugging_face.tensors import Piece, axis_sizes, from_leaf, tensor_shape, to_leaf
from megajax.interop.hugging_face.weights import Weights, pieces_of, tensor_names
from megajax.interop.output_file import replace_directory
from megajax.interop.safetensors import Shards, open_file

__all__ = ["RunLeaves", "adapter_pieces", "export_adapters", "modules_of", "read_adapters", "short_names"]

PREFIX, CONFIG, TENSORS = "base_model.model.", "adapter_config.json", "adapter_model.safetensors"
LORA = "/lora/"


class RunLeaves:
    """The parameters of a checkpoint without adapters, by region: these are added to the kernels that have any.

    Attributes:
      stored: shapes of the checkpoint's parameters by name, without "params/"; of averages in place of what has one.
      kernels: the adapters of each kernel that has some: {kernel: {target: (A, B)}}, arrays [layers, ...],
        B with all outputs of the matmul.
    """

    def __init__(self, path: pathlib.Path, model: ModelConfig, base: str | None, ema: bool = False):
        """Reads the adapters.

        Args:
          path: the checkpoint.
          model: its configuration.
          base: the Hugging Face model that the run has started from (`TrainConfig.init_from`).
          ema: reads the averages of the parameters that are trained.

        Raises:
          ConfigError: the checkpoint has no averages.
        """
        self.path, self.model, self._base = path, model, None
        names = layout.named(reader.arrays_in(path))
        parts = ("params", "ema") if ema else ("params",)
        of = {part: {name[len(part) + 1 :] for name in names if name.startswith(f"{part}/")} for part in parts}
        if ema and not of["ema"]:
            raise ConfigError(f"checkpoint {path} {NO_AVERAGE}.")
        self._part = {name: part for part in parts for name in of[part]}
        self.stored = {name: tuple(names[self.stored_name(name)].shape) for name in self._part}
        self.kernels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        for name in self.stored:
            above, _, rest = name.partition(LORA)
            if rest.endswith("/a"):
                target = rest.removesuffix("/a")
                a, b = (self._read(f"{above}{LORA}{target}/{which}") for which in "ab")
                if TARGETS[target].part:  # with zeros for the other projections of the matmul
                    size = parts_of(model, target)
                    start, stop = part_range(target, size)
                    b = np.pad(b, [*[(0, 0)] * (b.ndim - 2), (start, size - stop), (0, 0)])
                self.kernels.setdefault(f"{above}/kernel", {})[target] = a, b
        self._directory = base

    def _read(self, name: str) -> np.ndarray:
        return open_leaf(self.path, self.stored_name(name)).read().result()

    def stored_name(self, name: str) -> str:
        """The name of a parameter that is stored in the checkpoint, with its part of the state."""
        return f"{self._part[name]}/{name}"

    def use_base(self, leaves: Sequence[str]) -> None:
        """Opens the model that the run has started from, for those of the leaves that the checkpoint does not have."""
        absent = [name for name in leaves if name not in self.stored]
        if not absent:
            return
        if self._directory is None:
            raise ConfigError(
                f"checkpoint {self.path} has no params/{absent[0]}: it is of another model than its metadata says"
            )
        directory = pathlib.Path(local_directory(self._directory, "--init-from"))
        family, found = read_config(directory)
        model = dataclasses.replace(base_model(self.model), name=found.name)
        heads = [name for name in leaves if name in self.stored and name.startswith("shared/head/")]
        own = [name for name in leaves if name not in heads]
        self._base = Weights(directory, open_weights(directory), family.name, model, own)

    def chunk(self, name: str, shape: tuple[int, ...], first: int) -> tuple[int, ...]:
        """The shape in which a leaf is stored in pieces; of one read from the base model one layer."""
        if name not in self.stored:
            return (*[1] * first, *shape[first:])
        return open_leaf(self.path, self.stored_name(name)).chunk_layout.read_chunk.shape or shape

    def region(self, name: str, box: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        """A region of a leaf [layers, ...], fp32, with its adapters' product added."""
        if name in self.stored:
            values = np.asarray(open_leaf(self.path, self.stored_name(name))[box].read().result(), np.float32)
        else:
            values = self._base.region(name, box, shape)
        for a, b in self.kernels.get(name, {}).values():
            values = values + lora_scale(self.model) * _product(a, b, box)
        return values


def _product(a: np.ndarray, b: np.ndarray, box: tuple[slice, ...]) -> np.ndarray:
    """A region of A B [layers, *inputs, *outputs]."""
    layers, *rest = box
    inputs = a.ndim - 2
    a, b = a[(layers, *rest[:inputs])], b[(layers, slice(None), *rest[inputs:])]
    return np.stack([np.tensordot(one, other, 1) for one, other in zip(a, b, strict=True)])


def adapter_pieces(family: str, name: str, kinds: tuple[str, ...] | None) -> Piece:
    """The tensor of PEFT that an adapter's leaf "blocks/.../lora/TARGET/a" or "b" is.

    Raises:
      ConfigError: the family has no module of this projection.
    """
    above, _, rest = name.partition(LORA)
    target, which = rest.split("/")
    kernel = next(
        (p for p in pieces_of(family, f"{above}/kernel", kinds) if p.part == TARGETS[target].part and not p.whole), None
    )
    if kernel is None:
        raise ConfigError(
            f"{target} is no module of a {family}, so PEFT has no such adapter: export the merged weights, without --peft."
        )
    axes = kernel.ours
    inputs, outputs = (axes[:-1], axes[-1:]) if TARGETS[target].matmul in ROW else (axes[:1], axes[1:])
    words = kernel.theirs.split()
    inside = next(word for word in words if set(word) & set(inputs))
    outside = next(word for word in words if word != inside)
    module = PREFIX + kernel.tensor.removesuffix(".weight")
    if which == "a":
        return Piece(f"{module}.lora_A.weight", f"r {inside}", f"{inputs}r", None, kernel.layers)
    return Piece(f"{module}.lora_B.weight", f"{outside} r", f"r{outputs}", None, kernel.layers)


def read_adapters(directory: pathlib.Path, family: str, model: ModelConfig, target: StateLayout) -> Any:
    """The adapters of PEFT's files on a run's devices.

    Args:
      directory: with the two files.
      family: model_type.
      model: the run's configuration.
      target: the layout of the run's adapters, a part of its parameters.

    Raises:
      ConfigError: a file is missing or damaged, or has other adapters than the run.
    """
    _check_peft_config(directory, model)
    tensors, sizes = open_file(directory / TENSORS), axis_sizes(model) | {"r": model.lora}
    copies, used = {}, set()
    for (name, leaf), sharding in zip(
        layout.named(target.shapes).items(), jax.tree.leaves(target.shardings), strict=True
    ):
        piece, shape = (
            adapter_pieces(family, name, model.layer_kinds),
            layout.canonical_shape(name, leaf.shape, target.where),
        )
        ranges = {letter: (0, sizes[letter]) for letter in piece.ours}
        rows = []
        for index in range(shape[0]):
            key = piece.name((index,))
            if key not in tensors or tensors[key].shape != tensor_shape(piece, sizes):
                had = f"has no {key}" if key not in tensors else f"has {key} of shape {tensors[key].shape}"
                raise ConfigError(
                    f"{directory} {had}, and the run's is {tensor_shape(piece, sizes)}: pass its --lora and --lora-targets."
                )
            used.add(key)
            whole = tensors[key].rows(0, tensors[key].shape[0])
            rows.append(to_leaf(piece, whole.astype(np.float32), ranges, sizes))
        values = np.stack(rows)
        own = layout.canonical_sharding(name, leaf.shape, sharding, target.where)
        copies[name] = jax.make_array_from_callback(shape, own, values.__getitem__)
    if left := sorted(tensors.keys() - used):
        raise ConfigError(
            f"{directory} has {left[0]}, which the run has not: pass --lora-targets with its projections."
        )
    return layout.from_canonical(copies, target)


def _check_peft_config(directory: pathlib.Path, model: ModelConfig) -> None:
    config = read_json(directory / CONFIG)
    legal = {"peft_type": "LORA", "bias": "none"}
    for key in ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save"):
        legal[key] = None
    for key, value in legal.items():
        found = config.get(key)
        if found != value and (value is not None or found):
            raise ConfigError(f"{directory / CONFIG} has {key} = {found}, which is not supported: only plain LoRA is.")
    rank, alpha, own = config.get("r"), config.get("lora_alpha"), model.lora * lora_scale(model)
    if rank != model.lora or alpha != own:
        raise ConfigError(
            f"{directory} has rank {rank} and alpha {alpha}, and the run {model.lora} and {own:g}: "
            f"pass --lora {rank} --lora-alpha {alpha}."
        )


def export_adapters(leaves: RunLeaves, family: str, base: str | None, out: pathlib.Path) -> int:
    """Writes a checkpoint's adapters, and the heads trained with them, as PEFT's files; returns their number of tensors.

    Raises:
      ConfigError: the model has no adapters, PEFT has none of these, or `out` cannot be written.
    """
    model, kinds = leaves.model, leaves.model.layer_kinds
    if not model.lora:
        raise ConfigError(f"{leaves.path} is of a model without adapters: omit --peft.")
    sizes = axis_sizes(model) | {"r": model.lora}
    tensors: dict[str, np.ndarray] = {}
    heads = [name for name in leaves.stored if name.startswith(("shared/head/classifier", "shared/head/spans"))]
    for name in leaves.stored:
        if LORA in name:
            pieces = (adapter_pieces(family, name, kinds),)
        elif name in heads:
            pieces = tuple(piece._replace(tensor=PREFIX + piece.tensor) for piece in pieces_of(family, name))
        else:
            continue
        values = leaves._read(name)
        for piece in pieces:
            rows = values if piece.tensor.count("{}") else values[None]
            for index, one in enumerate(rows):
                tensors[piece.name((index,))] = from_leaf(piece, one, sizes)
    with replace_directory(out, "--out") as unfinished:

        def write() -> None:
            if jax.process_index() != 0:
                return
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            shards = Shards(unfinished, shapes, np.dtype(np.float32), 2**62)
            shards.create()
            for name, tensor in tensors.items():
                shards.write(name, 0, tensor)
            next(iter(shards.tensors.values())).path.rename(unfinished / TENSORS)
            config = _peft_config(model, family, base, [name for name in tensors if ".lora_A." in name], heads)
            (unfinished / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

        on_all_processes("export/adapters", write)
    return len(tensors)


def _peft_config(
    model: ModelConfig, family: str, base: str | None, names: list[str], heads: list[str]
) -> dict[str, Any]:
    """The contents of adapter_config.json; `names`: of all tensors A."""
    alpha = model.lora * lora_scale(model)
    modules = [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in names]
    task = "CAUSAL_LM"
    if isinstance(model, BertConfig):
        task = "SEQ_CLS" if model.has_classifier else "QUESTION_ANS" if model.has_spans else None
    saved = sorted({pieces_of(family, name)[0].tensor.split(".")[0] for name in heads})
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": model.lora,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": short_names(modules, modules_of(model, family)),
        "fan_in_fan_out": family == "gpt2",  # Conv1D
        "bias": "none",
        "inference_mode": True,
        **({"modules_to_save": saved} if saved else {}),
    }


def modules_of(model: ModelConfig, family: str) -> set[str]:
    """All modules of the blocks that are matrices."""
    kinds, sizes = model.layer_kinds, axis_sizes(model)
    found: set[str] = set()
    for kind in set(kinds) if kinds else {""}:
        for leaf in ("attention/qkv/kernel", "attention/output/kernel", "feedforward/up", "feedforward/down"):
            for end in ("", "/kernel") if leaf.startswith("feedforward") else ("",):
                try:
                    pieces = pieces_of(family, "/".join(filter(None, ("blocks", kind, leaf + end))), kinds)
                except ConfigError:  # of experts or not
                    continue
                for piece in pieces:
                    found.update(name.removesuffix(".weight") for name in tensor_names(piece, sizes))
    return found


def short_names(modules: list[str], every: set[str]) -> list[str]:
    """Names that PEFT finds exactly these modules by: their ends where no other module has them, or else whole names."""
    last = {module.rpartition(".")[2] for module in modules}
    is_named = lambda module, ends: any(module == end or module.endswith("." + end) for end in ends)  # noqa: E731
    for ends in (last, {".".join(module.split(".")[-2:]) for module in modules}):
        if {module for module in every if is_named(module, ends)} == set(modules):
            return sorted(ends)
    return sorted(modules)

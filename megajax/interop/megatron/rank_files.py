"""Checkpoints of Megatron-LM with one file a rank (--ckpt-format torch): mp_rank_TT[_PPP]/model_optim_rng.pt.

A file has "args", "checkpoint_version" and, for each virtual stage of the rank, "model" or "model0", "model1", ...: by
megatron-core's names, or nested dictionaries of Megatron-LM before megatron-core. Layers are numbered within a virtual
stage; virtual stage i of rank p is before that of rank p + 1, and all of i before those of i + 1.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.interop.hugging_face.keys import Keys
from megajax.interop.megatron.config import ranks
from megajax.interop.megatron.tensors import canonical_name, merge, reordered_qkv
from megajax.interop.megatron.torch_files import load
from megajax.interop.safetensors import Tensor

__all__ = ["RANK", "MappedTensor", "read_ranks"]

RANK = re.compile(r"mp_rank_(\d+)((?:_\d+)*)")
FILE = "model_optim_rng.pt"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclasses.dataclass(frozen=True)
class MappedTensor:
    """A tensor of torch's."""

    stored: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.stored.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis, fp32; of a mapped file, nothing else is read."""
        return self.stored[start:stop].float().numpy()


def read_ranks(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments, and the tensors by the names of `megatron/tensors.py`.

    Raises:
      ConfigError: see `megatron.checkpoint.open_checkpoint`.
    """
    folders = [found for one in sorted(path.iterdir()) if (found := RANK.fullmatch(one.name))]
    suffixes = {found[2] for found in folders}
    if any(suffix.count("_") > 1 for suffix in suffixes):
        raise ConfigError(
            f"{path} has directories of expert parallelism (mp_rank_TT_PPP_EEE): experts are not supported"
        )
    is_piped = suffixes != {""}
    first = load(path / ("mp_rank_00_000" if is_piped else "mp_rank_00") / FILE)
    args = arguments_of(first, path)
    tensor, pipe = ranks(args)
    expected = {
        (t, p): f"mp_rank_{t:02d}" + (f"_{p:03d}" if is_piped else "")
        for t, p in itertools.product(range(tensor), range(pipe if is_piped else 1))
    }
    extra = next((found[0] for found in folders if found[0] not in expected.values()), None)
    if extra:
        raise ConfigError(
            f"{path} has {extra}, but its args say tensor_model_parallel_size = {tensor} and pipeline_model_parallel_size = "
            f"{pipe}: remove the directories of another run"
        )
    states = {place: load(path / name / FILE) for place, name in expected.items()}
    version = float(first.get("checkpoint_version") or 0)
    heads = Keys(args, f"{path}: args").get("num_attention_heads", int) // tensor
    shards: dict[str, list[Tensor]] = {}
    for t in range(tensor):
        stages = [states[t, p] for p in range(len(states) // tensor)]
        for name, stored in _stacked(path, stages, args):
            if ".linear_qkv." in name and "layer_norm" not in name:
                stored = reordered_qkv(stored, heads, version)
            shards.setdefault(name, []).append(stored)
    short = next((name for name, parts in shards.items() if len(parts) != tensor), None)
    if short:
        raise ConfigError(
            f"{path}: only {len(shards[short])} of {tensor} ranks have {short}: copy the checkpoint again"
        )
    return args, merge(shards, bool(args.get("swiglu") or args.get("gated_linear_unit")))


def arguments_of(state: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The arguments in a checkpoint's dictionary.

    Raises:
      ConfigError: there are none.
    """
    if not hasattr(state.get("args"), "__dict__"):
        raise ConfigError(f"{path} has no args of Megatron-LM, so the model's sizes are unknown: give its checkpoint")
    return dict(vars(state["args"]))


def _stacked(
    path: pathlib.Path, stages: list[Mapping[str, Any]], args: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one rank of tensor parallelism, layers numbered within the model; a name comes once."""
    names = sorted((key for key in stages[0] if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
    seen, offset = set(), 0
    for chunk, stage in itertools.product(names, stages):
        if not isinstance(stage.get(chunk), Mapping):
            raise ConfigError(f"{path}: a rank of the pipeline has no {chunk}: copy the checkpoint again")
        count = 0
        for flat, stored in _flat(stage[chunk]):
            name = canonical_name(flat)
            if name is None:
                continue
            layer = LAYER.fullmatch(name)
            if layer:
                count = max(count, int(layer[1]) + 1)
                name = f"decoder.layers.{offset + int(layer[1])}.{layer[2]}"
            if name not in seen:  # the last stage has a copy of a tied table
                seen.add(name)
                yield name, MappedTensor(_legal(path, flat, stored))
        offset += count
    if not seen:
        raise ConfigError(f"{path} has no model: give a checkpoint of Megatron-LM")
    if args.get("num_layers") not in (None, offset):
        raise ConfigError(
            f"{path}: its stages have {offset} layers in all, and its args num_layers = {args['num_layers']}: copy the "
            "checkpoint again"
        )


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of nested dictionaries, with dots in their names."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif hasattr(value, "shape"):
            yield f"{prefix}{key}", value


def _legal(path: pathlib.Path, name: str, stored: Any) -> Any:
    """Raises ConfigError for tensors that are not of fp32, fp16 or bf16."""
    if not stored.is_floating_point() or stored.element_size() < 2:
        raise ConfigError(f"{path}: {name} is of {stored.dtype}: only fp32, bf16 and fp16 are read")
    return stored

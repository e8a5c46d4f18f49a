"""The parameters in a Hugging Face directory, as regions of megajax's leaves: each reader reads only what it needs."""

import itertools
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from megajax.checkpoint import layout
from megajax.checkpoint.layout import StateLayout
from megajax.config import ConfigError, ModelConfig, near
from megajax.config.layer_kinds import DENSE
from megajax.interop.hugging_face.quantized import open_weights
from megajax.interop.hugging_face.tables import TABLES
from megajax.interop.hugging_face.tensors import (
    STACKED,
    Piece,
    axis_sizes,
    first_row,
    lead_axis,
    overlap,
    rows_of,
    stacked_axes,
    tensor_shape,
    to_leaf,
)
from megajax.interop.hugging_face.ties import absent_prefix
from megajax.interop.safetensors import FLOATS, Tensor

__all__ = [
    "PART_BYTES",
    "Tensor",
    "Weights",
    "grid",
    "load_params",
    "missing_heads",
    "model_pieces",
    "pieces_of",
    "regions",
    "stacked_indices",
    "tensor_names",
]

NEW_HEADS = ("shared/head/classifier", "shared/head/spans", "shared/head/pooler")  # that fine-tuning may begin without
PART_BYTES = 32 * 2**20  # of fp32, read and converted at once
# Parameters of a module of multi-token prediction beside its block: in its layer, with the axes of both sides.
MTP = re.compile(r"shared/mtp(\d+)/(.*)")
MTP_LEAVES = {
    "embedding_norm/scale": ("enorm.weight", "h", "h"),
    "hidden_norm/scale": ("hnorm.weight", "h", "h"),
    "norm/scale": ("shared_head.norm.weight", "h", "h"),
    "projection": ("eh_proj.weight", "h ze", "zeh"),
}


class Weights:
    """The weights of a model in a directory or a file.

    Attributes:
      model: its configuration; it may be shorter (`sequence_length`) than the stored table of positions.
      pieces: each leaf's tensors.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        tensors: Mapping[str, Tensor],
        family: str,
        model: ModelConfig,
        leaves: Sequence[str],
    ):
        """Compares names and shapes with the model's.

        Args:
          directory: where the tensors are, for messages.
          tensors: by transformers' names.
          family: model_type.
          model: its configuration.
          leaves: names of the parameters' leaves, "blocks/..." and "shared/...".

        Raises:
          ConfigError: a tensor is missing, left over, or of another shape.
        """
        self.model, self._sizes = model, axis_sizes(model)
        table = TABLES[family]
        self._tensors = {_renamed(name, table.renamed): tensor for name, tensor in tensors.items()}
        self.pieces = {name: model_pieces(family, name, model) for name in leaves}
        self._cut = absent_prefix(self._tensors, table)
        if model.tied_embeddings:
            for second, first in table.tied.items():
                if self._stored(first) not in self._tensors and self._stored(second) in self._tensors:
                    self._tensors[self._stored(first)] = self._tensors[self._stored(second)]
        wanted = {}
        for pieces in self.pieces.values():
            for piece in pieces:
                wanted |= {self._stored(name): piece for name in tensor_names(piece, self._sizes)}
        missing = next((name for name in wanted if name not in self._tensors), None)
        if missing:
            raise ConfigError(f"{directory} has no tensor {missing}: {near(missing, self._tensors)}")
        tied = tuple(table.tied) if model.tied_embeddings else ()
        for name, tensor in self._tensors.items():
            if name not in wanted:
                after = table.more_layers and re.match(r"(?:model\.)?layers\.(\d+)\.", name)
                if after and int(after[1]) >= model.layers:
                    continue
                if not name.endswith((*table.ignored, *tied)):
                    raise ConfigError(
                        f"{directory} has a tensor {name}, which {family} with this configuration does not"
                    )
                continue
            dtype = getattr(tensor, "dtype", None)
            if dtype is not None and dtype not in FLOATS.values():
                raise ConfigError(f"{directory}: {name} has dtype {dtype}: only {', '.join(FLOATS)} are read")
            shape, expected = tensor.shape, tensor_shape(wanted[name], self._sizes)
            longer = wanted[name].theirs[0] == "s" and len(shape) == 2 and shape[0] >= expected[0]
            if shape != expected and not (longer and shape[1:] == expected[1:]):
                raise ConfigError(f"{directory}: {name} has shape {shape}, and this model's is {expected}")

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._cut)

    def region(self, name: str, region: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        """A region of a leaf in canonical layout ([layers, ...]), fp32; rows of padding, and leaves of no tensor, are zero.

        Args:
          name: of the leaf.
          region: a slice with start and stop for each axis.
          shape: of the leaf.
        """
        out = np.zeros([one.stop - one.start for one in region], np.float32)
        for piece in self.pieces[name]:
            first = stacked_axes(piece)
            found = overlap(piece, region[first:], self._sizes, shape[first:])
            if not found:
                continue
            inside, ranges = found
            before = first_row(piece, self._sizes)
            start, stop = (before + rows_of(piece, self._sizes) * one for one in ranges[piece.theirs[0]])
            for place, index in stacked_indices(region[:first], piece.absent):
                rows = self._tensors[self._stored(piece.name(index))].rows(start, stop)
                out[place + inside] = to_leaf(piece, rows, ranges, self._sizes)
        return out


def _renamed(name: str, endings: Mapping[str, str]) -> str:
    old = next((old for old in endings if name.endswith(old)), "")
    return name.removesuffix(old) + endings.get(old, "")


def pieces_of(family: str, name: str, kinds: tuple[str, ...] | None = None) -> tuple[Piece, ...]:
    """The tensors of a leaf.

    Args:
      family: model_type.
      name: of the leaf, "blocks/..." or "shared/..."; of a model with kinds of layers "blocks/dense/..." and so on.
      kinds: of the model's layers (`ModelConfig.layer_kinds`).

    Raises:
      ConfigError: the family has none.
    """
    of_blocks = kinds is not None and name.startswith("blocks/")
    kind, _, rest = name.removeprefix("blocks/").partition("/") if of_blocks else ("", "", "")
    is_dense = kind.endswith(DENSE)
    leaf = f"blocks/{rest}" if of_blocks else name
    pieces = TABLES[family].leaves.get(leaf)
    if pieces is None and is_dense and rest.startswith("feedforward/"):  # of families whose table has experts only
        pieces = TABLES["llama"].leaves.get(leaf)
    if pieces is None:
        raise ConfigError(f"the parameter {name} has no tensor in a {family} of Hugging Face")
    if not of_blocks:
        return pieces
    layers = tuple(number for number, one in enumerate(kinds) if one == kind)
    wide = (lambda axes: axes.replace("f", "w")) if is_dense else str
    return tuple(piece._replace(theirs=wide(piece.theirs), ours=wide(piece.ours), layers=layers) for piece in pieces)


def model_pieces(family: str, name: str, model: ModelConfig) -> tuple[Piece, ...]:
    """`pieces_of` a model, also of its modules of multi-token prediction: files have module k as layer `layers` + k - 1.

    Raises:
      ConfigError: the family has none.
    """
    found = MTP.fullmatch(name)
    if not found:
        return pieces_of(family, name, model.layer_kinds)
    layer, leaf, block = f"model.layers.{model.layers + int(found[1]) - 1}.", found[2], found[2].partition("block/")[2]
    if leaf == "loss":
        return ()
    if not TABLES[family].more_layers or not (block or leaf in MTP_LEAVES):
        raise ConfigError(f"the parameter {name} has no tensor in a {family} of Hugging Face")
    if not block:
        tensor, *axes = MTP_LEAVES[leaf]
        return (Piece(layer + tensor, *axes),)
    kinds = model.layer_kinds
    pieces = pieces_of(family, f"blocks/{kinds[-1]}/{block}" if kinds else f"blocks/{block}", kinds)
    rows = tuple(range(model.experts))  # of a leaf of experts: its first axis
    return tuple(
        piece._replace(
            tensor=layer + piece.tensor.partition("{}.")[2], layers=rows if stacked_axes(piece) > 1 else None
        )
        for piece in pieces
    )


def tensor_names(piece: Piece, sizes: Mapping[str, int]) -> Iterator[str]:
    """The names of a piece's tensors, of all layers and experts."""
    rows = sizes if piece.layers is None else {**sizes, "l": len(piece.layers)}
    whole = [slice(0, rows[letter]) for letter in STACKED[: stacked_axes(piece)]]
    for _, index in stacked_indices(whole, piece.absent):
        yield piece.name(index)


def stacked_indices(region: Sequence[slice], absent: int = 0) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each layer, or layer and expert, of a region: its place inside the region, and its index in the leaf.

    Not of the first layers, as many as are `absent`.
    """
    for place in itertools.product(*(range(one.stop - one.start) for one in region)):
        index = tuple(one.start + at for one, at in zip(region, place, strict=True))
        if not index or index[0] >= absent:
            yield place, index


def regions(shape: tuple[int, ...], pieces: Sequence[Piece]) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """Cuts a leaf in canonical layout into regions of one layer, or expert, and at most PART_BYTES, along the tensors' rows.

    Returns:
      The shape of a region, and all regions; those at the end may be smaller.
    """
    if not pieces:
        return shape, list(grid(shape, shape))
    chunk, first = list(shape), stacked_axes(pieces[0])
    chunk[:first] = [1] * first
    axis = first + lead_axis(pieces[0])
    row = 4 * math.prod(chunk) // max(1, chunk[axis])
    chunk[axis] = min(shape[axis], max(1, PART_BYTES // row))
    return tuple(chunk), list(grid(shape, chunk))


def grid(shape: Sequence[int], step: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cuts an array into regions of a shape; those at the end may be smaller."""
    for starts in itertools.product(*map(range, [0] * len(shape), shape, step)):
        yield tuple(slice(start, min(start + by, end)) for start, by, end in zip(starts, step, shape, strict=True))


def missing_heads(directory: pathlib.Path, family: str, leaves: Sequence[str]) -> list[str]:
    """Which of `leaves` are heads that fine-tuning adds (`NEW_HEADS`) and the directory has no tensor of."""
    tensors = open_weights(directory)
    return [name for name in leaves if name.startswith(NEW_HEADS) and _lacks(tensors, family, name)]


def load_params(
    directory: pathlib.Path,
    family: str,
    model: ModelConfig,
    target: StateLayout,
    given: Mapping[str, jax.Array] | None = None,
    *,
    as_stored: bool = False,
) -> Any:
    """The parameters on a run's devices: each process reads what its devices hold, part by part.

    Args:
      directory: with safetensors files.
      family, model: as of `Weights`.
      target: the layout of the parameters (`Training.state_layout`'s shapes and shardings of "params").
      given: leaves by name that are not read, `missing_heads`.
      as_stored: in the types of `target.shapes`.

    Returns:
      A tree like `target.shapes`, fp32 if not `as_stored`.

    Raises:
      ConfigError: a file is damaged; or see `Weights`.
    """
    leaves, copies = layout.named(target.shapes), dict(given or {})
    weights = Weights(
        directory, open_weights(directory), family, model, [name for name in leaves if name not in copies]
    )
    for (name, leaf), sharding in zip(leaves.items(), jax.tree.leaves(target.shardings), strict=True):
        if name not in copies:
            shape = layout.canonical_shape(name, leaf.shape, target.where)
            own = layout.canonical_sharding(name, leaf.shape, sharding, target.where)
            copies[name] = _load_leaf(weights, name, shape, own, leaf.dtype if as_stored else np.float32)
    return layout.from_canonical(copies, target)


def _lacks(tensors: Mapping[str, Tensor], family: str, name: str) -> bool:
    """Whether a directory has no tensor of a leaf."""
    endings = tuple(piece.tensor.removeprefix(TABLES[family].prefix) for piece in pieces_of(family, name))
    return not any(stored.endswith(endings) for stored in tensors)


def _load_leaf(weights: Weights, name: str, shape: tuple[int, ...], sharding: NamedSharding, dtype: Any) -> jax.Array:
    """A leaf in canonical layout; the host holds one region of it at a time."""
    buffers = []
    pieces = weights.pieces[name]
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = [slice(*one.indices(size)[:2]) for one, size in zip(index, shape, strict=True)]
        sizes = tuple(one.stop - one.start for one in box)
        buffer = jnp.zeros(sizes, dtype, device=device)
        for region in regions(sizes, pieces)[1]:
            moved = tuple(slice(a.start + b.start, a.stop + b.start) for a, b in zip(region, box, strict=True))
            part = jax.device_put(weights.region(name, moved, shape).astype(dtype), device)
            buffer = _put(buffer, part, tuple(one.start for one in region))
        buffers.append(buffer)
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


@partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, part: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, part, start)

"""How a tensor of Hugging Face is a piece of a leaf of the parameters, in both directions; the families' are in `tables.py`.

A leaf of one layer consists of pieces, each of them a tensor of Hugging Face's with other axes. The axes have letters:

    h hidden   f feedforward   v vocabulary   s positions   d elements of a head
    a heads    g key and value heads   n queries of a group (a / g)   q query, key and value (3)   1 an axis of size 1
    p queries, key and value of a group (n + 2)
    e a second axis of size hidden   t token types   o the orders of two segments (2)   c classes
    l layers   x experts   w feedforward of dense layers between sparse ones   y feedforward of the shared expert
    k, b latents of queries, and of keys and values   m the latter and the shared part of a key   i elements of a value head
    j elements of a head that are computed from the latent, of its key and its value
    z gate and up (2)   u an axis of size 1 that a tensor has too
    G groups of a recurrent mixer   H its heads, R in a group   P elements of a head's value, J of all in a group
    N elements of a key   K of its convolution   W query, key, value and gate of a group   B two steps of its heads

`Piece("self_attn.q_proj.weight", "gnd h", "hgnd", QUERIES)` is a matrix of (g n d) rows and h columns, and in the leaf
[h, g, n + 2, d] the part [:, :, :-2]. torch's Linear stores [outputs, inputs], GPT-2's Conv1D [inputs, outputs].
Both sides rotate element i of a head with element i + d/2, so queries and keys need no permutation.

A leaf of blocks has one tensor (or several pieces) for each layer, and the leaves of experts for each layer and expert:
`Piece("layers.{}.experts.{}.up_proj.weight", "f h", "h1f", UP)` is [:, 1:2] of each [h, 2, f] in [layers, experts, h, 2, f].

The first letter of a tensor is the axis along which a leaf is read and written in parts.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megajax.config import ModelConfig
from megajax.config.latent import latent_sizes
from megajax.config.layer_kinds import DENSE

__all__ = [
    "GATE",
    "KEY",
    "NORM",
    "QUERIES",
    "UP",
    "VALUE",
    "Piece",
    "Table",
    "axis_sizes",
    "expert_pieces",
    "shared_expert_pieces",
    "first_row",
    "from_leaf",
    "fused_qkv",
    "lead_axis",
    "linear_pieces",
    "norm_pieces",
]
__all__ += ["tensor_shape"]

QUERIES, KEY, VALUE = (0, -2), (-2, -1), (-1, None)  # parts of the leaf's last but one axis
GATE, UP = (0, 1), (1, 2)
NORM = {"scale": "weight", "bias": "bias"}
STACKED = "lx"  # the letters of a name's "{}"


class Piece(NamedTuple):
    """A tensor of Hugging Face's, as part of a leaf.

    Attributes:
      tensor: its name; the first "{}" is the layer, the second one the expert.
      theirs: its axes, as products of letters.
      ours: the axes of the leaf (of one layer and expert).
      part: start and stop on the leaf's last but one axis; None: the whole leaf.
      layers: the numbers of the layers that the leaf has rows for; None: all.
      whole: the first axis of the tensor, if the piece is one of several parts of it: products of letters, part after part.
      place: of this part in `whole`.
      absent: the first layers of which no file has it, and on which nothing depends: zero.
    """

    tensor: str
    theirs: str
    ours: str
    part: tuple[int, int | None] | None = None
    layers: tuple[int, ...] | None = None
    whole: tuple[str, ...] = ()
    place: int = 0
    absent: int = 0

    def name(self, index: tuple[int, ...]) -> str:
        """The tensor of a row of the leaf, or of a row and expert; of a leaf without layers () is its index."""
        return self.tensor.format(*(index if self.layers is None else (self.layers[index[0]], *index[1:])))


@dataclasses.dataclass(frozen=True)
class Table:
    """The tensors of a family.

    Attributes:
      leaves: by the name of the leaf, "blocks/..." or "shared/..."; without a piece, it is in no file and zero.
      prefix: of all tensors' names but the head's; files of a model without its head leave it out.
      ignored: ends of names of tensors that are no parameters: old buffers, second names, heads that are left out.
      renamed: ends of names in old files -> those of today.
      more_layers: whether files have layers after the last one (multi-token prediction), which are left out.
      tied: second names of parameters -> their first ones. A file may have either, or both.
    """

    leaves: Mapping[str, tuple[Piece, ...]]
    prefix: str
    ignored: tuple[str, ...]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more_layers: bool = False


def expert_pieces(
    mlp: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, tuple[Piece, ...]]:
    """The leaves of experts and their router, whose tensors begin with `mlp`; the router has no biases."""
    one = mlp + "experts.{}."
    return {
        "blocks/feedforward/router/kernel": (Piece(mlp + "gate.weight", "x h", "hx"),),
        "blocks/feedforward/router/bias": (),
        "blocks/feedforward/router/losses": (),
        "blocks/feedforward/up": (
            Piece(f"{one}{gate}.weight", "f h", "h1f", GATE),
            Piece(f"{one}{up}.weight", "f h", "h1f", UP),
        ),
        "blocks/feedforward/down": (Piece(f"{one}{down}.weight", "h f", "fh"),),
    }


def shared_expert_pieces(shared: str, gate: str = "") -> dict[str, tuple[Piece, ...]]:
    """The leaves of the MLP that all tokens pass, whose tensors begin with `shared`; `gate`: its gate's, if it has one."""
    gates = {"blocks/feedforward/shared_gate": (Piece(f"{gate}.weight", "u h", "hu"),)} if gate else {}
    return gates | {
        "blocks/feedforward/shared/up/kernel": (
            Piece(shared + "gate_proj.weight", "y h", "h1y", GATE),
            Piece(shared + "up_proj.weight", "y h", "h1y", UP),
        ),
        "blocks/feedforward/shared/down/kernel": (Piece(shared + "down_proj.weight", "h y", "yh"),),
    }


def norm_pieces(ours: str, theirs: str, absent: int = 0) -> dict[str, tuple[Piece, ...]]:
    """The leaves of a norm; `absent`: of `Piece`."""
    return {f"{ours}/{name}": (Piece(f"{theirs}.{torch}", "h", "h", absent=absent),) for name, torch in NORM.items()}


def linear_pieces(ours: str, theirs: str, matrix: str, leaf: str) -> dict[str, tuple[Piece, ...]]:
    """The leaves of a matmul; `matrix`, `leaf`: the axes of the weight, in the file and here."""
    outputs = matrix.split()[0]
    bias = Piece(f"{theirs}.bias", outputs, outputs)
    return {f"{ours}/kernel": (Piece(f"{theirs}.weight", matrix, leaf),), f"{ours}/bias": (bias,)}


def fused_qkv(tensor: str, inputs: str = "h") -> tuple[Piece, ...]:
    """Queries, keys and values one after the other in a tensor; `inputs`: "" of their biases."""
    whole, parts = ("gnd", "gd", "gd"), (("gnd", QUERIES), ("g1d", KEY), ("g1d", VALUE))
    return tuple(
        Piece(tensor, f"{theirs} {inputs}".rstrip(), inputs + ours, part, None, whole, place)
        for place, (theirs, (ours, part)) in enumerate(zip(whole, parts, strict=True))
    )


def axis_sizes(model: ModelConfig) -> dict[str, int]:
    """The size of each letter's axis."""
    return {
        **_recurrent_sizes(model),
        "h": model.hidden,
        "f": model.feedforward_size,
        "w": model.of_kind(DENSE).feedforward_size,
        "y": model.shared_feedforward,
        "z": 2,
        "u": 1,
        "v": model.vocabulary,
        "s": model.sequence_length,
        "d": model.head_dimension,
        "a": model.heads,
        "g": model.key_value_heads,
        "n": model.heads // model.key_value_heads,
        "q": 3,
        "p": model.heads // model.key_value_heads + 2,
        "1": 1,
        "e": model.hidden,
        "t": getattr(model, "token_types", 0),
        "o": 2,
        "c": getattr(model, "scores", 0),
        "l": model.layers,
        "x": model.experts,
        **_latent_sizes(model),
    }


def _latent_sizes(model: ModelConfig) -> dict[str, int]:
    if not model.kv_latent:
        return {}
    one = latent_sizes(model)
    both, joined = one.key_value + one.rotated, one.plain + one.value
    return {"k": one.query, "b": one.key_value, "m": both, "j": joined, "i": one.value}


def _recurrent_sizes(model: ModelConfig) -> dict[str, int]:
    groups, size, state = model.recurrent_groups, model.state_head_size, model.recurrent_state
    each = model.state_heads // groups
    sizes = {"G": groups, "R": each, "P": size, "J": each * size, "N": state, "K": model.recurrent_convolution}
    return sizes | {"H": model.state_heads, "W": 2 * (state + each * size), "B": 2 * each}


def tensor_shape(piece: Piece, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the piece's tensor."""
    first, *rest = (_size(axis, sizes) for axis in piece.theirs.split())
    return (sum(_size(part, sizes) for part in piece.whole) or first, *rest)


def first_row(piece: Piece, sizes: Mapping[str, int]) -> int:
    """The row of the tensor with which the piece begins."""
    return sum(_size(part, sizes) for part in piece.whole[: piece.place])


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[letter] for letter in axis)


def lead_axis(piece: Piece) -> int:
    """The leaf's axis, of one layer and expert, that the tensor's first letter is."""
    return piece.ours.index(piece.theirs[0])


def rows_of(piece: Piece, sizes: Mapping[str, int]) -> int:
    """Rows of the tensor for one index of its first letter."""
    return math.prod(sizes[letter] for letter in piece.theirs.split()[0][1:])


def part_range(piece: Piece, size: int) -> tuple[int, int]:
    """Start and stop of the piece on the leaf's last but one axis, which has `size` elements."""
    start, stop = piece.part or (0, size)
    return start + size * (start < 0), size if stop is None else stop + size * (stop < 0)


def overlap(piece: Piece, region: tuple[slice, ...], sizes: Mapping[str, int], shape: tuple[int, ...]):
    """The part of a leaf's region that the piece has.

    Args:
      region: a slice with start and stop for each axis of the leaf (of one layer and expert).
      shape: of the leaf.

    Returns:
      Slices inside the region, and the range of each of the tensor's letters; None if the piece has nothing of it.
    """
    inside, ranges = [], {}
    for axis, (letter, wanted) in enumerate(zip(piece.ours, region, strict=True)):
        first, last = 0, sizes[letter]
        if piece.part and axis == len(shape) - 2:
            first, last = part_range(piece, shape[axis])
        start, stop = max(wanted.start, first), min(wanted.stop, last)
        if start >= stop:
            return None
        inside.append(slice(start - wanted.start, stop - wanted.start))
        ranges[letter] = (start - first, stop - first)
    return tuple(inside), ranges


def to_leaf(
    piece: Piece, rows: np.ndarray, ranges: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> np.ndarray:
    """Rows of a tensor, those of the first letter's range, as a part of the leaf with these ranges."""
    letters = piece.theirs.replace(" ", "")
    rows = rows.reshape(-1, *(sizes[letter] for letter in letters[1:]))
    rows = rows[(slice(None), *(slice(*ranges[letter]) for letter in letters[1:]))]
    kept = [letter for letter in piece.ours if letter != "1"]
    return np.expand_dims(rows.transpose([letters.index(letter) for letter in kept]), _ones(piece))


def from_leaf(piece: Piece, leaf: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """The inverse of `to_leaf`, of a leaf of which only the first letter's axis may be a part: rows of the tensor."""
    if piece.part:
        leaf = leaf[..., slice(*part_range(piece, leaf.shape[-2])), :]
    letters = piece.theirs.replace(" ", "")
    kept = [letter for letter in piece.ours if letter != "1"]
    leaf = np.squeeze(leaf, _ones(piece)).transpose([kept.index(letter) for letter in letters])
    return leaf.reshape(-1, *tensor_shape(piece, sizes)[1:])


def _ones(piece: Piece) -> tuple[int, ...]:
    return tuple(axis for axis, letter in enumerate(piece.ours) if letter == "1")


def stacked_axes(piece: Piece) -> int:
    """The number of the leaf's first axes with a tensor for each index: 0, 1 for layers, or 2 for layers and experts."""
    return piece.tensor.count("{}")

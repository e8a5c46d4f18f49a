"""Which tensors of Hugging Face are which leaves of the parameters: one table per family, used in both directions.

Megatron-LM's tensors are two more families, which are only read (`megatron/tensors.py`).

A leaf of one layer consists of pieces, each of them a tensor of Hugging Face's with other axes. The axes have letters:

    h hidden   f feedforward   v vocabulary   s positions   d elements of a head
    a heads    g key and value heads   n queries of a group (a / g)   q query, key and value (3)   1 an axis of size 1
    p queries, key and value of a group (n + 2)
    e a second axis of size hidden   t token types   o the orders of two segments (2)   c classes
    l layers   x experts   w feedforward of dense layers between sparse ones

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
from megajax.config.layer_kinds import DENSE

__all__ = ["TABLES", "Piece", "Table", "axis_sizes", "from_leaf", "lead_axis", "tensor_shape"]

QUERIES, KEY, VALUE = (0, -2), (-2, -1), (-1, None)  # parts of the leaf's last but one axis
GATE, UP = (0, 1), (1, 2)
STACKED = "lx"  # the letters of a name's "{}"


class Piece(NamedTuple):
    """A tensor of Hugging Face's, as part of a leaf.

    Attributes:
      tensor: its name; the first "{}" is the layer, the second one the expert.
      theirs: its axes, as products of letters.
      ours: the axes of the leaf (of one layer and expert).
      part: start and stop on the leaf's last but one axis; None: the whole leaf.
      layers: the numbers of the layers that the leaf has rows for; None: all.
    """

    tensor: str
    theirs: str
    ours: str
    part: tuple[int, int | None] | None = None
    layers: tuple[int, ...] | None = None

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
      tied: second names of parameters -> their first ones. A file may have either, or both.
    """

    leaves: Mapping[str, tuple[Piece, ...]]
    prefix: str
    ignored: tuple[str, ...]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _norm(ours: str, theirs: str) -> dict[str, tuple[Piece, ...]]:
    return {f"{ours}/{name}": (Piece(f"{theirs}.{torch}", "h", "h"),) for name, torch in NORM.items()}


NORM = {"scale": "weight", "bias": "bias"}
LLAMA_LAYER = "model.layers.{}."
LLAMA = Table(
    {
        "shared/embedding/tokens": (Piece("model.embed_tokens.weight", "v h", "vh"),),
        **_norm("shared/head/norm", "model.norm"),
        "shared/head/vocabulary": (Piece("lm_head.weight", "v h", "vh"),),
        **_norm("blocks/attention_norm", LLAMA_LAYER + "input_layernorm"),
        "blocks/attention/qkv/kernel": (
            Piece(LLAMA_LAYER + "self_attn.q_proj.weight", "gnd h", "hgnd", QUERIES),
            Piece(LLAMA_LAYER + "self_attn.k_proj.weight", "gd h", "hg1d", KEY),
            Piece(LLAMA_LAYER + "self_attn.v_proj.weight", "gd h", "hg1d", VALUE),
        ),
        "blocks/attention/qkv/bias": (
            Piece(LLAMA_LAYER + "self_attn.q_proj.bias", "gnd", "gnd", QUERIES),
            Piece(LLAMA_LAYER + "self_attn.k_proj.bias", "gd", "g1d", KEY),
            Piece(LLAMA_LAYER + "self_attn.v_proj.bias", "gd", "g1d", VALUE),
        ),
        "blocks/attention/query_norm/scale": (Piece(LLAMA_LAYER + "self_attn.q_norm.weight", "d", "d"),),
        "blocks/attention/key_norm/scale": (Piece(LLAMA_LAYER + "self_attn.k_norm.weight", "d", "d"),),
        "blocks/attention/output/kernel": (Piece(LLAMA_LAYER + "self_attn.o_proj.weight", "h ad", "adh"),),
        "blocks/attention/output/bias": (Piece(LLAMA_LAYER + "self_attn.o_proj.bias", "h", "h"),),
        **_norm("blocks/feedforward_norm", LLAMA_LAYER + "post_attention_layernorm"),
        "blocks/feedforward/up/kernel": (
            Piece(LLAMA_LAYER + "mlp.gate_proj.weight", "f h", "h1f", GATE),
            Piece(LLAMA_LAYER + "mlp.up_proj.weight", "f h", "h1f", UP),
        ),
        "blocks/feedforward/up/bias": (
            Piece(LLAMA_LAYER + "mlp.gate_proj.bias", "f", "1f", GATE),
            Piece(LLAMA_LAYER + "mlp.up_proj.bias", "f", "1f", UP),
        ),
        "blocks/feedforward/down/kernel": (Piece(LLAMA_LAYER + "mlp.down_proj.weight", "h f", "fh"),),
        "blocks/feedforward/down/bias": (Piece(LLAMA_LAYER + "mlp.down_proj.bias", "h", "h"),),
    },
    prefix="model.",
    ignored=("rotary_emb.inv_freq", "position_ids"),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


def _sparse(mlp: str, gate: str, up: str, down: str) -> dict[str, tuple[Piece, ...]]:
    """Llama's leaves with experts in place of the MLP, whose tensors begin with `mlp` in each layer."""
    one = LLAMA_LAYER + mlp + "experts.{}."
    return {name: pieces for name, pieces in LLAMA.leaves.items() if not name.startswith("blocks/feedforward/")} | {
        "blocks/feedforward/router/kernel": (Piece(LLAMA_LAYER + mlp + "gate.weight", "x h", "hx"),),
        "blocks/feedforward/router/bias": (),
        "blocks/feedforward/router/losses": (),
        "blocks/feedforward/up": (
            Piece(f"{one}{gate}.weight", "f h", "h1f", GATE),
            Piece(f"{one}{up}.weight", "f h", "h1f", UP),
        ),
        "blocks/feedforward/down": (Piece(f"{one}{down}.weight", "h f", "fh"),),
    }


MIXTRAL = dataclasses.replace(LLAMA, leaves=_sparse("block_sparse_moe.", "w1", "w3", "w2"))
QWEN3_MOE = dataclasses.replace(LLAMA, leaves=_sparse("mlp.", "gate_proj", "up_proj", "down_proj"))
OLMOE = dataclasses.replace(  # norms over all heads
    QWEN3_MOE,
    leaves={
        **QWEN3_MOE.leaves,
        "blocks/attention/query_norm/scale": (Piece(LLAMA_LAYER + "self_attn.q_norm.weight", "gnd", "gnd"),),
        "blocks/attention/key_norm/scale": (Piece(LLAMA_LAYER + "self_attn.k_norm.weight", "gd", "gd"),),
    },
)
GPT2_LAYER = "transformer.h.{}."
GPT2 = Table(
    {
        "shared/embedding/tokens": (Piece("transformer.wte.weight", "v h", "vh"),),
        "shared/embedding/positions": (Piece("transformer.wpe.weight", "s h", "sh"),),
        **_norm("shared/head/norm", "transformer.ln_f"),
        "shared/head/vocabulary": (Piece("lm_head.weight", "v h", "vh"),),
        **_norm("blocks/attention_norm", GPT2_LAYER + "ln_1"),
        "blocks/attention/qkv/kernel": (Piece(GPT2_LAYER + "attn.c_attn.weight", "h qgd", "hgqd"),),
        "blocks/attention/qkv/bias": (Piece(GPT2_LAYER + "attn.c_attn.bias", "qgd", "gqd"),),
        "blocks/attention/output/kernel": (Piece(GPT2_LAYER + "attn.c_proj.weight", "ad h", "adh"),),
        "blocks/attention/output/bias": (Piece(GPT2_LAYER + "attn.c_proj.bias", "h", "h"),),
        **_norm("blocks/feedforward_norm", GPT2_LAYER + "ln_2"),
        "blocks/feedforward/up/kernel": (Piece(GPT2_LAYER + "mlp.c_fc.weight", "h f", "hf"),),
        "blocks/feedforward/up/bias": (Piece(GPT2_LAYER + "mlp.c_fc.bias", "f", "f"),),
        "blocks/feedforward/down/kernel": (Piece(GPT2_LAYER + "mlp.c_proj.weight", "f h", "fh"),),
        "blocks/feedforward/down/bias": (Piece(GPT2_LAYER + "mlp.c_proj.bias", "h", "h"),),
    },
    prefix="transformer.",
    ignored=("attn.bias", "attn.masked_bias", "position_ids"),
    tied={"lm_head.weight": "transformer.wte.weight"},
)
MEGATRON_LAYER = "decoder.layers.{}."


def _megatron(up: Mapping[str, tuple[Piece, ...]]) -> Table:
    """megatron-core's names, those of layers with TransformerEngine; `up`: of the MLP's first matmul."""
    attention, mlp = MEGATRON_LAYER + "self_attention.", MEGATRON_LAYER + "mlp."
    norms = {"attention_norm": attention + "linear_qkv", "feedforward_norm": mlp + "linear_fc1"}
    leaves = {
        "shared/embedding/tokens": (Piece("embedding.word_embeddings.weight", "v h", "vh"),),
        "shared/embedding/positions": (Piece("embedding.position_embeddings.weight", "s h", "sh"),),
        **_norm("shared/head/norm", "decoder.final_layernorm"),
        "shared/head/vocabulary": (Piece("output_layer.weight", "v h", "vh"),),
        **{
            f"blocks/{ours}/{name}": (Piece(f"{theirs}.layer_norm_{torch}", "h", "h"),)
            for ours, theirs in norms.items()
            for name, torch in NORM.items()
        },
        "blocks/attention/qkv/kernel": (Piece(attention + "linear_qkv.weight", "gpd h", "hgpd"),),
        "blocks/attention/qkv/bias": (Piece(attention + "linear_qkv.bias", "gpd", "gpd"),),
        "blocks/attention/query_norm/scale": (Piece(attention + "q_layernorm.weight", "d", "d"),),
        "blocks/attention/key_norm/scale": (Piece(attention + "k_layernorm.weight", "d", "d"),),
        "blocks/attention/output/kernel": (Piece(attention + "linear_proj.weight", "h ad", "adh"),),
        "blocks/attention/output/bias": (Piece(attention + "linear_proj.bias", "h", "h"),),
        "blocks/feedforward/down/kernel": (Piece(mlp + "linear_fc2.weight", "h f", "fh"),),
        "blocks/feedforward/down/bias": (Piece(mlp + "linear_fc2.bias", "h", "h"),),
        **up,
    }
    return Table(leaves, prefix="", ignored=())


FC1 = MEGATRON_LAYER + "mlp.linear_fc1."
MEGATRON = _megatron(
    {
        "blocks/feedforward/up/kernel": (Piece(FC1 + "weight", "f h", "hf"),),
        "blocks/feedforward/up/bias": (Piece(FC1 + "bias", "f", "f"),),
    }
)
MEGATRON_GATED = _megatron(
    {
        "blocks/feedforward/up/kernel": (
            Piece(FC1 + "weight_w", "f h", "h1f", GATE),
            Piece(FC1 + "weight_v", "f h", "h1f", UP),
        ),
        "blocks/feedforward/up/bias": (
            Piece(FC1 + "bias_w", "f", "1f", GATE),
            Piece(FC1 + "bias_v", "f", "1f", UP),
        ),
    }
)

BERT_HEADS = (
    "pooler.dense",
    "seq_relationship",
    "classifier",
    "qa_outputs",
    "predictions.transform.dense",
    "predictions.transform.LayerNorm",
)


def _bert(norms: Mapping[str, str]) -> Table:
    """The tensors of a BERT; `norms`: leaves of norms -> their tensors, which differ between the two families."""
    layer, head = "bert.encoder.layer.{}.", "cls.predictions."
    attention = layer + "attention.self."

    def linear(ours: str, theirs: str, matrix: str, leaf: str) -> dict[str, tuple[Piece, ...]]:
        bias = Piece(f"{theirs}.bias", matrix[0], matrix[0])
        return {f"{ours}/kernel": (Piece(f"{theirs}.weight", matrix, leaf),), f"{ours}/bias": (bias,)}

    return Table(
        {
            "shared/embedding/tokens": (Piece("bert.embeddings.word_embeddings.weight", "v h", "vh"),),
            "shared/embedding/positions": (Piece("bert.embeddings.position_embeddings.weight", "s h", "sh"),),
            "shared/embedding/types": (Piece("bert.embeddings.token_type_embeddings.weight", "t h", "th"),),
            "blocks/attention/qkv/kernel": (
                Piece(attention + "query.weight", "gnd h", "hgnd", QUERIES),
                Piece(attention + "key.weight", "gd h", "hg1d", KEY),
                Piece(attention + "value.weight", "gd h", "hg1d", VALUE),
            ),
            "blocks/attention/qkv/bias": (
                Piece(attention + "query.bias", "gnd", "gnd", QUERIES),
                Piece(attention + "key.bias", "gd", "g1d", KEY),
                Piece(attention + "value.bias", "gd", "g1d", VALUE),
            ),
            **linear("blocks/attention/output", layer + "attention.output.dense", "h ad", "adh"),
            **linear("blocks/feedforward/up", layer + "intermediate.dense", "f h", "hf"),
            **linear("blocks/feedforward/down", layer + "output.dense", "h f", "fh"),
            **linear("shared/head/pooler", "bert.pooler.dense", "e h", "he"),
            **linear("shared/head/transform", head + "transform.dense", "e h", "he"),
            **_norm("shared/head/transform_norm", head + "transform.LayerNorm"),
            "shared/head/bias": (Piece(head + "bias", "v", "v"),),
            **linear("shared/head/order", "cls.seq_relationship", "o h", "ho"),
            **linear("shared/head/classifier", "classifier", "c h", "hc"),
            **linear("shared/head/spans", "qa_outputs", "o h", "ho"),
            **{name: piece for ours, theirs in norms.items() for name, piece in _norm(ours, theirs).items()},
        },
        prefix="bert.",
        ignored=(
            *("embeddings.position_ids", "predictions.decoder.weight", "predictions.decoder.bias", "predictions.bias"),
            *(f"{name}.{kind}" for name in BERT_HEADS for kind in ("weight", "bias")),
        ),
        renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        tied={head + "decoder.weight": "bert.embeddings.word_embeddings.weight", head + "decoder.bias": head + "bias"},
    )


BERT = _bert(
    {
        "shared/embedding/norm": "bert.embeddings.LayerNorm",
        "blocks/attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
        "blocks/feedforward_norm": "bert.encoder.layer.{}.output.LayerNorm",
    }
)
MEGATRON_BERT = _bert(  # norms before attention and MLP
    {
        "blocks/attention_norm": "bert.encoder.layer.{}.attention.ln",
        "blocks/feedforward_norm": "bert.encoder.layer.{}.ln",
        "shared/head/norm": "bert.encoder.ln",
    }
)
TABLES = {
    "gpt2": GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "megatron": MEGATRON,
    "megatron_gated": MEGATRON_GATED,
    "bert": BERT,
    "megatron-bert": MEGATRON_BERT,
}


def axis_sizes(model: ModelConfig) -> dict[str, int]:
    """The size of each letter's axis."""
    return {
        "h": model.hidden,
        "f": model.feedforward_size,
        "w": model.of_kind(DENSE).feedforward_size,
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
    }


def tensor_shape(piece: Piece, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the piece's tensor."""
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in piece.theirs.split())


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

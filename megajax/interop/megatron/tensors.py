"""Tensors of Megatron-LM's checkpoints as those of one device, by one set of names: shards of tensor parallelism merged, old
names and orders converted, padding cut off. Nothing here needs torch.

The names are megatron-core's with TransformerEngine's layers, with the layer's number in the model:

    embedding.word_embeddings.weight [v, h]            embedding.position_embeddings.weight [s, h]
    decoder.layers.N.self_attention.linear_qkv.        weight [g (n + 2) d, h], bias, layer_norm_weight, layer_norm_bias
                     self_attention.q_layernorm.weight [d], k_layernorm.weight [d], linear_proj.weight [h, a d], bias [h]
                     mlp.linear_fc1.                   weight [f, h] (gated: weight_w and weight_v), bias, layer_norm_...
                     mlp.linear_fc2.weight [h, f], bias [h]
    decoder.final_layernorm.weight and bias [h]        output_layer.weight [v, h]

The letters are those of `hugging_face/tensors.py`. Ranks of tensor parallelism have whole groups of queries, key and value;
and of a gated linear_fc1 their part of the gate, then of the gated value.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from megajax.config import ConfigError
from megajax.interop.safetensors import Tensor

__all__ = ["Merged", "canonical_name", "for_model", "merge", "reordered_qkv", "split_gated"]

COLUMNS = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")  # split on axis 0
ROWS = ("linear_proj.weight", "linear_fc2.weight")  # split on axis 1
FC1 = ("linear_fc1.weight", "linear_fc1.bias")  # split on axis 0, gate and value each by itself
# Parts of a layer's names: of other layers of megatron-core, and of Megatron-LM before megatron-core -> ours.
ATTENTION, MLP = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
OTHER_NAMES = {
    r"input_(?:layer)?norm\.": ATTENTION,
    r"(?:pre_mlp_layernorm|post_attention_(?:layer)?norm)\.": MLP,
    r"(?:self_)?attention\.query_key_value\.": "self_attention.linear_qkv.",
    r"(?:self_)?attention\.dense\.": "self_attention.linear_proj.",
    r"mlp\.dense_h_to_4h\.": "mlp.linear_fc1.",
    r"mlp\.dense_4h_to_h\.": "mlp.linear_fc2.",
    # TransformerEngine's operation fuser
    r"mlp\.0\.": MLP,
    r"mlp\.1\.basic_ops\.[01]\.": "mlp.linear_fc1.",
    r"mlp\.3\.basic_ops\.[01]\.": "mlp.linear_fc2.",
}
STACKS = r"(?:decoder|encoder|transformer)"
UNUSED = re.compile(r"_extra_state(/.*)?$|rotary_pos_emb\.|^(chained_\d+\.)?optimizer\.")


@dataclasses.dataclass(frozen=True)
class Merged:
    """Shards of one tensor as one tensor.

    Attributes:
      shards: in the order of their ranks.
      axis: on which they are concatenated, 0 or 1.
    """

    shards: Sequence[Tensor]
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = list(self.shards[0].shape)
        shape[self.axis] = sum(shard.shape[self.axis] for shard in self.shards)
        return tuple(shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis; shards without any of them are not read."""
        if self.axis == 1:
            return np.concatenate([shard.rows(start, stop) for shard in self.shards], axis=1)
        found, first = [], 0
        for shard in self.shards:
            count = shard.shape[0]
            if first < stop and start < first + count:
                found.append(shard.rows(max(start - first, 0), min(stop - first, count)))
            first += count
        return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Consecutive elements of a tensor's first axis: half of a gated matrix, or a table without its padding."""

    whole: Tensor
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return (self.count, *self.whole.shape[1:])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the part."""
        return self.whole.rows(self.first + start, self.first + stop)


@dataclasses.dataclass(frozen=True)
class Reordered:
    """A tensor whose rows are in another order in the file. It is read whole.

    Attributes:
      stored: the tensor in the file.
      order: for each row its place in the file.
    """

    stored: Tensor
    order: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.stored.shape

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis."""
        return self.stored.rows(0, self.shape[0])[self.order[start:stop]]


@dataclasses.dataclass(frozen=True)
class ZeroCentred:
    """The scale of a norm that is stored as scale - 1 (`apply_layernorm_1p`)."""

    stored: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scale."""
        return self.stored.shape

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop, fp32."""
        return self.stored.rows(start, stop).astype(np.float32) + 1


@dataclasses.dataclass(frozen=True)
class Zeros:
    """A bias that the checkpoint does not have."""

    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis."""
        return np.zeros((stop - start, *self.shape[1:]), np.float32)


def canonical_name(name: str) -> str | None:
    """The name of a tensor in this module's docstring; its own if it has none there; None for what is no parameter."""
    if UNUSED.search(name):
        return None
    name = name.removeprefix("language_model.")
    name = re.sub(rf"^{STACKS}\.final_(?:layer)?norm\.", "decoder.final_layernorm.", name)
    found = re.fullmatch(rf"{STACKS}\.layers\.(\d+)\.(.*)", name)
    if not found:
        return name
    rest = found[2]
    for pattern, ours in OTHER_NAMES.items():
        rest = re.sub(rf"^{pattern}", ours, rest)
    return f"decoder.layers.{found[1]}.{rest}"


def merge(shards: Mapping[str, Sequence[Tensor]], gated: bool) -> dict[str, Tensor]:
    """One tensor from those of the ranks of tensor parallelism.

    Args:
      shards: by the names above, in the order of the ranks.
      gated: whether linear_fc1 is gated.
    """
    found: dict[str, Tensor] = {}
    for name, parts in shards.items():
        if gated and name.endswith(FC1):
            halves = [split_gated(part) for part in parts]
            for suffix, half in zip(("_w", "_v"), zip(*halves, strict=True), strict=True):
                found[name + suffix] = Merged(half)
        elif name.endswith((*COLUMNS, *FC1)):
            found[name] = Merged(parts)
        elif name.endswith(ROWS):
            found[name] = Merged(parts, axis=1)
        else:
            found[name] = parts[0]
    return found


def split_gated(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and the gated value of one rank's, or of the whole, linear_fc1."""
    half = tensor.shape[0] // 2
    return Rows(tensor, 0, half), Rows(tensor, half, tensor.shape[0] - half)


def reordered_qkv(shard: Tensor, heads: int, version: float) -> Tensor:
    """A rank's query_key_value of a `checkpoint_version` before 2.0 in today's order of rows, [heads, 3, d].

    Version 0 has [3, heads, d], version 1 [heads, d, 3] (Megatron-LM's fix_query_key_value_ordering).

    Args:
      shard: [3 heads d, ...].
      heads: of the rank.
      version: of the checkpoint.
    """
    if version >= 2:
        return shard
    places = np.arange(shard.shape[0])
    if version < 1:
        order = places.reshape(3, heads, -1).transpose(1, 0, 2)
    else:
        order = places.reshape(heads, -1, 3).transpose(0, 2, 1)
    return Reordered(shard, order.ravel())


def for_model(tensors: Mapping[str, Tensor], vocabulary: int, tied: bool, added: Mapping[str, tuple[int, ...]]) -> dict:
    """The tensors as `hugging_face.weights.Weights` compares them with a model's.

    Args:
      tensors: merged, by the names above.
      vocabulary: rows of the token tables without padding.
      tied: whether the output layer is the embedding: a copy of it, on the last stage, is dropped.
      added: names and shapes of biases that are zero.
    """
    found = dict(tensors)
    if tied:
        for name in ("output_layer.weight", "word_embeddings_for_head.weight"):
            found.pop(name, None)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in found:
            if found[name].shape[0] < vocabulary:
                raise ConfigError(
                    f"vocabulary = {vocabulary}, but {name} has {found[name].shape[0]} rows with its padding: pass the "
                    "--tokenizer of the checkpoint, or a smaller --vocabulary"
                )
            found[name] = Rows(found[name], 0, vocabulary)
    return found | {name: Zeros(shape) for name, shape in added.items() if name not in found}


def zero_centred(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint with `apply_layernorm_1p`: its norms' weights are stored without the 1."""
    is_scale = re.compile(r"(layer_norm_weight|layernorm\.weight)$")
    return {name: ZeroCentred(one) if is_scale.search(name) else one for name, one in tensors.items()}

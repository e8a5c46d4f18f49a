"""The costs of a model as plain numbers, the only input of the estimate and the planner.

`ModelCosts` describes one block and the parts outside the blocks: matmuls, attention, parameters, values stored for the
backward pass, and memory traffic. The numbers are for one sample or one token of the whole model, and state how a tensor
group splits them. `transformer_costs` computes them for `ModelConfig`; other models return theirs from
`PipelineModel.costs()`.
"""

import dataclasses

from megajax.config import ModelConfig
from megajax.models.remat import MODES

__all__ = ["Attention", "Elementwise", "KeptValue", "Matmul", "ModelCosts", "Parameters", "transformer_costs"]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of a block with one of its weights, from `inputs` to `outputs` elements per token.

    Attributes:
      name: for tables of FLOPs.
      inputs: rows of the weight.
      outputs: columns of the weight.
      split: how a tensor group splits the weight (1909.08053 section 3): "column" splits the outputs, "row" the inputs
        (its product is summed over the group), None not at all.
      recomputed: recompute modes in which the backward pass repeats it.
    """

    name: str
    inputs: int
    outputs: int
    split: str | None = None
    recomputed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of a block. Heads are split over tensor.

    Attributes:
      heads: query heads.
      groups: key and value heads.
      head_size: elements of a head.
      dropout: probability of dropping an attention probability; cuDNN's attention supports only 0.
      window: latest tokens that a token attends to; None: all before it.
      causal: whether tokens attend to earlier tokens only; if not, to all of the sample.
      scores_recomputed: recompute modes in which the backward computes queries times keys a second time; fused attention
        always does, and that is part of its backward.
      values_recomputed: recompute modes in which it computes probabilities times values a second time.
    """

    heads: int
    groups: int
    head_size: int
    dropout: float = 0.0
    window: int | None = None
    causal: bool = True
    scores_recomputed: tuple[str, ...] = ("selective", "full")
    values_recomputed: tuple[str, ...] = ("full",)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
      split: parameters in arrays that are split over tensor.
      whole: parameters in arrays that are replicated over tensor.
    """

    split: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        return self.split + self.whole

    def on_device(self, tensor: int) -> int:
        """Parameters on one device of a tensor group of this size."""
        return self.split // tensor + self.whole


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A value of a block that is stored from the forward to the backward pass.

    Attributes:
      name: as given to `checkpoint_name`; "input" is the block's own input.
      per_token: elements for each token.
      per_token_pair: elements for each pair of tokens of a sample (attention scores).
      split: "tensor" if the value is split over tensor; "sequence" if it is split over tensor only with sequence
        parallelism; None if never.
      modes: recompute modes that store it.
      itemsize: bytes of an element whatever the precision; None: the precision's.
      fused: True if only fused attention has it, False if only unfused attention has it, None otherwise.
      transposed_from: the smallest microbatch size for which XLA's GPU compiler transposes all stashed copies of this value
        before the backward pass (measured in compiled programs, see `estimate/memory.py`); None: it does not.
    """

    name: str
    per_token: int = 0
    per_token_pair: int = 0
    split: str | None = "sequence"
    modes: tuple[str, ...] = tuple(MODES)
    itemsize: int | None = None
    fused: bool | None = None
    transposed_from: int | None = None

    def elements(self, sequence: int) -> int:
        """Elements of one sample of `sequence` tokens, on all devices of a tensor group together."""
        return sequence * self.per_token + sequence * sequence * self.per_token_pair

    def bytes(self, *, samples: int, sequence: int, itemsize: int, tensor: int, sequence_parallel: bool) -> int:
        """Bytes on one device for a microbatch of `samples` samples of `sequence` tokens."""
        parts = tensor if self.split == "tensor" or (self.split == "sequence" and sequence_parallel) else 1
        return samples * self.elements(sequence) * (self.itemsize or itemsize) // parts


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """Memory traffic of a block's forward outside matmuls and attention, in elements for each token, read or written.

    Attributes:
      residual_passes: reads and writes of the whole residual stream; split over tensor only with sequence parallelism.
      masks: masks on the residual stream, of one byte an element, where the block has dropout.
      inner: elements of values that are split over tensor.
      whole: elements of values that are replicated over tensor.
    """

    residual_passes: int = 0
    masks: int = 0
    inner: int = 0
    whole: int = 0


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """A model of `layers` equal blocks on a residual stream [samples, sequence_length, hidden].

    Attributes:
      layers: blocks.
      hidden: elements of a token in the residual stream, which is what stages send each other.
      sequence_length: tokens of a sample.
      vocabulary: columns of the head's matmul, unpadded; 0 for a model without one.
      matmuls: of a block, with its weights.
      attention: of a block; None: it has none, or it is counted in `matmuls`.
      block: parameters of one block.
      shared: parameters outside the blocks, except those of the next field.
      vocabulary_width: parameters for each entry of the vocabulary: the embedding's, and the head's if untied. These tables
        are split over tensor, or over pipe and tensor.
      kept: values that a block's forward stores for its backward.
      kept_for_weights: values that zero bubble's I stores for its W (`pipeline/split_backward.py`): the gradients of the
        matmuls' outputs, and values that I recomputed with a matmul.
      elementwise: memory traffic of a block's forward.
      head: matmuls of the head on every token, beside the logits; their weights are replicated over tensor.
    """

    layers: int
    hidden: int
    sequence_length: int
    vocabulary: int
    matmuls: tuple[Matmul, ...]
    attention: Attention | None
    block: Parameters
    shared: Parameters
    vocabulary_width: int
    kept: tuple[KeptValue, ...]
    kept_for_weights: tuple[KeptValue, ...]
    elementwise: Elementwise = Elementwise()
    head: tuple[Matmul, ...] = ()

    @property
    def parameters(self) -> int:
        """Trainable parameters, with the vocabulary unpadded."""
        tables = self.vocabulary * self.vocabulary_width
        return self.layers * self.block.total + self.shared.total + tables

    @property
    def matmul_pairs(self) -> int:
        """Column- then row-parallel pairs of matmuls in a block; each has one sum over the tensor group."""
        return sum(one.split == "row" for one in self.matmuls)

    def kept_values(self, mode: str, fused_attention: bool = False) -> tuple[KeptValue, ...]:
        """The values that one block stores for its backward in recompute mode `mode`."""
        return tuple(value for value in self.kept if mode in value.modes and value.fused in (None, fused_attention))

    def kept_bytes(
        self,
        mode: str,
        *,
        samples: int,
        sequence: int | None = None,
        tensor: int = 1,
        sequence_parallel: bool = True,
        itemsize: int = 2,
        fused_attention: bool = False,
    ) -> int:
        """Bytes that one device keeps of one block for one microbatch; compare 2205.05198 table 2.

        Args:
          mode: none, selective or full.
          samples: in the microbatch.
          sequence: tokens of a sample on the device; the model's sequence_length if not given.
          tensor: devices of a tensor group.
          sequence_parallel: whether they also split the residual stream along its sequence.
          itemsize: bytes of an activation, 2 for bf16 and fp16.
          fused_attention: whether attention keeps no scores: cuDNN's, or ring attention.
        """
        sizes = {
            "samples": samples,
            "sequence": self.sequence_length if sequence is None else sequence,
            "itemsize": itemsize,
            "tensor": tensor,
            "sequence_parallel": sequence_parallel,
        }
        return sum(value.bytes(**sizes) for value in self.kept_values(mode, fused_attention))


def transformer_costs(config: ModelConfig) -> ModelCosts:
    """The costs of a decoder-only transformer (`models/transformer.py`, `models/gpt.py`), counted from its shape."""
    hidden, bias, size = config.hidden, int(config.biases), config.head_dimension
    heads, groups, qkv_bias = config.heads * size, config.key_value_heads * size, int(config.has_qkv_biases)
    query_key_value = heads + 2 * groups
    norm = hidden * (2 if config.norm == "layernorm" and config.biases else 1)
    mlp = _mlp_costs(config)
    over_heads = config.query_key_norm_over == "projection"  # then its scales are split as the heads are
    return ModelCosts(
        layers=config.layers,
        hidden=hidden,
        sequence_length=config.sequence_length,
        vocabulary=config.vocabulary,
        matmuls=(
            Matmul("query_key_value", hidden, query_key_value, "column", ("full",)),
            Matmul("attention_output", heads, hidden, "row", ("full",)),
            *mlp.matmuls,
        ),
        attention=Attention(
            config.heads,
            config.key_value_heads,
            size,
            dropout=config.dropout,
            window=config.attention_window,
            causal=config.causal,
        ),
        block=Parameters(
            split=(hidden + qkv_bias) * query_key_value
            + hidden * heads
            + mlp.parameters.split
            + over_heads * config.query_key_norm_parameters,
            whole=hidden * bias + 2 * norm + mlp.parameters.whole + (not over_heads) * config.query_key_norm_parameters,
        ),
        shared=Parameters(whole=(config.sequence_length * hidden if config.positions == "learned" else 0) + norm),
        vocabulary_width=hidden * (1 if config.tied_embeddings else 2),
        kept=_kept_by_transformer(config, query_key_value, mlp),
        kept_for_weights=(
            KeptValue("gradients of query_key_value and mlp_in", query_key_value + mlp.up, split="tensor"),
            KeptValue("gradients of attention_output and mlp_out", 2 * hidden if mlp.has_dense else hidden),
            KeptValue("gradients of the experts' results", mlp.rows * hidden, split=None),
            KeptValue("context", heads, split="tensor", modes=("full",)),
            KeptValue("residual", hidden, modes=("full",)),
            # two intermediate values of the activation function are fp32
            KeptValue("activation", 2 * mlp.up, split="tensor", modes=("full",), itemsize=4),
        ),
        elementwise=Elementwise(
            residual_passes=2 * 2 + 2 * 3,  # two norms (read, write), two additions (read two, write)
            masks=2,
            # the activation function; queries, keys and values (read, write); and the norm of queries and keys
            inner=mlp.up + mlp.inner + 2 * query_key_value + 2 * (heads + groups) * int(config.query_key_norm),
            whole=2 * 2 * mlp.rows * hidden,  # dispatch and combine (read, write)
        ),
    )


@dataclasses.dataclass(frozen=True)
class _MlpCosts:
    """The MLP of a block: the dense one, or router, experts and the shared one.

    Attributes:
      matmuls: with k rows of the experts for each token as k times the columns or rows of one expert.
      parameters: of all experts; without the router's `bias` and `losses`, which no gradient trains.
      up: elements of a token before the activation, in all MLPs that it passes.
      inner: after it.
      rows: experts that a token passes; 0 without experts.
      has_dense: whether there is a dense or a shared MLP.
    """

    matmuls: tuple[Matmul, ...]
    parameters: Parameters
    up: int
    inner: int
    rows: int
    has_dense: bool


def _mlp_costs(config: ModelConfig) -> _MlpCosts:
    hidden, bias, into = config.hidden, int(config.biases), 2 if config.is_gated else 1
    rows = config.experts_per_token if config.experts else 0
    dense = config.shared_feedforward if config.experts else config.feedforward_size
    routed = rows * config.feedforward_size
    matmuls = []
    split = whole = 0
    if dense:
        matmuls += [
            Matmul("mlp_in", hidden, into * dense, "column", ("full",)),
            Matmul("mlp_out", dense, hidden, "row"),
        ]
        split, whole = (hidden + bias) * into * dense + dense * hidden, bias * hidden
    if rows:
        matmuls += [
            Matmul("router", hidden, config.experts, None, ("full",)),
            Matmul("experts_in", hidden, into * routed, "column", ("full",)),
            Matmul("experts_out", routed, hidden, "row"),
        ]
        split += config.experts * (into + 1) * hidden * config.feedforward_size
        whole += hidden * config.experts
    parameters = Parameters(split, whole)
    return _MlpCosts(tuple(matmuls), parameters, into * (dense + routed), dense + routed, rows, dense > 0)


def _kept_by_transformer(config: ModelConfig, query_key_value: int, mlp: _MlpCosts) -> tuple[KeptValue, ...]:
    """The named values of `models/remat.py`, with the modes that keep them."""

    def value(name: str, per_token: int = 0, split: str | None = "sequence", **fields) -> KeptValue:
        modes = tuple(mode for mode, names in MODES.items() if name in names)
        return KeptValue(name, per_token, split=split, modes=modes, **fields)

    hidden, heads = config.hidden, config.heads
    changed = config.positions == "rotary" or config.query_key_norm  # queries and keys, before attention
    values = [
        KeptValue("input", hidden),
        *([] if config.post_norm else [value("attention_input", hidden)]),  # else the block's input
        value("qkv", query_key_value, "tensor", transposed_from=2 if changed else None),
        value("probabilities", 0, "tensor", per_token_pair=heads, fused=False, transposed_from=1),
        value("context", heads * config.head_dimension, "tensor"),
        value("attention_statistics", heads, "tensor", itemsize=4, fused=True),
        value("residual", hidden),
        value("feedforward_input", hidden),
        value("up", mlp.up, "tensor"),
        value("activation", mlp.inner, "tensor"),
        *([value("output_residual", hidden)] if config.post_norm else []),
    ]
    if config.experts:
        values += [
            value("router", config.experts, None, itemsize=4),
            value("dispatched", mlp.rows * hidden, None),
        ]
    if config.dropout > 0:
        values += [
            value("probabilities_mask", 0, "tensor", per_token_pair=heads, itemsize=1, fused=False, transposed_from=1),
            value("attention_mask", hidden, itemsize=1),
            value("feedforward_mask", hidden, itemsize=1),
        ]
    return tuple(values)

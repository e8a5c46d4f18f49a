"""The costs of a model as plain numbers, the only input of the estimate and the planner.

`ModelCosts` describes one block and the parts outside the blocks: matmuls, attention, parameters, values stored for the
backward pass, and memory traffic. The numbers are for one sample or one token of the whole model, and state how a tensor
group splits them. `transformer_costs.py` computes them for `ModelConfig`; other models return theirs from
`PipelineModel.costs()`.
"""

import dataclasses

from megajax.models.remat import MODES
from megajax.ops.expert_choice import Choice
from megajax.ops.expert_rounds import places_of_balanced, rows_of_balanced

__all__ = [
    "Attention",
    "Elementwise",
    "Experts",
    "KeptValue",
    "Matmul",
    "ModelCosts",
    "Parameters",
]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of a block with one of its weights, from `inputs` to `outputs` elements per token.

    Attributes:
      name: for tables of FLOPs.
      inputs: rows of the weight.
      outputs: columns of the weight.
      split: how a tensor group splits the weight (1909.08053 section 3): "column" splits the outputs, "row" the inputs
        (its product is summed over the group), None not at all, "sequence" not the weight, but the rows that pass it.
      recomputed: recompute modes in which the backward pass repeats it.
      added: its result is added to another matmul's, in place.
    """

    name: str
    inputs: int
    outputs: int
    split: str | None = None
    recomputed: tuple[str, ...] = ()
    added: bool = False

    def on_device(self, tensor: int) -> tuple[float, float]:
        """(inputs, outputs) of the weight's part on one device of a tensor group of this size."""
        inputs = self.inputs / tensor if self.split == "row" else self.inputs
        return inputs, self.outputs / tensor if self.split in ("column", "sequence") else self.outputs


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of a block. Heads are split over tensor.

    Attributes:
      heads: query heads.
      groups: key and value heads.
      head_size: elements of a head.
      dropout: probability of dropping an attention probability; cuDNN's attention supports only 0.
      windows: latest tokens that a token attends to; None: all before it. Of a model whose layers differ, one for each
        layer: what is counted is then of a layer on average.
      chunks: likewise tokens of a chunk, outside of which a token attends to none.
      causal: whether tokens attend to earlier tokens only; if not, to as many later ones too.
      scores_recomputed: recompute modes in which the backward computes queries times keys a second time; fused attention
        always does, and that is part of its backward.
      values_recomputed: recompute modes in which it computes probabilities times values a second time.
      unfused: what no fused kernel computes, a field of the model; "": nothing.
      value_size: elements of a head of the values; None: head_size.
      gathered: elements of a token that the column-parallel matmuls before it read; None: the residual stream's.
    """

    heads: int
    groups: int
    head_size: int
    dropout: float = 0.0
    windows: tuple[int | None, ...] = (None,)
    chunks: tuple[int | None, ...] = (None,)
    causal: bool = True
    scores_recomputed: tuple[str, ...] = ("selective", "full")
    values_recomputed: tuple[str, ...] = ("full",)
    unfused: str = ""
    value_size: int | None = None
    gathered: int | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of a head of queries and keys, and of values."""
        return self.head_size, self.value_size or self.head_size

    @property
    def mean_size(self) -> float:
        """The mean of both, for what has as many arrays of queries or keys as of values or results."""
        return sum(self.sizes) / 2

    def pairs(self, tokens: int) -> float:
        """Scores that a head computes for a sample of this many tokens, if it leaves out those that are masked."""
        each = max(self.windows, self.chunks, key=len)
        windows, chunks = (of if len(of) == len(each) else of * len(each) for of in (self.windows, self.chunks))
        before = sum(_pairs(tokens, *reach) for reach in zip(windows, chunks, strict=True)) / len(each)
        return before if self.causal else 2 * before

    @property
    def window(self) -> int | None:
        """The window of all layers; None: they differ, or have none."""
        return self.windows[0] if len(set(self.windows)) == 1 else None

    @property
    def differ(self) -> bool:
        """Whether layers have different windows, or chunks."""
        return len(set(self.windows)) > 1 or any(self.chunks)


def _pairs(tokens: int, window: int | None, chunk: int | None) -> float:
    """Pairs of a token and one that it sees, itself counted half."""
    if chunk and chunk < tokens:
        whole, rest = divmod(tokens, chunk)
        return whole * _pairs(chunk, window, None) + _pairs(rest, window, None)
    window = min(tokens, window or tokens)
    return window * (2 * tokens - window) / 2


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
class Experts:
    """The experts of a block, split over tensor and over the replicas of expert parallelism.

    Attributes:
      choice: of k of E experts.
      parameters: of all of them; part of `ModelCosts.block`.
      share: the largest share of a sample's tokens that one expert takes: 1 without capacity.
    """

    choice: Choice
    parameters: int
    share: float = 1.0

    def on_device(self, tensor: int, degree: int) -> int:
        """Parameters on one device."""
        return self.parameters // (tensor * degree)

    def rows(self, degree: int, dispatch: str = "gather") -> float:
        """Rows of a device's arrays for each row that balanced routing gives it: there is room for all that can be there.

        Args:
          degree: replicas that split the experts.
          dispatch: how tokens get to them; bucketed: the rows are those of its first exchange.
        """
        if dispatch == "bucketed" and degree > 1:
            return rows_of_balanced(self.choice, degree)
        here, chosen = self.choice.count // degree, self.choice.chosen
        return degree * min(here, chosen, here * self.share) / chosen

    def in_rounds(self, degree: int, dispatch: str) -> bool:
        """Whether rounds follow a first exchange that has no room for all rows (`ops/expert_rounds.py`)."""
        return self.rows(degree, dispatch) < self.rows(degree)

    def places(self, degree: int, dispatch: str = "gather") -> float:
        """Places of tokens that a group sends to a device, for each of its own: of all, or those of a first exchange."""
        if dispatch == "bucketed" and degree > 1:
            return degree * places_of_balanced(self.choice, degree)
        return degree


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
      routed: whether it has k rows of experts for each token, of which a device may have more (`Experts.rows`).
    """

    name: str
    per_token: int = 0
    per_token_pair: int = 0
    split: str | None = "sequence"
    modes: tuple[str, ...] = tuple(MODES)
    itemsize: int | None = None
    fused: bool | None = None
    routed: bool = False

    def elements(self, sequence: int) -> int:
        """Elements of one sample of `sequence` tokens, on all devices of a tensor group together."""
        return sequence * self.per_token + sequence * sequence * self.per_token_pair

    def bytes(
        self, *, samples: int, sequence: int, itemsize: int, tensor: int, sequence_parallel: bool, rows: float = 1.0
    ) -> int:
        """Bytes on one device for a microbatch of `samples` samples of `sequence` tokens; `rows`: of `Experts.rows`."""
        parts = tensor if self.split == "tensor" or (self.split == "sequence" and sequence_parallel) else 1
        count = samples * self.elements(sequence) * (self.itemsize or itemsize) // parts
        return int(count * rows) if self.routed else count


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
      looked_up_width: those of them that are only looked up, `parameter(looked_up=True)`.
      kept: values that a block's forward stores for its backward.
      kept_for_weights: values that zero bubble's I stores for its W (`pipeline/split_backward.py`): the gradients of the
        matmuls' outputs, and values that I recomputed with a matmul.
      elementwise: memory traffic of a block's forward.
      head: matmuls of the head on every token, beside the logits; their weights are replicated over tensor.
      experts: of a block; None: it has none.
      kinds: of a model whose layers are of several kinds, the number of layers of each kind and the costs of a model of that
        kind alone; `block` and all else about a block are then those of one kind, the one with experts, and the estimate
        adds up the kinds (`estimate/kinds.py`).
      scratch: bytes for each token that are live only in a block's backward, beside those of matmuls and attention; split
        over tensor.
      further: the modules of multi-token prediction, computed with the head: `layers` of them, `block` of each, and outside
        of the blocks `shared` of all, and `head` of each. None: there are none.
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
    experts: Experts | None = None
    kinds: tuple[tuple[int, "ModelCosts"], ...] = ()
    scratch: int = 0
    looked_up_width: int = 0
    further: "ModelCosts | None" = None

    @property
    def layers_of_kinds(self) -> tuple[tuple[int, "ModelCosts"], ...]:
        """The number of layers of each kind, with costs that describe a block of it."""
        return self.kinds or ((self.layers, self),)

    def expert_rows(self, degree: int, dispatch: str = "gather") -> float:
        """`Experts.rows`; 1 without experts."""
        return self.experts.rows(degree, dispatch) if self.experts else 1.0

    @property
    def parameters(self) -> int:
        """Trainable parameters, with the vocabulary unpadded."""
        tables, further = self.vocabulary * self.vocabulary_width, self.further
        modules = further.layers * further.block.total + further.shared.total if further else 0
        blocks = sum(layers * kind.block.total for layers, kind in self.layers_of_kinds)
        return blocks + modules + self.shared.total + tables

    @property
    def routed_inner(self) -> int:
        """Elements of a token before and after the activation in the experts that it passes."""
        routed = (one for one in self.matmuls if one.name.startswith("experts"))
        return sum(one.outputs if one.split == "column" else one.inputs for one in routed)

    @property
    def without_experts_traffic(self) -> "ModelCosts":
        """The costs without the memory traffic of the experts' rows, for which arrays have more room than is routed."""
        if self.experts is None:
            return self
        rows, one = 4 * self.experts.choice.chosen * self.hidden, self.elementwise
        return dataclasses.replace(
            self, elementwise=dataclasses.replace(one, inner=one.inner - self.routed_inner, whole=one.whole - rows)
        )

    @property
    def matmul_pairs(self) -> int:
        """Column- then row-parallel pairs of matmuls in a block; each has one sum over the tensor group."""
        return sum(one.split == "row" for one in self.matmuls)

    def elementwise_bytes(
        self, rows: float, *, itemsize: int, tensor: int, sequence_parallel: bool, dropout: bool
    ) -> float:
        """Bytes that a block's forward reads and writes outside matmuls and attention, on one device.

        Args:
          rows: tokens of a microbatch on the device.
          itemsize: bytes of an activation.
          tensor: devices of a tensor group.
          sequence_parallel: whether they also split the residual stream along its sequence.
          dropout: whether it reads the masks.
        """
        traffic, split = self.elementwise, tensor if sequence_parallel else 1
        masks = traffic.masks if dropout else 0
        residual = rows * self.hidden / split * (traffic.residual_passes * itemsize + masks)
        return residual + rows * (traffic.inner / tensor + traffic.whole) * itemsize

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
        rows: float = 1.0,
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
          rows: of experts, for each row that balanced routing gives a device (`Experts.rows`).
        """
        sizes = {
            "samples": samples,
            "sequence": self.sequence_length if sequence is None else sequence,
            "itemsize": itemsize,
            "tensor": tensor,
            "sequence_parallel": sequence_parallel,
            "rows": rows,
        }
        return sum(value.bytes(**sizes) for value in self.kept_values(mode, fused_attention))

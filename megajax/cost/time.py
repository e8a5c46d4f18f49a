"""How long a step takes: matmuls by shape, memory traffic, collectives and the pipeline's bubble, added up.

Everything follows from the run, the card (`cards.py`) and the constants below, each with its source. Three are fitted,
on the rows of the published tables that `python -m megajax.cost.validate` marks, and nothing else is.

A microbatch's forward and backward through a block are priced operation by operation (2104.04473 appendix for the
matmuls, 2205.05198 section 4 for what lies between them). Then, with m microbatches, p ranks and v chunks a rank,

    step = m (blocks of a rank + head) + bubble of the schedule + exposed sends + gradient sum + optimizer
"""

import dataclasses

from megajax.config import ModelConfig, ParallelConfig, RunConfig, padded_vocabulary
from megajax.cost.cards import Card

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Share of the dense peak that a large matmul sustains for seconds, all GPUs at work. Fitted: A100 on four rows of
# 2104.04473 table 1, H100 on three rows of Megatron-LM's H100 table. (Both below cuBLAS's best: clocks fall with power.)
MATMUL_SHARE = {"a100": 0.80, "h100": 0.70, "h200": 0.70}
# Share of the memory bandwidth that a streaming kernel reaches. Fitted with MATMUL_SHARE on the same rows.
MEMORY_SHARE = 0.8
# Share of NVLink's one-way rate that NCCL's large collectives reach: nccl-tests on DGX A100, 230 of 300 GB/s.
LINK_SHARE = 0.77
# Share of the network's rate left to collectives of many groups at once: 2104.04473 section 5.9 reports 12.9 TB/s of
# bisection bandwidth for the data-parallel all-reduce of 3,072 GPUs, 8.4 GB/s for each of 1,536 pairs, of 25.
NETWORK_SHARE = {'a100': 0.336, 'h100': 0.8, 'h200': 0.8}
# Share that one point-to-point stream reaches: ib_write_bw on HDR, 23 to 24 of 25 GB/s, less NCCL's copies.
STREAM_SHARE = 0.8
# Start of a collective, and of a send: NCCL's latency on NVLink and over InfiniBand (nccl-tests, small messages).
LINK_LATENCY, NETWORK_LATENCY = 15e-6, 30e-6
# Fused attention: share of the peak, FlashAttention-3's (2407.08608) abstract on FlashAttention-2; a backward is five
# matmuls to the forward's two (2307.08691 section 3.1.2), and half of the square is never computed.
FUSED_ATTENTION_SHARE = {"a100": 0.6, "h100": 0.35, "h200": 0.35}
FUSED_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True)
class Software:
    """What the training program does that a layout does not say.

    Attributes:
      name: as printed.
      fused_attention: scores are never written to memory (2205.14135), and those the mask hides not computed.
      tensor_overlap: share of the tensor-parallel communication hidden behind matmuls.
      data_overlap: the gradient sum runs behind the last backward.
      send_overlap: pipeline sends run behind the next chunk.
      gradient_bytes: of a gradient as it is summed over replicas.
      dropout: the blocks draw and apply masks.
      head_in_turn: only the last rank computes the head, and the others wait for it (no split over the pipe axis).
    """

    name: str
    fused_attention: bool = False
    tensor_overlap: float = 0.0
    data_overlap: bool = False
    send_overlap: bool = False
    gradient_bytes: int = 4
    dropout: bool = True
    logit_bytes: int = 52


MEGAJAX = Software("megajax", dropout=False, logit_bytes=10)
MEGATRON_2021 = Software("Megatron-LM of 2104.04473", gradient_bytes=2)
MEGATRON_2022 = Software("Megatron-LM of 2205.05198", gradient_bytes=2)
MEGATRON_2024 = Software(
    "Megatron-Core r0.8", fused_attention=True, tensor_overlap=0.5, data_overlap=True, send_overlap=True, dropout=True
)


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds of one block, one microbatch, on one device, one direction; `tensor` is the exposed communication."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.tensor

    def __add__(self, other: "LayerTime") -> "LayerTime":
        return LayerTime(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by where they go; they add up to `total`.

    Attributes:
      blocks: matmuls, attention and memory traffic of a rank's blocks, all microbatches.
      head: the last rank's head, which the others wait for, and the embedding.
      tensor: exposed communication within tensor groups.
      bubble: waiting for the pipeline to fill and drain.
      sends: exposed communication between stages.
      data: exposed sum of the gradients over replicas (and gathering of weights).
      optimizer: reading gradients, moments and weights, and writing them.
    """

    blocks: float
    head: float
    tensor: float
    bubble: float
    sends: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    @property
    def communication(self) -> float:
        return self.tensor + self.sends + self.data


class Prices:
    """What operations cost on a card, in seconds. Sizes are a device's own."""

    def __init__(self, card: Card, precision: str, software: Software):
        self.family = family = card.name.split("-")[0]
        self.card, self.software, self.itemsize = card, software, BYTES[precision]
        self.peak = card.peak(precision)
        self.rate = self.peak * MATMUL_SHARE[family]
        self.attention_rate = self.peak * FUSED_ATTENTION_SHARE[family]
        self.memory_rate = card.memory_bandwidth * MEMORY_SHARE

    def matmul(self, rows: float, inner: float, columns: float, batch: float = 1) -> float:
        """[rows, inner] times [inner, columns], `batch` of them: arithmetic, and operands and result once each."""
        arithmetic = 2 * batch * rows * inner * columns / self.rate
        return arithmetic + self.traffic(batch * (rows * inner + inner * columns + rows * columns) * self.itemsize)

    def traffic(self, count: float) -> float:
        """Reading or writing `count` bytes of memory."""
        return count / self.memory_rate

    def fused_attention(self, flops: float) -> float:
        """Attention of `flops` in full, of which the causal half is done."""
        return flops / 2 / self.attention_rate

    def collective(self, count: float, group: int, spread: int = 1) -> float:
        """A reduce-scatter or an all-gather of `count` bytes (the whole) over `group` devices; all-reduce is two.

        Args:
          spread: distance on the device list between members, 1 for neighbours.
        """
        if group == 1:
            return 0.0
        here = max(1, min(group, self.card.host_size // spread))  # members in one host
        rate, latency = self.card.host_bandwidth * LINK_SHARE, LINK_LATENCY
        if here < group:  # every member in a host has a network card, and the ring goes through all of them
            rate, latency = min(rate, here * self.card.network_bandwidth * NETWORK_SHARE[self.family]), NETWORK_LATENCY
        return count * (group - 1) / group / rate + latency

    def send(self, count: float, spread: int) -> float:
        """`count` bytes from one device to the one `spread` further on the list."""
        if spread < self.card.host_size:
            return count / (self.card.host_bandwidth * LINK_SHARE) + LINK_LATENCY
        return count / (self.card.network_bandwidth * STREAM_SHARE) + NETWORK_LATENCY


def layer_times(model: ModelConfig, parallel: ParallelConfig, prices: Prices) -> tuple[LayerTime, LayerTime]:
    """(forward, backward) of one block for one microbatch, the backward with what it computes again."""
    samples, tokens, hidden, tensor = parallel.microbatch_size, model.sequence_length, model.hidden, parallel.tensor
    rows, size, item = samples * tokens, prices.itemsize, prices.itemsize
    software, inner = prices.software, model.feedforward_size / tensor
    heads, groups = model.heads / tensor, model.key_value_heads / tensor
    gates = 2 if model.activation == "swiglu" else 1
    dense = [
        (hidden, (heads + 2 * groups) * model.head_size),
        (heads * model.head_size, hidden),
        (hidden, gates * inner),
        (inner, hidden),
    ]
    forward_matmul = sum(prices.matmul(rows, k, n) for k, n in dense)
    backward_matmul = sum(prices.matmul(rows, n, k) + prices.matmul(k, rows, n) for k, n in dense)

    scores = samples * heads * tokens * tokens
    flops = 4 * scores * model.head_size
    if software.fused_attention:
        forward_attention = prices.fused_attention(flops)
        backward_attention = FUSED_BACKWARD * forward_attention
        again = 0.0  # the backward computes scores again anyway
    else:
        products = 2 * prices.matmul(tokens, model.head_size, tokens, samples * heads)
        # passes over the scores: softmax reads and writes; dropout reads, writes and draws a mask of one byte
        passes = 2 * item + (2 * item + 1 if software.dropout else 0)
        forward_attention = products + prices.traffic(scores * passes)
        backward_attention = 2 * products + prices.traffic(scores * (passes + item))  # its softmax reads two
        again = forward_attention
    # Passes over the residual [rows, hidden] outside the matmuls: two norms (read, write), two adds (read two, write),
    # masks; over the inner activation (read, write) and queries, keys and values (read, write).
    split = tensor if parallel.sequence_parallel else 1
    residual = rows * hidden / split * (2 * 2 * size + 2 * 3 * size + (2 if software.dropout else 0))
    within = rows * ((gates + 1) * inner + 2 * (heads + 2 * groups) * model.head_size) * size
    forward_elementwise = prices.traffic(residual + within)
    backward_elementwise = prices.traffic(1.5 * (residual + within))  # reads the gradient too

    # Two pairs of matmuls, a gather before and a sum after each (an all-reduce is both).
    exchange = 2 * 2 * prices.collective(rows * hidden * item, tensor) * (1 - software.tensor_overlap)
    forward = LayerTime(forward_matmul, forward_attention, forward_elementwise, exchange)
    backward = LayerTime(backward_matmul, backward_attention, backward_elementwise, exchange)
    if parallel.recompute == "full":
        backward = backward + forward
    elif parallel.recompute == "selective":
        backward = backward + LayerTime(attention=again)
    return forward, backward


def head_time(model: ModelConfig, parallel: ParallelConfig, prices: Prices) -> float:
    """Seconds of the logits and the loss of one microbatch, forwards and backwards."""
    rows, columns = parallel.microbatch_size * model.sequence_length, padded_vocabulary(model.vocabulary, parallel.tensor)
    columns /= parallel.tensor
    products = prices.matmul(rows, model.hidden, columns) * 3
    # logits are read for the maximum, the sum and the label, in the backward once more, and the gradient is written
    softmax = prices.traffic(rows * columns * prices.software.logit_bytes)
    return products + softmax + 4 * prices.collective(rows * model.hidden * prices.itemsize, parallel.tensor)


def bubble_chunks(parallel: ParallelConfig, forward: float, backward: float, weight: float) -> float:
    """Seconds of waiting in a step: closed forms of the schedules (`pipeline/schedules.py`), which the tests simulate.

    Args:
      forward: a chunk's forward.
      backward: a chunk's backward.
      weight: the part of the backward that makes the weights' gradients, where the schedule does it apart.
    """
    waits = parallel.pipe - 1
    if parallel.schedule in ("zb_h1", "zb_1p_interleaved", "zb_v"):
        # lockstep: a tick is as long as its dearest piece, of forward, input's gradient and weights' gradient
        return waits * max(forward, backward - weight, weight) * (1 if parallel.schedule != "zb_v" else 1)
    return waits * (forward + backward)


def step_time(run: RunConfig, card: Card, software: Software = MEGAJAX, *, zero: int = 0) -> StepTime:
    """Predicted time of one optimizer step.

    Args:
      zero: 0, or 1 for optimizer state split over replicas: the gradient sum is then a reduce-scatter and the weights
        are gathered in 16 bit; or 3, weights split too, and gathered twice for each microbatch.
    """
    model, parallel, batches = run.model, run.parallel, run.microbatches
    prices = Prices(card, run.train.precision, software)
    forward, backward = layer_times(model, parallel, prices)
    both = forward + backward
    layers = model.layers / parallel.pipe
    head = head_time(model, parallel, prices) * batches
    per_chunk = layers / parallel.chunks
    weight = backward.matmul / 2 * per_chunk
    bubble = bubble_chunks(parallel, forward.total * per_chunk, backward.total * per_chunk, weight)

    activation = parallel.microbatch_size * model.sequence_length * model.hidden * prices.itemsize
    sends = 0.0
    if parallel.pipe > 1:
        split = parallel.tensor if parallel.sequence_parallel or software.name.startswith("Megatron") else 1
        one = prices.send(activation / split, parallel.tensor)
        turns = batches * parallel.chunks if not software.send_overlap else 0
        sends = 2 * one * (turns + parallel.pipe - 1)

    local = parameters_per_device(model, parallel)
    spread = parallel.tensor * parallel.pipe
    gradients = prices.collective(local * software.gradient_bytes, parallel.data, spread)
    weights = prices.collective(local * prices.itemsize, parallel.data, spread)
    data = {0: 2 * gradients, 1: gradients + weights, 3: gradients * batches + 2 * weights * batches}[zero]
    if software.data_overlap:
        data = max(0.0, data - backward.total * layers)
    # fp32 gradient, weight and two moments are read, the last three and a 16-bit copy written; the norm reads once more
    update = prices.traffic(local * (4 * 4 + 3 * 4 + 2 + 4)) / (parallel.data if zero else 1)
    return StepTime(
        blocks=batches * layers * (both.total - both.tensor),
        head=head,
        tensor=batches * layers * both.tensor,
        bubble=bubble,
        sends=sends,
        data=data,
        optimizer=update,
    )


def parameters_per_device(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Parameters on the device with most: its blocks, and the token table that the first and last rank hold."""
    tables = model.vocabulary * model.hidden * (1 if model.tied_embeddings else 2)
    return ((model.parameters - tables) / parallel.pipe + tables) / parallel.tensor

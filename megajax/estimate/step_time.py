"""How long a step takes: matmuls by shape, memory traffic, collectives and the pipeline's waiting, added up.

All of it follows from the run, the card (`cards.py`) and the constants below, each with its source. Five are fitted, on
ten rows of published tables that `python -m megajax.estimate.validate` marks; no other number was chosen to fit. With m
microbatches, p ranks and v chunks a rank,

    step = m (a rank's blocks + head) + bubble of the schedule + exposed sends + gradient sum + optimizer

What is left out: launching kernels, loading data, stragglers, contention between communication and compute.
"""

import dataclasses
import functools

from megajax.config import ModelConfig, ParallelConfig, RunConfig
from megajax.config.run_schedule import schedule_arguments
from megajax.estimate.attention import is_fused
from megajax.estimate.gpus import Card
from megajax.estimate.memory import (
    ITEMSIZE,
    Sharding,
    block_parameters,
    shared_parameters,
    slots_of,
    stash_copies,
)
from megajax.estimate.op_costs import FITTED, Fitted, Prices, spread
from megajax.estimate.software import MEGAJAX, Software
from megajax.schedules.registry import ScheduleSpec, find, make_schedule
from megajax.schedules.schedule import Schedule
from megajax.schedules.simulate import Costs, simulate_event, simulate_lockstep


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds of one block in one direction, one microbatch, one device; `tensor` is its exposed communication."""

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
      head: logits and loss on the last rank, which the others wait for.
      tensor: exposed communication within tensor groups.
      bubble: waiting for the pipeline to fill and drain, and in lockstep for the dearer op of a tick.
      sends: exposed communication between stages.
      data: exposed sum of the gradients over replicas, and gathering of weights.
      optimizer: reading gradients, moments and weights, and writing them.
      copies: transposing the stash, which a better compiled program would not.
    """

    blocks: float
    head: float
    tensor: float
    bubble: float
    sends: float
    data: float
    optimizer: float
    copies: float = 0.0

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    @property
    def communication(self) -> float:
        return self.tensor + self.sends + self.data


def layer_times(model: ModelConfig, parallel: ParallelConfig, prices: Prices) -> tuple[LayerTime, LayerTime]:
    """(forward, backward) of one block for one microbatch; the backward includes what it computes again."""
    rows, item, software = parallel.microbatch_size * model.sequence_length, prices.itemsize, prices.software
    heads, groups, inner = (
        size / parallel.tensor for size in (model.heads, model.key_value_heads, model.feedforward_size)
    )
    gates = 2 if model.activation == "swiglu" else 1
    query_key_value = (heads + 2 * groups) * model.head_size
    shapes = [
        (model.hidden, query_key_value),
        (heads * model.head_size, model.hidden),
        (model.hidden, gates * inner),
        (inner, model.hidden),
    ]
    matmul = sum(prices.matmul(rows, k, n) for k, n in shapes)
    matmul_backward = sum(prices.matmul(rows, n, k) + prices.matmul(k, rows, n) for k, n in shapes)
    attention, attention_backward, again = _attention_times(model, parallel, prices)

    # Outside the matmuls, by pass over the residual: two norms (read, write), two adds (read two, write), two masks;
    # over the inner activation (read, write), and over queries, keys and values (read, write). A backward also reads
    # the gradient: half as much again.
    split = parallel.tensor if parallel.sequence_parallel else 1
    residual = rows * model.hidden / split * (2 * 2 * item + 2 * 3 * item + (2 if software.dropout else 0))
    within = rows * ((gates + 1) * inner + 2 * query_key_value) * item
    elementwise = prices.traffic(residual + within)

    # Two pairs of matmuls; each is gathered for and summed after, as all-reduce is both (1909.08053, 2205.05198 4.2).
    whole = rows * model.hidden * item
    one = prices.collective(whole, parallel.tensor, spread(parallel, "tensor"))
    exchange = 2 * 2 * one * (1 - software.tensor_overlap)
    kept_split = parallel.sequence_parallel and parallel.recompute != "full"  # full gathers while it computes again
    exchange_again = software.gathers_again * one if kept_split else 0.0
    forward = LayerTime(matmul, attention, elementwise, exchange)
    backward = LayerTime(matmul_backward, attention_backward, 1.5 * elementwise, exchange + exchange_again)
    if parallel.recompute == "full":
        backward = backward + forward
    elif parallel.recompute == "selective":
        backward = backward + LayerTime(attention=again)
    return forward, backward


def _attention_times(model: ModelConfig, parallel: ParallelConfig, prices: Prices) -> tuple[float, float, float]:
    """Seconds of the attention core's forward, its backward, and of doing the forward again where it was not kept."""
    item, software = prices.itemsize, prices.software
    tokens, heads = model.sequence_length, parallel.microbatch_size * model.heads / parallel.tensor
    scores = heads * tokens * tokens
    if software.fused_attention or is_fused(parallel):
        forward = prices.fused_attention(4 * scores * model.head_size)
        return forward, prices.fused_backward * forward, 0.0  # a fused backward computes the scores again anyway
    products = 2 * prices.matmul(tokens, model.head_size, tokens, heads)
    # softmax reads and writes the scores; dropout reads and writes them and a mask of one byte
    passes = 2 * item + (2 * item + 1 if software.dropout else 0)
    forward = products + prices.traffic(scores * passes)
    return forward, 2 * products + prices.traffic(scores * (passes + item)), forward


def head_time(model: ModelConfig, parallel: ParallelConfig, prices: Prices, sharding: Sharding) -> float:
    """Seconds of the logits and the loss of one microbatch, forwards and backwards."""
    parts = parallel.tensor * (parallel.pipe if sharding.vocabulary_over_pipe else 1)
    rows, columns = parallel.microbatch_size * model.sequence_length, model.vocabulary / parts
    products = 3 * prices.matmul(rows, model.hidden, columns)
    passes = prices.traffic(rows * columns * prices.software.logit_bytes)
    one = prices.collective(rows * model.hidden * prices.itemsize, parallel.tensor, spread(parallel, "tensor"))
    return products + passes + 4 * one


def bubble_time(run: RunConfig, costs: Costs, lockstep: bool) -> float:
    """Seconds that a rank idles in a step: the closed form of the schedule's spec, or simulated where there is none.

    Args:
      costs: seconds of each operation on one chunk.
      lockstep: ranks start each tick together, as megajax's do (`simulate_lockstep`); otherwise each operation starts as
        soon as it can (`simulate_event`). They differ for ticks that hold one op on each rank, if ops differ in cost.
    """
    spec, arguments = find(run.parallel.schedule), schedule_arguments(run)
    if spec.bubble:
        return spec.bubble(costs=costs, lockstep=lockstep, **arguments)
    simulation = (simulate_lockstep if lockstep else simulate_event)(_table(spec, **arguments), costs)
    return simulation.makespan - simulation.ideal


@functools.lru_cache(maxsize=64)  # a search asks again for each recompute mode and microbatch size
def _table(spec: ScheduleSpec, **arguments) -> Schedule:
    return make_schedule(spec.name, **arguments)


def step_time(
    run: RunConfig,
    card: Card,
    software: Software = MEGAJAX,
    *,
    sharding: Sharding | None = None,
    fitted: Fitted = FITTED,
) -> StepTime:
    """Predicted time of one optimizer step of `run` on `card`s, wired as `make_mesh` lays the mesh over hosts.

    Raises:
      ConfigError: the card has no peak for the run's precision.
    """
    sharding = sharding or Sharding.of(run)
    model, parallel, batches = run.model, run.parallel, run.microbatches
    prices = Prices(card, run.train.precision, software, fitted)
    forward, backward = layer_times(model, parallel, prices)
    layers = model.layers / parallel.pipe
    chunk = layers / parallel.chunks
    both = forward + backward
    weight = chunk * (backward.matmul - (forward.matmul if parallel.recompute == "full" else 0)) / 2
    whole = backward.total * chunk
    bubble = bubble_time(run, Costs(forward.total * chunk, whole, whole - weight, weight), software.lockstep)
    blocks = batches * layers * both.total
    if sharding.zero == 3:
        data = _gathers_time(run, prices, blocks)
    else:
        data = _sum_time(run, prices, sharding, backward.total * layers)
    return StepTime(
        blocks=blocks - batches * layers * both.tensor,
        head=batches * head_time(model, parallel, prices, sharding),
        tensor=batches * layers * both.tensor,
        bubble=bubble,
        sends=_sends_time(run, prices),
        data=data,
        optimizer=_optimizer_time(run, prices, sharding),
        copies=_copies_time(run, prices) if software.copies_stash else 0.0,
    )


def _copies_time(run: RunConfig, prices: Prices) -> float:
    """Reading and writing the transposed part of the stash, once for each chunk's backward, bubbles included."""
    parallel = run.parallel
    count = (
        slots_of(run).stash * run.model.layers // parallel.pipe // parallel.chunks * stash_copies(run, prices.itemsize)
    )
    turns = run.microbatches * parallel.chunks + parallel.pipe - 1
    return turns * prices.traffic(2 * count)


def _sends_time(run: RunConfig, prices: Prices) -> float:
    """Exposed sends: one a tick in each direction, or where they hide behind work, those of the fill and drain."""
    parallel, software = run.parallel, prices.software
    if parallel.pipe == 1:
        return 0.0
    split = parallel.tensor if parallel.sequence_parallel or software.scatter_gather else 1
    count = parallel.microbatch_size * run.model.sequence_length * run.model.hidden * prices.itemsize / split
    turns = 0 if software.send_overlap else run.microbatches * parallel.chunks
    return 2 * prices.send(count, spread(parallel, "pipe")) * (turns + parallel.pipe - 1)


def _sum_time(run: RunConfig, prices: Prices, sharding: Sharding, backward: float) -> float:
    """Exposed sum of the gradients over replicas, once a step; `backward` is the time of one microbatch's.

    With ZeRO-1 it is a reduce-scatter, and the new weights are gathered.
    """
    parallel, software = run.parallel, prices.software
    local, distance = parameters_per_device(run, sharding), spread(parallel, "data")
    gradients = prices.collective(local * software.gradient_bytes, parallel.data, distance)
    weights = prices.collective(local * prices.itemsize, parallel.data, distance)
    times = gradients + (weights if sharding.zero else gradients)
    return max(0.0, times - backward) if software.data_overlap else times


def _gathers_time(run: RunConfig, prices: Prices, blocks: float) -> float:
    """Exposed part of ZeRO-3's communication (1910.02054 section 5.3, 2104.07857), all microbatches.

    A block's weights are gathered for its forward, for doing that again, and for its backward; its gradients are
    scattered. Where the program gathers ahead, this and the work of the blocks, `blocks` seconds in all, go on at the
    same time, for `gather_overlap` of the shorter of the two.
    """
    parallel, software, fitted = run.parallel, prices.software, prices.fitted
    local, distance = parameters_per_device(run, Sharding(zero=3)), spread(parallel, "data")
    pieces = software.gathered_pieces * run.model.layers // parallel.pipe
    share = fitted.gather_share if software.gathers_ahead else None
    one = lambda bytes_each: prices.collective(local * bytes_each, parallel.data, distance, pieces, share)  # noqa: E731
    gathers = 3 if parallel.recompute == "full" else 2
    times = run.microbatches * (gathers * one(prices.itemsize) + one(software.gradient_bytes))
    return times - (fitted.gather_overlap * min(times, blocks) if software.gathers_ahead else 0.0)


def _optimizer_time(run: RunConfig, prices: Prices, sharding: Sharding) -> float:
    """Gradient (twice, once for its norm), weight and two moments are read, the last three and a 16-bit copy written."""
    state = parameters_per_device(run, sharding) / (run.parallel.data if sharding.zero else 1)
    return prices.traffic(state * (5 * 4 + 3 * 4 + ITEMSIZE["bf16"]))


def parameters_per_device(run: RunConfig, sharding: Sharding) -> int:
    """Parameters on a device, before ZeRO."""
    model, parallel = run.model, run.parallel
    shared = shared_parameters(model, parallel.tensor, parallel.pipe, sharding)
    return model.layers // parallel.pipe * block_parameters(model, parallel.tensor) + shared

"""What a step sends, by mesh axis: the collectives of the program, and the papers' formulas (2104.04473 section 3,
2205.05198 section 4.2).

`collectives` is the description of the compiled program, of which the time model takes numbers and bytes (`*_sends`, and
`expert_dispatch.dispatches`); `expected` is the table of those that the papers count. b samples a microbatch, s tokens,
h hidden, m microbatches, v chunks a rank; d, C, p, t, N the degrees of data, context, pipe, tensor and expert parallelism;
k choices of a token, E experts, R the replicas that split them.
Bytes are those of ring algorithms, which are the fewest possible, on the rank that sends most.

How often a rank sends, and which backwards are split, is of `StepProgram`. The rest is here and not beside it, because it
needs the model's costs and a rank's parameters, which are `estimate`'s. Not covered: the rows that experts' tensor groups
gather with `--expert-dispatch all_to_all`, which count as those of an all-gather; the second gather of positions' gradients
with context parallelism; blocks that run in bubbles because of a ring.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ParallelConfig, RunConfig
from megajax.config.model_split import heads_of_device
from megajax.estimate import model_costs
from megajax.estimate.expert_dispatch import GATHER, TOKENS, dispatches, formula_of, sent_bytes
from megajax.estimate.kept import rows_of
from megajax.estimate.kinds import layers_of_kinds, modules_run, stage_layer_counts
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.parameters import (
    Sharding,
    block_arrays,
    block_parameters,
    experts_of_modules,
    parameters_of_ends,
    trained_rank_parameters,
    trained_shared_parameters,
)
from megajax.estimate.trained import trained_parameters
from megajax.models.costs import ModelCosts
from megajax.pipeline.program import StepProgram

__all__ = [
    "block_sends",
    "collectives",
    "context_elements",
    "copied_heads",
    "exchanged_elements",
    "expected",
    "replica_sends",
    "step_sends",
]

GRADIENT = 4  # bytes: gradients are summed in fp32
BLOCKS, ENDS, TICKS, STEP = "blocks", "embedding and head", "ticks", "step"
PERMUTE, SCATTER, REDUCE, ALL_TO_ALL = "collective-permute", "reduce-scatter", "all-reduce", "all-to-all"
# Of the tensor group: of pairs of matmuls that may be sent round a ring, of experts', and of the tokens of all replicas of
# an expert group, which are as many times as large.
DENSE, EXPERTS, GROUP = "dense", "experts", "group"
PAIRS = tuple((of, kind) for of in (DENSE, EXPERTS, GROUP) for kind in (GATHER, SCATTER, REDUCE))


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collectives of a program that are alike.

    Attributes:
      axis: of the mesh, or axes, "data and pipe"; with expert parallelism "data" is the mesh's data and expert. Of what is
        sent to experts "expert", or where tensor ranks have experts of their own "expert and tensor", or "tensor".
      kind: of `hlo.Collective`.
      what: is sent.
      part: of the step: the blocks, embedding and head, the ends of ticks, or once a step.
      formula: with the letters above.
      times: that it is sent in a step; several arrays that are sent together count once.
      each: bytes that a device sends each time.
      in_papers: whether the papers' formulas have it.
      devices, apart: of those once a step, the size of a group, and how far apart its devices are on the axis.
    """

    axis: str
    kind: str
    what: str
    part: str
    formula: str
    times: float
    each: float
    in_papers: bool = True
    devices: int = 0
    apart: int = 1

    @property
    def bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return self.times * self.each


class BlockSends(NamedTuple):
    """Collectives of a block over `tensor` for a microbatch, in the order of `PAIRS`; the time model prices these."""

    forward: np.ndarray
    gradients: np.ndarray  # of the block's input
    again: np.ndarray  # gathered for the weights' gradients, with full recomputation for the repeated forward too
    sums: np.ndarray  # of the repeated forward
    late: np.ndarray  # of W, where the backward is split


def expected(program: StepProgram) -> list[Sent]:
    """Bytes that a step sends, by the papers' formulas; each line is the sum of the collectives of one name, sent once."""
    lines: dict[tuple[str, str], Sent] = {}
    for one in collectives(program):
        if one.in_papers:
            first = lines.get((one.axis, one.what), dataclasses.replace(one, times=0))
            lines[one.axis, one.what] = dataclasses.replace(first, times=1, each=first.bytes + one.bytes)
    return list(lines.values())


def collectives(program: StepProgram) -> list[Sent]:
    """The collectives of the program of a valid run, but for those of vectors and numbers.

    Left out are softmax's sums, losses, norms, and over `tensor` the gradients of norms and of biases.
    """
    parallel = program.run.parallel
    found = _tensor(program) if parallel.tensor > 1 else []
    found += _pipe(program) if parallel.pipe > 1 else []
    found += _expert(program) if parallel.expert > 1 else []
    return found + _modules(program.run) + _data(program.run) + step_sends(program.run)


def _modules(run: RunConfig) -> list[Sent]:
    """Those of the blocks of multi-token prediction, which are computed with the head."""
    one = modules_run(run)
    if one is None:
        return []
    program, parallel = StepProgram.of(one), run.parallel
    found = _tensor(program) if parallel.tensor > 1 else []
    found += _expert(program) if parallel.expert > 1 else []
    found += _data(one)
    return [
        dataclasses.replace(sent, part=ENDS, what=f"{sent.what}, of modules") for sent in found if sent.part == BLOCKS
    ]


def _activation(run: RunConfig) -> int:
    """Bytes of bsh."""
    model = model_costs(run.model)
    return rows_of(model, run.parallel) * model.hidden * ITEMSIZE[run.train.precision]


def _of_blocks(run: RunConfig, count: Callable[[ModelCosts], Any], most: Callable[[Any], float] = float) -> Any:
    """The sum of `count` over the blocks of a rank, on the stages with most; `most`: of a sum that is not a number."""
    each = [count(model_costs(kind.run.model)) for kind in layers_of_kinds(run)]
    return run.parallel.chunks * max(
        (sum(map(operator.mul, each, stage)) for stage in stage_layer_counts(run)), key=most
    )


def _tensor(program: StepProgram) -> list[Sent]:
    """A pair of matmuls gathers its input and scatters the sum of its output, and so for the gradients in the backward."""
    run, parallel, model = program.run, program.run.parallel, model_costs(program.run.model)
    ring, split, degree = "tensor_overlap" in parallel.rings, parallel.sequence_parallel, parallel.expert_replicas
    one = _activation(run) * (parallel.tensor - 1) / parallel.tensor
    blocks = _of_blocks(run, lambda kind: 1)
    lines: list[Sent] = []

    def add(what: str, count: Callable[[BlockSends], np.ndarray]) -> None:
        counts = _of_blocks(run, lambda kind: count(block_sends(parallel, kind)), lambda sent: _units(sent, degree))
        formula = f"{_units(counts, degree) / blocks:g} bsh (t-1)/t per layer and microbatch"
        for (of, kind), number in zip(PAIRS, counts, strict=True):
            sends = parallel.tensor - 1 if of == DENSE and ring else 1  # round the ring, in place of one collective
            each = one * (2 if kind == REDUCE else 1) * (degree if of == GROUP else 1) / sends
            if number > 0:
                times, name = float(number * sends * run.microbatches), PERMUTE if of == DENSE and ring else kind
                lines.append(Sent("tensor", name, what, BLOCKS, formula, times, each))

    if elements := copied_heads(run):  # and their gradients
        number = 3 if parallel.recompute == "full" else 2
        text, times = f"{number} bs(a/t+2)d (t-1)/t per layer and microbatch", number * float(blocks * run.microbatches)
        each = (parallel.tensor - 1) / parallel.tensor * elements * ITEMSIZE[run.train.precision]
        lines.append(Sent("tensor", ALL_TO_ALL, "fewer key and value heads than ranks", BLOCKS, text, times, each))
    add("pairs of matmuls", lambda sent: sent.forward + sent.gradients)
    if split:
        add("gathered again for dW", lambda sent: sent.again + program.split_backwards * sent.late)
    if parallel.recompute == "full":
        add("full recompute", lambda sent: sent.sums)
    if not model.vocabulary_width:
        return lines
    # The embedding's rows and their gradient; the head's input and its gradient. In Megatron-LM the first and the last
    # stage have two of them each.
    ends = 4 if parallel.pipe == 1 or Sharding.from_config(run).vocabulary_over_pipe else 2
    formula, times = f"{ends} bsh (t-1)/t per microbatch", run.microbatches * ends / 2
    kinds = ((GATHER, one), (SCATTER, one)) if split else ((REDUCE, 2 * one),)
    return lines + [Sent("tensor", kind, "embedding and head", ENDS, formula, times, each) for kind, each in kinds]


def _units(counts: Sequence[float], degree: int) -> float:
    """The bytes of these collectives, in the order of `PAIRS`, relative to an all-gather's: an all-reduce sends two."""
    sizes = ((2 if kind == REDUCE else 1) * (degree if of == GROUP else 1) for of, kind in PAIRS)
    return sum(map(operator.mul, counts, sizes))


def block_sends(parallel: ParallelConfig, kind: ModelCosts) -> BlockSends:
    """The collectives of a block; a pair of matmuls has two collectives of bsh, or one sum without sequence parallelism.

    Of experts of several replicas (N > 1), a tensor group gathers the tokens of all N and sums their results by an
    all-reduce; and it gathers its own replica's for the router. Tensor ranks with experts of their own do neither.

    Again are gathered, with sequence parallelism, the inputs of the column-parallel matmuls, which only recompute none
    keeps gathered, where they are not sent round a ring. W also gathers the gradients of the row-parallel matmuls' outputs,
    of which those of experts are kept in rows; and after full recompute the inputs once more. The repeated forward has the
    sums of blocks that are recomputed together, except the last one.
    """
    every, split = int(kind.experts is not None), parallel.sequence_parallel
    none, full = parallel.recompute == "none", parallel.recompute == "full"
    experts = every * (not parallel.experts_over_tensor)
    dense, several = kind.matmul_pairs - every, experts * (parallel.expert > 1)
    alone = experts - several
    kept = none and "tensor_overlap" not in parallel.rings
    last = dense if every > experts else max(0, kind.matmul_pairs - 1 / parallel.recompute_blocks)
    whole, parts = [0, 0, dense, 0, 0, alone, 0, 0, several], [dense, dense, 0, alone, alone, 0, several, 0, several]
    pairs = np.array(parts if split else whole, float)
    # of latents less than bsh is gathered, and their gradient scattered or summed
    less = 1 - kind.attention.gathered / kind.hidden if kind.attention and kind.attention.gathered else 0.0
    fewer = [less * np.array([split * (at == 0), split * (at == 1), at and not split, *[0] * 6]) for at in (0, 1)]
    router = split * several * np.array([0, 0, 0, 1, 0, 0, 0, 0, 0])
    again = split * np.array(
        [(dense - less) * (not kept), 0, 0, experts * (not none), 0, 0, several * (not none), 0, 0]
    )
    late = split * np.array([dense * (1 + full) - less * full, 0, 0, experts * full, 0, 0, 0, 0, 0])
    sums = full * last * np.array([0, split, not split, 0, 0, 0, 0, 0, 0])
    return BlockSends(pairs + router - fewer[0], pairs - fewer[1], again, sums, late)


def _pipe(program: StepProgram) -> list[Sent]:
    run, parallel, p = program.run, program.run.parallel, program.run.parallel.pipe
    part = _activation(run) // parallel.sequence_shares
    work, idle = program.sends
    placed = "" if not program.placement.turns else ", but those of a rank to itself"
    lines = [
        Sent("pipe", PERMUTE, "activations and gradients", TICKS, f"2 v bsh/t per microbatch{placed}", work, part),
        Sent("pipe", PERMUTE, "sends of ticks without work", TICKS, "bsh/t per send", idle, part, in_papers=False),
    ]
    if Sharding.from_config(run).vocabulary_over_pipe:
        what, formula = "shared embedding and head", "2 (p-1)/p of 4 bsh/t per microbatch"
        lines.append(Sent("pipe", REDUCE, what, ENDS, formula, 4 * run.microbatches, 2 * (p - 1) / p * part))
    return lines


def _expert(program: StepProgram) -> list[Sent]:
    run, parallel, model = program.run, program.run.parallel, model_costs(program.run.model)
    passes = run.microbatches * _of_blocks(run, lambda kind: int(kind.experts is not None))
    lines, item, sent = [], ITEMSIZE[run.train.precision], sent_bytes(run)
    for one in dispatches(model, parallel, item, sent):
        formula = f"{formula_of(one, model, parallel, sent != item)} per layer with experts and microbatch"
        times, in_papers = (one.forward + one.backward) * passes, one.what == TOKENS
        lines.append(Sent(" and ".join(one.axes), one.kind, one.what, BLOCKS, formula, times, one.each, in_papers))
    return lines


def _data(run: RunConfig) -> list[Sent]:
    """Keys and values round a ring; with ZeRO-3 the gradients of a block, and its weights, each time it runs."""
    lines, item = [], ITEMSIZE[run.train.precision]
    if run.parallel.context > 1:
        lines += _exchanged(run, item) if run.parallel.ring_ranks == 1 else _around(run, item)
    trained = trained_parameters(run)
    for number, kind in enumerate(layers_of_kinds(run) if run.parallel.zero == 3 else ()):
        own = trained.blocks[number] if trained else None
        lines += replica_sends(run, block_parameters(kind.run), kind.rank_slots, own)
    return lines


def replica_sends(
    run: RunConfig, held: tuple[int, int], blocks: int = 0, trained: tuple[int, int] | None = None
) -> list[Sent]:
    """The sums of gradients of (parameters, experts'), with ZeRO scattered, weights gathered: once, or by so many blocks.

    `trained`: those of `held` that have gradients; None: all. Each array of a block is sent alone.
    """
    zero, replicas, degree = run.parallel.zero, run.parallel.replicas, run.parallel.expert_replicas
    passes, ways, part = (run.microbatches * blocks, 2, BLOCKS) if blocks else (1, 1, STEP)  # forward and backward
    arrays = block_arrays(run) if blocks else (1, 1)
    formula = "(dC-1)/(dC) of a device's {}, " + ("blocks' {}per microbatch, the rest once" if zero == 3 else "once")
    scattered, gathered = formula.format("gradients", ""), formula.format("16-bit weights", "twice ")
    kinds = [
        (SCATTER, "gradients, reduce-scattered", scattered, passes, GRADIENT),
        (GATHER, "weights, all-gathered", gathered, ways * passes, ITEMSIZE[run.train.precision]),
    ]
    if zero == 0:
        kinds = [(REDUCE, "gradients", f"2 {scattered}", 1, 2 * GRADIENT)]
    # Experts have dC/R replicas, every R-th on the axis.
    groups = lambda kind: zip(  # noqa: E731
        held if trained is None or kind == GATHER else trained,
        (replicas, replicas // degree),
        (1, degree),
        arrays,
        strict=True,
    )
    return [
        Sent("data", kind, what, part, formula, times * n, (size - 1) / size * count * item / n, True, size, apart)
        for kind, what, formula, times, item in kinds
        for count, size, apart, n in groups(kind)
        if count and size > 1
    ]


def step_sends(run: RunConfig) -> list[Sent]:
    """The collectives after the last tick, which the time model prices: gradients of all that a device holds, and weights.

    Without ZeRO one all-reduce sums what all stages hold over replicas and stages.
    """
    parallel, replicas, pipe, rest = run.parallel, run.parallel.replicas, run.parallel.pipe, _on_all_stages(run)
    together = parallel.zero == 0 and replicas > 1 and pipe > 1
    common, experts = trained_rank_parameters(run, Sharding.from_config(run))
    held = (_shared(run), 0) if parallel.zero == 3 else (common - rest * together, experts)  # blocks': see `_data`
    lines = replica_sends(run, held)
    axis, degrees, size = ("data and pipe", "(dCp-1)/(dCp)", replicas * pipe) if together else ("pipe", "(p-1)/p", pipe)
    if pipe > 1:  # with ZeRO they are reduced over the replicas first
        each = 2 * (size - 1) / size * (rest + experts_of_modules(run)) * GRADIENT / (replicas if parallel.zero else 1)
        what, formula = "gradients of what all stages hold", f"2 {degrees} of them, once"
        lines.append(Sent(axis, REDUCE, what, STEP, formula, 1, each, True, size))
    return lines


def _on_all_stages(run: RunConfig) -> int:
    """Trained parameters outside the blocks that all stages of a pipeline hold, on a device."""
    if trained := trained_parameters(run):
        return trained.on_all_stages
    over_pipe = Sharding.from_config(run).vocabulary_over_pipe
    return parameters_of_ends(model_costs(run.model), run.parallel.tensor) if over_pipe else _shared(run)


def _shared(run: RunConfig) -> int:
    """Trained parameters outside the blocks on a device."""
    return trained_shared_parameters(run, Sharding.from_config(run))


def _around(run: RunConfig, item: int) -> list[Sent]:
    """Keys and values round a ring: C - 1 times forward and backward, gradients C times."""
    ranks, each = run.parallel.context, context_elements(run)
    times = 2 * (2 * (ranks - 1) + ranks) * run.microbatches * _of_blocks(run, lambda kind: 1) if each else 0.0
    formula = "(6C-4) bsgd/(Ct) per layer and microbatch"
    return [Sent("data", PERMUTE, "keys, values round a ring", BLOCKS, formula, times, each * item)]


def _exchanged(run: RunConfig, item: int) -> list[Sent]:
    """Parts of the sequence for parts of the heads. Full recompute sends the results once more."""
    ranks, blocks = run.parallel.context, run.microbatches * _of_blocks(run, lambda kind: 1)
    often = 6 + (run.parallel.recompute == "full")
    arrays = zip(
        ("queries and results for heads", "keys and values for heads"),
        (f"{often} (C-1) bsad/(CCt) per layer and microbatch", "6 (C-1) bsgd/(CCt), g at least C t"),
        (often, 6),
        exchanged_elements(run),
        strict=True,
    )
    return [
        Sent("data", ALL_TO_ALL, what, BLOCKS, formula, times * blocks, (ranks - 1) / ranks * one * item, False)
        for what, formula, times, one in arrays
        if one
    ]


def copied_heads(run: RunConfig) -> float:
    """Elements of a device's queries, keys and values where these come from an all-to-all over tensor; else 0.

    Of fewer heads of keys than ranks of tensor each rank has a copy of one; matmuls split the elements of a head.
    """
    model, tensor = model_costs(run.model), run.parallel.tensor
    if model.attention is None or model.attention.groups % tensor == 0:
        return 0.0
    return rows_of(model, run.parallel) * (model.attention.heads / tensor + 2) * model.attention.head_size


def exchanged_elements(run: RunConfig) -> tuple[float, float]:
    """Elements of a rank's queries, and of its keys as often as they are copied, that ranks exchange for heads.

    Of each two arrays forward, four backward (`ops/exchanged_attention.py`).
    """
    model, parallel = model_costs(run.model), run.parallel
    if model.attention is None:
        return 0.0, 0.0
    one = rows_of(model, parallel) * model.attention.mean_size
    queries, keys = heads_of_device(model.attention.heads, model.attention.groups, parallel.tensor)
    return one * queries, one * max(keys, parallel.context)


def context_elements(run: RunConfig) -> float:
    """Elements of a rank's keys, or of its values, that each send round the ring has: of both on average."""
    model, parallel = model_costs(run.model), run.parallel
    if model.attention is None:
        return 0.0
    keys = heads_of_device(model.attention.heads, model.attention.groups, parallel.tensor)[1]
    return rows_of(model, parallel) * keys * model.attention.mean_size

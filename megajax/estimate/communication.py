"""What a step sends, by mesh axis: the collectives of the program, and the papers' formulas (2104.04473 section 3,
2205.05198 section 4.2).

`collectives` is the description of the compiled program, `expected` the table of those that the papers count. b samples a
microbatch, s tokens, h hidden, m microbatches, v chunks a rank; d, C, p, t, N the degrees of data, context, pipe, tensor
and expert parallelism. Bytes are those of ring algorithms, which are the fewest possible, on the rank that sends most.

How often a rank sends, and which backwards are split, is of `StepProgram`. The rest is here and not beside it, because it
needs the model's costs and a rank's parameters, which are `estimate`'s. Not covered: the rows that experts' tensor groups
gather with `--expert-dispatch all_to_all`, which count as those of an all-gather; the second gather of positions' gradients
with context parallelism; blocks that run in bubbles because of a ring.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megajax.config import ParallelConfig, RunConfig, padded_vocabulary
from megajax.estimate import model_costs
from megajax.estimate.expert_dispatch import sent_share
from megajax.estimate.kinds import layers_of_kinds, stage_layer_counts
from megajax.estimate.memory import ITEMSIZE, Sharding, rank_block_parameters, rows_of, shared_parameters
from megajax.models.costs import ModelCosts
from megajax.pipeline.program import StepProgram

__all__ = ["Sent", "collectives", "expected"]

GRADIENT = 4  # bytes: gradients are summed in fp32
CHOICE = 4  # bytes: an expert's number, its weight
BLOCKS, ENDS, TICKS, STEP = "blocks", "embedding and head", "ticks", "step"
PERMUTE, ALL_TO_ALL = "collective-permute", "all-to-all"
GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
# Of the tensor group: of pairs of matmuls that may be sent round a ring, and of experts'.
PAIRS = tuple((dense, kind) for dense in (True, False) for kind in (GATHER, SCATTER, REDUCE))


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collectives of a program that are alike.

    Attributes:
      axis: of the mesh, or axes, "data and pipe"; with expert parallelism "data" is the mesh's data and expert.
      kind: of `hlo.Collective`.
      what: is sent.
      part: of the step: the blocks, embedding and head, the ends of ticks, or once a step.
      formula: with the letters above.
      times: that it is sent in a step; several arrays that are sent together count once.
      each: bytes that a device sends each time.
      in_papers: whether the papers' formulas have it.
    """

    axis: str
    kind: str
    what: str
    part: str
    formula: str
    times: float
    each: float
    in_papers: bool = True

    @property
    def bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return self.times * self.each


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
    return found + (_data(program.run) if parallel.replicas > 1 else [])


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
    ring, split = "tensor_overlap" in parallel.rings, parallel.sequence_parallel
    one = _activation(run) * (parallel.tensor - 1) / parallel.tensor
    blocks = _of_blocks(run, lambda kind: 1)
    lines: list[Sent] = []

    def add(what: str, counts: Sequence[float]) -> None:
        formula = f"{_units(counts) / blocks:g} bsh (t-1)/t per layer and microbatch"
        for (dense, kind), count in zip(PAIRS, counts, strict=True):
            sends = parallel.tensor - 1 if dense and ring else 1  # round the ring, in place of one collective
            each, name = one * (2 if kind == REDUCE else 1) / sends, PERMUTE if dense and ring else kind
            if count > 0:
                times = float(count * sends * run.microbatches)
                lines.append(Sent("tensor", name, what, BLOCKS, formula, times, each))

    add("pairs of matmuls", _of_blocks(run, lambda kind: _pair_counts(parallel, kind), _units))
    if split:
        add("gathered again for dW", _of_blocks(run, lambda kind: _gathered_again(program, kind), _units))
    if parallel.recompute == "full":
        # The sums of blocks that are recomputed together, except the last one.
        last = lambda kind: kind.matmul_pairs - 1 / parallel.recompute_blocks  # noqa: E731
        sums = max(0, _of_blocks(run, last))
        add("full recompute", (0, sums if split else 0, 0 if split else sums, 0, 0, 0))
    if not model.vocabulary_width:
        return lines
    # The embedding's rows and their gradient; the head's input and its gradient. In Megatron-LM the first and the last
    # stage have two of them each.
    ends = 4 if parallel.pipe == 1 or Sharding.from_config(run).vocabulary_over_pipe else 2
    formula, times = f"{ends} bsh (t-1)/t per microbatch", run.microbatches * ends / 2
    kinds = ((GATHER, one), (SCATTER, one)) if split else ((REDUCE, 2 * one),)
    return lines + [Sent("tensor", kind, "embedding and head", ENDS, formula, times, each) for kind, each in kinds]


def _units(counts: Sequence[float]) -> float:
    """The bytes of these collectives, in the order of `PAIRS`, relative to an all-gather's: an all-reduce sends two."""
    return sum(count * (2 if kind == REDUCE else 1) for (_, kind), count in zip(PAIRS, counts, strict=True))


def _experts_pairs(kind: ModelCosts) -> int:
    return int(kind.experts is not None)


def _pair_counts(parallel: ParallelConfig, kind: ModelCosts) -> np.ndarray:
    """Collectives of a block's pairs in a forward and a backward, of b s h elements, in the order of `PAIRS`.

    Of experts of several replicas (N > 1), a tensor group gathers the tokens of all N and sums their results by an
    all-reduce; and it gathers its own replica's for the router.
    """
    experts, degree = _experts_pairs(kind), parallel.expert
    dense, split, several = 2 * (kind.matmul_pairs - experts), parallel.sequence_parallel, int(degree > 1)
    gathers, scatters, reduces = (2 * degree + several, 2 - 2 * several, 2 * degree * several)
    if not split:
        gathers, scatters, reduces = 0, 0, 2 * degree
    of_dense = (dense, dense, 0) if split else (0, 0, dense)
    return np.array([*of_dense, experts * gathers, experts * scatters, experts * reduces])


def _gathered_again(program: StepProgram, kind: ModelCosts) -> np.ndarray:
    """Likewise what a block's backward gathers again for the gradients of the weights, with sequence parallelism.

    The inputs of the column-parallel matmuls, which only recompute none keeps gathered, where they are not sent round a
    ring. Where the backward is split, W also gathers the gradients of the row-parallel matmuls' outputs, of which those of
    experts are kept in rows; and after full recompute the inputs once more.
    """
    parallel, experts = program.run.parallel, _experts_pairs(kind)
    none, full = parallel.recompute == "none", parallel.recompute == "full"
    dense, several = kind.matmul_pairs - experts, int(parallel.expert > 1)
    late = program.split_backwards * (1 + full)
    of_dense = dense * (late + (not none or "tensor_overlap" in parallel.rings))
    of_experts = experts * (program.split_backwards * full + (0 if none else parallel.expert + several))
    return np.array([of_dense, 0, 0, of_experts, 0, 0])


def _pipe(program: StepProgram) -> list[Sent]:
    run, parallel, p = program.run, program.run.parallel, program.run.parallel.pipe
    part = _activation(run) // parallel.sequence_shares
    work, idle = program.sends
    placed = "" if program.placement == "loop" else ", but those of a rank to itself"
    lines = [
        Sent("pipe", PERMUTE, "activations and gradients", TICKS, f"2 v bsh/t per microbatch{placed}", work, part),
        Sent("pipe", PERMUTE, "sends of ticks without work", TICKS, "bsh/t per send", idle, part, in_papers=False),
    ]
    ring = 2 * (p - 1) / p
    if Sharding.from_config(run).vocabulary_over_pipe:
        what, formula = "shared embedding and head", "2 (p-1)/p of 4 bsh/t per microbatch"
        lines.append(Sent("pipe", REDUCE, what, ENDS, formula, 4 * run.microbatches, ring * part))
    if _together(run):
        return lines  # see `_data`
    cut = parallel.replicas if parallel.zero else 1  # with ZeRO they are reduced over the replicas first
    rest = ring * _on_all_stages(run) * GRADIENT / cut
    what = "gradients of what all stages hold"
    return [*lines, Sent("pipe", REDUCE, what, STEP, "2 (p-1)/p of them, once", 1, rest)]


def _expert(program: StepProgram) -> list[Sent]:
    """Tokens sent to their experts' replicas, and results back (`ops/expert_dispatch.py`), with balanced routing.

    By all-gather in the forward, and the results by a sum where they arrive, which is an all-to-all. Except with recompute
    none, the backward gathers the tokens again, for the weights' gradients.
    """
    run, parallel, degree = program.run, program.run.parallel, program.run.parallel.expert
    experts, again = model_costs(run.model).experts, parallel.recompute != "none"
    part = _activation(run) / parallel.sequence_shares * (degree - 1)
    passes = run.microbatches * _of_blocks(run, _experts_pairs)
    share, each = 1.0, f"{4 + again} (N-1) bsh/t per layer with experts and microbatch"
    counts = ((GATHER, 2 + again), (ALL_TO_ALL, 2))
    if parallel.expert_dispatch == "all_to_all":
        share, _ = sent_share(experts, parallel)
        each, counts = f"{share:.3g} of {each}", ((ALL_TO_ALL, 4 + again),)
    lines = [
        Sent("expert", kind, "tokens and experts' results", BLOCKS, each, count * passes, share * part)
        for kind, count in counts
    ]
    # Of each token: its experts' numbers and weights, in the forward and where it is repeated, and the weights' gradients.
    choices = (degree - 1) * rows_of(model_costs(run.model), parallel) * experts.chosen * CHOICE
    formula = f"{2 * (1 + again) + 1} (N-1) bs k of 4 bytes per layer with experts and microbatch"
    return lines + [
        Sent("expert", kind, "choices of experts", BLOCKS, formula, count * passes, choices, in_papers=False)
        for kind, count in ((GATHER, 2 * (1 + again)), (ALL_TO_ALL, 1))
    ]


def _data(run: RunConfig) -> list[Sent]:
    """The gradients of all that a device holds, once; with ZeRO-3 those of a block, and its weights, each time it runs.

    Without ZeRO one all-reduce sums what all stages hold over replicas and stages.
    """
    parallel, replicas, (common, experts) = run.parallel, run.parallel.replicas, rank_block_parameters(run)
    ring, shared, item = (replicas - 1) / replicas, _shared(run), ITEMSIZE[run.train.precision]
    # The number of a block's parameters that the ring's factor applies to. Experts have dC/N replicas, which are on the
    # data axis alone.
    blocks = common + experts * (1 - parallel.expert / replicas) / ring
    lines = []
    if parallel.context > 1:
        times, each = _context_sends(run)
        formula = "(6C-4) bsgd/(Ct) per layer and microbatch"
        lines.append(Sent("data", PERMUTE, "keys, values round a ring", BLOCKS, formula, times, each * item))
    if parallel.zero == 0:
        summed = _on_all_stages(run) if _together(run) else 0
        formula = "2 (dC-1)/(dC) of a device's gradients, once"
        sums = 2 * ring * (blocks + shared - summed) * GRADIENT
        lines.append(Sent("data", REDUCE, "gradients", STEP, formula, 1, sums))
        if summed:
            devices = replicas * parallel.pipe
            sums = 2 * (devices - 1) / devices * summed * GRADIENT
            what, formula = "gradients of what all stages hold", "2 (dCp-1)/(dCp) of them, once"
            lines.append(Sent("data and pipe", REDUCE, what, STEP, formula, 1, sums))
        return lines
    each = "(dC-1)/(dC) of a device's {}, " + (
        "blocks' {}per microbatch, the rest once" if parallel.zero == 3 else "once"
    )
    often, part = (run.microbatches, BLOCKS) if parallel.zero == 3 else (1, STEP)
    ways = 2 if parallel.zero == 3 else 1  # forward and backward
    scattered, gathered = each.format("gradients", ""), each.format("16-bit weights", "twice ")
    return [
        *lines,
        Sent("data", SCATTER, "gradients, reduce-scattered", part, scattered, often, ring * blocks * GRADIENT),
        Sent("data", SCATTER, "gradients, reduce-scattered", STEP, scattered, 1, ring * shared * GRADIENT),
        Sent("data", GATHER, "weights, all-gathered", part, gathered, ways * often, ring * blocks * item),
        Sent("data", GATHER, "weights, all-gathered", STEP, gathered, 1, ring * shared * item),
    ]


def _together(run: RunConfig) -> bool:
    """Whether gradients of what all stages hold are summed over replicas and stages at once."""
    return run.parallel.zero == 0 and run.parallel.replicas > 1 and run.parallel.pipe > 1


def _on_all_stages(run: RunConfig) -> int:
    """Parameters outside the blocks that all stages of a pipeline hold, on a device."""
    return _shared(run) - (_tables(run) if Sharding.from_config(run).vocabulary_over_pipe else 0)


def _shared(run: RunConfig) -> int:
    """Parameters outside the blocks on a device."""
    sharding = Sharding.from_config(run)
    return shared_parameters(model_costs(run.model), run.parallel.tensor, run.parallel.pipe, sharding)


def _tables(run: RunConfig) -> int:
    """Parameters of the token tables on a device."""
    model, shares = model_costs(run.model), run.parallel.vocabulary_shares
    return padded_vocabulary(model.vocabulary, shares) // shares * model.vocabulary_width


def _context_sends(run: RunConfig) -> tuple[float, float]:
    """(sends round the ring, elements of each): keys and values C - 1 times forward and backward, gradients C times."""
    model, parallel = model_costs(run.model), run.parallel
    if model.attention is None:
        return 0.0, 0.0
    one = rows_of(model, parallel) * model.attention.groups * model.attention.head_size / parallel.tensor
    ranks = parallel.context
    return 2 * (2 * (ranks - 1) + ranks) * run.microbatches * _of_blocks(run, lambda kind: 1), one

"""Formulas for the bytes that a device sends per step and mesh axis (2104.04473 section 3, 2205.05198 section 4.2).

b samples a microbatch, s tokens, h hidden, m microbatches, v chunks a rank; d, C, p, t, N the degrees of data, context,
pipe, tensor and expert parallelism. Bytes are those of ring algorithms, which are the fewest possible.
"""

import dataclasses
import operator
from collections.abc import Callable

from megajax.config import RunConfig, padded_vocabulary
from megajax.estimate import model_costs
from megajax.estimate.expert_time import sent_share
from megajax.estimate.kinds import layers_of_kinds, stage_layer_counts
from megajax.estimate.memory import ITEMSIZE, Sharding, rank_block_parameters, shared_parameters
from megajax.models.costs import ModelCosts

__all__ = ["Sent", "expected"]

GRADIENT = 4  # bytes: gradients are summed in fp32
# Collectives of a pair of matmuls and a microbatch, each of b s h (t - 1) / t elements: an all-gather and a reduce-scatter
# in the forward, and again in the backward.
PAIR = 4
# Of a layer with experts: an all-gather and a reduce-scatter in each direction, or two all-to-alls.
EXPERT_COLLECTIVES = 4


@dataclasses.dataclass(frozen=True)
class Sent:
    """A line of the table.

    Attributes:
      axis: of the mesh.
      what: is sent.
      formula: with the letters above.
      bytes: on the rank that sends most.
    """

    axis: str
    what: str
    formula: str
    bytes: float


def expected(run: RunConfig) -> list[Sent]:
    """Bytes that a step of a validated run sends, by the formulas."""
    lines = _tensor(run) if run.parallel.tensor > 1 else []
    lines += _pipe(run) if run.parallel.pipe > 1 else []
    lines += _expert(run) if run.parallel.expert > 1 else []
    return lines + (_data(run) if run.parallel.data * run.parallel.context > 1 else [])


def _activation(run: RunConfig) -> int:
    """Bytes of bsh."""
    model, parallel = model_costs(run.model), run.parallel
    tokens = parallel.microbatch_size * model.sequence_length // parallel.context
    return tokens * model.hidden * ITEMSIZE[run.train.precision]


def _of_blocks(run: RunConfig, count: Callable[[ModelCosts], int]) -> int:
    """The sum of `count` over the blocks of a rank, on the stages with most."""
    each = [count(model_costs(kind.run.model)) for kind in layers_of_kinds(run)]
    return run.parallel.chunks * max(sum(map(operator.mul, each, stage)) for stage in stage_layer_counts(run))


def _tensor(run: RunConfig) -> list[Sent]:
    parallel, t, model = run.parallel, run.parallel.tensor, model_costs(run.model)
    one = run.microbatches * _activation(run) * (t - 1) / t
    all_pairs = _of_blocks(run, lambda kind: kind.matmul_pairs)
    blocks = _of_blocks(run, lambda kind: 1)
    pairs = all_pairs / blocks  # of a block, or a mean over kinds
    each = "bsh (t-1)/t per layer and microbatch"
    lines = [Sent("tensor", "pairs of matmuls", f"{PAIR * pairs:g} {each}", PAIR * all_pairs * one)]
    if parallel.sequence_parallel:  # the inputs of the column-parallel matmuls, for their weights' gradients
        lines.append(Sent("tensor", "gathered again for dW", f"{pairs:g} {each}", all_pairs * one))
    if parallel.recompute == "full" and pairs:
        # The sums of blocks that are recomputed together, except the last one; a sum is a reduce-scatter with sequence
        # parallelism, otherwise an all-reduce.
        group = parallel.recompute_blocks
        count = (pairs * group - 1) / group * (1 if parallel.sequence_parallel else 2)
        lines.append(Sent("tensor", "full recompute", f"{count:g} {each}", count * blocks * one))
    if not model.vocabulary_width:
        return lines
    # The embedding's rows and their gradient; the head's input and its gradient. In Megatron-LM the first and the last
    # stage have two of them each.
    ends = 4 if parallel.pipe == 1 or Sharding.from_config(run).vocabulary_over_pipe else 2
    sums = ends * run.microbatches * _activation(run) * (t - 1) / t
    return [*lines, Sent("tensor", "embedding and head", f"{ends} bsh (t-1)/t per microbatch", sums)]


def _pipe(run: RunConfig) -> list[Sent]:
    parallel, p = run.parallel, run.parallel.pipe
    part = _activation(run) // (parallel.tensor if parallel.sequence_parallel else 1)
    ends = 1 if p == 2 else 0  # the first chunk sends no gradient, the last no activation; other ranks have neither
    sends = (2 * parallel.chunks - ends) * run.microbatches * part
    lines = [Sent("pipe", "activations and gradients", "2 v bsh/t per microbatch", sends)]
    ring, summed = 2 * (p - 1) / p, _shared(run)
    if Sharding.from_config(run).vocabulary_over_pipe:
        sums = ring * 4 * run.microbatches * part
        lines.append(Sent("pipe", "shared embedding and head", "2 (p-1)/p of 4 bsh/t per microbatch", sums))
        summed -= _tables(run)
    cut = _replicas(run) if parallel.zero else 1  # with ZeRO they are reduced over the replicas first
    rest = ring * summed * GRADIENT / cut
    return [*lines, Sent("pipe", "gradients of what all stages hold", "2 (p-1)/p of them, once", rest)]


def _expert(run: RunConfig) -> list[Sent]:
    """Tokens sent to their experts' replicas, and results back (`ops/expert_dispatch.py`), with balanced routing."""
    parallel, model, degree = run.parallel, model_costs(run.model), run.parallel.expert
    part = _activation(run) / (parallel.tensor if parallel.sequence_parallel else 1)
    one = run.microbatches * _of_blocks(run, lambda kind: kind.experts is not None) * part * (degree - 1)
    count = EXPERT_COLLECTIVES + (parallel.recompute != "none")  # tokens again, for the weights' gradients
    share, each = 1.0, f"{count} (N-1) bsh/t per layer with experts and microbatch"
    if parallel.expert_dispatch == "all_to_all":
        share, _ = sent_share(model.experts, parallel)
        each = f"{share:.3g} of {each}"
    return [Sent("expert", "tokens and experts' results", each, share * count * one)]


def _data(run: RunConfig) -> list[Sent]:
    parallel, replicas, (common, experts) = run.parallel, _replicas(run), rank_block_parameters(run)
    ring, shared, item = (replicas - 1) / replicas, _shared(run), ITEMSIZE[run.train.precision]
    # The number of a block's parameters that the ring's factor applies to. Experts have dC/N replicas, which are on the
    # data axis alone.
    blocks = common + experts * (1 - parallel.expert / replicas) / ring
    lines = []
    if parallel.context > 1:
        around = _context_sends(run) * item
        lines.append(Sent("data", "keys, values round a ring", "(6C-4) bsgd/(Ct) per layer and microbatch", around))
    if parallel.zero == 0:
        sums = 2 * ring * (blocks + shared) * GRADIENT
        return [*lines, Sent("data", "gradients", "2 (dC-1)/(dC) of a device's gradients, once", sums)]
    often = run.microbatches if parallel.zero == 3 else 1
    each = "(dC-1)/(dC) of a device's {}, " + (
        "blocks' {}per microbatch, the rest once" if parallel.zero == 3 else "once"
    )
    scattered = ring * (often * blocks + shared) * GRADIENT
    ways = 2 if parallel.zero == 3 else 1  # forward and backward
    gathered = ring * (ways * often * blocks + shared) * item
    return [
        *lines,
        Sent("data", "gradients, reduce-scattered", each.format("gradients", ""), scattered),
        Sent("data", "weights, all-gathered", each.format("16-bit weights", "twice "), gathered),
    ]


def _replicas(run: RunConfig) -> int:
    return run.parallel.data * run.parallel.context


def _shared(run: RunConfig) -> int:
    """Parameters outside the blocks on a device."""
    sharding = Sharding.from_config(run)
    return shared_parameters(model_costs(run.model), run.parallel.tensor, run.parallel.pipe, sharding)


def _tables(run: RunConfig) -> int:
    """Parameters of the token tables on a device."""
    model, shares = model_costs(run.model), run.parallel.vocabulary_shares
    return padded_vocabulary(model.vocabulary, shares) // shares * model.vocabulary_width


def _context_sends(run: RunConfig) -> float:
    """Elements sent round the ring: keys and values C - 1 times forward and backward, their gradients C times."""
    model, parallel = model_costs(run.model), run.parallel
    if model.attention is None:
        return 0.0
    tokens = parallel.microbatch_size * model.sequence_length // parallel.context
    one = 2 * tokens * model.attention.groups * model.attention.head_size / parallel.tensor
    ranks = parallel.context
    return run.microbatches * _of_blocks(run, lambda kind: 1) * (2 * (ranks - 1) + ranks) * one

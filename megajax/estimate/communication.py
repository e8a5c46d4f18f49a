"""What a step sends on paper: bytes a device sends per step and mesh axis (2104.04473 section 3, 2205.05198 section 4.2).

b samples a microbatch, s tokens, h hidden, m microbatches, v chunks a rank; d, C, p, t the degrees of data, context, pipe
and tensor parallelism. Bytes are those that a ring sends, which is the least.
"""

import dataclasses

from megajax.config import RunConfig, padded_vocabulary
from megajax.estimate.memory import Sharding, block_parameters, shared_parameters

__all__ = ["Sent", "expected"]

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GRADIENT = 4  # bytes: they are summed in fp32
# Collectives of a layer and microbatch, each of b s h (t - 1) / t elements: gathers and scatters, forward and backward.
PAIR = 8
GATHERED_AGAIN = 2  # the inputs of the two column-parallel matmuls, for their kernels' gradients


@dataclasses.dataclass(frozen=True)
class Sent:
    """A line of the account.

    Attributes:
      axis: of the mesh.
      what: is sent.
      formula: with the letters above.
      bytes: of the rank that sends most.
    """

    axis: str
    what: str
    formula: str
    bytes: float


def expected(run: RunConfig) -> list[Sent]:
    """What the formulas say that a step of a validated run sends."""
    lines = _tensor(run) if run.parallel.tensor > 1 else []
    lines += _pipe(run) if run.parallel.pipe > 1 else []
    return lines + (_data(run) if run.parallel.data * run.parallel.context > 1 else [])


def _activation(run: RunConfig) -> int:
    """Bytes of bsh."""
    model, parallel = run.model, run.parallel
    tokens = parallel.microbatch_size * model.sequence_length // parallel.context
    return tokens * model.hidden * BYTES[run.train.precision]


def _tensor(run: RunConfig) -> list[Sent]:
    parallel, t = run.parallel, run.parallel.tensor
    one = run.microbatches * run.model.layers // parallel.pipe * _activation(run) * (t - 1) / t
    each = "bsh (t-1)/t per layer and microbatch"
    lines = [Sent("tensor", "pairs of matmuls", f"{PAIR} {each}", PAIR * one)]
    if parallel.sequence_parallel:
        lines.append(Sent("tensor", "gathered again for dW", f"{GATHERED_AGAIN} {each}", GATHERED_AGAIN * one))
    if parallel.recompute == "full":
        # The sums of blocks computed again together, but for the last one's; a sum is a scatter, or an all-reduce.
        group = parallel.recompute_blocks
        count = (2 * group - 1) / group * (1 if parallel.sequence_parallel else 2)
        lines.append(Sent("tensor", "full recompute", f"{count:g} {each}", count * one))
    # Rows found, and their gradient; the head's input, and its gradient. Megatron's ends have two of them each.
    ends = 4 if parallel.pipe == 1 or Sharding.of(run).vocabulary_over_pipe else 2
    sums = ends * run.microbatches * _activation(run) * (t - 1) / t
    return [*lines, Sent("tensor", "embedding and head", f"{ends} bsh (t-1)/t per microbatch", sums)]


def _pipe(run: RunConfig) -> list[Sent]:
    parallel, p = run.parallel, run.parallel.pipe
    part = _activation(run) // (parallel.tensor if parallel.sequence_parallel else 1)
    ends = 1 if p == 2 else 0  # the first chunk sends nothing back, the last nothing on; others have neither
    sends = (2 * parallel.chunks - ends) * run.microbatches * part
    lines = [Sent("pipe", "activations and gradients", "2 v bsh/t per microbatch", sends)]
    ring, summed = 2 * (p - 1) / p, _shared(run)
    if Sharding.of(run).vocabulary_over_pipe:
        sums = 3 + GRADIENT // BYTES[run.train.precision]  # the head's gradient is summed in fp32
        shared = ring * sums * run.microbatches * part
        lines.append(Sent("pipe", "shared embedding and head", f"2 (p-1)/p of {sums} bsh/t per microbatch", shared))
        summed -= _tables(run)
    cut = _replicas(run) if parallel.zero else 1  # they are summed over the replicas first
    rest = ring * summed * GRADIENT / cut
    return [*lines, Sent("pipe", "gradients of what all stages hold", "2 (p-1)/p of them, once", rest)]


def _data(run: RunConfig) -> list[Sent]:
    parallel, replicas = run.parallel, _replicas(run)
    blocks = run.model.layers // parallel.pipe * block_parameters(run.model, parallel.tensor)
    ring, shared, item = (replicas - 1) / replicas, _shared(run), BYTES[run.train.precision]
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
        Sent("data", "gradients, to who holds that part", each.format("gradients", ""), scattered),
        Sent("data", "weights, from who holds that part", each.format("16-bit weights", "twice "), gathered),
    ]


def _replicas(run: RunConfig) -> int:
    return run.parallel.data * run.parallel.context


def _shared(run: RunConfig) -> int:
    """Parameters outside the blocks on a device."""
    return shared_parameters(run.model, run.parallel.tensor, run.parallel.pipe, Sharding.of(run))


def _tables(run: RunConfig) -> int:
    """Those of the token tables."""
    shares = run.parallel.vocabulary_shares
    rows = padded_vocabulary(run.model.vocabulary, shares) // shares
    return rows * run.model.hidden * (1 if run.model.tied_embeddings else 2)


def _context_sends(run: RunConfig) -> float:
    """Elements round the ring: keys and values C - 1 times forward and backward, and their gradients C times."""
    model, parallel = run.model, run.parallel
    tokens = parallel.microbatch_size * model.sequence_length // parallel.context
    one = 2 * tokens * model.key_value_heads * model.head_size / parallel.tensor
    ranks = parallel.context
    return run.microbatches * model.layers / parallel.pipe * (2 * (ranks - 1) + ranks) * one

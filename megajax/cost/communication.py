"""What a step sends on paper: bytes a device sends per step and mesh axis (2104.04473 section 3, 2205.05198 section 4.2).

b samples a microbatch, s tokens, h hidden, m microbatches, v chunks a rank; d, C, p, t the degrees of data, context, pipe
and tensor parallelism. Bytes are those that a ring sends, which is the least.
"""

import dataclasses

from megajax.config import RunConfig

__all__ = ["Sent", "expected"]

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
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


def expected(run: RunConfig, gradient_bytes: int = 4) -> list[Sent]:
    """What the formulas say that a step of a validated run sends; gradients are summed in fp32."""
    model, parallel = run.model, run.parallel
    itemsize, m, t, p = BYTES[run.train.precision], run.microbatches, parallel.tensor, parallel.pipe
    tokens = parallel.microbatch_size * model.sequence_length // parallel.context
    activation, layers = tokens * model.hidden * itemsize, model.layers // p
    split = t if parallel.sequence_parallel else 1
    lines = []
    if t > 1:
        one = m * layers * activation * (t - 1) / t
        lines.append(Sent("tensor", "pairs of matmuls", "8 bsh (t-1)/t per layer and microbatch", PAIR * one))
        if parallel.sequence_parallel:
            again = GATHERED_AGAIN * one
            lines.append(Sent("tensor", "gathered again for dW", "2 bsh (t-1)/t per layer and microbatch", again))
        if parallel.recompute == "full":
            # The sums of blocks computed again together, but for the last one's; a sum is a scatter, or an all-reduce.
            group = parallel.recompute_blocks
            count = (2 * group - 1) / group * (1 if parallel.sequence_parallel else 2)
            lines.append(
                Sent("tensor", "full recompute", f"{count:g} bsh (t-1)/t per layer and microbatch", count * one)
            )
    if p > 1:
        ends = 1 if p == 2 else 0  # the first chunk sends nothing back, the last nothing on; others have neither
        sends = (2 * parallel.chunks - ends) * m * activation / split
        lines.append(Sent("pipe", "activations and gradients", "2 v bsh/t per microbatch", sends))
        shared = (model.parameters - _block_parameters(run)) * gradient_bytes / t
        lines.append(Sent("pipe", "embedding and head", "2 (p-1)/p of their gradients", 2 * (p - 1) / p * shared))
    replicas = parallel.data * parallel.context
    if parallel.context > 1:
        around = _context_sends(run) * itemsize
        lines.append(Sent("data", "keys, values round a ring", "(6C-4) bsgd/(Ct) per layer and microbatch", around))
    if replicas > 1:
        here = _block_parameters(run) / p / t + (model.parameters - _block_parameters(run)) / t
        sums = 2 * (replicas - 1) / replicas * here * gradient_bytes
        lines.append(Sent("data", "gradients", "2 (dC-1)/(dC) of a device's gradients, once", sums))
    return lines


def _block_parameters(run: RunConfig) -> int:
    """Parameters of all blocks: what a model of twice the layers has more."""
    twice = dataclasses.replace(run.model, layers=2 * run.model.layers)
    return twice.parameters - run.model.parameters


def _context_sends(run: RunConfig) -> float:
    """Elements round the ring: keys and values C - 1 times forward and backward, and their gradients C times."""
    model, parallel = run.model, run.parallel
    tokens = parallel.microbatch_size * model.sequence_length // parallel.context
    one = 2 * tokens * model.key_value_heads * model.head_size / parallel.tensor
    ranks = parallel.context
    return run.microbatches * model.layers / parallel.pipe * (2 * (ranks - 1) + ranks) * one

"""Seconds of sending tokens to the devices of their experts, by all-gather or all-to-all (`ops/expert_dispatch.py`).

The members of a group that split the experts are replicas, or with `--expert-tensor 1` the tensor ranks of replicas, each of
which sends its own part of the sequence. `--expert-dispatch auto` is the faster of the two by these, of those that it takes
(`with_expert_dispatch`).
"""

import math
from typing import NamedTuple

from megajax.config import ParallelConfig, RunConfig
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu
from megajax.estimate.kept import rows_of
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.rates import Rates, devices_here, rates_of
from megajax.models.costs import Experts, ModelCosts
from megajax.ops.expert_rounds import places_of_balanced
from megajax.ops.fp8_rows import bytes_of_element

__all__ = [
    "CHOICES",
    "DispatchSeconds",
    "GATHER",
    "LOGITS",
    "SUMS",
    "TENSOR_HIDDEN",
    "TOKENS",
    "by_all_to_all",
    "dispatch_times",
    "dispatches",
    "expert_seconds",
    "formula_of",
    "sent_bytes",
    "sent_share",
    "with_expert_dispatch",
]

GATHER, ALL_TO_ALL, REDUCE = "all-gather", "all-to-all", "all-reduce"
TOKENS, CHOICES = "tokens and experts' results", "choices of experts"
LOGITS, SUMS = "routers' logits", "routers' gradients"
CHOICE = 4  # bytes: an expert's number, its weight; a logit of a router
TENSOR_HIDDEN = 0.4  # with tensor parallelism the part of a merged tick's exchanges that matmuls hide


class Dispatch(NamedTuple):
    """Collectives that are alike of a block with experts, for a microbatch."""

    what: str
    kind: str
    each: float  # bytes that a device sends each time
    forward: int  # how many
    backward: int
    ragged: bool = False  # sizes are known at run time only
    axes: tuple[str, ...] = ("expert",)  # of the mesh, along which the devices of a group differ

    def seconds(self, parallel: ParallelConfig, rates: Rates) -> float:
        """Of one of them."""
        sizes = {"expert": ("data", parallel.expert_replicas), "tensor": ("tensor", parallel.tensor)}
        groups = [sizes[axis] for axis in self.axes]
        degree = math.prod(size for _, size in groups)
        here = math.prod(devices_here(parallel, rates.host_size, size, axis) for axis, size in groups)
        if self.kind != ALL_TO_ALL:
            return rates.collective(self.kind, self.each, degree, here)
        return rates.all_to_all(self.each / (degree - 1), degree, here, self.ragged)


def sent_bytes(run: RunConfig) -> float:
    """Bytes of an element of tokens, and of gradients of results, that are sent to experts."""
    if run.train.expert_dispatch_dtype == "fp8":
        return bytes_of_element(run.model.hidden)
    return ITEMSIZE[run.train.precision]


def dispatches(model: ModelCosts, parallel: ParallelConfig, item: int, sent: float | None = None) -> list[Dispatch]:
    """Tokens sent to their experts' devices, and results back (`ops/expert_dispatch.py`), with balanced routing.

    By all-gather, and the results by a sum where they arrive, which is an all-to-all; gradients likewise. Except with
    recompute none, the backward sends the tokens again, for the weights' gradients. Of each token also its experts' numbers
    and weights, over replicas, in the forward and where it is repeated, and the weights' gradients. Where tensor ranks have
    experts of their own, their router reads a part of the sequence: its logits are gathered, which full recomputation
    repeats, and the gradients of its matrix and of choices' weights are sums over tensor. `item`: bytes of an activation;
    `sent`: those of `sent_bytes`, of what is sent to experts, if they differ.
    """
    degree, again = parallel.expert, int(parallel.recompute != "none")
    if degree == 1 or model.experts is None:
        return []
    elements = rows_of(model, parallel) * model.hidden / parallel.sequence_shares * (degree - 1)
    part, there = item * elements, (sent or item) * elements
    tokens = [Dispatch(TOKENS, GATHER, there, 1, 1 + again), Dispatch(TOKENS, ALL_TO_ALL, part, 1, 1)]
    if by_all_to_all(model.experts, parallel):
        share, ragged = sent_share(model.experts, parallel)
        tokens = [Dispatch(TOKENS, ALL_TO_ALL, share * part, 2, 2 + again, ragged)]
        if there != part:
            counts = (there, 1, 1 + again), (part, 1, 1)
            tokens = [Dispatch(TOKENS, ALL_TO_ALL, share * each, *own, ragged) for each, *own in counts]
    over = (*["expert"] * (parallel.expert_replicas > 1), *["tensor"] * parallel.experts_over_tensor)
    return [
        *(one._replace(axes=over) for one in tokens),
        *_choices(model, parallel, again),
        *_of_ranks(model, parallel),
    ]


def _choices(model: ModelCosts, parallel: ParallelConfig, again: int) -> list[Dispatch]:
    """Experts' numbers and their weights, which all tensor ranks of a replica have."""
    others = parallel.expert_replicas - 1
    each = rows_of(model, parallel) * model.experts.choice.chosen * CHOICE * others
    found = [Dispatch(CHOICES, GATHER, each, 2, 2 * again), Dispatch(CHOICES, ALL_TO_ALL, each, 0, 1)]
    return found if others else []


def _of_ranks(model: ModelCosts, parallel: ParallelConfig) -> list[Dispatch]:
    """Of a router that reads a part of the sequence on each tensor rank, whose rows are its own."""
    if not parallel.experts_over_tensor:
        return []
    choice, rows, each = (
        model.experts.choice,
        rows_of(model, parallel),
        CHOICE * (parallel.tensor - 1) / parallel.tensor,
    )
    counts = (LOGITS, GATHER, rows * choice.count, 1, int(parallel.recompute == "full"))
    sums = ((SUMS, REDUCE, 2 * size, 0, 1) for size in (model.hidden * choice.count, rows * choice.chosen))
    return [Dispatch(what, kind, size * each, *times, axes=("tensor",)) for what, kind, size, *times in (counts, *sums)]


def formula_of(one: Dispatch, model: ModelCosts, parallel: ParallelConfig, apart: bool) -> str:
    """What those of a name send, with the letters of `communication.py`; `apart`: those of tokens have two sizes."""
    again, count = parallel.recompute != "none", one.forward + one.backward
    if one.what in (LOGITS, SUMS):
        size = "bsE" if one.what == LOGITS else "hE or bsk"
        return f"{count * (1 + (one.what == SUMS))} {size} of 4 bytes (t-1)/t"
    if one.what == CHOICES:
        return f"{2 * (1 + again) + 1} ({'R' if parallel.experts_over_tensor else 'N'}-1) bs k of 4 bytes"
    share = f"{sent_share(model.experts, parallel)[0]:.3g} of " if by_all_to_all(model.experts, parallel) else ""
    return f"{share}{count if apart else 4 + again} (N-1) bsh/t"


class ExposedSeconds(NamedTuple):
    """Seconds in which a block with experts sends tokens and nothing else: in each pass, and in both of a merged tick."""

    forward: float
    backward: float
    merged: float


class DispatchSeconds(NamedTuple):
    """Seconds in which a block with experts sends tokens to their devices, and results back.

    Attributes:
      forward, backward: all of it.
      exposed: what the order of the program leaves exposed, however long kernels take.
    """

    forward: float
    backward: float
    exposed: ExposedSeconds


def expert_seconds(
    model: ModelCosts, parallel: ParallelConfig, rates: Rates, item: int, sent: float | None = None
) -> DispatchSeconds:
    """Of a microbatch, in one block; `item` and `sent` as of `dispatches`.

    A backward needs the tokens that are sent again for its last matmuls only, unless it computes its forward again. For its
    output's gradient all that it computes waits. In a merged tick the other pass could hide that, but XLA's scheduler
    starts with it, and with choices, and with the tokens that are gathered again if a backward has rounds, which read both.
    The other exchanges have the other pass's matmuls beside them. With full recomputation and all-gathers there are few
    matmuls to put there: only the forward's results return beside the weights' gradients. All-to-alls are shorter, and one
    of five is exposed (read off DeepSeek-V3's program). With tensor parallelism, too, less is hidden: collectives of the
    tensor group are beside the same matmuls, and with two ranks one may start at a time.
    """
    times = [(one, one.seconds(parallel, rates)) for one in dispatches(model, parallel, item, sent)]
    forward, backward = (sum(getattr(one, name) * each for one, each in times) for name in ("forward", "backward"))
    both, tokens = forward + backward, [each for one, each in times if one.what == TOKENS]
    if parallel.tensor > 1 or not tokens:
        return DispatchSeconds(forward, backward, ExposedSeconds(forward, backward, (1 - TENSOR_HIDDEN) * both))
    first, last, gathered = tokens[0], tokens[-1], times[0][0].kind == GATHER  # sending tokens, and results back
    if parallel.recompute == "full":
        merged = both - last if gathered else first
        return DispatchSeconds(forward, backward, ExposedSeconds(forward, backward, merged))
    choices = sum((one.forward + one.backward) * each for one, each in times if one.what == CHOICES)
    again = first * (parallel.recompute != "none")
    together = again * (parallel.expert_dispatch == "bucketed" and gathered)
    merged = min(both, first + together + choices)
    return DispatchSeconds(forward, backward, ExposedSeconds(forward, backward - again, merged))


def dispatch_times(
    model: ModelCosts, parallel: ParallelConfig, rates: Rates, item: int, sent: float | None = None
) -> tuple[float, float]:
    """(seconds of sending a microbatch's tokens to their experts, seconds of sending results back), of one block."""
    tokens = [one.seconds(parallel, rates) for one in dispatches(model, parallel, item, sent) if one.what == TOKENS]
    return (tokens[0], tokens[-1]) if tokens else (0.0, 0.0)


def by_all_to_all(experts: Experts, parallel: ParallelConfig) -> bool:
    """Whether tokens are sent by all-to-all, or all of them to all replicas: so also with buckets that all tokens fit in."""
    if parallel.expert_dispatch == "bucketed":
        return sent_share(experts, parallel)[0] < 1
    return parallel.expert_dispatch == "all_to_all"


def sent_share(experts: Experts, parallel: ParallelConfig) -> tuple[float, bool]:
    """(the part of its tokens that a member sends to another one by all-to-all, whether only routed tokens are sent).

    With capacity all places are sent, and with buckets those of the first exchange. Without, of balanced routing, those
    tokens that chose any of the member's experts.
    """
    here = experts.choice.count // parallel.expert
    if parallel.expert_dispatch == "bucketed":
        return places_of_balanced(experts.choice, parallel.expert), False
    places = here * experts.share * parallel.sequence_shares
    if places < 1:
        return places, False
    return experts.choice.balanced_share(parallel.expert), True


def with_expert_dispatch(run: RunConfig, gpu: Gpu) -> RunConfig:
    """The run with `expert_dispatch` resolved to "gather" or "all_to_all", what is faster on a cluster of this GPU.

    Memory and results do not depend on it. Of equal ones it is gather. A ragged all-to-all is taken only if asked for: on
    GPUs others saw it hang (marin-community/marin#7655, #8870), gradients of NaN (#8077), and reads of other addresses in
    groups of more than 32 (openxla/xla#47283).
    """
    if run.parallel.expert_dispatch != "auto":
        return run
    if run.parallel.expert == 1 or sent_share(model_costs(run.model).experts, run.parallel)[1]:
        return run.with_layout(expert_dispatch="gather")
    choices = [run.with_layout(expert_dispatch=name) for name in ("gather", "all_to_all")]
    how = rates_of(gpu, run.train.precision), ITEMSIZE[run.train.precision], sent_bytes(run)
    return min(choices, key=lambda one: sum(dispatch_times(model_costs(one.model), one.parallel, *how)))

"""The account of a run's compiled step."""

import dataclasses
from collections.abc import Mapping, Sequence

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.branch_counts import counts_of_ranks
from megajax.estimate.expert_dispatch import sent_share
from megajax.estimate.gpus import Gpu
from megajax.estimate.hlo import loop_trip_counts, merged_passes
from megajax.estimate.rates import Rates, rates_of
from megajax.estimate.roofline import Account, account, accounts
from megajax.pipeline.program import StepProgram
from megajax.runtime.mesh import mesh_places
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from megajax.schedules.simulate import Costs

__all__ = [
    "StepAccount",
    "account_arguments",
    "account_of",
    "operation_costs",
    "ragged_part",
    "rates_of_run",
    "routed_part",
]


@dataclasses.dataclass(frozen=True)
class StepAccount:
    """The account of a rank that computes all of its microbatches, and the schedule's bubble as a share of its time.

    Where stages have other layers, the account is a mean over ranks (`hlo.loop_trip_counts`), and the bubble has their waits
    for the slowest of them, which has the most to do.

    Where blocks have rings, ranks without work run their blocks too (`StepProgram.computes_bubbles`): the account has the
    bubble in it, as kernels, and the share is 0.
    """

    account: Account
    bubble: float

    @property
    def seconds(self) -> float:
        """The step's time with the bubble."""
        return self.account.total * (1 + self.bubble)


def account_of(run: RunConfig, gpu: Gpu, hlo: str) -> StepAccount:
    """The account of a run's compiled step.

    The bubble is that of megajax's executor, in which ranks start each tick together, of operations that take as long as in
    the program (`operation_costs`).
    """
    arguments, program = account_arguments(run, gpu), StepProgram.of(run)
    found = account(hlo, *arguments)
    if run.parallel.pipe == 1 or program.computes_bubbles:
        return StepAccount(found, 0.0)
    bubble = program.bubble(operation_costs(program, found), lockstep=True) + _waits(program, found, hlo, *arguments)
    return StepAccount(found, bubble / found.total)


def _waits(
    program: StepProgram,
    found: Account,
    hlo: str,
    trip_counts: Mapping[str, float],
    rates: Rates,
    places: Sequence[int],
) -> float:
    """Seconds that an average rank waits for the rank with the most work, where stages have other layers."""
    ranks = {tuple(counts.items()): {**trip_counts, **counts} for counts in counts_of_ranks(program)}
    totals = (one.total for one in accounts(hlo, ranks.values(), rates, places))
    return max(totals, default=found.total) - found.total


def operation_costs(program: StepProgram, found: Account) -> Costs:
    """Seconds of each operation on one chunk where it runs alone, the account's mean; as `Costs` says if none does."""
    alone = program.passes - sum(merged_passes(program))
    needed = (FORWARD, *((INPUT, WEIGHT) if program.splits else (BACKWARD,)))
    if alone <= 0 or any(found.scopes[op] <= 0 for op in needed):
        return Costs().scaled(found.total / program.passes / (Costs.forward + Costs.backward))
    forward, *parts = (found.scopes[op] / alone for op in needed)
    whole = sum(parts)
    return Costs(forward, whole, *(parts if program.splits else (whole / 2, whole / 2)))


def account_arguments(run: RunConfig, gpu: Gpu) -> tuple[dict[str, float], Rates, Sequence[int]]:
    """What `roofline.account` and `seconds_by_name` need besides a run's program: trip counts, rates, places of devices."""
    return loop_trip_counts(run), rates_of_run(run, gpu), mesh_places(run.parallel)


def rates_of_run(run: RunConfig, gpu: Gpu) -> Rates:
    """The GPU's, with what the run's kernels compute of their operands."""
    model, rates = model_costs(run.model), rates_of(gpu, run.train.precision)
    parts = {"routed_part": routed_part(run), "ragged_part": ragged_part(run)}
    if model.attention is not None:
        tokens = model.sequence_length
        parts["attention_part"] = model.attention.pairs(tokens) / tokens**2
    return dataclasses.replace(rates, **parts)


def routed_part(run: RunConfig) -> float:
    """Of the rows that a device has for experts, those that balanced routing gives it."""
    return 1 / model_costs(run.model).expert_rows(run.parallel.expert, run.parallel.expert_dispatch)


def ragged_part(run: RunConfig) -> float:
    """Of the rows that a ragged all-to-all has room for, those that balanced routing sends."""
    experts = model_costs(run.model).experts
    return sent_share(experts, run.parallel)[0] if experts else 1.0

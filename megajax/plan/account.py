"""The dry run's account of a compiled step: estimated time and memory traffic by class, and the largest wastes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.expert_time import sent_share
from megajax.estimate.gpus import Gpu
from megajax.estimate.hlo import loop_trip_counts
from megajax.estimate.kernels import CLASSES
from megajax.estimate.roofline import EXPOSED, GAPS, SYNCS, Account, account, rates_of
from megajax.estimate.step_time import bubble_time
from megajax.runtime.mesh import mesh_places
from megajax.schedules.simulate import Costs

__all__ = ["StepAccount", "account_of", "account_table", "largest_wastes", "ragged_part", "routed_part", "to_json"]

# What a better program of the same schedule would not spend. Elementwise kernels are not waste: a model has them.
WASTES: Mapping[str, str] = {
    "accumulation": "weight gradients accumulated by kernels of their own",
    "copy": "slices and copies of arrays",
    "stash": "writes into buffers",
    EXPOSED: "collectives that overlap no kernel",
    GAPS: "gaps between kernels",
    SYNCS: "the host waiting for loop conditions",
}


@dataclasses.dataclass(frozen=True)
class StepAccount:
    """The account of a rank that computes all of its microbatches, and the schedule's bubble as a share of its time."""

    account: Account
    bubble: float

    @property
    def seconds(self) -> float:
        """The step's time with the bubble."""
        return self.account.total * (1 + self.bubble)


def account_of(run: RunConfig, gpu: Gpu, hlo: str) -> StepAccount:
    """The account of a run's compiled step.

    The bubble is that of megajax's executor, in which ranks start each tick together, with a backward twice as long as a
    forward.
    """
    costs = Costs()
    ideal = run.microbatches * run.parallel.chunks * (costs.forward + costs.backward)
    bubble = bubble_time(run, costs, lockstep=True) / ideal if run.parallel.pipe > 1 else 0.0
    rates, attention = rates_of(gpu, run.train.precision), model_costs(run.model).attention
    if attention is not None and not attention.causal:
        rates = dataclasses.replace(rates, attention_part=1.0)
    rates = dataclasses.replace(rates, routed_part=routed_part(run), ragged_part=ragged_part(run))
    return StepAccount(account(hlo, loop_trip_counts(run), rates, mesh_places(run.parallel)), bubble)


def routed_part(run: RunConfig) -> float:
    """Of the rows that a device has for experts, those that balanced routing gives it."""
    return 1 / model_costs(run.model).expert_rows(run.parallel.expert)


def ragged_part(run: RunConfig) -> float:
    """Of the rows that a ragged all-to-all has room for, those that balanced routing sends."""
    experts = model_costs(run.model).experts
    return sent_share(experts, run.parallel)[0] if experts else 1.0


def account_table(found: StepAccount) -> str:
    """The account as lines of text: time, share, bytes and kernels by class."""
    one = found.account
    lines = [
        "estimated time of a step on one GPU, each kernel at its roofline; nothing was run:",
        f"  {'class':<22}{'ms':>10}{'share':>8}{'GB read':>11}{'GB written':>12}{'kernels':>10}",
    ]
    for name, seconds in sorted(one.seconds.items(), key=lambda item: -item[1]):
        moved = f"{one.read[name] / 1e9:>11.1f}{one.written[name] / 1e9:>12.1f}" if name in CLASSES else f"{'':23}"
        count = one.kernels[name] if name in CLASSES else one.synchronisations if name == SYNCS else 0
        lines.append(
            f"  {name:<22}{1e3 * seconds:>10.1f}{seconds / one.total:>8.1%}{moved}{f'{count:,.0f}' if count else '':>10}"
        )
    hidden, exposed = sum(one.hidden.values()), sum(one.exposed.values())
    share = hidden / (hidden + exposed) if hidden + exposed else 1.0
    lines += [
        f"  {'without the bubble':<22}{1e3 * one.total:>10.1f}",
        f"  {'with the bubble':<22}{1e3 * found.seconds:>10.1f}{found.bubble:>8.1%} more",
        f"  collectives take {1e3 * (hidden + exposed):,.1f} ms, of which {share:.0%} overlap kernels",
        "largest wastes: "
        + "; ".join(f"{text} {1e3 * seconds:,.0f} ms ({share:.1%})" for text, seconds, share in largest_wastes(found)),
    ]
    return "\n".join(lines)


def largest_wastes(found: StepAccount, count: int = 3) -> list[tuple[str, float, float]]:
    """The classes that cost most and that a better program would not have: description, seconds, share of the step."""
    lost = {text: found.account.seconds[name] for name, text in WASTES.items()}
    lost["the pipeline's bubble"] = found.seconds - found.account.total
    ordered = sorted(lost.items(), key=lambda item: -item[1])[:count]
    return [(text, seconds, seconds / found.seconds) for text, seconds in ordered if seconds > 0]


def to_json(found: StepAccount) -> dict[str, Any]:
    """The account as plain numbers: seconds, bytes, FLOPs and counts on one GPU in one step."""
    one = found.account
    return {
        "seconds": found.seconds,
        "seconds_without_bubble": one.total,
        "bubble": found.bubble,
        "seconds_by_class": dict(one.seconds),
        "bytes_read": dict(one.read),
        "bytes_written": dict(one.written),
        "flops": {name: flops for name, flops in one.flops.items() if flops},
        "kernels": dict(one.kernels),
        "host_synchronisations": one.synchronisations,
        "collective_seconds_hidden": dict(one.hidden),
        "collective_seconds_exposed": dict(one.exposed),
        "largest_wastes": [{"waste": text, "seconds": s, "share": share} for text, s, share in largest_wastes(found)],
    }

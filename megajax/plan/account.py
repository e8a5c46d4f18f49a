"""The dry run's account of a compiled step: estimated time and memory traffic by class, and the largest wastes."""

from collections.abc import Mapping
from typing import Any

from megajax.estimate.kernels import CLASSES
from megajax.estimate.program_account import StepAccount
from megajax.estimate.roofline import EXPOSED, GAPS, SYNCS

# What a better program of the same schedule would not spend. Elementwise kernels are not waste: a model has them.
WASTES: Mapping[str, str] = {
    "accumulation": "weight gradients accumulated by kernels of their own",
    "copy": "slices and copies of arrays",
    "stash": "writes into buffers",
    EXPOSED: "collectives that overlap no kernel",
    GAPS: "gaps between kernels",
    SYNCS: "the host waiting for loop conditions",
}


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


def largest_wastes(found: StepAccount) -> list[tuple[str, float, float]]:
    """The classes that cost most and that a better program would not have: description, seconds, share of the step."""
    lost = {text: found.account.seconds[name] for name, text in WASTES.items()}
    lost["the pipeline's bubble"] = found.seconds - found.account.total
    ordered = sorted(lost.items(), key=lambda item: -item[1])[:3]
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

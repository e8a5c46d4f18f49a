"""The verdict as text and as JSON."""

import json
import math
from collections.abc import Sequence
from typing import Any

from megajax.verify.certify import Verdict
from megajax.verify.compare import PARTS, quotient
from megajax.verify.programs import ProgramDifference

COLUMNS = {
    "outputs": "block outputs",
    "backward": "their gradients",
    "gradients": "weight gradients",
    "update": "updated state",
}


def verdict_line(verdict: Verdict, exact: bool) -> str:
    """One line: equal, or the first step, tensor and place that differ."""
    if verdict.difference is None:
        if exact:
            return f"equal: every bit of {_steps(verdict)} is the same"
        most = max((quotient(*pair) for row in verdict.rows for pair in row.largest.values()), default=0.0)
        return f"equal: {_steps(verdict)} agree up to rounding; the largest distance is {most:.2g} of its tolerance"
    difference = verdict.difference
    when = f"step {difference.step}: " if verdict.rows else ""
    shown = difference.entry.text
    if math.isfinite(difference.entry.distance):
        shown += f" differs by {difference.entry.distance:.2g} of its size, tolerance {difference.tolerance:.2g}"
    elif difference.entry.part != "replicas":
        shown += " differs"
    return f"differs: {when}{shown}"


def _steps(verdict: Verdict) -> str:
    first, last = verdict.rows[0].step, verdict.rows[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def table(verdict: Verdict) -> list[str]:
    """One line a step: both losses, and the largest distances with their tolerances in brackets."""
    rows = [["step", "loss of a", "loss of b", *COLUMNS.values()]]
    for row in verdict.rows:
        cells = [str(row.step), *(f"{loss:.6f}" for loss in row.losses)]
        for part in COLUMNS:
            pair = row.largest.get(part)
            cells.append("-" if pair is None else f"{pair[0]:.1e} ({pair[1]:.1e})")
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def header(layouts: Sequence[str], programs: Sequence[ProgramDifference]) -> str:
    """The two layouts, and what differs between their programs; printed before a step runs."""
    lines = [f"a  {layouts[0]}", f"b  {layouts[1]}", ""]
    if programs:
        rows = [("program", "a", "b"), *(one.cells for one in programs)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines += [*(f"{name.ljust(widths[0])}  {a.ljust(widths[1])}  {b}" for name, a, b in rows), ""]
    return "\n".join(lines)


def text(verdict: Verdict, exact: bool) -> str:
    """The table, the verdict and what is known of the difference."""
    lines = []
    if verdict.rows:
        lines += [*table(verdict), ""]
    lines.append(verdict_line(verdict, exact))
    lines += [f"         {line}" for line in verdict.details]
    if verdict.difference and verdict.difference.others:
        lines.append(f"         {verdict.difference.others} more tensors of this kind differ in the step")
    return "\n".join(lines)


def to_json(verdict: Verdict, layouts: Sequence[str], exact: bool, programs: Sequence[ProgramDifference]) -> str:
    """All of it as a JSON object."""
    first: dict[str, Any] | None = None
    if difference := verdict.difference:
        first = {
            "step": difference.step,
            "before_first_step": not verdict.rows,
            "tensor": difference.entry.key,
            "kind": difference.entry.part,
            "layer": difference.entry.layer,
            "text": difference.entry.text,
            "distance": _finite(difference.entry.distance),
            "tolerance": difference.tolerance,
            "samples": difference.exceeding,
            "others": difference.others,
            "details": list(verdict.details),
        }
    steps = [
        {
            "step": row.step,
            "loss": [_finite(loss) for loss in row.losses],
            "distances": {
                part: {"distance": _finite(row.largest[part][0]), "tolerance": row.largest[part][1]}
                for part in PARTS
                if part in row.largest
            },
        }
        for row in verdict.rows
    ]
    return json.dumps(
        {
            "equal": verdict.difference is None,
            "verdict": verdict_line(verdict, exact),
            "a": layouts[0],
            "b": layouts[1],
            "exact": exact,
            "programs": {one.name: {"a": one.a, "b": one.b} for one in programs},
            "first_difference": first,
            "steps": steps,
        },
        indent=1,
    )


def _finite(value: float) -> float | str:
    """JSON has no infinity and no NaN: they become texts."""
    return value if math.isfinite(value) else str(value)

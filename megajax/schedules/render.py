"""Renders schedules as text, JSON, or a Perfetto trace; `timeline` draws them."""

from typing import Any

from megajax.schedules.io import to_json
from megajax.schedules.schedule import Schedule, show
from megajax.schedules.simulate import Simulation


def as_json(schedule: Schedule, event: Simulation, lockstep: Simulation) -> dict[str, Any]:
    """A schedule and how long it takes, as JSON values."""
    return {
        **to_json(schedule),
        "ticks": len(schedule.ticks),
        "simulated": {
            "ideal": event.ideal,
            "event": event.makespan,
            "lockstep": lockstep.makespan,
            "bubble": event.bubble,
            "peak_live": list(event.peak_live),
        },
    }


def as_text(schedule: Schedule, simulation: Simulation) -> str:
    """A table of one row for each rank and one column for each tick; B and B' are the parts of a backward."""
    cells = [[" ".join(show(work, short=True) for work in row[rank]) or "." for row in schedule.ticks] for rank in
             range(schedule.stages)]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches, {_chunks(schedule)}: bubble "
        f"{simulation.bubble:.1%} of the ideal time; F3.1 is the forward of microbatch 3 through chunk 1"
    ]
    for rank, row in enumerate(cells):
        table = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"rank {rank}  {table}  {simulation.peak_live[rank]} in flight")
    return "\n".join(lines)


def as_trace(schedule: Schedule, simulation: Simulation) -> list[dict[str, Any]]:
    """Chrome trace events, for ui.perfetto.dev; one unit of time is shown as one millisecond."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(schedule.stages)
    ]
    return names + [
        {
            "ph": "X",
            "name": show(span.work, short=True),
            "cat": schedule.does(span.work),
            "pid": 0,
            "tid": span.rank,
            "ts": 1000 * span.start,
            "dur": 1000 * (span.stop - span.start),
        }
        for span in simulation.spans
    ]


def _chunks(schedule: Schedule) -> str:
    return f"{schedule.chunks} chunk{'s' if schedule.chunks > 1 else ''} on each rank"

"""Renders schedules as text, JSON, a Perfetto trace, or a picture (which needs matplotlib, the extra `plot`)."""

from collections.abc import Sequence
from typing import Any

from megajax.schedules.io import to_json
from megajax.schedules.schedule import BACKWARD, OVERLAP_PARTS, Schedule, ScheduleError, Work, show
from megajax.schedules.simulate import Simulation, Span

# Light for the first chunk, darker for later ones. Blue, orange and green are distinguishable with colour blindness.
SHADES = {
    "F": ("#9ecae1", "#4292c6", "#2171b5", "#084594"),
    "B": ("#fdd0a2", "#fd8d3c", "#e6550d", "#a63603"),
    "I": ("#fdd0a2", "#fd8d3c", "#e6550d", "#a63603"),
    "W": ("#c7e9c0", "#74c476", "#31a354", "#006d2c"),
}
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
IDLE = "#eeeeee"
ROW = 0.34  # inches of a rank's row
MARGIN = 2.4  # inches right of the time axis, for each rank's numbers
PICTURES = ("svg", "png", "pdf")
MOST_BOXES, MOST_ROWS = 20_000, 512  # of a picture, which takes about a millisecond a box and 0.34 inches a row


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


def draw(schedules: Sequence[Schedule], simulations: Sequence[Simulation], path: str) -> None:
    """Draws schedules one below the other on the same time axis, to a file that ends in .svg, .png or .pdf.

    Raises:
      ScheduleError: the ending is another one, there are too many operations, or matplotlib is not installed.
    """
    if path.rpartition(".")[2] not in PICTURES:
        raise ScheduleError(f"out is {path!r}; end it in .svg, .png or .pdf")
    boxes, rows = sum(len(one.spans) for one in simulations), sum(one.stages for one in schedules)
    if boxes > MOST_BOXES or rows > MOST_ROWS:
        raise ScheduleError(
            f"a picture shows at most {MOST_BOXES} operations on {MOST_ROWS} ranks, not {boxes} on {rows}: pass fewer "
            "--microbatches or --pipe, or --text instead of --out"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ScheduleError("pictures need matplotlib, which is not installed: pip install 'megajax[plot]'") from None
    longest = max(simulation.makespan for simulation in simulations)
    across = max(_boxes_across(simulation) for simulation in simulations)
    width = min(18.0, max(7.0, 0.3 * across + MARGIN + 1))
    heights = [schedule.stages * ROW + 0.6 for schedule in schedules]
    figure = Figure(figsize=(width, sum(heights) + 0.55), layout=None)
    FigureCanvasAgg(figure)
    total = figure.get_figheight()
    top = total - 0.1
    for schedule, simulation, height in zip(schedules, simulations, heights, strict=True):
        rows = schedule.stages * ROW
        box = [0.75 / width, (top - 0.35 - rows) / total, (width - 0.75 - MARGIN) / width, rows / total]
        _draw_one(figure.add_axes(box), schedule, simulation, longest)
        top -= height
    _legend(figure, schedules)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.endswith("svg") else None)


def _chunks(schedule: Schedule) -> str:
    return f"{schedule.chunks} chunk{'s' if schedule.chunks > 1 else ''} on each rank"


def _boxes_across(simulation: Simulation) -> float:
    """The makespan divided by the shortest operation, which determines the width of the picture."""
    shortest = min(span.stop - span.start for span in simulation.spans)
    return simulation.makespan / shortest


def _draw_one(axes, schedule: Schedule, simulation: Simulation, longest: float) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0, 0), simulation.makespan, schedule.stages, facecolor=IDLE))
    for rank, work, start, stop in _operations(schedule, simulation):
        op = schedule.does(work)
        shade = min(work.chunk, 3) if schedule.chunks > 1 else 0
        # Of two that overlap, the forward is above the backward.
        height = 0.46 if _overlaps(schedule, work) else 0.92
        top = rank + (0.5 if height < 0.9 and op == BACKWARD else 0.04)
        axes.add_patch(
            Rectangle((start, top), stop - start, height, facecolor=SHADES[op][shade], edgecolor="white", lw=0.8)
        )
        ink, size = "white" if shade >= 2 else "black", 8 if height > 0.9 else 6
        place = ((start + stop) / 2, top + height / 2 + 0.02)
        axes.text(*place, str(work.microbatch), ha="center", va="center", fontsize=size, color=ink, clip_on=True)
    unit = "chunks in flight" if schedule.chunks > 1 else "in flight"
    for rank in range(schedule.stages):
        text = f"{simulation.busy[rank]:.0%} busy, {simulation.peak_live[rank]} {unit}"
        axes.text(longest * 1.012, rank + 0.5, text, va="center", fontsize=8)
    title = f"{schedule.name}: {schedule.microbatches} microbatches"
    title += f", {_chunks(schedule)}" if schedule.chunks > 1 else ""
    axes.set_title(f"{title}; bubble {simulation.bubble:.1%} of the ideal time", fontsize=10, loc="left")
    axes.set_xlim(0, longest)
    axes.set_ylim(schedule.stages, 0)
    axes.set_yticks(
        [rank + 0.5 for rank in range(schedule.stages)], [f"rank {rank}" for rank in range(schedule.stages)]
    )
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=9)
    axes.set_facecolor("white")
    for side in axes.spines.values():
        side.set_visible(False)


def _overlaps(schedule: Schedule, work: Work) -> bool:
    return not schedule.paired and work.parts == OVERLAP_PARTS


def _operations(schedule: Schedule, simulation: Simulation) -> list[Span]:
    """The spans, with consecutive parts of a backward merged into one, and so those of two operations that overlap."""
    whole: list[Span] = []
    last: dict[int, int] = {}
    for span in simulation.spans:
        before = whole[last[span.rank]] if span.rank in last else None
        if _overlaps(schedule, span.work) and (span.work.part or span.work.op == BACKWARD):
            if not span.work.part:  # the backward, after the forward's first part
                whole.append(span._replace(start=before.start))
                last[span.rank] += 1
            for place in (last[span.rank] - 1, last[span.rank]):
                whole[place] = whole[place]._replace(stop=span.stop)
        elif span.work.part and not schedule.split and before.stop == span.start:
            whole[last[span.rank]] = before._replace(stop=span.stop)
        else:
            last[span.rank] = len(whole)
            whole.append(span)
    return whole


def _legend(figure, schedules: Sequence[Schedule]) -> None:
    from matplotlib.patches import Patch

    done = {schedule.does(work) for schedule in schedules for row in schedule.ticks for works in row for work in works}
    patches = [Patch(color=SHADES[op][1], label=NAMES[op]) for op in NAMES if op in done]
    patches.append(Patch(color=IDLE, label="idle (the bubble)"))
    note = "numbers: microbatches" + ("; darker: later chunk" if any(s.chunks > 1 for s in schedules) else "")
    legend = figure.legend(
        handles=patches, loc="lower left", ncols=len(patches), fontsize=8, frameon=False, title=note, title_fontsize=8
    )
    legend._legend_box.align = "left"

"""The pictures of the planner's page as inline SVG and HTML: a schedule's timeline, bars of parts, throughput by mesh."""

from collections.abc import Mapping, Sequence
from html import escape

from megajax.estimate.step_time import chunk_costs
from megajax.pipeline.program import StepProgram
from megajax.plan.search import Candidate, best_by
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import Schedule
from megajax.schedules.simulate import Simulation, simulate_lockstep
from megajax.schedules.timeline import NAMES, SHADES

WIDTH, ROW = 1000, 14  # of the timeline, and of a rank's row in it
MOST_BOXES = 12_000  # of a timeline; of schedules with more operations fewer microbatches are shown


def bar(parts: Mapping[str, float], whole: float, colours: Mapping[str, str], label: str) -> str:
    """A horizontal bar of parts, each with a tooltip; its full width is `whole`, and what exceeds it is cut off."""
    pieces, start = [], 0.0
    for name, value in parts.items():
        width = max(0.0, min(value, whole - start)) / whole * 100
        if width > 0.05:
            pieces.append(
                f'<rect x="{start / whole * 100:.2f}%" width="{width:.2f}%" height="100%" fill="{colours[name]}">'
                f"<title>{escape(name)}: {label.format(value)}</title></rect>"
            )
        start += value
    return f'<svg class="bar" role="img" aria-label="{escape(", ".join(parts))}">{"".join(pieces)}</svg>'


def timeline(one: Candidate) -> tuple[str, str]:
    """The winner's schedule, in lockstep as megajax runs it, with the time model's costs: (caption, SVG)."""
    parallel, microbatches = one.run.parallel, one.run.microbatches
    each = parallel.pipe * parallel.chunks * 3
    spec = StepProgram.of(one.run).spec
    step = parallel.pipe if spec.rounds else 1
    least = max(spec.fewest_microbatches(parallel.pipe), step)
    shown = min(microbatches, max(least, MOST_BOXES // each // step * step))
    schedule = make_schedule(parallel.schedule, stages=parallel.pipe, microbatches=shown, chunks=parallel.chunks)
    simulation = simulate_lockstep(schedule, chunk_costs(one.run, one.question.gpu))
    part = "" if shown == microbatches else f"the first {shown} of {microbatches} microbatches as a step of their own; "
    caption = (
        f"{parallel.schedule}, {parallel.pipe} ranks, {parallel.chunks} chunks each: {part}{simulation.makespan:.2f} s of "
        f"forwards and backwards, ranks idle for {1 - simulation.ideal / simulation.makespan:.1%} of it. One row for each "
        "rank, time to the right" + "; later chunks are darker." * (parallel.chunks > 1)
    )
    return caption, _timeline_svg(schedule, simulation)


def _timeline_svg(schedule: Schedule, simulation: Simulation) -> str:
    """One path for each kind of operation and chunk, which keeps the file small."""
    scale, chunks, height = WIDTH / simulation.makespan, schedule.chunks, schedule.stages * ROW
    paths: dict[tuple[str, int], list[str]] = {}
    for span in simulation.spans:
        shade = min(span.work.chunk, 2) if chunks > 1 else 0
        start, stop = span.start * scale, span.stop * scale
        gap = min(0.6, (stop - start) / 4)
        paths.setdefault((schedule.does(span.work), shade), []).append(
            f"M{start:.1f} {span.rank * ROW + 1}h{stop - start - gap:.1f}v{ROW - 2}h-{stop - start - gap:.1f}z"
        )
    drawn = "".join(
        f'<path fill="{SHADES[op][shade]}" d="{"".join(boxes)}"><title>{NAMES[op]}'
        f"{f', chunk {shade}' if chunks > 1 else ''}</title></path>"
        for (op, shade), boxes in sorted(paths.items())
    )
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'style="height:{min(height, 480)}px" aria-label="timeline of the schedule">'
        f'<rect width="{WIDTH}" height="{height}" style="fill:var(--idle)"/>{drawn}</svg>'
    )


def heat_map(candidates: Sequence[Candidate], best: Candidate) -> str:
    """TFLOP/s per GPU of the fastest layout of each tensor (rows) and pipe size (columns) as a table; data is the rest."""
    of = lambda one: one.mesh[:2]  # noqa: E731
    fitting = best_by((one for one in candidates if one.fits), of)  # candidates are the fastest first
    legal = {of(one) for one in candidates}
    rows, columns = (sorted({key[place] for key in legal}) for place in (0, 1))
    most = max(one.teraflops for one in fitting.values())
    head = "".join(f'<th scope="col">{pipe}</th>' for pipe in columns)
    body = "".join(
        f'<tr><th scope="row">{tensor}</th>'
        + "".join(_cell(fitting.get((tensor, pipe)), (tensor, pipe) in legal, most, best) for pipe in columns)
        + "</tr>"
        for tensor in rows
    )
    corner = '<th scope="col">tensor \\ pipe</th>'
    return f'<table class="heat"><thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(one: Candidate | None, is_legal: bool, most: float, best: Candidate) -> str:
    if one is None:
        return f'<td class="none" title="{"does not fit" if is_legal else "no layout"}">{"✕" if is_legal else ""}</td>'
    share = one.teraflops / most
    parallel = one.run.parallel
    text = f"data {parallel.data}, {parallel.schedule}, {parallel.chunks} chunks, microbatch {parallel.microbatch_size}"
    mark = ' class="best"' if one.mesh == best.mesh else ""
    ink = "#fff" if share > 0.8 else "#111"
    style = f"background:hsl(210 {20 + 60 * share:.0f}% {94 - 52 * share**3:.0f}%);color:{ink}"
    return f'<td{mark} style="{style}" title="{escape(text)}">{one.teraflops:.0f}</td>'

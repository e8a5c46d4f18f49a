"""The planner's answer as one HTML file that needs nothing else: `python -m megajax.plan ... --html report.html`."""

import dataclasses
import pathlib
import string
from collections.abc import Mapping, Sequence
from html import escape

import megajax
from megajax.estimate.gpus import Gpu
from megajax.estimate.step_time import StepTime, chunk_costs
from megajax.pipeline.program import StepProgram
from megajax.plan.explain import reasons, seconds
from megajax.plan.report import PARTS, Answer, accuracy, cells, shown_parameters
from megajax.plan.search import Candidate, best_by, is_tie, usable_bytes
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import Schedule
from megajax.schedules.simulate import Simulation, simulate_lockstep
from megajax.schedules.timeline import NAMES, SHADES

# Okabe and Ito's colours, which people with colour blindness can tell apart, and greys.
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7", "#8c8c8c", "#555555", "#b9a3e3")
COLOURS += ("#7b4f9d", "#8c510a", "#66c2a4", "#bdbdbd")
PAGE = string.Template(pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
WIDTH, ROW = 1000, 14  # of the timeline, and of a rank's row in it
MOST_BOXES = 12_000  # of a timeline; of schedules with more operations fewer microbatches are shown
MEMORY = dict(zip(PARTS, COLOURS, strict=False))
TIMES = dict(zip((field.name for field in dataclasses.fields(StepTime)), COLOURS, strict=True))


def page(found: Answer, command: str, date: str) -> str:
    """The page of an answer in which something fits, which `command` gave on `date`: page.html with its values."""
    best, question = found.fitting[0], found.question
    texts = {
        "title": f"{question.model.name} on {question.gpus} {question.gpu.name}",
        "parameters": shown_parameters(question.model),
        "batch": f"{question.global_batch}",
        "precision": question.precision,
        "attention": question.resolved_attention,
        "priced": f"{found.found.priced:,}",
        "accuracy": accuracy(best),
        "version": megajax.__version__,
        "date": date,
        "command": command,
        "rates": _rates(question.gpu),
    }
    facts = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in _facts(found).items())
    reason = "".join(
        f"<li><b>{escape(topic.capitalize())}.</b> {escape(text)}</li>" for topic, text in reasons(found.compared)
    )
    return PAGE.substitute(
        {name: escape(text) for name, text in texts.items()},
        facts="".join(facts),
        layouts=f"{_table(found)}\n{_key(MEMORY)}",
        times=_times(found.shown[:5]),
        schedule=_schedule(best),
        meshes=_heat_map(found.candidates, best),
        reasons=f'<ul class="why">{reason}</ul>',
    )


def _facts(found: Answer) -> dict[str, str]:
    """The figures of the chosen layout, by name."""
    best, tokens, cluster = found.fitting[0], found.tokens, found.cluster
    cost = cluster.cost(best.question.gpus, best.days(tokens))
    facts = {
        "step": seconds(best.time.total),
        "model TFLOP/s per GPU": f"{best.teraflops:.0f}",
        "MFU": f"{best.utilisation:.1%}",
        f"{tokens / 1e9:,.0f}B tokens": f"{best.days(tokens):.1f} days",
        "GPU hours": f"{cost.gpu_hours:,.0f}",
        "energy": f"{cost.megawatt_hours:,.0f} MWh" if cost.megawatt_hours >= 10 else f"{cost.megawatt_hours:.2g} MWh",
        "memory": f"{best.peak / 1e9:.1f} of {usable_bytes(best.question.gpu) / 1e9:.1f} GB",
    }
    if cost.money is not None:
        facts["cost"] = f"{cost.money:,.0f} {cluster.currency}"
    return facts


def _rates(gpu: Gpu) -> str:
    """The GPU's memory and links, as the models use them; each way, for one GPU."""
    rates = (
        f"{gpu.name}: {gpu.memory_bandwidth / 1e12:.2f} TB/s to its memory, {gpu.host_bandwidth / 1e9:.0f} GB/s between the "
        f"{gpu.host_size} GPUs of a host, {gpu.network_bandwidth / 1e9:.1f} GB/s between hosts, of which collectives of all "
        f"GPUs reach {gpu.network_share:.0%}; links each way, for one GPU."
    )
    return rates + (" A calibration's measured rates are used in their place." if gpu.measured else "")


def _schedule(best: Candidate) -> str:
    """The timeline of a pipeline, with its key."""
    if best.run.parallel.pipe == 1:
        return "<p>The first layout has no pipeline.</p>\n"
    caption, picture = _timeline(best)
    operations = "FIW" if StepProgram.of(best.run).splits else "FB"
    key = _key({NAMES[op]: SHADES[op][0] for op in operations} | {"idle": "var(--idle)"})
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>\n{key}"


def _table(found: Answer) -> str:
    names = (*cells(found.fitting[0], found.tokens), "memory", "tie")
    head = "".join(f'<th scope="col"{_class(name)}>{name}</th>' for name in names)
    rows = "".join(_row(one, found) for one in found.shown)
    return (
        '<p class="soft">Each mesh with its fastest layout; memory relative to what is usable.</p>'
        '<div class="scroll"><table class="full">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _class(column: str) -> str:
    return ' class="text"' if column in ("schedule", "recompute", "memory") else ""


def _row(one: Candidate, found: Answer) -> str:
    texts = cells(one, found.tokens)
    drawn = "".join(f"<td{_class(name)}>{escape(text)}</td>" for name, text in texts.items())
    gigabytes = {name: one.memory.get(name, 0) / 1e9 for name in PARTS}
    memory = _bar(gigabytes, usable_bytes(one.question.gpu) / 1e9, MEMORY, "{:.2f} GB")
    mark = ' class="chosen"' if one is found.fitting[0] else ""
    tie = "=" if is_tie(one, found.fitting[0]) else ""
    return f'<tr{mark}>{drawn}<td class="wide">{memory}</td><td>{tie}</td></tr>'


def _times(shown: Sequence[Candidate]) -> str:
    """A bar for each layout, all on the slowest one's scale."""
    whole = max(one.time.total for one in shown)
    used = [name for name in TIMES if any(getattr(one.time, name) for one in shown)]
    colours = {name: TIMES[name] for name in used}
    bars = [_bar({name: getattr(one.time, name) for name in used}, whole, colours, "{:.3f} s") for one in shown]
    rows = "".join(
        f'<tr><th scope="row">t{one.mesh[0]} p{one.mesh[1]} d{one.mesh[2]}</th><td>{seconds(one.time.total)}</td>'
        f'<td class="wide">{drawn}</td></tr>'
        for one, drawn in zip(shown, bars, strict=True)
    )
    return f'<div class="scroll"><table class="full"><tbody>{rows}</tbody></table></div>{_key(colours)}'


def _key(colours: dict[str, str]) -> str:
    """The key of a picture's colours."""
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in colours.items())
    return f'<ul class="key">{items}</ul>'


def _bar(parts: Mapping[str, float], whole: float, colours: Mapping[str, str], label: str) -> str:
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


def _timeline(one: Candidate) -> tuple[str, str]:
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


def _heat_map(candidates: Sequence[Candidate], best: Candidate) -> str:
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

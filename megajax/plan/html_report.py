"""The planner's answer as one HTML file that needs nothing else: `python -m megajax.plan ... --html report.html`."""

import dataclasses
import pathlib
import string
from collections.abc import Sequence
from html import escape

import megajax
from megajax.estimate.gpus import Gpu
from megajax.estimate.step_time import StepTime
from megajax.pipeline.program import StepProgram
from megajax.plan.explain import reasons, seconds
from megajax.plan.html_charts import bar, heat_map, timeline
from megajax.plan.report import PARTS, Answer, accuracy, cells, shown_parameters
from megajax.plan.search import Candidate, is_tie, usable_bytes
from megajax.schedules.timeline import NAMES, SHADES

# Okabe and Ito's colours, which people with colour blindness can tell apart, and greys.
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7", "#8c8c8c", "#555555", "#b9a3e3")
COLOURS += ("#7b4f9d", "#8c510a", "#66c2a4")
PAGE = string.Template(pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
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
        "legal": f"{len(found.candidates):,}",
        "fit": f"{len(found.fitting):,}",
        "accuracy": accuracy(best),
        "version": megajax.__version__,
        "date": date,
        "command": command,
        "rates": _rates(question.gpu),
    }
    facts = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in _facts(found).items())
    reason = "".join(
        f"<li><b>{escape(topic.capitalize())}.</b> {escape(text)}</li>" for topic, text in reasons(found.ordered)
    )
    return PAGE.substitute(
        {name: escape(text) for name, text in texts.items()},
        facts="".join(facts),
        layouts=f"{_table(found)}\n{_key(MEMORY)}",
        times=_times(found.shown[:5]),
        schedule=_schedule(best),
        meshes=heat_map(found.candidates, best),
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
    caption, picture = timeline(best)
    operations = "FIW" if StepProgram.of(best.run).spec.split else "FB"
    key = _key({NAMES[op]: SHADES[op][0] for op in operations} | {"idle": "var(--idle)"})
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>\n{key}"


def _table(found: Answer) -> str:
    names = (*cells(found.fitting[0], found.tokens), "memory", "tie")
    head = "".join(f'<th scope="col"{_class(name)}>{name}</th>' for name in names)
    rows = "".join(_row(one, found) for one in found.shown)
    return (
        '<p class="soft">Each mesh with its fastest schedule, the simplest of ties first; memory relative to what is '
        'usable.</p><div class="scroll"><table class="full">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _class(column: str) -> str:
    return ' class="text"' if column in ("schedule", "recompute", "memory") else ""


def _row(one: Candidate, found: Answer) -> str:
    texts = cells(one, found.tokens)
    drawn = "".join(f"<td{_class(name)}>{escape(text)}</td>" for name, text in texts.items())
    gigabytes = {name: one.memory.get(name, 0) / 1e9 for name in PARTS}
    memory = bar(gigabytes, usable_bytes(one.question.gpu) / 1e9, MEMORY, "{:.2f} GB")
    mark = ' class="chosen"' if one is found.fitting[0] else ""
    tie = "=" if is_tie(one, found.fastest) else ""
    return f'<tr{mark}>{drawn}<td class="wide">{memory}</td><td>{tie}</td></tr>'


def _times(shown: Sequence[Candidate]) -> str:
    """A bar for each layout, all on the slowest one's scale."""
    whole = max(one.time.total for one in shown)
    used = [name for name in TIMES if any(getattr(one.time, name) for one in shown)]
    colours = {name: TIMES[name] for name in used}
    bars = [bar({name: getattr(one.time, name) for name in used}, whole, colours, "{:.3f} s") for one in shown]
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

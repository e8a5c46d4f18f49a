"""The planner's answer as one HTML file that needs nothing else: `python -m megajax.plan ... --html report.html`."""

import dataclasses
from collections.abc import Sequence
from html import escape

import megajax
from megajax.estimate.gpus import Gpu
from megajax.estimate.step_time import StepTime
from megajax.pipeline.program import StepProgram
from megajax.plan.explain import Reason, reasons, seconds
from megajax.plan.html_charts import bar, heat_map, timeline
from megajax.plan.report import PARTS, Answer, accuracy, cells, shown_parameters
from megajax.plan.search import Candidate, is_tie, usable_bytes
from megajax.schedules.timeline import NAMES, SHADES

# Okabe and Ito's colours, which people with colour blindness can tell apart, and greys.
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7", "#8c8c8c", "#555555", "#b9a3e3")
COLOURS += ("#7b4f9d", "#8c510a", "#66c2a4")
MEMORY = dict(zip(PARTS, COLOURS, strict=False))
TIMES = dict(zip((field.name for field in dataclasses.fields(StepTime)), COLOURS, strict=True))
TERMS = {
    "tensor, pipe, data": "Into how many parts the GPUs split each layer (tensor), the layers (pipe) and the batch (data). "
    "Their product is the number of GPUs.",
    "microbatch": "The samples that pass the pipeline together. A replica's share of the batch is cut into microbatches.",
    "chunks": "How many separate groups of layers a rank of the pipeline holds.",
    "schedule": "The order of the forwards and backwards of each rank of the pipeline.",
    "bubble": "The time in which ranks of the pipeline wait for each other, as a share of the step.",
    "recompute": "What a backward computes again to save memory: none, selective (attention) or full (the whole block).",
    "ZeRO": "Splits over the replicas: 0 nothing, 1 the optimizer's state and fp32 weights, 3 also weights and gradients.",
    "MFU": "Model FLOPs utilisation: the model's FLOP/s without recomputation, as a share of the GPU's peak.",
    "comm": "Communication that no computation hides, as a share of the step.",
    "ends": "Communication of the embedding and the head, where all stages share them, that no computation hides.",
    "gaps, waits": "Times without work on the GPU: between kernels, and for conditions that the host reads.",
    "stash": "The activations that a rank keeps from a forward to its backward.",
    "inboxes": "Received activations and gradients that wait for their use.",
    "tie": "= is as fast as the fastest layout, within the error of comparisons.",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d8dee4; --paper: #fff; --panel: #f6f8fa;
  --chosen: #fff8e1; --idle: #eeeeee; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #9aa5b1; --line: #3a424c; --paper: #14181d;
  --panel: #1d232a; --chosen: #3a3320; --idle: #323a44; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: clamp(10px, 2.5vw, 24px); background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; } p { margin: 4px 0; }
.soft, figcaption { color: var(--soft); font-size: 13px; }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; padding: 0; }
.facts div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; }
.facts dt { color: var(--soft); font-size: 12px; } .facts dd { margin: 0; font-size: 19px; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 6px; text-align: right; white-space: nowrap; font-size: 13px; }
thead th { border-bottom: 2px solid var(--line); font-size: 11px; color: var(--soft); }
tbody tr { border-bottom: 1px solid var(--line); } td.text, th.text { text-align: left; }
tr.chosen { background: var(--chosen); font-weight: 600; } table.full { width: 100%; }
td.wide { width: 100%; min-width: 90px; } svg.bar { width: 100%; height: 14px; background: var(--idle); display: block; }
svg.timeline { width: 100%; display: block; border: 1px solid var(--line); } figure { margin: 0; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0; padding: 0; list-style: none; font-size: 13px; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 2px; }
table.heat td, table.heat thead th { min-width: 52px; text-align: center; } td.none { color: var(--soft); }
td.best { outline: 3px solid #d55e00; outline-offset: -3px; font-weight: 700; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px; white-space: pre-wrap;
  font-size: 12.5px; line-height: 1.45; overflow-wrap: anywhere; }
.command { user-select: all; margin: 6px 0; }
.why { padding-left: 18px; } .why li { margin: 6px 0; overflow-wrap: anywhere; }
.terms { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; } .terms dt { font-weight: 600; }
.terms dd { margin: 0; }
@media (max-width: 600px) { .terms { display: block; } .terms dd { margin: 0 0 8px; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; print-color-adjust: exact; }
  section, figure, tr { break-inside: avoid; } .scroll { overflow: visible; } th, td { padding: 2px 3px; font-size: 9px; } }
"""


def page(found: Answer, command: str, date: str) -> str:
    """The page of an answer in which something fits, which `command` gave on `date`."""
    best, question = found.fitting[0], found.question
    title = f"{question.model.name} on {question.gpus} {question.gpu.name}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: plan</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(shown_parameters(question.model))}, global batch {question.global_batch}, {
        escape(question.precision)
    }, attention
{escape(question.resolved_attention)}; {len(found.candidates):,} legal layouts, {len(found.fitting):,} fit.</p>
<p class="soft">All figures are predicted by megajax's time and memory models; nothing was run. {
        escape(accuracy(best))
    }</p>
<p class="soft">Made by megajax {escape(megajax.__version__)} on {
        escape(date)
    } with this command (a click selects it):</p>
<pre class="command"><code>{escape(command)}</code></pre>
<p class="soft">{escape(_rates(question.gpu))}</p>
</header>
<dl class="facts">{
        "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in _facts(found).items())
    }</dl>
<section id="layouts">
<h2>Layouts</h2>
{_table(found)}
{_key(MEMORY)}
</section>
<section id="time">
<h2>Where the step's time goes</h2>
{_times(found.shown[:5])}
</section>
<section id="timeline">
<h2>The schedule of the first layout</h2>
{_schedule(best)}
</section>
<section id="meshes">
<h2>Throughput over mesh shapes</h2>
<p class="soft">Model TFLOP/s per GPU of the fastest layout with this tensor and pipeline size; the remaining GPUs are data
parallel. ✕ does not fit. Outlined: the mesh of the first layout.</p>
<div class="scroll">{heat_map(found.candidates, best)}</div>
</section>
<section id="why">
<h2>Why</h2>
{_reasons(reasons(found.ordered))}
</section>
<section id="terms">
<h2>Terms</h2>
<dl class="terms">{"".join(f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in TERMS.items())}</dl>
</section>
</body>
</html>
"""


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


def _reasons(found: Sequence[Reason]) -> str:
    """The reasons as a list."""
    items = "".join(f"<li><b>{escape(topic.capitalize())}.</b> {escape(text)}</li>" for topic, text in found)
    return f'<ul class="why">{items}</ul>'


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

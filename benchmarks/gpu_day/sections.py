"""The sections of the page of benchmarks.gpu_day: the charts and tables of each part."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from benchmarks.gpu_day.charts import (
    LOSSES,
    MEASURED,
    PREDICTED,
    REFERENCE,
    Bar,
    bars,
    key,
    loss_chart,
    strip,
)
from benchmarks.gpu_day.style import STATUSES
from benchmarks.gpu_day.values import (
    Case,
    Record,
    decimal,
    is_measured,
    is_slow,
    kernel_ratio,
    number,
    numbers,
    positive,
    prediction_error,
    record,
    scientific,
    share,
)
from megajax.schedules.errors import counted
from megajax.schedules.pictures import COLOURS

TABLE = "What megajax.plan --calibrate writes: append it to a cluster's TOML file, and pass that with --cluster."
MOST_CHARTS = 3  # of losses, if all cases passed
STEP_COLUMNS = (
    *("status", "shape", "implementation", "ms", "predicted ms", "error", "tokens/s", "TFLOP/s", "MFU"),
    *("MFU, causal", "peak GB", "predicted peak GB", "error", "rounds, ms"),
)


def shown_status(which: str) -> str:
    """The word with a coloured mark."""
    colour, mark = STATUSES.get(which, STATUSES["not run"])
    return f'<span class="status"><i style="background:{colour}">{mark}</i>{escape(which)}</span>'


def part_section(part: str, group: Sequence[Case]) -> str:
    """The charts and tables of a part; a sentence where no case has numbers."""
    sections = {"kernels": _kernels, "generation": _generation, "rates": _rates, "steps": _steps, "compiled": _compiled}
    drawn = sections.get(part, _losses)(group)
    return drawn or "<p>No case of this part has numbers.</p>"


def _losses(group: Sequence[Case]) -> str:
    """The differences relative to their limits, charts of some cases, and all losses as text."""
    charts = {case: chart for case in group if (chart := _chart(case))}
    bad = [case for case in charts if case.status != "passed"]
    worst = sorted(charts, key=lambda case: -1.0 if case.ratio is None else case.ratio, reverse=True)
    figures = "".join(charts[case] for case in bad or worst[:MOST_CHARTS])
    if figures:
        which = "Cases that did not pass" if bad else "The largest differences relative to their limits"
        colours = key({"losses": LOSSES, "reference": REFERENCE})
        figures = f'<p class="soft">{which}:</p>{colours}<div class="charts">{figures}</div>'
    texts = "".join(map(_loss_text, group))
    return (
        strip(group) + figures + (f"<details><summary>All losses as text</summary>{texts}</details>" if texts else "")
    )


def _loss_lists(case: Case) -> dict[str, list[float]]:
    return {one: numbers(case.result.get(one)) for one in ("losses", "reference")}


def _chart(case: Case) -> str:
    """Losses and their reference as a figure, or ""."""
    lists = _loss_lists(case)
    drawn = loss_chart(lists["losses"], lists["reference"], f"losses of {case.name} and their reference")
    missing = sum(not math.isfinite(one) for one in lists["losses"])
    note = f": {counted(missing, 'loss', 'losses')} not finite" if missing else ""
    caption = f"<figcaption>{escape(case.name)} {shown_status(case.status)}{note}</figcaption>"
    return f"<figure>{caption}{drawn}</figure>" if drawn else ""


def _loss_text(case: Case) -> str:
    """All losses of a case."""
    lists = _loss_lists(case)
    texts = (
        f"<p>{escape(case.name)}: {one}, {len(values)}</p><pre>{' '.join(decimal(value, 6) for value in values)}</pre>"
        for one, values in lists.items()
    )
    return "".join(texts) if any(lists.values()) else ""


def _kernels(group: Sequence[Case]) -> str:
    """The errors of each kernel against its limit, those beyond it first."""
    lines = []
    found = [(kernel_ratio(row), case, row) for case in group for row in case.rows]
    for ratio, case, row in sorted(found, key=lambda one: one[0] is None or one[0] <= 1):
        verdict = "not run" if ratio is None else "passed" if ratio <= 1 else "wrong"
        errors = [scientific(row.get(one)) for one in ("output", "gradients", "limit")]
        texts = [shown_status(verdict), escape(case.name), escape(row["label"])]
        lines.append((texts, [*errors, "" if ratio is None else decimal(ratio, 2)]))
    return _table(("status", "case", "kernel", "output error", "gradients error", "limit", "error / limit"), lines)


def _generation(group: Sequence[Case]) -> str:
    """How many texts equal the reference's."""
    lines = []
    for case in group:
        if case.result:
            first = case.result.get("first_difference")
            counts = [decimal(case.result.get(one)) for one in ("texts", "equal")]
            texts = [shown_status(case.status), escape(case.name)]
            lines.append((texts, [*counts, "" if first is None else escape(str(first))]))
    return _table(("status", "case", "texts", "equal", "first difference"), lines)


def _compiled(group: Sequence[Case]) -> str:
    """Every compiled program, those that do not compile first."""
    lines = []
    programs = [(case, row) for case in group for row in case.rows]
    for case, row in sorted(programs, key=lambda one: not one[1].get("problem")):
        problem = row.get("problem")
        words = f'{escape(row["label"])}<div class="soft">{escape(str(problem or ""))}</div>'
        texts = [shown_status("error" if problem else "passed"), *map(_wrapped, (escape(case.name), words))]
        figures = (decimal(row.get(one)) for one in ("seconds", "peak_gigabytes", "predicted_milliseconds"))
        lines.append((texts, [one or "–" for one in figures]))
    head = ("status", "case", "program", "compiled in s", "peak GB", "predicted ms")
    return _table(head, lines)


def _wrapped(content: str) -> str:
    """A cell whose long text takes several lines."""
    return f'<div class="wrapped">{content}</div>'


def _table(head: Sequence[str], lines: Sequence[tuple[Sequence[str], Sequence[str]]]) -> str:
    """A table of lines of (cells of text, cells of numbers) in HTML; "" without lines."""
    if not lines:
        return ""
    texts = len(lines[0][0])
    mark = lambda index: ' class="text"' if index < texts else ""  # noqa: E731
    headings = "".join(f'<th scope="col"{mark(index)}>{escape(one)}</th>' for index, one in enumerate(head))
    cells = lambda line: "".join(f"<td{mark(index)}>{cell or '–'}</td>" for index, cell in enumerate(line))  # noqa: E731
    body = "".join(f"<tr>{cells((*words, *figures))}</tr>" for words, figures in lines)
    return f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def _rates(group: Sequence[Case]) -> str:
    """Bars for each shape and implementation."""
    charts = []
    colours = _colours(one for case in group for row in case.rows for one in record(row.get("values")))
    for case in group:
        unit = str(case.result.get("unit") or "")
        shapes = [
            (row["label"], [_rate(one, value, unit, colours[one]) for one, value in record(row.get("values")).items()])
            for row in case.rows
        ]
        if shapes:
            drawn = bars(shapes, f"rates of {case.name}") or "<p>No implementation could run.</p>"
            charts.append(f"<h3>{escape(case.name)} {shown_status(case.status)}</h3>{drawn}")
        if table := case.result.get("table"):
            charts.append(f"<h3>{escape(case.name)} {shown_status(case.status)}</h3>")
            charts.append(f'<p class="soft">{TABLE}</p><pre>{escape(str(table))}</pre>')
    return "".join(charts)


def _rate(implementation: str, value: Any, unit: str, colour: str) -> Bar:
    text = decimal(value)
    return Bar(implementation, [(positive(value), colour)], f"{text} {unit}".rstrip() if text else "could not run")


def _colours(implementations: Iterable[str]) -> dict[str, str]:
    """A colour for each implementation, in the order in which they appear."""
    return {one: COLOURS[index % len(COLOURS)] for index, one in enumerate(dict.fromkeys(implementations))}


def _steps(group: Sequence[Case]) -> str:
    """A table of all columns, bars of MFU, and measured and predicted times by class."""
    table = [row for case in group for row in case.rows]
    colours = _colours(row["implementation"] for row in table)
    shares: dict[str, list[Bar]] = {}
    for row in table:
        value = [(positive(row.get("mfu")), colours[row["implementation"]])]
        bar = Bar(row["implementation"], value, share(row.get("mfu")) or "–")
        shares.setdefault(row["label"], []).append(bar)
    classes = [
        (
            f"{row['label']}, {row['implementation']}",
            [_pair(one, record(times)) for one, times in record(row.get("by_class")).items()],
        )
        for row in table
    ]
    found = _table(STEP_COLUMNS, [_step(case, row) for case in group for row in case.rows])
    if drawn := bars(list(shares.items()), "MFU"):
        found += f"<h3>MFU</h3>{drawn}"
    if drawn := bars(classes, "milliseconds by class", one_scale=False):
        caption = key({"measured": MEASURED, "predicted": PREDICTED})
        found += f"<h3>Milliseconds by class, measured / predicted</h3>{caption}{drawn}"
    return found


def _pair(name: str, times: Record) -> Bar:
    values = [number(times.get(one)) for one in ("measured", "predicted")]
    text = " / ".join("–" if value is None else decimal(value) for value in values)
    return Bar(name, list(zip(values, (MEASURED, PREDICTED), strict=True)), text)


def _step(case: Case, row: Record) -> tuple[list[str], list[str]]:
    """A row of the table of steps."""
    rounds = " ".join(decimal(one) for one in numbers(row.get("rounds")))
    figures = [
        *_predicted(row, "milliseconds"),
        *(decimal(row.get(one)) for one in ("tokens_per_second", "teraflops")),
        *(share(row.get(one)) for one in ("mfu", "mfu_causal")),
        *_predicted(row, "peak_gigabytes"),
        rounds and f'<span class="rounds">{rounds}</span>',
    ]
    return [shown_status(_step_status(case, row)), escape(row["label"]), escape(row["implementation"])], figures


def _predicted(row: Record, name: str) -> list[str]:
    """A measured number, its prediction, and the prediction's error."""
    error = prediction_error(row, name, f"predicted_{name}")
    both = [decimal(row.get(one)) for one in (name, f"predicted_{name}")]
    return [*both, "" if error is None else f"{error:+.1%}"]


def _step_status(case: Case, row: Record) -> str:
    """The row's own status: a case is slow as a whole if one of its rows is."""
    if is_slow(row):
        return "slow"
    if not is_measured(row):
        return "not run"
    return "passed" if case.status == "slow" else case.status

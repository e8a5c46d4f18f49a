"""The sections of the page of benchmarks.gpu_day: the charts and tables of each part."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.gpu_day.charts import (
    LOSSES,
    MEASURED,
    PREDICTED,
    REFERENCE,
    Bar,
    Dot,
    bars,
    key,
    loss_chart,
    pairs,
    strip,
)
from benchmarks.gpu_day.style import STATUSES
from benchmarks.gpu_day.values import (
    Record,
    decimal,
    is_measured,
    is_slow,
    kernel_ratio,
    name,
    number,
    numbers,
    positive,
    prediction_error,
    record,
    relative,
    rows,
    scientific,
    share,
    status,
)
from megajax.schedules.errors import counted
from megajax.schedules.pictures import COLOURS

MOST_CHARTS = 3  # of losses, if all cases passed
STEP_COLUMNS = (
    *("status", "shape", "implementation", "ms", "predicted ms", "error", "tokens/s", "TFLOP/s", "MFU"),
    *("MFU, causal", "peak GB", "predicted peak GB", "error", "rounds, ms"),
)


def shown_status(which: str) -> str:
    """The word with a coloured mark."""
    colour, mark = STATUSES.get(which, STATUSES["not run"])
    return f'<span class="status"><i style="background:{colour}">{mark}</i>{escape(which)}</span>'


def part_section(part: str, group: Sequence[Record]) -> str:
    """The charts and tables of a part; a sentence where no case has numbers."""
    drawn = {"kernels": _kernels, "generation": _generation, "rates": _rates, "steps": _steps}.get(part, _losses)(group)
    return drawn or "<p>No case of this part has numbers.</p>"


def _losses(group: Sequence[Record]) -> str:
    """The differences relative to their limits, charts of some cases, and all losses as text."""
    dots, ratios = [], {}
    for case in group:
        result = record(case.get("result"))
        ratio = relative(result.get("difference"), result.get("limit"))
        if ratio is not None:
            ratios[id(case)] = ratio
            text = f"{scientific(result.get('difference'))} / {scientific(result.get('limit'))}"
            dots.append(Dot(name(case), ratio, text))
    charts = {id(case): chart for case in group if (chart := _chart(case))}
    bad = [case for case in group if status(case) != "passed" and id(case) in charts]
    worst = sorted(group, key=lambda case: -ratios.get(id(case), -1.0))
    shown = bad or [case for case in worst if id(case) in charts][:MOST_CHARTS]
    figures = "".join(charts[id(case)] for case in shown)
    if figures:
        which = "Cases that did not pass" if bad else "The largest differences relative to their limits"
        colours = key({"losses": LOSSES, "reference": REFERENCE})
        figures = f'<p class="soft">{which}:</p>{colours}<div class="charts">{figures}</div>'
    texts = "".join(map(_loss_text, group))
    texts = f"<details><summary>All losses as text</summary>{texts}</details>" if texts else ""
    return strip(dots, "differences relative to their limits") + figures + texts


def _chart(case: Record) -> str:
    """Losses and their reference as a figure, or ""."""
    result = record(case.get("result"))
    losses, reference = numbers(result.get("losses")), numbers(result.get("reference"))
    drawn = loss_chart(losses, reference, f"losses of {name(case)} and their reference")
    missing = sum(not math.isfinite(one) for one in losses)
    note = f": {counted(missing, 'loss', 'losses')} not finite" if missing else ""
    caption = f"<figcaption>{escape(name(case))} {shown_status(status(case))}{note}</figcaption>"
    return f"<figure>{caption}{drawn}</figure>" if drawn else ""


def _loss_text(case: Record) -> str:
    """All losses of a case."""
    result = record(case.get("result"))
    lists = {one: numbers(result.get(one)) for one in ("losses", "reference")}
    if not any(lists.values()):
        return ""
    return "".join(
        f"<p>{escape(name(case))}: {one}, {len(values)}</p><pre>{' '.join(decimal(value, 6) for value in values)}</pre>"
        for one, values in lists.items()
    )


def _kernels(group: Sequence[Record]) -> str:
    """The errors of each kernel against its limit."""
    lines = []
    for case in group:
        for row in rows(case):
            ratio = kernel_ratio(row)
            verdict = "not run" if ratio is None else "passed" if ratio <= 1 else "wrong"
            cells = [scientific(row.get(one)) or "–" for one in ("output", "gradients", "limit")]
            cells.append("–" if ratio is None else decimal(ratio, 2))
            lines.append(([shown_status(verdict), escape(name(case)), escape(str(row.get("label") or ""))], cells))
    head = ("status", "case", "kernel", "output error", "gradients error", "limit", "error / limit")
    return _table(head, lines)


def _generation(group: Sequence[Record]) -> str:
    """How many texts equal the reference's."""
    lines = []
    for case in group:
        if result := record(case.get("result")):
            first = result.get("first_difference")
            texts = [shown_status(status(case)), escape(name(case))]
            counts = [decimal(result.get(one)) or "–" for one in ("texts", "equal")]
            lines.append((texts, [*counts, "–" if first is None else escape(str(first))]))
    return _table(("status", "case", "texts", "equal", "first difference"), lines)


def _table(head: Sequence[str], lines: Sequence[tuple[Sequence[str], Sequence[str]]]) -> str:
    """A table of lines of (cells of text, cells of numbers) in HTML; "" without lines."""
    if not lines:
        return ""
    texts = len(lines[0][0])
    mark = lambda index: ' class="text"' if index < texts else ""  # noqa: E731
    headings = "".join(f'<th scope="col"{mark(index)}>{escape(one)}</th>' for index, one in enumerate(head))
    body = "".join(
        f"<tr>{''.join(f'<td{mark(index)}>{cell}</td>' for index, cell in enumerate((*words, *figures)))}</tr>"
        for words, figures in lines
    )
    return f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def _rates(group: Sequence[Record]) -> str:
    """Bars for each shape and implementation."""
    charts = []
    values = [record(row.get("values")) for case in group for row in rows(case)]
    colours = _colours([one for each in values for one in each])
    for case in group:
        unit = str(record(case.get("result")).get("unit") or "")
        shapes = [
            (
                str(row.get("label") or ""),
                [
                    Bar(one, positive(value), _rate(value, unit), colours[one])
                    for one, value in record(row.get("values")).items()
                ],
            )
            for row in rows(case)
        ]
        if shapes:
            drawn = bars(shapes, f"rates of {name(case)}") or "<p>No implementation could run.</p>"
            charts.append(f"<h3>{escape(name(case))} {shown_status(status(case))}</h3>{drawn}")
    return "".join(charts)


def _rate(value: Any, unit: str) -> str:
    text = decimal(value)
    return f"{text} {unit}".rstrip() if text else "could not run"


def _colours(implementations: Sequence[str]) -> dict[str, str]:
    """A colour for each implementation, in the order in which they appear."""
    distinct = dict.fromkeys(implementations)
    return {one: COLOURS[index % len(COLOURS)] for index, one in enumerate(distinct)}


def _steps(group: Sequence[Record]) -> str:
    """A table of all columns, bars of MFU, and measured and predicted times by class."""
    table = [(case, row) for case in group for row in rows(case)]
    if not table:
        return ""
    lines = [_step(case, row) for case, row in table]
    colours = _colours([_implementation(row) for _, row in table])
    labels = dict.fromkeys(_label(row) for _, row in table)
    shares = [
        (
            label,
            [
                Bar(
                    _implementation(row),
                    positive(row.get("mfu")),
                    share(row.get("mfu")) or "–",
                    colours[_implementation(row)],
                )
                for _, row in table
                if _label(row) == label
            ],
        )
        for label in labels
    ]
    classes = [
        (
            f"{_label(row)}, {_implementation(row)}",
            [_pair(one, times) for one, times in record(row.get("by_class")).items()],
        )
        for _, row in table
    ]
    found = _table(STEP_COLUMNS, lines)
    if drawn := bars(shares, "MFU"):
        found += f"<h3>MFU</h3>{drawn}"
    if drawn := pairs(classes, "milliseconds by class"):
        caption = key({"measured": MEASURED, "predicted": PREDICTED})
        found += f"<h3>Milliseconds by class, measured / predicted</h3>{caption}{drawn}"
    return found


def _pair(one: str, times: Any) -> tuple[str, float | None, float | None]:
    return one, *(number(record(times).get(kind)) for kind in ("measured", "predicted"))


def _step(case: Record, row: Record) -> tuple[list[str], list[str]]:
    """A row of the table of steps."""
    rounds = " ".join(decimal(one) for one in numbers(row.get("rounds")))
    figures = [
        *(decimal(row.get("milliseconds")), decimal(row.get("predicted_milliseconds"))),
        *(_error(row, "milliseconds", "predicted_milliseconds"), decimal(row.get("tokens_per_second"))),
        *(decimal(row.get("teraflops")), share(row.get("mfu")), share(row.get("mfu_causal"))),
        *(decimal(row.get("peak_gigabytes")), decimal(row.get("predicted_peak_gigabytes"))),
        *(
            _error(row, "peak_gigabytes", "predicted_peak_gigabytes"),
            rounds and f'<span class="rounds">{rounds}</span>',
        ),
    ]
    texts = [shown_status(_step_status(case, row)), escape(_label(row)), escape(_implementation(row))]
    return texts, [one or "–" for one in figures]


def _step_status(case: Record, row: Record) -> str:
    """The row's own status: a case is slow as a whole if one of its rows is."""
    if is_slow(row):
        return "slow"
    if not is_measured(row):
        return "not run"
    return "passed" if status(case) == "slow" else status(case)


def _error(row: Record, measured: str, predicted: str) -> str:
    error = prediction_error(row, measured, predicted)
    return "" if error is None else f"{error:+.1%}"


def _label(row: Record) -> str:
    return str(row.get("label") or "unnamed")


def _implementation(row: Record) -> str:
    return str(row.get("implementation") or "unnamed")

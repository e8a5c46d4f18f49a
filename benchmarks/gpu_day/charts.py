"""The charts of the page of benchmarks.gpu_day as inline SVG in HTML, readable on screens of 400 pixels.

Horizontal charts are rows of a CSS grid: the text is HTML, which keeps its size, and the SVG beside it has lengths in
percent. Each value is also written as text, so that no chart depends on its colours or on a tooltip.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from benchmarks.gpu_day.values import Case, decimal, positive, scientific
from megajax.schedules.pictures import COLOURS

WIDTH, HEIGHT = 420, 190  # of a chart of losses
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 8, 24  # its margins
LEAST_DECADE, MOST_DECADE = -6, 3  # of the strip's axis; what is beyond them is drawn at its ends
REFERENCE, LOSSES = "var(--soft)", COLOURS[1]
MEASURED, PREDICTED = COLOURS[0], COLOURS[5]


class Bar(NamedTuple):
    """The bars of a line, one above the other: (length, colour) each; None has no bar. `text` has the values."""

    name: str
    values: Sequence[tuple[float | None, str]]
    text: str


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], label: str, one_scale: bool = True) -> str:
    """Horizontal bars in groups with a heading; "" without values.

    Args:
      groups: (heading, bars) of each.
      label: what the bars are, for screen readers.
      one_scale: for all groups; otherwise each has its own, and is left out without values.
    """
    longest = [max((value or 0 for bar in group for value, _ in bar.values), default=0) for _, group in groups]
    lines = []
    for (heading, group), own in zip(groups, longest, strict=True):
        if whole := max(longest) if one_scale else own:
            lines.append(f'<b class="head">{escape(heading)}</b>')
            lines += [_line(bar.name, _bar(bar.values, whole), bar.text) for bar in group]
    return _rows(lines, label) if lines else ""


def _bar(values: Sequence[tuple[float | None, str]], whole: float) -> str:
    """One bar, or two of a pair."""
    is_pair = len(values) > 1
    places = ('y="0%" ', 'y="50%" ') if is_pair else ("",)
    rects = "".join(
        f'<rect {place}width="{100 * (value or 0) / whole:.2f}%" height="{46 if is_pair else 100}%" fill="{colour}"></rect>'
        for place, (value, colour) in zip(places, values, strict=True)
    )
    return f'<svg class="bar{" pair" if is_pair else ""}">{rects}</svg>'


def strip(cases: Sequence[Case]) -> str:
    """The differences of cases relative to their limits: dots on a logarithmic axis; "" without any.

    A diamond is beyond its limit. A ratio of 0 is drawn at the left end, one that is infinite at the right end.
    """
    compared = [one for one in cases if one.ratio is not None]
    if not compared:
        return ""
    logs = [math.log10(one.ratio) for one in compared if positive(one.ratio)]
    low = max(LEAST_DECADE, min([math.floor(one) for one in logs] + [-1]))
    high = min(MOST_DECADE, max([math.ceil(one) for one in logs] + [1]))
    place = lambda decade: f"{3 + 94 * (min(max(decade, low), high) - low) / (high - low):.2f}%"  # noqa: E731
    limit = f'<line class="limit" x1="{place(0)}" x2="{place(0)}" y1="0" y2="100%"></line>'
    lines = []
    for one in compared:
        where = place(math.log10(one.ratio) if positive(one.ratio) else high if one.ratio else low)
        mark = (
            f'<svg x="{where}" y="8" overflow="visible"><path d="M0-7L7 0L0 7L-7 0z" fill="{COLOURS[1]}"></path></svg>'
            if one.ratio > 1
            else f'<circle cx="{where}" cy="8" r="5" fill="{COLOURS[2]}"></circle>'
        )
        text = " / ".join(scientific(one.result[key]) for key in ("difference", "limit"))
        lines.append(_line(one.name, f'<svg class="strip">{limit}{mark}</svg>', text))
    stride = math.ceil((high - low) / 4)
    decades = [decade for decade in range(low, high + 1) if decade % stride == 0]
    words = {decade: scientific(10.0**decade) if decade else "limit" for decade in decades}
    ticks = "".join(
        f'<text x="{place(decade)}" y="12" text-anchor="middle">{word}</text>' for decade, word in words.items()
    )
    lines.append(_line("difference / limit", f'<svg class="axis">{ticks}</svg>', ""))
    return _rows(lines, "differences relative to their limits")


def loss_chart(losses: Sequence[float], reference: Sequence[float], label: str) -> str:
    """Losses by step over their reference, which is the thick line; "" without finite losses."""
    finite = [one for one in (*losses, *reference) if math.isfinite(one)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high, steps = low - margin, high + margin, max(len(losses), len(reference), 2) - 1
    across = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / steps  # noqa: E731
    down = lambda loss: TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)  # noqa: E731
    parts = [f'<path class="axes" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"></path>']
    for value in dict.fromkeys((max(finite), min(finite))):
        parts.append(
            f'<text x="{LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{decimal(value)}</text>'
            f'<path class="limit" d="M{LEFT} {down(value):.1f}H{WIDTH - RIGHT}"></path>'
        )
    for step, anchor in ((0, "start"), (steps, "end")):
        parts.append(f'<text x="{across(step)}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>')
    for values, colour, width in ((reference, REFERENCE, 6), (losses, LOSSES, 2)):
        points = [(across(step), down(loss)) if math.isfinite(loss) else None for step, loss in enumerate(values)]
        parts.append(
            f'<path d="{_path(points)}" fill="none" style="stroke:{colour}" stroke-width="{width}" '
            'stroke-linecap="round" stroke-linejoin="round"></path>'
        )
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"'
    return f'<svg class="losses" {box}>{"".join(parts)}</svg>'


def key(colours: dict[str, str]) -> str:
    """The key of a chart's colours."""
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in colours.items())
    return f'<ul class="key">{items}</ul>'


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """A path through the points, with a gap at each None; a single point between gaps is a dot."""
    pieces, pen_down = [], False
    for point in points:
        if point is not None:
            pieces.append(f"{'L' if pen_down else 'M'}{point[0]:.1f} {point[1]:.1f}{'' if pen_down else 'h0'}")
        pen_down = point is not None
    return "".join(pieces)


def _rows(lines: Sequence[str], label: str) -> str:
    return f'<div class="rows" role="group" aria-label="{escape(label)}">{"".join(lines)}</div>'


def _line(name: str, drawn: str, text: str) -> str:
    return f'<span class="name">{escape(name)}</span>{drawn}<span class="value">{escape(text)}</span>'

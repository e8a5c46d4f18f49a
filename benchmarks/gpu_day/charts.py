"""The charts of the page of benchmarks.gpu_day as inline SVG in HTML, readable on screens of 400 pixels.

Horizontal charts are rows of a CSS grid: the text is HTML, which keeps its size, and the SVG beside it has lengths in
percent. Each value is also written as text, so that no chart depends on its colours or on a tooltip.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from benchmarks.gpu_day.values import decimal, positive, scientific
from megajax.schedules.pictures import COLOURS

WIDTH, HEIGHT = 420, 190  # of a chart of losses
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 8, 24  # its margins
LEAST_DECADE, MOST_DECADE = -6, 3  # of the strip's axis; what is beyond them is drawn at its ends
REFERENCE, LOSSES = "var(--soft)", COLOURS[1]
MEASURED, PREDICTED = COLOURS[0], COLOURS[5]


class Bar(NamedTuple):
    """A bar with its name and its value as text; a value of None has no bar."""

    name: str
    value: float | None
    text: str
    colour: str


class Dot(NamedTuple):
    """A case of the strip: its difference relative to its limit, and both as text."""

    name: str
    ratio: float
    text: str


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], label: str) -> str:
    """Horizontal bars on one scale, in groups with a heading; "" without values.

    Args:
      groups: (heading, bars) of each.
      label: what the bars are, for screen readers.
    """
    whole = max((bar.value or 0 for _, group in groups for bar in group), default=0)
    if not whole:
        return ""
    lines = []
    for heading, group in groups:
        lines.append(f'<b class="head">{escape(heading)}</b>')
        for bar in group:
            rect = f'<rect width="{_percent(bar.value or 0, whole)}" height="100%" fill="{bar.colour}"></rect>'
            lines.append(_line(bar.name, f'<svg class="bar">{rect}</svg>', bar.text))
    return _rows(lines, label)


def pairs(groups: Sequence[tuple[str, Sequence[tuple[str, float | None, float | None]]]], label: str) -> str:
    """Pairs of bars, measured above predicted, on one scale for each group; "" without values.

    Args:
      groups: (heading, [(name, measured, predicted)]) of each.
      label: what the bars are, for screen readers.
    """
    lines = []
    for heading, group in groups:
        whole = max((value or 0 for _, *several in group for value in several), default=0)
        if not whole:
            continue
        lines.append(f'<b class="head">{escape(heading)}</b>')
        for name, *values in group:
            rects = "".join(
                f'<rect y="{50 * index}%" width="{_percent(value or 0, whole)}" height="46%" fill="{colour}"></rect>'
                for index, (value, colour) in enumerate(zip(values, (MEASURED, PREDICTED), strict=True))
            )
            text = " / ".join("–" if value is None else decimal(value) for value in values)
            lines.append(_line(name, f'<svg class="bar pair">{rects}</svg>', text))
    return _rows(lines, label) if lines else ""


def strip(dots: Sequence[Dot], label: str) -> str:
    """A dot for each case on a logarithmic axis, on which 1 is the limit; "" without cases.

    A diamond is beyond its limit. A ratio of 0 is drawn at the left end, one that is infinite at the right end.
    """
    if not dots:
        return ""
    logs = [math.log10(one.ratio) for one in dots if positive(one.ratio)]
    low = max(LEAST_DECADE, min([math.floor(one) for one in logs] + [-1]))
    high = min(MOST_DECADE, max([math.ceil(one) for one in logs] + [1]))
    place = lambda decade: f"{3 + 94 * (min(max(decade, low), high) - low) / (high - low):.2f}%"  # noqa: E731
    limit = f'<line class="limit" x1="{place(0)}" x2="{place(0)}" y1="0" y2="100%"></line>'
    lines = []
    for one in dots:
        where = place(math.log10(one.ratio) if positive(one.ratio) else high if one.ratio else low)
        mark = (
            f'<svg x="{where}" y="8" overflow="visible"><path d="M0-7L7 0L0 7L-7 0z" fill="{COLOURS[1]}"></path></svg>'
            if one.ratio > 1
            else f'<circle cx="{where}" cy="8" r="5" fill="{COLOURS[2]}"></circle>'
        )
        lines.append(_line(one.name, f'<svg class="strip">{limit}{mark}</svg>', one.text))
    stride = math.ceil((high - low) / 4)
    decades = [decade for decade in range(low, high + 1) if decade % stride == 0]
    words = {decade: scientific(10.0**decade) if decade else "limit" for decade in decades}
    ticks = "".join(
        f'<text x="{place(decade)}" y="12" text-anchor="middle">{word}</text>' for decade, word in words.items()
    )
    lines.append(_line("difference / limit", f'<svg class="axis">{ticks}</svg>', ""))
    return _rows(lines, label)


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


def _percent(value: float, whole: float) -> str:
    return f"{100 * value / whole:.2f}%"

"""Pictures in one style, written as .svg, .png or .pdf with matplotlib (the extra `plot`), and the errors of writing them.

The page is white, so that a picture is also readable on a dark one. Text in an SVG is text, which can be searched. It is
laid out in DejaVu Sans, which matplotlib brings; Verdana has the same widths, and what a viewer has instead is narrower.
"""

import argparse
import contextlib
import io
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from megajax.schedules.errors import UserError, shown
from megajax.schedules.paths import local_path, tell_replaced

ENDINGS = (".svg", ".png", ".pdf")
# Okabe and Ito's colours, which people with colour blindness can tell apart, without black and yellow, and three more.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c8c8c", "#7b4f9d", "#8c510a")
INK, SOFT, LINE = "#1b1f24", "#5b6570", "#d8dee4"
FONTS = ("DejaVu Sans", "Verdana", "Helvetica", "Arial")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megajax",  # the same picture is the same file
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
    "font.sans-serif": FONTS,
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 160,
    "savefig.facecolor": "white",
}
NOT_INSTALLED = "pictures need matplotlib, which is not installed: pip install 'megajax[plot]'"


def picture_file(words: str) -> str:
    """A reader of an option's value: the path of a picture, whose folder exists."""
    path = pathlib.Path(local_path(words))
    if path.suffix not in ENDINGS or path.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(words)} is not the name of a picture: end it in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(words)} cannot be written: there is no folder {path.parent}")
    return words


@contextlib.contextmanager
def picture(path: str | pathlib.Path, width: float, height: float, layout: str | None = "constrained") -> Iterator[Any]:
    """A `matplotlib.figure.Figure` of these sizes in points (72 an inch), which is written to `path` at the block's end.

    Raises:
      UserError: matplotlib is not installed, the ending is another one, or the file cannot be written.
    """
    if pathlib.Path(path).suffix not in ENDINGS:
        raise UserError(f"{shown(str(path))} is not the name of a picture: end it in .svg, .png or .pdf")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(NOT_INSTALLED) from None
    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        figure = Figure(figsize=(width / 72, height / 72), layout=layout)
        FigureCanvasAgg(figure)
        yield figure
        _write(figure, pathlib.Path(path))


def _write(figure: Any, path: pathlib.Path) -> None:
    """Saves a figure; of an SVG, the font is written once, not for each text."""
    content, is_svg = io.BytesIO(), path.suffix == ".svg"
    figure.savefig(content, format=path.suffix[1:], metadata={"Date": None, "Creator": None} if is_svg else None)
    written = content.getvalue()
    if is_svg:
        text = written.decode()
        names = ", ".join([*(f"'{name}'" for name in FONTS), "sans-serif"])
        text = text.replace(f"font-family: {names}; ", "")
        text = text.replace("</style>", f"text{{font-family: {names}}}</style>", 1)
        written = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", text).encode()
    tell_replaced(path)
    try:
        path.write_bytes(written)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """The width of a text in points, in a picture's font."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=FONTS[:1], weight=weight)))
    font.set_size(size, 72)
    font.set_text(text)
    return font.get_width_height()[0] / 64


def shortened(text: str, width: float, size: float, weight: str = "normal") -> str:
    """A text that is at most so many points wide, without its middle if it is too long."""
    short, kept = text, len(text)
    while kept > 2 and text_width(short, size, weight) > width:
        kept -= 1
        short = f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
    return short


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Lines of at most so many points."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def label_ends(axes, labels: Sequence[tuple[float, float, str, Any]], size: float = 8) -> None:
    """Labels lines right of the axes, beside their last points: (x, y, text, colour) each.

    Labels that would overlap are moved apart and joined to their points by thin lines. A text may have several lines.
    Call it when the limits of the axes are final.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # which lays out the axes
    height = axes.get_window_extent().height * 72 / figure.dpi
    ends = sorted((axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1], x, y, text, colour)
                  for x, y, text, colour in labels)  # fmt: skip
    heights = [1.3 * size * (text.count("\n") + 1) / height for *_, text, _ in ends]
    centres = spread([end[0] for end in ends], heights)
    for centre, (_, x, y, text, colour) in zip(centres, ends, strict=True):
        axes.annotate(
            text,
            (x, y),
            (1.04, centre),
            textcoords="axes fraction",
            va="center",
            fontsize=size,
            color=INK,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.9, "shrinkA": 2, "shrinkB": 4, "relpos": (0, 0.5)},
        )


def spread(centres: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Ascending centres of intervals, moved so that none overlap, with the least sum of squared moves.

    In terms of each centre less the room that those before it take, none may be smaller than the one before: that is
    isotonic regression, which pools neighbours that are too close and takes their mean.
    """
    room, pools = [0.0], []
    for before, after in itertools.pairwise(heights):
        room.append(room[-1] + (before + after) / 2)
    for centre, start in zip(centres, room, strict=False):
        pools.append([centre - start])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [mean(pool) + start for (pool, start) in zip((pool for pool in pools for _ in pool), room, strict=False)]

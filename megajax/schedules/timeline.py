"""Draws schedules on a time axis: a row for each rank, a box for each operation. All lengths here are points."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megajax.schedules.pictures import INK, SOFT, picture, shortened, text_width, wrapped
from megajax.schedules.schedule import BACKWARD, OVERLAP_PARTS, Schedule, ScheduleError, Work
from megajax.schedules.simulate import Simulation, Span

# The first, the second and later chunks. Chosen so that the colours of different operations stay apart for people with
# any of the three kinds of colour blindness (tests/schedules/test_timeline.py computes how far).
SHADES = {
    "F": ("#80cdfd", "#698fe7", "#084a97"),
    "B": ("#ffd144", "#e99852", "#905508"),
    "I": ("#d493a8", "#8f6290", "#5c1a4a"),
    "W": ("#ace4a6", "#377f4f", "#0f3d12"),
}
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
IDLE = "#eeeeee"
LEFT, BUSY, LIVE, RIGHT = 48.0, 34.0, 116.0, 120.0  # names of the ranks; ends of each rank's numbers right of the axis
HEAD, AXIS, LEGEND_LINE = 30.0, 40.0, 13.0  # heights: a schedule's title, the time axis, a line of the legend
LEAST_WIDTH, MOST_WIDTH = 420.0, 1150.0  # of the time axis
LEAST_ROW, MOST_ROW, ALL_ROWS = 8, 20, 1000  # heights: of a rank's row, and of all rows if they fit
TITLE, LABEL = 10.0, 8.0  # sizes of text
NUMBERS = (8.0, 7.0, 6.0)  # of the microbatch in a box: the first that fits is used, or the number is left out
DIGIT = 0.64  # width of a digit relative to its size
GAP = 0.8  # between boxes
MOST_BOXES, MOST_RANKS = 200_000, 512  # of a picture; 100,000 boxes take some seconds, and 6 MB as .svg
BOXES_IN_A_PATH = 2000  # the renderer of .png has a limit

Kind = tuple[str, int]  # the operation, and which of its shades


class Box(NamedTuple):
    """An operation in the picture; `size` is that of its microbatch's number, 0 if that does not fit."""

    kind: Kind
    left: float
    top: float
    width: float
    height: float
    number: str
    size: float


def draw(schedules: Sequence[Schedule], simulations: Sequence[Simulation], path: str, unit: str = "F = 1") -> None:
    """Draws schedules one below the other on the same time axis, to a file that ends in .svg, .png or .pdf.

    Args:
      unit: of the time axis, for its label.

    Raises:
      UserError: there are too many operations, the ending is another one, or matplotlib is not installed.
    """
    count, ranks = sum(len(one.spans) for one in simulations), sum(one.stages for one in schedules)
    if count > MOST_BOXES or ranks > MOST_RANKS:
        raise ScheduleError(
            f"a picture shows at most {MOST_BOXES} operations on {MOST_RANKS} ranks, not {count} on {ranks}: pass fewer "
            "--microbatches or --pipe, or --text instead of --out"
        )
    longest = max(simulation.makespan for simulation in simulations)
    operations = [_operations(*pair) for pair in zip(schedules, simulations, strict=True)]
    wanted = max(_wanted_scale(*pair) for pair in zip(schedules, operations, strict=True)) * longest
    width = float(round(min(MOST_WIDTH, max(LEAST_WIDTH, wanted))))
    row = max(LEAST_ROW, min(MOST_ROW, ALL_ROWS // ranks))
    with picture(path, LEFT + width + RIGHT, 1, layout=None) as figure:
        page = _Page(figure, width)
        boxes: list[Box] = []
        for schedule, simulation, spans in zip(schedules, simulations, operations, strict=True):
            own = list(_boxes(schedule, spans, width / longest, row))
            page.schedule(schedule, simulation, own, simulation.makespan * width / longest, row)
            boxes += own
        page.axis(longest, unit)
        page.legend({box.kind for box in boxes}, any(busy < 1 - 1e-9 for one in simulations for busy in one.busy))
        page.notes(any(box.size for box in boxes), max(schedule.chunks for schedule in schedules) > 1)
        page.fit()


def _wanted_scale(schedule: Schedule, spans: Sequence[Span]) -> float:
    """The points for a unit of time with which a microbatch's number fits in the shortest box."""
    digits = len(str(schedule.microbatches - 1))
    return (DIGIT * NUMBERS[1] * digits + 2 + GAP) / min(span.stop - span.start for span in spans)


def _boxes(schedule: Schedule, spans: Sequence[Span], scale: float, row: float) -> Iterator[Box]:
    """The boxes of a schedule, from the start of the time axis and the top of the first rank's row."""
    first, digits = min(span.start for span in spans), len(str(schedule.microbatches - 1))
    for rank, work, start, stop in spans:
        op, height, top = schedule.does(work), row - 2.0, rank * row + 1.0
        if _overlaps(schedule, work):  # the forward is above the backward
            height = (height - GAP) / 2
            top += height + GAP if op == BACKWARD else 0
        width = scale * (stop - start)
        width -= min(GAP, width / 4)
        room = min((width - 2) / (DIGIT * digits), height - 0.5)
        size = next((size for size in NUMBERS if size <= room), 0.0)
        yield Box((op, min(work.chunk, 2)), scale * (start - first), top, width, height, str(work.microbatch), size)


class _Page:
    """A figure that is filled from top to bottom, in points from its upper left corner."""

    def __init__(self, figure: Any, width: float):
        self.figure, self.width, self.top = figure, width, -8.0  # the first title needs no space above it
        self.axes = figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, LEFT + width + RIGHT)

    def fit(self) -> None:
        """Makes the figure as high as what has been drawn."""
        height = self.top + 6
        self.figure.set_size_inches((LEFT + self.width + RIGHT) / 72, height / 72)
        self.axes.set_ylim(height, 0)

    def _text(self, x: float, y: float, text: str, size: float = LABEL, colour: str = INK, **options) -> None:
        self.axes.text(x, y, text, fontsize=size, color=colour, parse_math=False, **options)

    def _fill(self, colour: str, corners: Sequence[tuple[float, float, float, float]]) -> None:
        """Boxes of (left, top, width, height) in one colour."""
        import numpy as np
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        for start in range(0, len(corners), BOXES_IN_A_PATH):
            left, top, wide, high = np.round(np.array(corners[start : start + BOXES_IN_A_PATH]), 2).T
            right, bottom = left + wide, top + high
            corner = np.stack([left, top, right, top, right, bottom, left, bottom, left, top], 1).reshape(-1, 2)
            codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(left))
            # add_patch would look at every corner in Python, for limits that are set already.
            self.axes.add_artist(PathPatch(Path(corner, codes), facecolor=colour, edgecolor="none", lw=0))

    def schedule(
        self, schedule: Schedule, simulation: Simulation, boxes: Sequence[Box], stop: float, row: float
    ) -> None:
        """A title, a row for each rank, and their numbers."""
        facts = f"{schedule.microbatches} microbatch{'es' if schedule.microbatches > 1 else ''}"
        facts += f", {schedule.chunks} chunks per rank" if schedule.chunks > 1 else ""
        facts += f", bubble {simulation.bubble:.1%}"
        room = 0.9 * self.width - text_width(facts, LABEL) - 8  # where the viewer has a wider font
        name = shortened(schedule.name, room, TITLE, "bold")
        base = self.top + 24
        self._text(LEFT, base, name, TITLE, fontweight="bold")
        self._text(LEFT + text_width(name, TITLE, "bold") + 8, base, facts, colour=SOFT)
        right = LEFT + self.width
        self._text(right + BUSY, base, "busy", colour=SOFT, ha="right")
        self._text(right + LIVE, base, f"{'chunks ' * (schedule.chunks > 1)}in flight", colour=SOFT, ha="right")
        self.top += HEAD
        self._fill(IDLE, [(LEFT, self.top, stop, schedule.stages * row)])
        kinds: dict[Kind, list[Box]] = {}
        for box in boxes:
            kinds.setdefault(box.kind, []).append(box)
        for kind, several in sorted(kinds.items()):
            colour = SHADES[kind[0]][kind[1]]
            self._fill(colour, [(LEFT + box.left, self.top + box.top, *box[3:5]) for box in several])
            for box in several:
                if box.size:
                    middle = LEFT + box.left + box.width / 2, self.top + box.top + box.height / 2
                    # The middle of digits is 0.36 of their size above the baseline.
                    self._text(
                        middle[0], middle[1] + 0.36 * box.size, box.number, box.size, ink_on(colour), ha="center"
                    )
        size = min(LABEL, row - 1.5)
        for rank in range(schedule.stages):
            base = self.top + (rank + 0.5) * row + 0.36 * size
            self._text(LEFT - 6, base, f"rank {rank}", size, ha="right")
            self._text(right + BUSY, base, f"{simulation.busy[rank]:.0%}", size, ha="right")
            self._text(right + LIVE, base, str(simulation.peak_live[rank]), size, ha="right")
        self.top += schedule.stages * row

    def axis(self, longest: float, unit: str) -> None:
        """The time axis, with its unit."""
        from matplotlib.ticker import MaxNLocator

        ticks = MaxNLocator(max(1, int(self.width // 60)), steps=[1, 2, 5, 10]).tick_values(0, longest)
        line = self.top + 4
        self.axes.plot([LEFT, LEFT + self.width], [line, line], color=SOFT, lw=0.8)
        for tick in ticks:
            x = LEFT + tick / longest * self.width
            if tick <= longest * (1 + 1e-9):
                self.axes.plot([x, x], [line, line + 3], color=SOFT, lw=0.8)
                self._text(x, line + 13, f"{tick:g}", ha="center")
        self._text(LEFT + self.width / 2, line + 27, f"time; {unit}", ha="center")
        self.top += AXIS

    def legend(self, kinds: set[Kind], idles: bool) -> None:
        """A swatch of each shade in the picture, and the operation's name; in as many lines as needed."""
        entries = []
        for op in NAMES:
            colours = [SHADES[op][shade] for shade in range(3) if (op, shade) in kinds]
            entries += [(colours, f"{NAMES[op]} ({op})")] if colours else []
        x, end = LEFT, LEFT + self.width + RIGHT - 6
        for colours, name in [*entries, *[([IDLE], "idle")] * idles]:
            wide = 11 * len(colours) + 4 + text_width(name, LABEL)
            if x > LEFT and x + wide > end:
                x, self.top = LEFT, self.top + LEGEND_LINE
            for place, colour in enumerate(colours):
                self._fill(colour, [(x + 11 * place, self.top + 2, 10, 8)])
            self._text(x + 11 * len(colours) + 4, self.top + 9, name)
            x += wide + 14
        self.top += LEGEND_LINE + 2

    def notes(self, numbers: bool, chunks: bool) -> None:
        """What numbers, shades and columns mean."""
        text = "Numbers are microbatches. " * numbers + "Darker boxes are of later chunks of the model. " * chunks
        text += (
            "Bubble: idle time relative to the ideal time. Busy: the share of the time in which a rank computes. In "
        )
        text += f"flight: the most {'chunks' if chunks else 'microbatches'} whose activations a rank holds."
        for line in wrapped(text, self.width, LABEL):
            self._text(LEFT, self.top + 9, line, colour=SOFT)
            self.top += LEGEND_LINE


def ink_on(colour: str) -> str:
    """The colour of text on a colour: dark, or white where that has the higher contrast (WCAG 2.1's definition)."""
    dark, white = (contrast(colour, ink) for ink in (INK, "#ffffff"))
    return INK if dark >= white else "white"


def contrast(one: str, other: str) -> float:
    """WCAG 2.1's contrast ratio of two colours, 1 to 21."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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

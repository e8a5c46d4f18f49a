"""The pictures of schedules, read back from their SVG: labels, legend, time axis, colours."""

import itertools
import re

import numpy as np
import pytest

from megajax.schedules.draw import main
from megajax.schedules.timeline import IDLE, INK, NAMES, SHADES, contrast, ink_on
from tests.svg import Area, Picture, overlapping

CASES = [
    "--schedule gpipe --pipe 1 --microbatches 1",
    "--schedule 1f1b --pipe 1 --microbatches 60",
    "--schedule gpipe --pipe 2 --microbatches 3",
    "--schedule 1f1b --pipe 4 --microbatches 8",
    "--schedule interleaved_1f1b --pipe 2 --microbatches 6 --chunks 4 --costs 1,2.5,1,1.5 --latency 0.25",
    "--schedule zb_h1 --pipe 4 --microbatches 8",
    "--schedule zb_v --pipe 3 --microbatches 6",
    "--schedule dualpipe_v --pipe 2 --microbatches 6",
    "--schedule pipedream_2bw --pipe 3 --microbatches 4",
    "--compare gpipe interleaved_1f1b zb_v --pipe 2 --microbatches 4",
    "--compare FILE gpipe eager_1f1b --pipe 3 --microbatches 7 --costs 0.003,900",
]
LARGE = [
    "--schedule interleaved_1f1b --pipe 8 --microbatches 32",
    "--schedule interleaved_1f1b --pipe 4 --microbatches 16 --chunks 4 --costs 1,2.5,1,1.5 --latency 0.25",
    "--schedule zb_v --pipe 12 --microbatches 24",
    "--schedule dualpipe_v --pipe 4 --microbatches 12",
    "--schedule 1f1b --pipe 1 --microbatches 120",
    "--compare gpipe 1f1b interleaved_1f1b zb_h1 zb_v",
    "--schedule zb_v --pipe 64 --microbatches 256",
    "--compare gpipe 1f1b dualpipe_v --pipe 16 --microbatches 128",
    "--schedule 1f1b --pipe 512 --microbatches 8",
]


def drawn(words, folder):
    """The picture of a command; FILE is a schedule with a long name."""
    file = folder / f"{'a_schedule_with_a_long_name_' * 5}.json"
    if "FILE" in words:
        assert main(["--schedule", "zb_1p_interleaved", "--pipe", "2", "--microbatches", "4", "--save", str(file)]) == 0
    assert main([*words.replace("FILE", str(file)).split(), "--out", str(folder / "x.svg")]) == 0
    return Picture(folder / "x.svg")


@pytest.mark.parametrize("words", [*CASES, *(pytest.param(words, marks=pytest.mark.slow) for words in LARGE)])
def test_labels_are_apart_and_within_their_boxes(words, tmp_path):
    picture = drawn(words, tmp_path)
    assert overlapping(picture.texts) == []
    page = Area(0, 0, picture.width, picture.height)
    assert [text for text in picture.texts if not page.contains(text.area)] == []
    (axis,) = [text for text in picture.texts if text.words.startswith("time; F = ")]
    ticks = [text for text in picture.texts if abs(text.area.bottom - axis.area.bottom) < 18 and text is not axis]
    values = [
        float(text.words) for text in sorted(ticks, key=lambda text: text.area.left) if text.area.top < axis.area.top
    ]
    assert len(values) > 1 and values[0] == 0 and values == sorted(values)
    # numbers are in boxes, the names of ranks are not
    colours = {colour: (op, shade) for op, shades in SHADES.items() for shade, colour in enumerate(shades)}
    boxes = [(box, colour) for colour in colours for box in picture.boxes.get(colour, ())]
    operations = [box for box, _ in boxes if box.bottom < axis.area.top]
    left, right = min(box.left for box in operations), max(box.right for box in operations)
    for text in picture.texts:
        middle = (text.area.left + text.area.right) / 2
        if text.area.bottom < axis.area.top - 20 and text.words.isdigit() and left < middle < right:
            (box,) = [box for box in operations if box.left < middle < box.right and box.overlaps(text.area)]
            assert box.contains(text.area), (text, box)
        elif re.fullmatch(r"rank \d+", text.words):
            assert text.area.right < left
    # the legend has what is drawn, and nothing else
    above, below = ({colour for box, colour in boxes if (box.top > axis.area.top) == is_below} for is_below in (0, 1))
    assert above == below
    named = {op for op, name in NAMES.items() if f"{name} ({op})" in picture.words()}
    assert named == {colours[colour][0] for colour in above}
    assert all(f"{op} = " in axis.words for op in named)
    assert ("idle" in picture.words()) == any(box.top > axis.area.top for box in picture.boxes[IDLE])


def test_no_rank_idles(tmp_path):
    assert "idle" not in drawn(CASES[0], tmp_path).words()


def test_boxes_are_at_their_times(tmp_path):
    """GPipe, p = 2, m = 2, by hand."""
    picture = drawn("--schedule gpipe --pipe 2 --microbatches 2", tmp_path)
    at = {text.words: (text.area.left + text.area.right) / 2 for text in picture.texts if text.area.top > 70}
    unit = (at["8"] - at["0"]) / 8
    tops = sorted({box.top for box in picture.boxes[SHADES["F"][0]]})[:2]  # of the ranks; the third is the legend's
    wanted = {"F": {(0, 0, 1), (0, 1, 2), (1, 1, 2), (1, 2, 3)}, "B": {(0, 5, 7), (0, 7, 9), (1, 3, 5), (1, 5, 7)}}
    for op, times in wanted.items():
        boxes = [box for box in picture.boxes[SHADES[op][0]] if box.top in tops]
        ends = [[(x - at["0"]) / unit for x in (box.left, box.right)] for box in boxes]
        assert {(tops.index(box.top), *map(round, both)) for box, both in zip(boxes, ends, strict=True)} == times
        assert all(abs(end - round(end)) < 0.03 for both in ends for end in both)  # but for the gaps between boxes


# Machado, Oliveira and Fernandes (2009), severity 1: what linear RGB looks like to people without one kind of cones.
BLINDNESS = {
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, kind):
    """CIELAB of a colour as seen with a kind of colour blindness."""
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    x, y, z = TO_XYZ @ np.clip(np.array(BLINDNESS[kind]) @ linear, 0, 1) / TO_XYZ.sum(1)
    f = lambda t: np.cbrt(t) if t > 0.008856 else 7.787 * t + 16 / 116  # noqa: E731
    return np.array([116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))])


@pytest.mark.parametrize("kind", BLINDNESS)
def test_operations_can_be_told_apart(kind):
    """A difference of 2.3 can just be seen side by side (Mahy, 1994); the palette before had 10 at least."""
    shades = [(op, colour) for op, colours in SHADES.items() for colour in colours] + [("idle", IDLE)]
    for (op, colour), (other, its) in itertools.combinations(shades, 2):
        if op != other:
            assert np.linalg.norm(lab(colour, kind) - lab(its, kind)) > 18, (op, colour, other, its)


def test_numbers_can_be_read():
    """WCAG 2.1's AA for text is 4.5. Black on white has 21."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for colours in SHADES.values():
        for colour in colours:
            ink = {"white": "#ffffff"}.get(ink_on(colour), INK)
            assert contrast(colour, ink) > 4.5, colour

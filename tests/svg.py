"""Reads a picture back from its SVG: filled boxes, lines and texts, with conservative estimates of the texts' sizes."""

import re
import xml.etree.ElementTree
from typing import NamedTuple

WIDE = set("%mwMW@…")


class Area(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other, slack=0.0):
        return (
            self.left < other.right - slack
            and other.left < self.right - slack
            and self.top < other.bottom - slack
            and other.top < self.bottom - slack
        )

    def contains(self, other):
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )


class Text(NamedTuple):
    area: Area
    words: str
    turned: bool


class Picture:
    """The width and height, the texts, the boxes of each colour, and the lines of each colour as lists of points."""

    def __init__(self, path):
        root = xml.etree.ElementTree.fromstring(path.read_text())
        _, _, self.width, self.height = map(float, root.get("viewBox").split())
        self.texts = [text_of(one) for one in root.iter("{http://www.w3.org/2000/svg}text") if "".join(one.itertext())]
        self.boxes, self.lines = {}, {}
        for one in root.iter("{http://www.w3.org/2000/svg}path"):
            colour = re.search(r"fill: (#[0-9a-f]{6})", one.get("style", ""))
            stroke = re.search(r"stroke: (#[0-9a-f]{6})", one.get("style", ""))
            if stroke and "fill: none" in one.get("style"):
                self.lines.setdefault(stroke[1], []).append(points_of(one.get("d")))
            if colour:
                self.boxes.setdefault(colour[1], []).extend(boxes_of(one.get("d")))

    def words(self):
        return [text.words for text in self.texts]


def text_of(element):
    """Widths are those of Verdana's and DejaVu Sans' average letters, and of an em for the wide ones."""
    style, words = element.get("style"), "".join(element.itertext())
    size = float(re.search(r"([\d.]+)px", style)[1])
    each = 0.70 if "bold" in style else 0.64 if words.strip().isdigit() else 0.59
    width = size * sum(1.0 if letter in WIDE else each for letter in words)
    x, y = (float(element.get(name, 0)) for name in ("x", "y"))
    turned = re.search(r"rotate\((-?[\d.]+)", element.get("transform") or "")
    shift = re.search(r"translate\((-?[\d.]+) (-?[\d.]+)\)", element.get("transform") or "")
    if shift:
        x, y = x + float(shift[1]), y + float(shift[2])
    left = x - width * {"middle": 0.5, "end": 1}.get(
        anchor[1] if (anchor := re.search(r"anchor: (\w+)", style)) else "", 0
    )
    below = 0 if words.strip().isdigit() else 0.2
    return Text(Area(left, y - 0.74 * size, left + width, y + below * size), words, bool(turned and float(turned[1])))


def boxes_of(path):
    """The rectangles of a path that consists of nothing else."""
    found = []
    for part in path.split("z"):
        points = points_of(part)
        if points:
            xs, ys = zip(*points, strict=True)
            found.append(Area(min(xs), min(ys), max(xs), max(ys)))
    return found


def overlapping(texts):
    """The pairs of texts whose areas overlap."""
    ordered = sorted((text for text in texts if not text.turned), key=lambda text: text.area.left)
    pairs, near = [], []
    for text in ordered:
        near = [other for other in near if other.area.right > text.area.left]
        pairs += [(other.words, text.words) for other in near if other.area.overlaps(text.area)]
        near.append(text)
    return pairs


def points_of(path):
    """The corners of a path of straight lines."""
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path)]


def crossed(texts, lines):
    """The texts that one of the lines goes through, by points close to each other on the lines."""
    found = set()
    for line in lines:
        for (x, y), (right, bottom) in zip(line, line[1:], strict=False):
            steps = 1 + int(max(abs(right - x), abs(bottom - y)))
            for step in range(steps + 1):
                at = (x + (right - x) * step / steps, y + (bottom - y) * step / steps)
                point = Area(*at, *at)
                found |= {text.words for text in texts if not text.turned and text.area.contains(point)}
    return found

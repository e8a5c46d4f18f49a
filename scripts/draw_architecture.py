"""Draws docs/images/architecture.svg: the folders of megajax/, and which imports which.

python scripts/draw_architecture.py            writes the picture
python scripts/draw_architecture.py --check    exits with 1 if the picture on file is not that of the code

A folder stands above all that it imports. A line is an import that does not follow from others: where plan imports
estimate, which imports models, there is no line from plan to models.
"""

import ast
import pathlib
import sys
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/architecture.svg"
WIDTH, ROW, BOX, MARGIN = 760, 84, (116, 42), 16  # pixels
TEXT, BOXES = "text-anchor: middle; font: {}px sans-serif; fill: {}", "fill: #f6f8fa; stroke: #5b6570"
LINES = "fill: none; stroke: #0072b2"


def imported(path: pathlib.Path) -> Iterator[str]:
    """The modules of megajax that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in names if name.startswith("megajax."))


def folders() -> tuple[dict[str, set[str]], dict[str, int]]:
    """The folders that each folder imports, and how many files it has."""
    files: dict[str, list[pathlib.Path]] = {}
    for path in sorted((ROOT / "megajax").rglob("*.py")):
        parts = path.relative_to(ROOT / "megajax").parts
        if len(parts) > 1:
            files.setdefault(parts[0], []).append(path)
    edges = {
        name: {module.split(".")[1] for path in paths for module in imported(path)} & files.keys() - {name}
        for name, paths in files.items()
    }
    return edges, {name: len(paths) for name, paths in files.items()}


def levels(edges: Mapping[str, set[str]]) -> dict[str, int]:
    """The level of each folder: above all that it imports.

    Raises:
      RecursionError: folders import each other in a circle.
    """
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            found[name] = 1 + max(map(level, edges[name]), default=-1)
        return found[name]

    for name in edges:
        level(name)
    return found


def direct(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The imports that do not follow from others."""

    def reached(name: str) -> set[str]:
        return edges[name].union(*map(reached, edges[name]))

    return {name: to - set().union(*map(reached, to)) for name, to in edges.items()}


def outside_in(names: list[str]) -> list[str]:
    """The first name to the left, the second to the right, and so on to the middle."""
    return names[::2] + names[1::2][::-1]


def picture() -> str:
    """The SVG."""
    edges, counts = folders()
    level, lines = levels(edges), direct(edges)
    importers = {name: sum(name in to for to in lines.values()) for name in edges}
    top, centre = max(level.values()), {}
    for row in range(top + 1):
        # Lines from far above end at folders that few import: in the middle they go past the boxes between.
        names = outside_in(sorted((one for one in level if level[one] == row), key=lambda one: (-importers[one], one)))
        for place, name in enumerate(names):
            centre[name] = (place + 0.5) * WIDTH / len(names), MARGIN + (top - row) * ROW + BOX[1] / 2
    height, half = 2 * MARGIN + top * ROW + BOX[1], BOX[1] / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The folders of megajax, each above those that it imports</title>",
        f'<rect width="{WIDTH}" height="{height}" style="fill: #ffffff"/>',
    ]
    for name, to in sorted(lines.items()):
        for other in sorted(to):
            (x, y), (u, v) = centre[name], centre[other]
            parts.append(f'<path d="M {x:.0f} {y + half:.0f} L {u:.0f} {v - half:.0f}" style="{LINES}"/>')
    for name, (x, y) in sorted(centre.items()):
        corner = f'x="{x - BOX[0] / 2:.0f}" y="{y - half:.0f}" width="{BOX[0]}" height="{BOX[1]}"'
        parts += [
            f'<rect {corner} rx="6" style="{BOXES}"/>',
            f'<text x="{x:.0f}" y="{y - 2:.0f}" style="{TEXT.format(14, "#1b1f24")}">{name}</text>',
            f'<text x="{x:.0f}" y="{y + 14:.0f}" style="{TEXT.format(11, "#5b6570")}">{counts[name]} files</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main(words: list[str]) -> int:
    """Writes or checks; returns the exit code."""
    if words == ["--check"]:
        return int(not PICTURE.exists() or PICTURE.read_text() != picture())
    if words:
        print(__doc__.strip())
        return 2
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

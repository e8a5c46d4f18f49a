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
WIDTH, ROW, BOX, HEIGHT = 760, 84, (116, 40), 30  # pixels: of the picture, of a level, of a box, of the margins
STYLE = """text { font: 13px system-ui, sans-serif; text-anchor: middle; fill: #1b1f24; }
.files { font-size: 11px; fill: #5b6570; }
rect { fill: #f6f8fa; stroke: #5b6570; }
path { fill: none; stroke: #0072b2; stroke-opacity: 0.6; }
@media (prefers-color-scheme: dark) {
text { fill: #e3e8ee; } .files { fill: #9aa5b1; } rect { fill: #1d232a; stroke: #9aa5b1; } path { stroke: #56b4e9; } }"""


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


def picture() -> str:
    """The SVG."""
    edges, counts = folders()
    level = levels(edges)
    top = max(level.values())
    centre = {}
    for row in range(top + 1):
        names = sorted(name for name in level if level[name] == row)
        for place, name in enumerate(names):
            centre[name] = (place + 0.5) * WIDTH / len(names), HEIGHT + (top - row) * ROW + BOX[1] / 2
    lines, boxes = [], []
    for name, to in sorted(direct(edges).items()):
        (x, y), half = centre[name], BOX[1] / 2
        for other in sorted(to):
            u, v = centre[other]
            bend = (v - y) / 2
            start, end = f"{x:.0f},{y + half:.0f}", f"{u:.0f},{v - half:.0f}"
            lines.append(f'<path d="M{start} C{x:.0f},{y + bend:.0f} {u:.0f},{v - bend:.0f} {end}"/>')
    for name, (x, y) in sorted(centre.items()):
        boxes.append(
            f'<rect x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y - 2:.0f}">{name}</text>'
            f'<text class="files" x="{x:.0f}" y="{y + 13:.0f}">{counts[name]} files</text>'
        )
    size = f"0 0 {WIDTH} {2 * HEIGHT + top * ROW + BOX[1]}"
    title = "<title>The folders of megajax, each above those that it imports</title>"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">', title, f"<style>{STYLE}</style>"]
    return "\n".join([*parts, *lines, *boxes, "</svg>", ""])


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

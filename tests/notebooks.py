"""Runs the notebooks of docs/notebooks: `python -m tests.notebooks --update` writes their outputs.

Without Jupyter, which is no part of the extra `test`: the code cells of a notebook run in one process, one after the other,
in one namespace. The outputs of a cell are what it prints, and the value of its last expression, as SVG if it has
`_repr_svg_`. The files are those that Jupyter writes (nbformat 4.5).
"""

import ast
import contextlib
import io
import json
import pathlib
import sys
from typing import Any

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def source(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def run(cell: dict[str, Any], names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a code cell, run in the namespace `names`."""
    tree, printed, value = ast.parse(source(cell)), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        svg = getattr(value, "_repr_svg_", None)
        data = {"text/plain": _lines(f"<{type(value).__name__}>" if svg else repr(value))}
        data |= {"image/svg+xml": _lines(svg())} if svg else {}
        outputs.append(
            {
                "data": dict(sorted(data.items())),
                "execution_count": None,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def outputs(path: pathlib.Path) -> dict[str, Any]:
    """The notebook with the outputs of a run."""
    notebook, names, count = json.loads(path.read_text()), {"__name__": "__main__"}, 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["outputs"], cell["execution_count"] = run(cell, names), count
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = count
    return notebook


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(arguments: list[str]) -> None:
    """Prints the notebooks as JSON after a run, one on a line; with --update writes them."""
    for path in NOTEBOOKS:
        notebook = outputs(path)
        if "--update" in arguments:
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        else:
            print(json.dumps(notebook))


if __name__ == "__main__":
    main(sys.argv[1:])

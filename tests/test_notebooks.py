"""The notebooks of docs/notebooks: their code runs, and the outputs in the files are those of a run."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.notebooks import NOTEBOOKS, source

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_outputs_and_is_linked(path):
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) // 2
    assert max(len(line) for cell in notebook["cells"] for line in source(cell).splitlines()) <= 120
    for page in ("README.md", "docs/index.md"):
        links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
        assert path.resolve() in [((ROOT / page).parent / link).resolve() for link in links], page
    for link in re.findall(r"\]\(([^)#]+)\)", " ".join(map(source, notebook["cells"]))):
        assert (path.parent / link).exists(), link


@pytest.mark.slow
def test_the_outputs_are_those_of_a_run():
    done = subprocess.run([sys.executable, "-m", "tests.notebooks"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path, line in zip(NOTEBOOKS, done.stdout.splitlines(), strict=True):
        assert outputs(json.loads(line)) == outputs(json.loads(path.read_text())), (
            f"{path.name}: python -m tests.notebooks --update"
        )


def outputs(notebook):
    """The outputs; of a picture whether there is one, as matplotlib's versions differ in their files."""
    return [
        output.get("text") or {kind: kind == "image/svg+xml" or text for kind, text in output["data"].items()}
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    ]

"""The picture of docs/architecture.md is that of the code, and the page names all folders."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_the_picture_is_that_of_the_code():
    """If not: python scripts/draw_architecture.py."""
    assert subprocess.run([sys.executable, ROOT / "scripts/draw_architecture.py", "--check"]).returncode == 0


def test_the_page_names_every_folder_and_no_file_that_does_not_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    folders = {path.name for path in (ROOT / "megajax").iterdir() if (path / "__init__.py").exists()}
    table = text[text.index("## What is where") : text.index("## What may")]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == folders
    for name in re.findall(r"`(\w+/[\w/]*\.py|commands\.py)`", text):
        assert (ROOT / "megajax" / name).exists(), name

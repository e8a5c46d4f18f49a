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


def test_only_the_schedules_and_the_description_of_the_program_look_a_schedule_up_by_its_name():
    """`registry.find` returns a spec; other code asks the registry a question, or reads `StepProgram`."""
    users = []
    for path in sorted(one for room in ("megajax", "experiments", "benchmarks") for one in (ROOT / room).rglob("*.py")):
        imported = re.findall(r"from megajax\.schedules\.registry import (\([^)]*\)|[^\n]*)", path.read_text())
        if any("find" in re.findall(r"\w+", names) for names in imported):
            users.append(path.relative_to(ROOT).as_posix())
    others = [user for user in users if not user.startswith("megajax/schedules/")]
    assert others == ["megajax/pipeline/program.py"]

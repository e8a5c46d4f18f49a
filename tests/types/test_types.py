"""The package has types: its stub lists the public names, and mypy checks what a user writes (extra types)."""

import pathlib
import re
import subprocess
import sys

import pytest

import megajax

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "megajax"
WRONG = {  # a line of a user's: what mypy says
    'TrainConfig(steps="ten")': 'Argument "steps" to "TrainConfig" has incompatible type "str"; expected "int"',
    "OutputConfig(run_dir=3)": 'Argument "run_dir" to "OutputConfig" has incompatible type "int"',
    "Trainer(run, validation=None)": 'Unexpected keyword argument "validation" for "Trainer"',
    "Trainer(run).fit().stoped": '"Result" has no attribute "stoped"; maybe "stopped"?',
    "megajax.Trianer": 'Module has no attribute "Trianer"',
}


def test_the_stub_has_the_names_that_are_imported_on_first_use():
    found = re.findall(r"from (megajax\S*) import (\w+) as (\w+)\n", (PACKAGE / "__init__.pyi").read_text())
    assert {name: module for module, name, same in found if name == same} == megajax._MODULES
    assert (PACKAGE / "py.typed").read_text() == ""


@pytest.mark.slow
def test_a_users_code_is_checked(tmp_path):
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    first = "import megajax\nfrom megajax import OutputConfig, RunConfig, TrainConfig, Trainer\nrun: RunConfig\n"
    wrong.write_text(first + "".join(f"{line}\n" for line in WRONG))
    options = ["--follow-imports=silent", "--disable-error-code=import-untyped", f"--cache-dir={tmp_path}/cache"]
    words = [sys.executable, "-m", "mypy", *options, "tests/types/user_code.py", str(wrong)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), done.stdout + done.stderr
    for line, said in zip(errors, WRONG.values(), strict=True):
        assert "wrong.py" in line and said in line

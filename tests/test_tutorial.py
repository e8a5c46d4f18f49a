"""docs/tutorial.md: every line of it runs as it is printed, in an empty folder, and what it shows is what is printed."""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from megajax.__main__ import with_module
from megajax.commands import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/tutorial.md"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def blocks() -> list[tuple[str, str]]:
    """(language, text) of each block of the page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    """The command lines of a block of the shell; continued ones are joined."""
    return text.replace("\\\n", "").splitlines()


def test_the_page_has_only_blocks_that_run_or_are_compared():
    assert {language for language, _ in blocks()} == {"sh", "python", "text"}
    assert "\n    " not in re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_lines_parse():
    files = set()
    for language, text in blocks():
        if language == "python":
            compile(text, "block", "exec")
            files.add(file_name(text))
        elif language == "sh":
            for line in lines(text):
                program, *words = shlex.split(line)
                assert program in ("python", "megajax", "ls")
                assert program != "python" or words[0] in files
                assert program != "megajax" or with_module(words)[0] in COMMANDS


def file_name(text: str) -> str:
    """A script's name is in its first line."""
    return re.match(r"# (\w+\.py)\n", text)[1]


def agrees(shown: str, printed: str) -> bool:
    """Whether a printed line is the shown one: words and whole numbers are equal, others differ by 3% at most."""
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    numbers = [(float(one.replace(",", "")), float(other.replace(",", "")), "." in one) for one, other in pairs]
    return all(abs(one - other) <= (0.03 * one if rounded else 0) for one, other, rounded in numbers)


def test_shown_lines_are_compared():
    shown = "step 200: validation loss 4.9517 per token, perplexity 141.4"
    assert agrees(shown, "step 200: validation loss 4.9600 per token, perplexity 142.5")
    assert not agrees(shown, "step 200: validation loss 5.3000 per token, perplexity 141.4")
    assert not agrees(shown, "step 201: validation loss 4.9517 per token, perplexity 141.4")
    assert not agrees(shown, "step 200: validation loss 4.9517 per token")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_line_runs(tmp_path):
    """As a reader would run them: new processes, and nothing in the environment of this one's jax."""
    have_transformers = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    programs, folder = tmp_path / "programs", tmp_path / "empty"
    programs.mkdir(), folder.mkdir()
    for name, words in {"python": "", "megajax": "-m megajax "}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
        program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PJRT_"))}
    environment = kept | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    printed: dict[str, str] = {}

    def run(line: str) -> None:
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
        printed[line] = done.stdout
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"

    for language, text in blocks():
        if language == "python":
            (folder / file_name(text)).write_text(text)
        elif language == "sh":
            for line in lines(text):
                if line != "python compare.py" or have_transformers:
                    run(line)
        else:
            everything = "\n".join(printed.values()).splitlines()
            for shown in text.splitlines():
                assert any(agrees(shown, one) for one in everything), shown
    outputs = {
        line.split(" --run-dir")[0]: text for line, text in printed.items() if line.startswith("megajax generate")
    }
    greedy = printed[next(line for line in printed if "--temperature 0" in line)]
    assert greedy.startswith("ROMEO:") or "ROMEO:" in greedy, outputs
    assert 50 < json.loads((folder / "perplexity.json").read_text())["perplexity"] < 200
    assert (
        next(text for line, text in printed.items() if "verify" in line).rstrip().splitlines()[-1].startswith("equal:")
    )
    assert (folder / "plan.toml").exists()
    if have_transformers:
        assert printed["python compare.py"].strip() in greedy
    else:
        pytest.skip("all lines ran but compare.py, which needs torch and transformers")

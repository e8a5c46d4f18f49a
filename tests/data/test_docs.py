"""The examples of docs/data.md run, and its options exist."""

import pathlib
import re

import pytest

from experiments import gpt3
from megajax.checkpoint import inspect
from megajax.data import preprocess

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if "datatrove" not in program:  # test_datatrove.py has that one
            exec(program, {})


def test_the_options_of_the_page_exist(capsys):
    for command in (preprocess.main, gpt3.main):
        with pytest.raises(SystemExit):
            command(["--help"])
    for command in ("merge", "inspect", "verify"):
        with pytest.raises(SystemExit):
            preprocess.main([command, "--help"])
    with pytest.raises(SystemExit):
        inspect.main(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) | {"--megatron-python", "--array"}  # sbatch's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known

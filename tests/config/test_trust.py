"""Code that a run directory names is imported if this account has written it, or with --trust."""

import pathlib

import pytest

from megajax import OutputConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config import ConfigError
from megajax.config.cli import Experiment, parse
from megajax.config.trust import sign_imports
from megajax.generate.options import read_options
from megajax.interop.weight_source import RunDirectorySource
from megajax.train.run_directory import RunDirectory

EXPERIMENT = Experiment("An experiment.", {"model": "tiny"})


@pytest.fixture(autouse=True)
def account(tmp_path, monkeypatch):
    """An account of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def code(tmp_path):
    """A file that notes when it runs; `ran()` says whether it has."""
    path = tmp_path / "model.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return path


def ran(tmp_path) -> bool:
    return (tmp_path / "ran").exists()


def trained(directory: pathlib.Path, imports: tuple[str, ...]) -> pathlib.Path:
    """The directory of a run that imports files, with a checkpoint in name; returns its configuration."""
    train = TrainConfig(global_batch_size=8, steps=10, warmup_steps=1)
    run = RunConfig(preset("tiny"), ParallelConfig(), train, imports=imports)
    RunDirectory(run, OutputConfig(run_dir=str(directory), tensorboard=False), None).close()
    (directory / "checkpoints" / "step_00000010" / "state").mkdir(parents=True)
    return directory / "config.toml"


def test_ones_own_run_is_read_without_a_word(tmp_path, code):
    config = trained(tmp_path / "run", (str(code),))
    parse(["--config", str(config)], EXPERIMENT)
    assert ran(tmp_path)


def test_a_run_of_one_account_is_its_own_wherever_it_is_moved(tmp_path, code):
    inside = tmp_path / "run" / "logs" / "model.py"
    inside.parent.mkdir(parents=True)
    code.rename(inside)
    trained(tmp_path / "run", (str(inside),)).parent.rename(tmp_path / "moved")
    parse(["--config", str(tmp_path / "moved" / "config.toml")], EXPERIMENT)
    assert ran(tmp_path)


@pytest.mark.parametrize("kind", ["another account", "no signature", "another import", "no key"])
def test_a_foreign_run_runs_nothing(tmp_path, code, monkeypatch, kind):
    """By any command that reads run directories."""
    config = trained(tmp_path / "run", ("json",) if kind == "another import" else (str(code),))
    if kind == "another account":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        sign_imports(tmp_path, ["any"], {"XDG_STATE_HOME": str(tmp_path / "other")})  # it has a key
    elif kind == "no signature":
        (tmp_path / "run" / ".imports").unlink()
    elif kind == "no key":
        (tmp_path / "state" / "megajax" / "key").unlink()
    else:
        config.write_text(config.read_text().replace('"json"', repr(str(code))))
    commands = [
        lambda *more: parse(["--config", str(config), *more], EXPERIMENT),
        lambda *more: RunDirectorySource(str(tmp_path / "run"), None, trust="--trust" in more),
    ]
    for command in commands:
        with pytest.raises(ConfigError, match="config.toml runs code, .*model.py.* pass --trust, or --import"):
            command()
    assert not ran(tmp_path)
    for command in commands:
        command("--trust")
    assert ran(tmp_path)


def test_what_the_command_line_imports_is_trusted(tmp_path, code):
    config = trained(tmp_path / "run", (str(code),))
    (tmp_path / "run" / ".imports").unlink()
    parse(["--config", str(config), "--import", str(code)], EXPERIMENT)
    assert ran(tmp_path)


def test_a_file_of_the_users_is_no_run_directory(tmp_path, code):
    """One that was written by hand or by the planner."""
    (tmp_path / "mine.toml").write_text(f'[options]\nimports = ["{code}"]\n')
    parse(["--config", str(tmp_path / "mine.toml")], EXPERIMENT)
    assert ran(tmp_path)


def test_a_run_without_imports_needs_neither_key_nor_signature(tmp_path):
    parse(["--config", str(trained(tmp_path / "run", ()))], EXPERIMENT)
    assert not (tmp_path / "state").exists() and not (tmp_path / "run" / ".imports").exists()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path, code, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    config = trained(tmp_path / "run", (str(code),))
    with pytest.raises(ConfigError, match="--trust"):
        parse(["--config", str(config)], EXPERIMENT)


def test_the_key_is_the_accounts_alone(tmp_path, code):
    trained(tmp_path / "run", (str(code),))
    key = tmp_path / "state" / "megajax" / "key"
    assert key.stat().st_mode & 0o077 == 0 and len(key.read_text()) == 64


def test_the_commands_have_the_option():
    words = ["--run-dir", "run", "--prompt", "a"]
    assert read_options([*words, "--trust"]).trust and not read_options(words).trust

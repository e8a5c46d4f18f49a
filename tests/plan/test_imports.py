"""Schedules and models from a user's files: planned and dry run by their names, in the compiler's process too."""

import dataclasses
import pickle
import sys
import tomllib

import pytest

from experiments import own_model
from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.plan import dryrun
from megajax.plan.__main__ import main
from megajax.plan.compiler import CompilerError, compile_for
from megajax.schedules import registry

SCHEDULE = """
from megajax.schedules.registry import register
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, pack

@register("{name}", simplicity=0)
def one_at_a_time(stages, microbatches, chunks):
    order = [Operation(op, 0, microbatch) for microbatch in range(microbatches) for op in (FORWARD, BACKWARD)]
    return pack("{name}", [order] * stages, microbatches=microbatches, paired=False)
"""


@pytest.fixture
def schedule(tmp_path, request):
    """(the name of a user's schedule, the file that registers it); unregistered afterwards."""
    name = f"one_at_a_time_{len(request.node.name)}"
    file = tmp_path / "mine.py"
    file.write_text(SCHEDULE.format(name=name))
    yield name, str(file)
    registry.SPECS.pop(name, None)


def test_a_users_schedule_is_searched_and_written(schedule, tmp_path, capsys):
    name, file = schedule
    words = "--model gpt3-13b --gpus 16 --gpu a100-80gb --global-batch-size 16 --microbatch-size 2 --recompute full"
    out = tmp_path / "plan.toml"
    assert main([*words.split(), "--import", file, "--schedule", name, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    tables = tomllib.loads(out.read_text())
    assert name in text and tables["options"]["imports"] == [file] and tables["parallel"]["schedule"] == name


def test_a_users_schedule_has_a_dry_run_without_the_compiler(schedule, capsys):
    name, file = schedule
    words = (
        f"--model gpt3-13b --gpu h100-80gb --pipe 4 --tensor 4 --global-batch-size 16 --schedule {name} --model-only"
    )
    assert dryrun.main([*words.split(), "--import", file]) == 0
    assert f"; {name}, 1 chunks" in capsys.readouterr().out


def test_a_run_of_a_users_file(tmp_path, capsys):
    file = tmp_path / "run.py"
    text = "from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset\n"
    file.write_text(text + "RUN = RunConfig(preset('gpt3-13b'), ParallelConfig(pipe=4, tensor=4), TrainConfig())\n")
    words = ["--run", str(file), "--gpu", "h100-80gb", "--model-only"]
    assert dryrun.main(words) == 0
    assert capsys.readouterr().out.startswith("gpt3-13b: 12.9B parameters on data 1 x pipe 4 x tensor 4 = 16 h100-80gb")
    for more, says in (
        ([*words, "--pipe", "2"], "--pipe 2 cannot be combined with --run"),
        (words, "has no RunConfig"),
    ):
        assert dryrun.main(more) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and says in error
        file = tmp_path / "empty.py"
        file.write_text("")
        words[1] = str(file)


def test_the_dry_run_of_another_model(capsys):
    assert dryrun.dry_run(own_model.RUN, find_gpu("h100-80gb"), compiling=False) == 0
    assert capsys.readouterr().out.startswith("denoiser: ")


@pytest.mark.slow
@pytest.mark.compiler
def test_another_model_compiles_in_the_compilers_process():
    compiled = compile_for(own_model.RUN, find_gpu("h100-80gb"))
    modelled = bytes_per_device(own_model.RUN)
    assert compiled["arguments"]["weights"] == modelled["weights"]
    assert compiled["arguments"]["optimizer"] == pytest.approx(modelled["optimizer"], abs=64)  # and the step's number


def test_a_file_that_cannot_be_imported_is_one_line(tmp_path, capsys):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    words = ["--model", "tiny", "--gpu", "h100-80gb"]
    for command, more in ((dryrun.main, []), (main, ["--gpus", "8", "--global-batch-size", "8"])):
        assert command([*words, *more, "--import", str(file)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and "ZeroDivisionError" in error


@pytest.mark.slow
@pytest.mark.compiler
def test_the_compilers_process_imports_the_users_files(schedule):
    name, file = schedule
    parallel = ParallelConfig(pipe=2, schedule=name)
    run = RunConfig(preset("tiny"), parallel, TrainConfig(global_batch_size=4), imports=(file,))
    assert compile_for(run, find_gpu("h100-80gb"))["memory"]["peak"] > 0
    with pytest.raises(CompilerError, match="is unknown"):
        compile_for(dataclasses.replace(run, imports=()), find_gpu("h100-80gb"))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A configuration that is no ModelConfig."""

    name: str = "mine"
    layers: int = 2


def test_any_dataclass_reaches_the_compilers_process(monkeypatch, tmp_path):
    """It is pickled; a class of the script that is run is found there again."""
    from megajax.plan import compiler

    sent = {}

    def stop(command, **_):
        file = command[3]
        sent.update(pickle.loads(open(file, "rb").read()), command=command)
        raise compiler.subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(compiler, "has_compiler", lambda: True)
    monkeypatch.setattr(compiler, "gpu_flags", lambda users: (users, ()))
    monkeypatch.setattr(compiler.subprocess, "run", stop)
    run = RunConfig(Shape(), ParallelConfig(), TrainConfig(), imports=("a.py", "b"))
    with pytest.raises(CompilerError, match="took longer"):
        compile_for(run, find_gpu("h100-80gb"), 1)
    assert pickle.loads(sent["run"]) == run and sent["script"] is None
    assert sent["command"][-2:] == ["a.py", "b"]
    monkeypatch.setattr(Shape, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Shape", Shape, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    with pytest.raises(CompilerError):
        compile_for(run, find_gpu("h100-80gb"), 1)
    assert sent["script"] == "script.py"

"""`python -m benchmarks.gpu_day`: what is wrong, slow, hangs or crashes is a result, and a second start continues."""

import dataclasses
import importlib
import inspect
import json
import pathlib
import re
import time
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_day import compiling, kernels, verdict
from benchmarks.gpu_day.__main__ import main
from benchmarks.gpu_day.cases import Case, cases
from benchmarks.gpu_day.compiling import compiled_case
from benchmarks.gpu_day.outcomes import NotAvailable, Refused, Wrong
from benchmarks.gpu_day.programs import Programs, compiled
from benchmarks.gpu_day.runner import Store, _devices, run_all, run_case
from megajax.config.cli import parse
from megajax.ops.attention import Kernel
from megajax.ops.attention_kernels import XLA
from megajax.plan.compiler import MISSING_PLUGIN, has_compiler
from megajax.runtime.compat_kernels import tokamax_installed

HEADER = {
    "device": {"platform": "cpu", "kind": "cpu", "count": 1},
    "versions": {"jax": "1"},
    "command": "",
    "started": "",
}


def case(function: str, **arguments) -> Case:
    part, deadline = "steps" if function == "slow" else "losses", 3 if function == "hangs" else 60
    return Case(function, part, f"tests.benchmarks.planted.{function}", arguments, deadline=deadline)


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        ("wrong", "wrong", "losses differ by 1.0e+00 from those of a CPU, more than 1e-03"),
        ("slow", "slow", "a step takes 3.0 times what its compiled program predicts"),
        ("lacks", "not run", "torch is not installed"),
        ("hangs", "hang", "no result after 3 s: the process was killed"),
        ("crashes", "error", "exit code 7: a last word"),
        ("raises", "error", "exit code 1: ValueError: no such kernel"),
    ],
)
def test_what_goes_wrong_is_a_result(function, status, reason, tmp_path):
    result = run_case(case(function), logs=tmp_path / "logs")
    assert (result["name"], result["status"], result["reason"]) == (function, status, reason)
    assert (tmp_path / "logs" / f"{function}.log").exists() == (status in ("error", "hang"))
    assert any(claim.holds is False for claim in verdict.claims({**HEADER, "cases": [result]})) == (status != "not run")


def test_a_second_start_continues(tmp_path):
    path, lines = tmp_path / "day.json", []
    run = partial(run_all, [case("passes", number=1), case("wrong")], jobs=2, tell=lines.append)
    run(Store(path, HEADER), ends=time.monotonic())
    assert [one["status"] for one in json.loads(path.read_text())["cases"]] == ["not run"] * 2
    for _ in range(2):
        run(Store(path, HEADER), ends=float("inf"))
    found = {one["name"]: one["status"] for one in json.loads(path.read_text())["cases"]}
    assert found == {"passes": "passed", "wrong": "wrong"} and len(lines) == 4  # the third start ran nothing
    assert not Store(path, HEADER | {"versions": {"jax": "2"}}).results["cases"]


def test_ctrl_c_ends_the_processes_of_cases(tmp_path):
    def interrupt(line):
        raise KeyboardInterrupt

    sleeper = dataclasses.replace(case("hangs"), deadline=600)
    sleeper.arguments["pid_file"] = str(tmp_path / "pid")
    both, store = [case("waits_for", path=str(tmp_path / "pid")), sleeper], Store(tmp_path / "day.json", HEADER)
    with pytest.raises(KeyboardInterrupt):
        run_all(both, store, 2, float("inf"), interrupt)
    pid = int((tmp_path / "pid").read_text())
    while is_running(pid):  # until the test's time limit
        time.sleep(0.05)
    time.sleep(0.2)
    assert not store.has("hangs")  # a second start runs it


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return False


def test_a_wrong_kernel_is_found(monkeypatch):
    """A mask that hides one key too many, and a gradient of keys that is 2% too large."""
    monkeypatch.setattr(kernels, "SHAPES", [(64, 2, True, "documents")] * 3)
    assert kernels.attention("xla", tiny=True)["rows"]

    def forward(query, key, value, causal, first):
        return XLA.forward(query, key, value, causal, jnp.minimum(first + 1, jnp.arange(query.shape[1])))

    def backward(*arguments):
        of_query, of_key, of_value = XLA.backward(*arguments)
        return of_query, 1.02 * of_key, of_value

    for broken in (Kernel(forward, XLA.backward), Kernel(XLA.forward, backward)):
        monkeypatch.setattr("megajax.ops.attention_kernels.XLA", broken)
        with pytest.raises(Wrong, match="3 of 3 differ from fp64 by more than their limit"):
            kernels.attention("xla", tiny=True)


def test_a_result_that_is_not_a_number_is_wrong():
    assert kernels.error(np.array([1.0, np.nan]), np.ones(2)) == float("inf")


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_cases_can_be_called(gpus, tiny):
    found = cases(gpus, tiny)
    assert len({one.name for one in found}) == len(found)
    for one in found:
        module, _, name = one.function.rpartition(".")
        inspect.signature(getattr(importlib.import_module(module), name)).bind(**one.arguments)
    meshes = [one for one in found if "--pipe 2" in one.name]
    assert bool(meshes) == (gpus > 1)


def test_wrong_options_are_one_line(capsys, tmp_path):
    (tmp_path / "file").touch()
    for words, text in {
        ("--out", str(tmp_path / "file")): "is a file: pass --out FOLDER",
        ("--minutes", "soon"): "minutes",
        ("--only", "nothing"): "only = nothing begins no case's name",
    }.items():
        assert main(["--devices", "cpu:1", "--out", str(tmp_path / "out"), *words]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_planted_faults_are_in_the_json_and_on_the_page(monkeypatch, tmp_path):
    """A wrong kernel, a hang and a slow step, beside a case that passes."""
    planted = [case("passes", number=1), case("hangs"), case("slow"), case("wrong_kernel")]
    planted[-1] = dataclasses.replace(planted[-1], part="kernels")
    monkeypatch.setattr("benchmarks.gpu_day.__main__.cases", lambda *_: planted)
    assert main(["--devices", "cpu:1", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu_day_cpu.json").read_text())["cases"]
    assert {one["name"]: one["status"] for one in found} == {
        "passes": "passed",
        "hangs": "hang",
        "slow": "slow",
        "wrong_kernel": "wrong",
    }
    text = re.sub("<[^>]+>", " ", (tmp_path / "gpu_day_cpu.html").read_text())
    verdict_, listed = text.partition("All cases")[0], text.partition("Did not pass")[2].partition("Losses")[0]
    assert "1 case hung: hangs." in verdict_ and "The kernels do not all agree" in verdict_
    assert "More than 2 times the predicted time: slow." in verdict_
    for name, reason in {
        "hangs": "no result after 3 s: the process was killed",
        "slow": "a step takes 3.0 times what its compiled program predicts",
        "wrong_kernel": "differ from fp64 by more than their limit: xla: bfloat16",
    }.items():
        assert name in listed and reason in listed
    assert "passes" not in listed


def test_a_case_of_one_device_sees_one(monkeypatch):
    one, all_of_them = cases(8, tiny=True)[0], next(c for c in cases(8, tiny=True) if "--pipe 2" in c.name)
    monkeypatch.setenv("MEGAJAX_GPU_DAY_DEVICES", "cpu:8")
    assert _devices(one) == {"MEGAJAX_GPU_DAY_DEVICES": "cpu:1"} and _devices(all_of_them) == {}
    monkeypatch.delenv("MEGAJAX_GPU_DAY_DEVICES")
    monkeypatch.setenv("MEGAJAX_GPU_DAY_GPUS", "3,5")
    visible = {_devices(one)["CUDA_VISIBLE_DEVICES"] for one in cases(8, tiny=False) if one.one_device}
    assert visible == {"3", "5"}


def test_every_case_compiles_or_says_why_not():
    """The functions of --compile-only take the arguments of those that run."""
    for one in cases(8, tiny=False):
        twin = compiled_case(one, "h100-80gb", 8)
        module, _, name = twin.function.rpartition(".")
        inspect.signature(getattr(importlib.import_module(module), name)).bind(**twin.arguments)
        assert (twin.name, twin.part) == (one.name, "compiled")
        assert twin.environment["MEGAJAX_GPU_DAY_TARGET"] == "h100-80gb:8"


def test_a_step_whose_kernels_are_not_installed_is_not_compiled(monkeypatch):
    """`--attention auto` names kernels that the machine with the GPUs has; without them the case is not run."""
    monkeypatch.setattr(compiling, "tokamax_installed", lambda: False)
    run = parse("--model gpt2 --attention tokamax --precision bf16".split(), "", {}).run(1, "bf16")
    with pytest.raises(NotAvailable, match="tokamax is not installed: .* pip install"):
        compiling.step(run, "a step")


@pytest.mark.skipif(not has_compiler(), reason=MISSING_PLUGIN)
def test_kernels_are_compiled_and_a_refused_one_is_a_result(tmp_path, monkeypatch):
    words = ["--tiny", "--compile-only", "h100-80gb", "--only", "kernels: grouped matmul x", "--out", str(tmp_path)]
    assert main(words) == 0
    found = json.loads((tmp_path / "gpu_day_compiled_h100_80gb.json").read_text())["cases"]
    assert [one["status"] for one in found] == ["passed"]
    assert all(row["seconds"] > 0 and row["problem"] is None for one in found for row in one["result"]["rows"])
    monkeypatch.setenv("MEGAJAX_GPU_DAY_TARGET", "h100-80gb:8")
    programs = Programs()
    programs.call("fits", lambda x: x + 1, np.ones(3))
    programs.call("too much", lambda x: x @ x, np.ones(3).reshape(1, 3))
    with pytest.raises(Refused, match="1 of 2 programs do not compile: too much: TypeError"):
        compiled(programs.rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.compiler
@pytest.mark.parametrize("gpu", ["h100-80gb", "b200"])
def test_rates_and_steps_are_compiled(gpu, tmp_path):
    """Those of other programs too: of tokamax, where it is installed, and of plain JAX."""
    words = ["--tiny", "--compile-only", gpu, "--only", "rates:", "--only", "steps:", "--out", str(tmp_path)]
    assert main(words) == 0
    found = json.loads(next(tmp_path.glob("gpu_day_compiled_*.json")).read_text())["cases"]
    status = {one["name"]: one["status"] for one in found}
    assert [name for name, one in status.items() if one != "passed"] == ["steps: tiny, PyTorch", "rates: calibration"]
    labels = {row["label"].split(":")[0] for one in found if one["result"] for row in one["result"]["rows"]}
    assert not tokamax_installed() or {"tokamax", "tokamax, its own backward"} < labels


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_small_cases_on_cpu_devices(tmp_path):
    assert main(["--tiny", "--out", str(tmp_path), "--jobs", "2"]) == 0
    results = json.loads((tmp_path / "gpu_day_cpu.json").read_text())
    status = {one["name"]: one["status"] for one in results["cases"]}
    assert set(status.values()) == {"passed", "not run"}
    assert {name for name, one in status.items() if one == "not run"} >= {
        "losses: gpt bf16 cudnn",
        "steps: tiny, plain JAX",
    }
    assert "<html" in (tmp_path / "gpu_day_cpu.html").read_text()

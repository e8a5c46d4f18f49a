"""benchmarks/mfu.py: the runs of its sweeps, the rates of its rows, its error messages; one tiny run."""

import json
import pathlib
import re
import shutil
import sys

import pytest

from benchmarks import mfu, mfu_cases, mfu_report, peers
from megajax.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.plan import measure

TINY = "--model tiny --layers 4 --hidden 16 --heads 4 --vocabulary 32 --sequence-length 8 --devices cpu:8"
RESULTS = pathlib.Path(mfu.__file__).parent / "results"
MODEL = ModelConfig(name="m", layers=4, hidden=16, heads=4, vocabulary=32, sequence_length=8)


def base(**parallel) -> RunConfig:
    parallel = ParallelConfig(**{"data": 2, "pipe": 2, "tensor": 2, "chunks": 2, "microbatch_size": 2} | parallel)
    return RunConfig(MODEL, parallel, TrainConfig(global_batch_size=16, precision="fp32"))


def test_a_sweep_varies_one_option():
    cases = mfu_cases.sweeps(base(), None, None, (1, 2, 4), ("none", "full"))
    labels = {sweep: [case.label for case in cases if case.sweep == sweep] for sweep in {one.sweep for one in cases}}
    # pipe = 8 has too few layers, tensor = 8 too few heads
    assert sorted(labels["mesh shape"]) == sorted(
        f"d{data} p{pipe} t{tensor}"
        for data, pipe, tensor in (
            *((8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4)),
        )
    )
    assert labels["microbatch size"] == ["b1", "b2", "b4"] and labels["recompute"] == ["none", "full"]
    assert {"gpipe", "1f1b", "interleaved_1f1b v2", "zb_v v2"} <= set(labels["schedule"])
    assert {case.run.parallel.devices for case in cases} == {8}
    assert {case.run.train.global_batch_size for case in cases} == {16}
    whole = next(case.run for case in cases if case.label == "d2 p4 t1")
    assert whole.parallel.chunks == 1  # four layers on four ranks; the base has two chunks


def test_blocks_are_as_deep_as_memory_allows():
    one = base(data=1, pipe=1, tensor=1, chunks=1, microbatch_size=1)
    shapes = lambda limit, layers=None: {  # noqa: E731
        case.label: (case.run.model.layers, case.run.model.heads)
        for case in mfu_cases.blocks(one, (2304, 12288), (1, 8), limit, layers)
    }
    # 18 bytes of a parameter: 12 h^2 of them a layer, so 1.1 GB a layer and 33 GB
    assert shapes(64_000_000_000) == {
        "h2304 b1": (8, 24),
        "h2304 b8": (8, 24),
        "h12288 b1": (1, 96),
        "h12288 b8": (1, 96),
    }
    assert shapes(10**12)["h12288 b1"] == (8, 96)
    assert shapes(10**12, 3)["h12288 b1"] == (3, 96) and shapes(None)["h2304 b1"] == (2, 24)


def test_rates_of_a_row_by_hand():
    results = {
        "device": {"platform": "gpu"},
        "peak": {"flops": 1e12, "source": "published"},
        "ceilings": {"matmul_flops": 5e11},
    }
    run = base()
    row = mfu.row(mfu_cases.Case("sweep", "label", run), [3.0, 1.0, 2.0], results)
    assert row["seconds"] == 2.0  # the median
    assert row["tokens_per_second"] == 16 * 8 / 2.0
    # 2205.05198 appendix A: 72 B L s h^2 (1 + s/(6h) + V/(12hL))
    flops = 72 * 16 * 4 * 8 * 16**2 * (1 + 8 / (6 * 16) + 32 / (12 * 16 * 4))
    assert row["teraflops_per_device"] == pytest.approx(flops / 2.0 / 8 / 1e12)
    assert row["mfu"] == pytest.approx(flops / 2.0 / 8 / 1e12)
    causal = 72 * 16 * 4 * 8 * 16**2 * (1 + 8 / (12 * 16) + 32 / (12 * 16 * 4))  # half of the scores
    assert row["mfu_causal"] == pytest.approx(causal / 2.0 / 8 / 1e12)
    assert row["share_of_ceiling"] == pytest.approx(2 * row["mfu"])
    results["device"]["platform"], results["peak"], results["ceilings"] = "cpu", None, {}
    row = mfu.row(mfu_cases.Case("sweep", "label", run), [3.0, 1.0, 2.0], results)
    assert row["seconds"] == 1.0 and row["mfu"] is row["mfu_causal"] is row["share_of_ceiling"] is None
    assert mfu.row(mfu_cases.Case("sweep", "label", run), [], results)["tokens_per_second"] is None


def test_the_ceiling_counts_flops(monkeypatch):
    import jax

    device = jax.devices("cpu")[0]
    assert measure.matmul_ceiling(device, "fp32", (64,), 1e6, 0.01) > 1e6
    monkeypatch.setattr(measure, "mean_seconds", lambda call, seconds: float(call().size))
    assert measure.matmul_ceiling(device, "fp32", (64,), 1e6, 0.01) == 2 * 64**3 * 2 / 64**2  # two in 1e6 FLOPs


@pytest.mark.slow
def test_a_run_is_measured_and_written(tmp_path, capsys):
    words = f"{TINY} --data 1 --pipe 1 --tensor 1 --microbatch-sizes 1 --recomputes selective --rounds 2"
    words += " --global-batch-size 2 --microbatch-size 1"
    assert mfu.main([*words.split(), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "only ratios are meaningful" in out and "MFU" not in out
    results = json.loads((tmp_path / "mfu_cpu.json").read_text())
    assert results["command"].startswith("python -m benchmarks.mfu --model tiny") and "--out" not in results["command"]
    assert results["versions"]["jax"] and results["device"]["kind"] == "cpu"
    assert [row["sweep"] for row in results["rows"]] == ["mesh shape", "microbatch size", "recompute"]
    first = results["rows"][0]
    assert len(first["rounds"]) == 2 and first["seconds"] == min(first["rounds"])
    assert {tuple(row["rounds"]) for row in results["rows"]} == {tuple(first["rounds"])}  # one run, measured once
    assert (tmp_path / "mfu_cpu.txt").read_text() in out
    assert "<svg" in (tmp_path / "mfu_cpu.svg").read_text()


def results_on_a_gpu() -> dict:
    run = base(data=1, pipe=1, tensor=1, chunks=1)
    results = {
        "command": "c",
        "device": {"platform": "gpu", "kind": "NVIDIA H200", "count": 1, "cores": 2},
        "versions": {"jax": "0"},
        "peak": {"flops": 1e12, "source": "published"},
        "ceilings": {"matmul_flops": 5e11, "copy_bytes": 4e12},
    }
    return results | {"rows": [mfu.row(mfu_cases.Case("blocks", "h16 b2", run), [1e-3], results)]}


def peer(tmp_path, code: str):
    file = tmp_path / "peer.py"
    file.write_text(code)
    return file


def test_peers_follow_the_run_of_their_shape(tmp_path, monkeypatch):
    args = mfu.read_options(["--peers"])
    answer = json.dumps({"seconds": 2e-3, "versions": {"torch": "9"}})
    code = f"import json, sys\nfor shape in json.load(sys.stdin)['shapes']: print('{answer}')"
    monkeypatch.setattr(mfu, "PEERS", {"good": peer(tmp_path, code)})
    results = results_on_a_gpu()
    results["peers"] = mfu.peer_rows(args, results)
    assert results["peers"][0]["tokens_per_second"] == results["rows"][0]["tokens_per_second"] / 2
    text = mfu_report.table(results).splitlines()
    below = text[next(number for number, line in enumerate(text) if line.startswith("h16 b2")) + 1]
    assert below.split()[0] == "good" and text[-1] == "peers: torch 9"
    mfu_report.plot(results, tmp_path / "p.svg")
    assert "good, h16 b2" in (tmp_path / "p.svg").read_text()


def test_a_peer_that_cannot_run_is_one_line(tmp_path, monkeypatch):
    args = mfu.read_options(["--peers"])
    missing = "import sys; print('torch is not installed', file=sys.stderr); sys.exit(3)"
    for code, says in (
        (missing, "pip install torch"),
        ("raise ValueError('x')", "it exited with code 1: ValueError: x"),
    ):
        monkeypatch.setattr(mfu, "PEERS", {"bad": peer(tmp_path, code)})
        results = results_on_a_gpu()
        results["peers"] = mfu.peer_rows(args, results)
        assert says in mfu_report.table(results)


def test_the_parameters_that_a_peer_gets():
    assert peers.shape_of(base()) == {
        "layers": 4,
        "hidden": 16,
        "heads": 4,
        "vocabulary": 32,
        "sequence_length": 8,
        "microbatch_size": 2,
        "microbatches": 4,
        "precision": "fp32",
    }


def test_the_command_has_no_paths_of_this_machine():
    assert mfu.repeatable(["--blocks", "--out", "/a/b", "--peer-python", "/c/python", "--rounds", "2"]) == (
        "python -m benchmarks.mfu --blocks --peer-python PYTHON --rounds 2"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--meshes 2x2x2", "meshes = '2x2x2' is not DATA,PIPE,TENSOR"),
        ("--meshes 1,8,1", "layers = 4 cannot be cut"),
        ("--schedules 1f1b:x", "schedules = '1f1b:x' is not NAME or NAME:CHUNKS"),
        ("--schedules 1f1b --pipe 1", "schedules = 1f1b differ only with a pipeline"),
        ("--rounds 0", "--rounds: 0 must be a whole number, 1 or more"),
        ("--microbatch-sizes two", "--microbatch-sizes: 'two' is not a whole number"),
        ("--recomputes some", "recompute = 'some' is not known"),
        ("--modle tiny", "there is no option --modle: did you mean --model"),
        ("--blocks 0", "--blocks: 0 must be a whole number, 1 or more"),
        ("--blocks --data 2", "blocks run on one device, not 2"),
        ("--peers --peer-python /no/python", "peer_python = /no/python is not a program"),
    ],
)
def test_wrong_input_is_one_line(words, says, capsys, tmp_path):
    assert mfu.main([*TINY.split(), *words.split(), "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error


def test_peers_need_a_run_on_one_device():
    with pytest.raises(ConfigError, match="peers run on one device, and no run here does"):
        mfu.measure(mfu.read_options([*TINY.split(), "--peers"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_run(name):
    """If torch and transformers are installed."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    (answer,) = peers.run_peer(peers.PEERS[name], sys.executable, [base(data=1, pipe=1, tensor=1)], "cpu", 2)
    assert answer["seconds"] > 0 and answer["versions"]["torch"]


def test_results_on_file_are_the_table_and_the_plot_on_file(tmp_path, capsys):
    """benchmarks/results/mfu_cpu.txt and .svg are what their .json gives."""
    files = [RESULTS / f"mfu_cpu.{ending}" for ending in ("json", "txt", "svg")]
    for file in files:
        shutil.copy(file, tmp_path)
    for file in files[1:]:
        (tmp_path / file.name).write_text("")
    assert mfu.main(["--redraw", str(tmp_path / "mfu_cpu.json")]) == 0
    drawn = lambda path: re.findall(r">([^<>]+)</text>", path.read_text())  # noqa: E731 (matplotlibs' paths differ)
    assert len(drawn(files[2])) > 5 and drawn(tmp_path / files[2].name) == drawn(files[2])
    for file in files[:2]:
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    assert files[1].read_text() in capsys.readouterr().out
    (tmp_path / "other.json").write_text("[1]")
    for name, says in (("no.json", "cannot read"), ("other.json", "has no results of benchmarks.mfu")):
        assert mfu.main(["--redraw", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1

"""The planner's command line: its output, the file it writes, and its error messages."""

import dataclasses
import re
import sys
import tomllib

import pytest

from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.toml import toml_text
from megajax.estimate.gpus import find_gpu
from megajax.plan.__main__ import config_sections, main
from megajax.plan.report import PARTS, memory_bar, smallest
from megajax.plan.search import Question, search

SMALL = "--model gpt3-13b --gpus 32 --gpu a100-80gb --global-batch-size 64"

FEW = f"{SMALL} --schedule 1f1b --microbatch-size 1 2"  # of SMALL's layouts


def read(path) -> RunConfig:
    """The file as a RunConfig, as experiments.gpt3 reads it: the preset, then the values in the file."""
    tables = tomllib.loads(path.read_text())
    known = {"options", "model", "parallel", "train"}
    assert set(tables) <= known
    lists = lambda table: {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}  # noqa: E731
    model = dataclasses.replace(preset(tables["options"]["model"]), **lists(tables.get("model", {})))
    return RunConfig(model, ParallelConfig(**lists(tables["parallel"])), TrainConfig(**lists(tables["train"])))


def test_prints_the_best_layouts_and_writes_the_fastest(tmp_path, capsys):
    out = tmp_path / "plan.toml"
    assert main([*SMALL.split(), "--out", str(out), "--top", "4"]) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("gpt3-13b: 12.9B parameters on 32 a100-80gb")
        and " layouts priced, no other can be faster" in text
    )
    rows = [line for line in text.splitlines() if line[2:3] == "." and line[:2].strip().isdigit()]
    assert len(rows) == 4
    run = read(out)
    run.validate(32)
    first = rows[0].split()
    parallel = run.parallel
    assert first[1:7] == [
        str(n)
        for n in (
            parallel.tensor,
            parallel.pipe,
            parallel.data,
            parallel.chunks,
            parallel.microbatch_size,
            run.microbatches,
        )
    ]
    assert run.train.global_batch_size == 64 and f"--config {out}" in text


def test_a_sparse_model_names_the_parameters_of_a_token(tmp_path, capsys):
    words = "--model mixtral-8x7b --gpus 64 --gpu h100-80gb --global-batch-size 64 --schedule 1f1b --top 1"
    words += " --recompute selective --expert 2 --zero 0 --context 1 --vocab-parallel pipe"
    assert main([*words.split(), "--memory-margin", "0", "--out", str(tmp_path / "plan.toml")]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("mixtral-8x7b: 46.7B parameters (12.9B for a token) on 64 h100-80gb")
    assert rest[1].startswith("experts: FLOPs and times are those of balanced routing")
    best = read(tmp_path / "plan.toml").parallel
    (row,) = (line for line in rest if line.startswith(" 1."))
    assert best.expert > 1 and f"  expert {best.expert}" in row
    assert row.endswith("  !") and any(line.startswith("!: less than 5% of the usable memory is free") for line in rest)
    assert read(tmp_path / "plan.toml").model == preset("mixtral-8x7b")


def test_experts_over_tensor_ranks_are_in_a_row_and_in_the_plan(tmp_path, capsys):
    words = "--model mixtral-8x7b --gpus 64 --gpu h100-80gb --global-batch-size 64 --schedule 1f1b --top 64 --zero 1"
    words += " --recompute selective --expert 4 8 --expert-tensor 1 --context 1 --vocab-parallel pipe --explain e8"
    assert main([*words.split(), "--out", str(tmp_path / "plan.toml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line[2:3] == "." and line[:2].strip().isdigit()]
    assert rows and all(re.search(r"  expert [48], expert-tensor 1", row) for row in rows)
    assert not any(row.split()[1] == "1" for row in rows)  # tensor
    assert read(tmp_path / "plan.toml").parallel.expert_tensor == 1
    assert any(line.startswith("e8: the best of") and "expert 8, expert tensor 1" in line for line in lines)


def test_a_changed_model_is_written_as_what_differs_from_its_preset(tmp_path):
    out = tmp_path / "plan.toml"
    words = "--model gpt3-175b --layers 32 --hidden 20480 --heads 128 --gpus 64 --gpu a100-80gb --global-batch-size 128"
    words += " --vocab-parallel tensor"
    assert main([*words.split(), "--out", str(out)]) == 0
    assert tomllib.loads(out.read_text())["model"] == {"layers": 32, "hidden": 20480, "heads": 128}
    run = read(out)
    assert (run.parallel.tensor, run.parallel.pipe, run.parallel.data) == (8, 8, 1)


def test_the_file_holds_every_kind_of_value():
    model = ModelConfig(layers=2, hidden=8, heads=2, vocabulary=10, sequence_length=4, dropout=0.25, biases=False)
    text = toml_text(config_sections(RunConfig(model, ParallelConfig(), TrainConfig()), "tiny"), "two\nlines")
    assert text.startswith("# two\n# lines\n")
    tables = tomllib.loads(text)
    assert tables["model"]["dropout"] == 0.25 and tables["model"]["biases"] is False
    assert tables["parallel"]["axis_order"] == ["data", "pipe", "tensor"]
    assert "kv_heads" not in tables["model"]  # None: not given


def test_the_layouts_are_drawn(tmp_path):
    picture = tmp_path / "shapes.svg"
    assert main([*FEW.split(), "--out", str(tmp_path / "p"), "--plot", str(picture)]) == 0
    assert "<svg" in picture.read_text()


def test_drawing_without_matplotlib_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it fails
    assert main([*FEW.split(), "--out", str(tmp_path / "p"), "--plot", str(tmp_path / "shapes.svg")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'megajax[plot]'" in error


def test_zero_is_written(tmp_path):
    out = tmp_path / "plan.toml"
    words = "--model gpt3-13b --gpus 64 --gpu a100-80gb --global-batch-size 512 --zero 1 --schedule 1f1b"
    assert main([*words.split(), "--out", str(out)]) == 0
    assert read(out).parallel.zero == 1


def test_the_attention_that_the_gpus_would_run(tmp_path, capsys):
    """--attention auto stays auto in the file, so that it also runs without cuDNN."""
    out, seconds = tmp_path / "plan.toml", {}
    for words, shown, written in (("", "cudnn", "auto"), ("--attention xla", "xla", "xla")):
        assert main([*FEW.split(), *words.split(), "--out", str(out)]) == 0
        text = capsys.readouterr().out
        assert f"attention {shown}," in text and read(out).parallel.attention == written
        seconds[shown] = float(next(line for line in text.splitlines() if line.startswith(" 1.")).split()[10])
    assert seconds["cudnn"] < seconds["xla"]


def test_the_search_reports_that_nothing_fits(tmp_path, capsys):
    words = "--model gpt3-1t --gpus 8 --gpu a100-80gb --global-batch-size 64"
    assert main([*words.split(), "--out", str(tmp_path / "p")]) == 1
    out = capsys.readouterr().out
    assert "nothing fits; the smallest:" in out and out.splitlines()[-1] == "pass --gpus 256"


def test_it_says_that_zero_would_fit():
    """Two layers on two stages, without tensor parallelism: only ZeRO splits them further."""
    model = dataclasses.replace(preset("gpt3-175b"), layers=2)
    question = Question(model, 8, find_gpu("a100-40gb"), 64, tensor_sizes=(1,))
    *_, advice = smallest(search(question)).splitlines()
    assert advice.startswith("pass --zero ") and advice[-1] in "13"
    assert search(dataclasses.replace(question, zero=(int(advice[-1]),)))[0].fits


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model gpt3-17b --gpus 8 --gpu a100-80gb --global-batch-size 8", "model = 'gpt3-17b' is not a preset"),
        ("--model gpt2 --gpus 8 --gpu a100 --global-batch-size 8", "gpu = 'a100' is not known"),
        ("--model gpt2 --gpus 0 --gpu a100-80gb --global-batch-size 8", "--gpus: 0 must be a whole number, 1 or more"),
        ("--model gpt2 --gpus 8 --gpu a100-80gb", "--global-batch-size"),
        ("--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --heads 7", "is not a multiple of heads = 7"),
        ("--model gpt2 --gpus x --gpu a100-80gb --global-batch-size 8", "--gpus: 'x' is not a whole number"),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --microbatch-size 0",
            "--microbatch-size: 0 must be",
        ),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --out /no/such/plan.toml",
            "cannot write /no/such/plan.toml: No such file or directory; pass --out",
        ),
        (
            "--model gpt3-530b --gpus 8 --gpu a100-80gb --global-batch-size 8 --attention cudnn",
            "attention = cudnn, but cuDNN's",
        ),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --tokens -1",
            "--tokens: -1.0 must be a number, above 0",
        ),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --tokens inf",
            "--tokens: inf must be a number, above 0",
        ),
        ("--model gpt2 --gpus 9999999 --gpu a100-80gb --global-batch-size 8", "--gpus: 9999999 must be"),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --layers 100000",
            "layers = 100000 must be at most 1024",
        ),
        ("--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --out=", "--out: '' must not be empty"),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --microbatch-size 3 5",
            "takes a global batch of 8 with --microbatch-size 3 5: omit --microbatch-size, or",
        ),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --schedule pipedream_2bw --precision fp16",
            "with --schedule pipedream_2bw: omit --schedule, or",
        ),
        pytest.param(
            "--model gpt2 --gpus 97 --gpu a100-80gb --global-batch-size 8",
            "takes a global batch of 8; the nearest with good layouts: pass --gpus 96 (",
            marks=pytest.mark.slow,
        ),
        ("--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --zero 2", "--zero: invalid choice: 2"),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --precision fp8",
            "--precision: invalid choice: 'fp8'",
        ),
        (
            "--model gpt2 --gpus 8 --gpu a100-80gb --global-batch-size 8 --plot x.jpg2",
            "--plot: 'x.jpg2' is not the name of a picture: end it in .svg",
        ),
    ],
)
def test_wrong_input_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error


def test_the_memory_bar_by_hand():
    bar = memory_bar({"weights": 25, "optimizer": 50}, 100, 8)
    assert bar == "wwoooo.."
    over = memory_bar({"weights": 50, "stash": 100}, 100, 8)
    assert over == "wwwwssss|ssss"
    assert len(set(PARTS.values())) == len(PARTS)

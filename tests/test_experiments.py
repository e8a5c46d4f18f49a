"""The experiments from the command line: options, error lines, recipes, a short run, a replay."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import gpt2, gpt3
from megajax.train.sinks import read_steps

ROOT = pathlib.Path(__file__).parent.parent


def command(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiled faster
    words = [sys.executable, "-m", "experiments.gpt3", *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_a_short_run(tmp_path):
    """Trains, validates, samples, and writes one JSON object per step."""
    log = tmp_path / "log.jsonl"
    small = (
        "--steps 3 --layers 4 --hidden 32 --sequence-length 16 --global-batch-size 8 --microbatch-size 1 --new-tokens 5"
    )
    done = command("--devices", "cpu:8", *small.split(), "--validation-batches", "1", "--log-jsonl", str(log))
    assert done.returncode == 0, done.stderr
    assert "data 2 x pipe 2 x tensor 2 on 8 cpu devices" in done.stdout
    assert "schedule  interleaved_1f1b, 2 chunks a rank, 4 microbatches" in done.stdout
    changed = (
        "--hidden 32 --sequence-length 16 --microbatch-size 1 --global-batch-size 8 --steps 3 --validation-batches 1"
    )
    assert f"config    {changed} --log-jsonl {log}\n" in done.stdout  # what differs from the defaults, and no more
    assert "step 3: validation loss" in done.stdout and "a sample, continuing 'The ':\nThe " in done.stdout
    steps = read_steps(log)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_second", "tflops_per_device"} <= steps[0].keys()
    assert "mfu" not in steps[0] and "MFU" not in done.stdout  # CPU devices have no peak
    assert 5 < steps[0]["loss"] < 6.5 and steps[2]["loss"] < steps[0]["loss"]


def test_shapes_without_the_devices():
    done = command(
        "--model", "gpt3-175b", "--steps", "1", "--pipe", "8", "--tensor", "8", "--chunks", "3", "--dry-shapes"
    )
    assert done.returncode == 0, done.stderr
    assert "gpt3-175b: 174,615,846,912 parameters on data 1 x pipe 8 x tensor 8 = 64 devices" in done.stdout
    up = next(line for line in done.stdout.splitlines() if "feedforward/up/kernel" in line)
    assert "float32[3, 8, 4, 12288, 49152]" in up and "(None, 'pipe', None, None, 'tensor')" in up
    assert up.endswith(f"{3 * 4 * 12288 * 49152 // 8 * 4:,}")


def test_too_few_devices_ends_without_a_traceback(capsys):
    assert gpt3.main("--devices cpu:4 --pipe 4 --tensor 2 --data 1".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "= 8 devices, but there are 4" in error


BAD = [
    (["--layers", "3", "--pipe", "4", "--data", "1", "--tensor", "2"], "layers"),
    (["--heads", "3", "--hidden", "96"], "--tensor"),
    (["--global-batch-size", "15"], "global_batch_size"),
    (["--global-batch-size", "12"], "microbatches"),  # 3 microbatches, not a multiple of 2 stages
    (["--schedule", "1f1", "--data", "2"], "did you mean 1f1b"),
    (["--schedule", "gpipe", "--chunks", "2"], "chunks"),
    (["--model", "gpt3-174b"], "did you mean"),
    (["--recompute", "some"], "recompute"),
    (["--precision", "fp8"], "fp16"),
    (["--sequence-length", "127"], "sequence_length"),
    (["--steps", "many"], "--steps"),
    (["--stpes", "3"], "--steps"),
    (["--learning-rate", "-1"], "learning_rate"),
    (["--dropout", "1.5"], "dropout"),
    (["--text", "/nowhere/text.txt"], "/nowhere/text.txt"),
    (["--tokenizer", "gpt-2"], "did you mean gpt2"),
    (["--tokenizer", "gpt2"], "--vocabulary 50257"),
    (["--log-jsonl", "/nowhere/log.jsonl"], "/nowhere/log.jsonl"),
    (["--devices", "tpu"], "--devices"),
    (["--prompt"], "--prompt"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_clear_line(arguments, message, capsys):
    """In this process, which has eight CPU devices."""
    devices = [] if "--devices" in arguments else ["--devices", "cpu:8"]
    assert gpt3.main([*arguments, *devices]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert message in error


def test_help_shows_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        gpt3.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options = "model data pipe tensor chunks schedule microbatch-size global-batch-size sequence-length recompute steps"
    options += " learning-rate seed precision dropout devices log-jsonl sequence-parallel dry-shapes text tokenizer"
    for name in options.split():
        assert re.search(rf"--{name}(?![\w-])", text), name  # --data, not only --data-path
    assert "--no-sequence-parallel" in text
    assert text.count("(default:") > 40


@pytest.mark.slow
def test_a_run_is_replayed_from_its_configuration(tmp_path, capsys):
    """The saved file replays the run; options take precedence over it; a resume is reported."""
    words = "--devices cpu:1 --layers 1 --hidden 32 --sequence-length 16 --global-batch-size 8 --microbatch-size 4"
    words += " --new-tokens 0 --validation-batches 0 --steps 4 --log-every 1 --batch-ramp 4,4,8"
    assert gpt3.main([*words.split(), "--run-dir", str(tmp_path / "a")]) == 0
    config = str(tmp_path / "a" / "config.toml")
    assert gpt3.main(["--config", config, "--run-dir", str(tmp_path / "b"), "--log-every", "3"]) == 0
    losses = [[row["loss"] for row in read_steps(tmp_path / d / "log.jsonl")] for d in "ab"]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    saved = (tmp_path / "b" / "config.toml").read_text()
    assert "log_every = 3" in saved and "hidden = 32" in saved and 'devices = "cpu:1"' in saved
    capsys.readouterr()
    assert gpt3.main(["--config", config]) == 2
    assert "pass --resume auto to resume from step 5" in capsys.readouterr().err
    assert gpt3.main(["--config", config, "--resume", "auto"]) == 0
    assert "resume    after step 5, 32 samples, 0 skipped steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = ", "is not TOML"),
        ("[train]\nstpes = 3", "stpes in [train] is not known: did you mean steps"),
        ("[trian]\nsteps = 3", "[trian], which is not known: did you mean train"),
        ('[train]\nsteps = "many"', "must be a whole number, 1 or more: change it in the file"),
        (None, "cannot read the configuration"),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(tmp_path, capsys, text, message):
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    assert gpt3.main(["--devices", "cpu:8", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_gpt2_starts(capsys):
    assert gpt3.main(["--dry-shapes", "--data", "64"], gpt2.EXPERIMENT) == 0
    assert "gpt2-medium: 354,823,168 parameters on data 64 x pipe 1 x tensor 1 = 64 devices" in capsys.readouterr().out

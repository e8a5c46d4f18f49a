"""The experiments from the command line: options, error lines, recipes, a short run, a replay."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import gpt2, gpt3
from megajax.config import PRESETS, preset
from megajax.config.cli import parse

ROOT = pathlib.Path(__file__).parent.parent


def command(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    words = [sys.executable, "-m", "experiments.gpt3", *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def test_a_short_run(tmp_path):
    """Trains, validates, samples, and writes one object a step."""
    log = tmp_path / "log.jsonl"
    small = (
        "--steps 3 --layers 4 --hidden 32 --sequence-length 16 --global-batch-size 8 --microbatch-size 1 --new-tokens 5"
    )
    done = command("--devices", "cpu:8", *small.split(), "--validation-batches", "1", "--log-jsonl", str(log))
    assert done.returncode == 0, done.stderr
    assert "data 2 x pipe 2 x tensor 2 on 8 cpu devices" in done.stdout
    assert "schedule  interleaved_1f1b, 2 chunks a rank, 4 microbatches" in done.stdout
    assert "step 3: validation loss" in done.stdout and "a sample, continuing 'The ':\nThe " in done.stdout
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "tflops_per_device"} <= steps[0].keys()
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


def test_too_few_devices_ends_without_a_traceback():
    done = command("--devices", "cpu:4", "--pipe", "4", "--tensor", "2", "--data", "1")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert "= 8 devices, but there are 4" in done.stderr


BAD = [
    (["--layers", "6", "--pipe", "4", "--data", "1", "--tensor", "2"], "layers"),
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


def test_a_run_is_replayed_from_its_configuration(tmp_path, capsys):
    """The saved file alone replays the run; options take precedence over it; a resume is reported."""
    words = "--devices cpu:1 --layers 1 --hidden 32 --sequence-length 16 --global-batch-size 8 --microbatch-size 4"
    words += " --new-tokens 0 --validation-batches 0 --steps 4 --log-every 1 --batch-ramp 4,4,8"
    assert gpt3.main([*words.split(), "--run-dir", str(tmp_path / "a")]) == 0
    config = str(tmp_path / "a" / "config.toml")
    assert gpt3.main(["--config", config, "--run-dir", str(tmp_path / "b"), "--log-every", "3"]) == 0
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / d / "log.jsonl").read_text().splitlines()] for d in "ab"
    ]
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
        ('[train]\nsteps = "many"', "steps = 'many' must be a whole number"),
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


# 2005.14165 table 2.1: batch in tokens and learning rate; 300 billion tokens for all of them.
GPT3 = {
    "gpt3-125m": (0.5e6, 6.0e-4),
    "gpt3-350m": (0.5e6, 3.0e-4),
    "gpt3-760m": (0.5e6, 2.5e-4),
    "gpt3-1.3b": (1e6, 2.0e-4),
    "gpt3-2.7b": (1e6, 1.6e-4),
    "gpt3-6.7b": (2e6, 1.2e-4),
    "gpt3-13b": (2e6, 1.0e-4),
    "gpt3-175b": (3.2e6, 0.6e-4),
}


@pytest.mark.parametrize("model", GPT3)
def test_gpt3_has_the_papers_recipe(model):
    run = parse(["--model", model], "", gpt3.DEFAULTS, gpt3.RECIPES).run(8, "bf16")
    run.validate(8)
    batch, rate = GPT3[model]
    train, tokens = run.train, run.model.sequence_length
    assert train.global_batch_size * tokens == pytest.approx(batch, rel=0.05)
    assert run.total_samples * tokens == pytest.approx(300e9, rel=1e-3)
    assert (train.learning_rate, train.minimum_learning_rate) == (rate, pytest.approx(rate / 10))
    assert train.warmup_samples * tokens == pytest.approx(375e6, rel=1e-3)
    assert train.decay_samples * tokens == pytest.approx(260e9, rel=1e-3)
    assert (train.beta1, train.beta2, train.epsilon, train.weight_decay, train.clip_norm) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert train.batch_ramp[0] * tokens == pytest.approx(32e3, rel=0.05)
    assert 4e9 <= train.batch_ramp[2] * tokens * 1.001 and train.batch_ramp[2] * tokens <= 12.01e9


def test_a_short_run_scales_the_lengths_of_its_recipe():
    run = parse("--model gpt3-1.3b --steps 1000".split(), "", gpt3.DEFAULTS, gpt3.RECIPES).run(8, "bf16")
    run.validate(8)
    whole = gpt3.RECIPES["gpt3-1.3b"]
    share = 1000 / whole["steps"]
    assert run.train.decay_samples == pytest.approx(share * whole["decay_samples"], rel=1e-3)
    assert run.train.batch_ramp == (16, 16, pytest.approx(share * whole["batch_ramp"][2], rel=1e-3))
    run = parse("--model gpt3-1.3b --batch-ramp none".split(), "", gpt3.DEFAULTS, gpt3.RECIPES).run(8, "bf16")
    assert run.train.batch_ramp == ()
    parse("--model gpt3-1.3b --global-batch-size 8".split(), "", gpt3.DEFAULTS, gpt3.RECIPES).run(8, "bf16").validate(8)


@pytest.mark.parametrize("model", [name for name in PRESETS if name != "tiny"])
def test_no_published_model_is_trained_with_the_toys_settings(model):
    request = parse(["--model", model], "", gpt3.DEFAULTS, gpt3.RECIPES)
    run = request.run(1, "bf16")
    run.validate(1)
    assert run.train.learning_rate <= 6e-4 and run.train.global_batch_size * run.model.sequence_length >= 0.5e6
    assert run.train.steps > 10_000 and request.output.save_every in (500, 5000) and request.sample is None


def test_llama2_has_the_papers_recipe():
    """2307.09288 section 2.2."""
    run = parse(["--model", "llama2-7b"], "", gpt3.DEFAULTS, gpt3.RECIPES).run(8, "bf16")
    train, tokens = run.train, run.model.sequence_length
    assert train.global_batch_size * tokens == pytest.approx(4e6, rel=0.05)
    assert run.total_samples * tokens == pytest.approx(2e12, rel=1e-3)
    assert (train.learning_rate, train.minimum_learning_rate) == (3e-4, pytest.approx(3e-5))
    assert (train.beta1, train.beta2, train.epsilon, train.weight_decay, train.clip_norm) == (0.9, 0.95, 1e-5, 0.1, 1.0)
    assert (train.warmup_steps, train.learning_rate_decay) == (2000, "cosine")


@pytest.mark.parametrize("model", ["gpt2-medium", "megatron-2.5b-2019", "megatron-8.3b-2019"])
def test_gpt2_has_the_first_papers_recipe(model):
    """1909.08053 section 4.2: 512 samples, 300k steps, 1.5e-4 after 3k, cosine to 1e-5, decay 0.01, clip 1, dropout 0.1."""
    run = parse(["--model", model], "", gpt2.RECIPE, {}).run(8, "bf16")
    run.validate(8)
    train = run.train
    assert (train.global_batch_size, train.steps, train.warmup_steps) == (512, 300_000, 3000)
    assert (train.learning_rate, train.minimum_learning_rate, train.learning_rate_decay) == (1.5e-4, 1e-5, "cosine")
    assert (train.weight_decay, train.clip_norm, run.parallel.recompute) == (0.01, 1.0, "full")
    assert (run.model.dropout, run.model.sequence_length) == (0.1, 1024)
    assert run.model == preset(model)


def test_gpt2_starts(capsys):
    assert gpt3.main(["--dry-shapes", "--data", "64"], gpt2.EXPERIMENT) == 0
    assert "gpt2-medium: 354,823,168 parameters on data 64 x pipe 1 x tensor 1 = 64 devices" in capsys.readouterr().out

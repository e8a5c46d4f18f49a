"""Ctrl-C ends every command with one line and exit code 130."""

import importlib

import pytest

from tests.parsers import ALL, main_of

TRAIN = "megajax.train.command.parse"
COMMANDS = {  # command: (function that the Ctrl-C interrupts, the command line)
    "train": (TRAIN, ""),
    "finetune": ("experiments.finetune.parse", ""),
    "dpo": ("experiments.dpo.parse", ""),
    "grpo": ("experiments.grpo.parse", ""),
    "bert": (TRAIN, ""),
    "finetune-bert": ("experiments.finetune_bert.parse", ""),
    "gpt2": (TRAIN, ""),
    "moe": (TRAIN, ""),
    "own-model": ("megajax.Trainer", ""),
    "launch": ("megajax.launch.__main__.read_request", "-- experiments.gpt3"),
    "preprocess": ("megajax.data.preprocess._preprocess", ""),
    "inspect": ("megajax.checkpoint.inspect._checkpoints", "runs/first"),
    "import": ("megajax.interop.import_command._run", "DIR --run-dir RUN"),
    "import-megatron": ("megajax.interop.import_command._run", "DIR --run-dir RUN"),
    "export": ("megajax.interop.import_command._run", "RUN --out DIR"),
    "generate": ("megajax.generate.__main__.run", "--init-from DIR --prompt a"),
    "evaluate": ("megajax.evaluate.__main__.run", "--init-from DIR --harness a"),
    "evaluate-squad": ("megajax.evaluate.squad._run", "--task-data FILE --predictions FILE"),
    "plan": (
        "megajax.plan.__main__.question_of",
        "--model gpt3-1.3b --gpus 8 --gpu h100-80gb --global-batch-size 512",
    ),
    "dryrun": ("megajax.plan.dryrun._own", "--model gpt3-1.3b"),
    "calibrate": ("megajax.plan.calibrate._kept", ""),
    "failures": ("experiments.failures._command", ""),
    "sites": ("experiments.slow_links._command", ""),
    "draw": ("megajax.schedules.draw.run", ""),
    "verify": ("megajax.verify.__main__.run", "--a= --b="),
    "validate": ("benchmarks.published.__main__.check", ""),
    "papers": ("experiments.papers._command", ""),
    "bench mfu": ("benchmarks.mfu.measure", ""),
    "bench communication": ("benchmarks.communication.comparison", ""),
    "bench gpu-day": ("benchmarks.gpu_day.__main__.in_child", ""),
    "bench gpu-settings": ("benchmarks.gpu_settings.step_seconds", ""),
    "bench loss-curve": ("benchmarks.loss_curve.draw", "log.jsonl --out loss.svg"),
    "bench roofline": ("benchmarks.compiled.account", ""),
    "bench rankings": ("benchmarks.rankings.compile_question", ""),
    "bench standing-questions": ("benchmarks.compiled.compile_cases", ""),
    "bench time-model": ("benchmarks.compiled.show", "--show"),
    "bench memory-model": ("benchmarks.compiled.show", "--show"),
    "bench attention": ("benchmarks.attention.mean_seconds", ""),
    "bench checkpoints": ("benchmarks.checkpoints.start_devices", ""),
    "bench data": ("benchmarks.data.preprocess_rows", ""),
    "bench generation": ("benchmarks.generation.start_devices", ""),
    "bench replication": ("benchmarks.replication.start_devices", ""),
    "bench schedules": ("benchmarks.schedules.simulated_rows", ""),
}


def test_all_commands_are_here():
    assert set(COMMANDS) == {*ALL, "own-model"}


@pytest.mark.parametrize("name", ALL)
def test_ctrl_c_is_one_line(name, monkeypatch, capsys):
    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    main, (interrupted, words) = main_of(name), COMMANDS[name]
    module, _, function = interrupted.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), function, interrupt)
    assert main([*ALL[name].words, *words.split()]) == 130
    assert capsys.readouterr().err.strip().startswith("stopped")

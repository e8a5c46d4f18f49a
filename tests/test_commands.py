"""Ctrl-C ends every command with one line and exit code 130."""

import importlib

import pytest

COMMANDS = {  # module: (function that the Ctrl-C interrupts, its arguments' command line)
    "megajax.checkpoint.inspect": ("_checkpoints", "runs/first"),
    "megajax.evaluate.squad": ("_run", "--task-data FILE --predictions FILE"),
    "megajax.generate.__main__": ("run", "--init-from DIR --prompt a"),
    "megajax.interop.hugging_face": ("_run", "export RUN --out DIR"),
    "megajax.launch.__main__": ("read_request", "-- experiments.gpt3"),
    "megajax.plan.__main__": ("question_of", "--model gpt3-1.3b --gpus 8 --gpu h100-80gb --global-batch-size 512"),
    "megajax.plan.dryrun": ("_own", "--model gpt3-1.3b"),
    "megajax.schedules.draw": ("run", ""),
    "megajax.verify.__main__": ("run", "--a= --b="),
    "benchmarks.communication": ("comparison", ""),
    "benchmarks.loss_curve": ("draw", "log.jsonl --out loss.svg"),
    "benchmarks.mfu": ("measure", ""),
    "benchmarks.roofline": ("report", ""),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_one_line(name, monkeypatch, capsys):
    module, (interrupted, words) = importlib.import_module(name), COMMANDS[name]

    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, interrupted, interrupt)
    assert module.main(words.split()) == 130
    assert capsys.readouterr().err.strip().startswith("stopped")

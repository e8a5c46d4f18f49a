"""Command lines of every command: legal, or one line that says why not; and what that line proposes is legal."""

import dataclasses
import pathlib
from unittest import mock

from hypothesis import strategies as st

from experiments import gpt2, gpt3
from megajax.checkpoint import inspect
from megajax.config import PRESETS
from megajax.config.cli import Experiment, parse
from megajax.config.options import Parser, make_parser
from megajax.config.stored_paths import absolute_paths
from megajax.config.toml import config_tables, toml_text
from megajax.data import preprocess
from megajax.pipeline.program import StepProgram
from megajax.plan import __main__ as plan
from megajax.plan import dryrun
from megajax.plan.options import plan_parser
from megajax.schedules import draw
from megajax.schedules.registry import names
from tests.fuzz.values import command_lines, error_of, fuzz, outcome_of, remedies, rule_of, texts

SMALL = st.integers(1, 8).map(str)
# Options whose legal values are not listed by argparse.
LEGAL = {
    "--model": st.sampled_from(list(PRESETS)),
    "--schedule": st.sampled_from(names()),
    "--precision": st.sampled_from(["bf16", "fp32", "fp16"]),
    "--recompute": st.sampled_from(["none", "selective", "full"]),
    "--zero": st.sampled_from(["0", "1", "3"]),
    "--tokenizer": st.sampled_from(["byte", "gpt2"]),
    "--batch-ramp": st.tuples(SMALL, SMALL, st.sampled_from(["9", "100"])).map(",".join),
    "--positions": st.just("rotary"),
    "--run-dir": st.just("run"),
    "--steps": st.integers(1, 3000).map(str),
    "--global-batch-size": st.integers(1, 300).map(str),
    **{f"--{name}": SMALL for name in ("data", "pipe", "tensor", "context", "chunks", "microbatch-size", "heads")},
    **{f"--{name}": SMALL for name in ("kv-heads", "recompute-blocks", "group-size", "live-chunks", "warmup-steps")},
    **{f"--{name}": st.integers(1, 100).map(str) for name in ("layers", "hidden", "feedforward", "sequence-length")},
}
TRAINING = command_lines(make_parser("", gpt3.DEFAULTS), LEGAL)
EXPERIMENTS = {"experiments.gpt3": gpt3.EXPERIMENT, "experiments.gpt2": gpt2.EXPERIMENT}


def read(words: list[str], experiment: Experiment) -> None:
    """What a command does with its options before it starts devices, and the replay of the configuration it would save."""
    request = parse(words, experiment)
    run = request.run(request.devices_needed or 8, "fp32")
    run.validate(run.parallel.devices)
    request.changed(run)
    if run.parallel.pipe * run.parallel.chunks * run.microbatches < 200 and run.parallel.schedule != "auto":
        _ = StepProgram.of(run).schedule
    pathlib.Path("config.toml").write_text(toml_text(config_tables(run, request.output, request.others), "A run."))
    again = parse(["--config", "config.toml"], experiment)
    stored = again.run(run.parallel.devices, "fp32")
    assert dataclasses.replace(stored, data=run.data) == run
    assert absolute_paths(vars(stored.data)) == absolute_paths(vars(run.data))
    assert (again.output, again.others) == (request.output, request.others)


@fuzz(st.tuples(TRAINING, st.sampled_from(list(EXPERIMENTS))))
def test_training_options_are_legal_or_refused_in_one_line(example):
    words, name = example
    experiment = EXPERIMENTS[name]
    message = error_of(read, words, experiment)
    for remedy in remedies(message) if message else []:
        after = error_of(read, [*words, *remedy], experiment)
        assert after is None or rule_of(after) != rule_of(message), f"{message!r}: {remedy} leads to {after!r}"


@fuzz(command_lines(draw._parser(), {"--schedule": st.sampled_from(names()), "--costs": st.just("1,2")}))
def test_draw(words):
    sizes = ["--pipe=2", "--microbatches=4"]  # the default, unless other ones are drawn
    outcome = outcome_of(draw.main, [*sizes, *(word for word in words if not word.startswith("--out"))])
    assert outcome.code in (0, 2)


def searched(search):
    """Stands for the search, which takes seconds: the options are legal."""
    raise plan.ConfigError("searched")


NEEDED = {
    "--model": st.sampled_from(["gpt2", "tiny", "gpt3-1t"]),
    "--gpu": st.sampled_from(["h100-80gb", "a100-80gb"]),
    "--gpus": SMALL,
    "--global-batch-size": SMALL,
}


@fuzz(command_lines(plan_parser(Parser(add_help=False), ""), NEEDED, most=4))
def test_plan(words):
    usual = ["--model", "gpt2", "--gpus", "8", "--gpu", "h100-80gb", "--global-batch-size", "8"]
    with mock.patch("megajax.plan.best._BestFirst.found", searched):
        assert outcome_of(plan.main, [*usual, *words]).code in (0, 2)  # one GPU needs no search


@fuzz(
    TRAINING
    | st.lists(st.sampled_from(["--gpu", "--run", "--timeout", "--model-only", "--import"]) | texts, max_size=4)
)
def test_dry_run(words):
    before, dryrun.dry_run = dryrun.dry_run, lambda *run, **options: 0
    try:
        assert outcome_of(dryrun.main, ["--gpu", "h100-80gb", *words]).code in (0, 2)
    finally:
        dryrun.dry_run = before


@fuzz(
    st.lists(st.sampled_from(["--verify", "--arrays", "--workers", "--input", "merge", "verify"]) | texts, max_size=4)
)
def test_inspect_and_preprocess(words):
    """Options, and files that do not exist; test_files.py has checkpoints."""
    assert outcome_of(inspect.main, words).code == 2
    assert outcome_of(preprocess.main, words).code == 2

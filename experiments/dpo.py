r"""Train on preferences, pairs of a chosen and a rejected answer: DPO, IPO or KTO.

python -m experiments.dpo --init-from DIR --pairs pairs.jsonl --epochs 1 --sequence-length 1024 --run-dir runs/preferred
python -m experiments.dpo --init-from DIR --pairs pairs.jsonl --loss-type ipo --beta 0.1 --pipe 2 --tensor 2
python -m megajax.interop.hugging_face export runs/preferred --out preferred           for transformers

DIR is the directory of a Hugging Face model with its tokenizer: the policy starts from it, and it is the reference, whose
log-probabilities are computed once, on the same mesh, and kept in RUN_DIR/reference.npz. A line of a file is
{"prompt": "...", "chosen": "...", "rejected": "..."}, or has messages in place of texts, as in TRL. A sample of a batch is
one completion: --global-batch-size 64 is 32 pairs, and --microbatch-size is even. Every mesh, schedule and option of gpt3
is legal, except --context. The log has TRL's rewards/chosen, /rejected, /accuracies, /margins and logps/.
"""

import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from experiments import own_options
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import Experiment, Request, parse
from megajax.config.preference import PreferenceConfig
from megajax.interop.init_from import HUGGING_FACE
from megajax.schedules.errors import exit_code
from megajax.train import command

DEFAULTS: dict[str, Any] = own_options.TRL_DEFAULTS | {"microbatch_size": 2}  # a pair
OPTIONS = "preference.json"
EXPERIMENT = Experiment(
    f"{__doc__}\noptions of its own:\n  --epochs COUNT\n      sets --steps\n{own_options.describe(PreferenceConfig)}",
    DEFAULTS,
    program="python -m experiments.dpo",
    importer=HUGGING_FACE,
    defaults_for_imports=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code (see `megajax.train.command`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """One training."""
    settings, rest = own_options.split(words, PreferenceConfig, OPTIONS)
    epochs, rest = own_options.split_epochs(rest)
    if {"-h", "--help"} & set(rest):
        return command.main(EXPERIMENT, rest)
    request = parse(rest, EXPERIMENT)
    if not settings.pairs:
        raise ConfigError("there is nothing to train on: pass --pairs FILE (JSON lines; --help shows a line).")
    if epochs:
        rest += ["--steps", str(steps_of(request, settings, epochs))]
    make = lambda run, request, devices: make_trainer(settings, run, request, devices)  # noqa: E731
    return command.main(EXPERIMENT, rest, make=make)


def load(run: RunConfig, settings: PreferenceConfig) -> tuple[list, str, Any]:
    """The pairs, their counts in words, and the tokenizer."""
    from megajax.data.preferences import load_preferences
    from megajax.data.source import tokenizer_of_model
    from megajax.data.tokenizers import load_tokenizer

    run.data.validate()
    tokenizer = tokenizer_of_model(run, load_tokenizer(run.data.tokenizer, run.data.end_of_document))
    pairs, counts = load_preferences(settings.pairs, tokenizer, settings.chat_template, run.model.sequence_length)
    return pairs, counts, tokenizer


def steps_of(request: Request, settings: PreferenceConfig, epochs: int) -> int:
    """Steps in which every pair is trained on `epochs` times; the last step may start another epoch."""
    run = request.run(request.devices_needed or 1, "fp32")
    return math.ceil(2 * epochs * len(load(run, settings)[0]) / run.train.global_batch_size)


def make_trainer(settings: PreferenceConfig, run: RunConfig, request: Request, devices: Sequence[Any]) -> Any:
    """The trainer of preferences."""
    from megajax.data.preferences import PreferenceBatches
    from megajax.models.preference import preference_model
    from megajax.train.preference import PreferenceTraining
    from megajax.train.trainer import Trainer

    if run.parallel.microbatch_size % 2:
        raise ConfigError(
            f"microbatch_size = {run.parallel.microbatch_size} parts a pair, whose completions are two samples: pass "
            f"--microbatch-size {run.parallel.microbatch_size + 1}."
        )
    if run.train.batch_ramp:
        raise ConfigError("batch_ramp is not supported for preferences: pass --batch-ramp none.")
    run.validate(len(devices))
    pairs, counts, tokenizer = load(run, settings)
    shape = (run.microbatches, run.parallel.microbatch_size * run.parallel.data)
    words = f"{settings.loss_type} with beta {settings.beta:g}; {', '.join(settings.pairs)}: {counts}"
    kto = settings.loss_type == "kto"
    data = PreferenceBatches(
        *(pairs, shape, run.model.sequence_length, run.train.seed),
        with_mismatched=kto,
        tokenizer=tokenizer,
        description=[words],
    )
    trainer = Trainer(run, output=request, model=preference_model(settings), data=data, devices=devices)
    directory = request.output.run_dir and pathlib.Path(request.output.run_dir).absolute()
    trainer.training = PreferenceTraining.of(trainer.training, data, directory or None)
    own_options.keep(settings, directory or None, OPTIONS)
    return trainer


if __name__ == "__main__":
    sys.exit(main())

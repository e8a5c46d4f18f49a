r"""Fine-tune a BERT on one of GLUE's tasks (MNLI, QQP, SST-2, MRPC, RTE), on SQuAD 1.1 or 2.0, or on RACE.

python -m experiments.finetune_bert --init-from DIR --task mrpc --task-data train.tsv --dev-data dev.tsv --epochs 3 \
    --run-dir runs/mrpc
python -m experiments.finetune_bert --init-from DIR --task mrpc --task-data train.jsonl --dev-data dev.jsonl \
    --seeds 1,2,3,4,5 --run-dir runs/mrpc                     one run each in runs/mrpc/seed_1, ..., and the median
python -m experiments.finetune_bert --init-from DIR --task squad2 --task-data train-v2.0.json --dev-data dev-v2.0.json \
    --run-dir runs/squad2
python -m experiments.finetune_bert --init-from DIR --task race --task-data RACE/train --dev-data RACE/dev \
    --run-dir runs/race
python -m megajax.interop.hugging_face export runs/mrpc --out tuned               for transformers

DIR is a Hugging Face BERT with its tokenizer. Data are SQuAD's .json; RACE's folders; GLUE's .tsv, or JSON lines with the
columns of Hugging Face's glue dataset. After each epoch the dev samples are scored; RUN_DIR/best.json has the best step,
whose checkpoint is kept. --epochs E sets --steps to E times the steps of an epoch, and --save-every to one epoch. Every
mesh, schedule and option of bert is legal. Defaults are those of 1810.04805 section 4, and Megatron-LM's for RACE.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.config import ConfigError, near, option
from megajax.config.cli import Experiment, Request, parse
from megajax.config.tasks import TASKS, Task
from megajax.interop.init_from import HUGGING_FACE
from megajax.schedules.arguments import whole
from megajax.schedules.errors import exit_code
from megajax.train import command

DEFAULTS = {
    "model": "bert-tiny",
    "tokenizer": "wordpiece",
    "global_batch_size": 32,
    "microbatch_size": 8,
    "sequence_length": 128,
    "steps": 200,
    "learning_rate": 2e-5,
    "minimum_learning_rate": 0.0,
    "learning_rate_decay": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "clip_norm": 1.0,
    "validation_batches": 0,
}
EXPERIMENT = Experiment(
    __doc__ or "",
    DEFAULTS,
    program="python -m experiments.finetune_bert",
    importer=HUGGING_FACE,
    defaults_for_imports=True,
)
FILES = f"--task {'|'.join(TASKS)}, --task-data FILE and --dev-data FILE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code (see `megajax.train.command`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """One training, or one for each of --seeds."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--epochs", type=whole())
    parser.add_argument("--seeds", type=seeds)
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name} {error.message}.") from None
    if {"-h", "--help"} & set(rest):
        return command.main(EXPERIMENT, rest)
    task = task_of(parse(rest, EXPERIMENT))
    experiment = dataclasses.replace(EXPERIMENT, defaults=DEFAULTS | task.recipe)
    given = {word.partition("=")[0] for word in rest}
    if "--output-heads" not in given:
        rest += [word for name, value in task.model.items() for word in (option(name), str(value))]
    request = parse(rest, experiment)
    steps = steps_of_epoch(request)
    epochs = found.epochs or (None if {"--steps", "--config"} & given else task.epochs)
    if epochs:
        rest += ["--steps", str(epochs * steps)]
        if not {"--warmup-steps", "--warmup-samples"} & given:
            rest += ["--warmup-steps", str(round(task.warmup * epochs * steps))]
    save_every = request.passed.get("save_every", steps)
    if save_every < 1 or steps % save_every:
        raise ConfigError(
            f"save_every = {save_every} does not divide the {steps} steps of an epoch, after each of which "
            f"the best checkpoint is kept: omit --save-every, or pass a divisor of {steps}."
        )
    rest += ["--save-every", str(save_every)]
    if found.seeds is None:
        return train(experiment, rest, steps)
    if request.output.run_dir is None:
        raise ConfigError("--seeds has nowhere to write its runs: pass --run-dir DIR too.")
    directories = {seed: pathlib.Path(request.output.run_dir) / f"seed_{seed}" for seed in found.seeds}
    for seed, directory in directories.items():
        code = train(experiment, [*rest, "--seed", str(seed), "--run-dir", str(directory)], steps)
        if code:
            return code
    return report(directories, task.criterion)


def seeds(text: str) -> list[int]:
    """The numbers of --seeds 1,2,3."""
    try:
        return [whole()(word) for word in text.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} are not seeds: pass --seeds 1,2,3") from None


def task_of(request: Request) -> Task:
    """The task to fine-tune on.

    Raises:
      ConfigError: there is none, or nothing to train on or to score.
    """
    task = request.given.get("task")
    if task is not None and task not in TASKS:
        raise ConfigError(f"task = {task} is not known: {near(task, TASKS)} Pass --task {'|'.join(TASKS)}.")
    if not (task and request.given.get("task_data") and request.given.get("dev_data")):
        raise ConfigError(f"there is nothing to fine-tune on: pass {FILES}.")
    return TASKS[task]


def steps_of_epoch(request: Request) -> int:
    """Steps in which every sample of --task-data is trained on; the last one may begin the next epoch."""
    from megajax.data.task_samples import task_samples
    from megajax.data.tokenizers import load_tokenizer

    run = request.run(request.devices_needed or 1, "fp32")
    run.data.validate()
    tokenizer = load_tokenizer(run.data.tokenizer, run.data.end_of_document)
    samples = task_samples(run, run.data.task_data, tokenizer, run.train.seed)
    return math.ceil(samples.count / run.train.global_batch_size)


def train(experiment: Experiment, words: Sequence[str], steps: int) -> int:
    """One training; `steps` are those of an epoch."""

    def evaluations(trainer: Any, request: Request) -> list[Any]:
        from megajax.evaluate.dev_score import DevScore

        if request.evaluate:
            raise ConfigError("--evaluate-every is of models that write text: omit it.")
        return [DevScore(trainer, steps)]

    return command.main(experiment, words, evaluator=evaluations)


def report(directories: Mapping[int, pathlib.Path], criterion: str) -> int:
    """Prints the best dev scores of each seed's run, and their median, as 1909.08053 reports it."""
    from megajax.evaluate.dev_score import BEST
    from megajax.runtime.processes import is_first_process

    if not is_first_process():
        return 0
    scores = {seed: json.loads((path / BEST).read_text(encoding="utf-8")) for seed, path in directories.items()}
    for seed, score in scores.items():
        print(f"seed {seed}: best dev {criterion} {score[criterion]:.4f} at step {score['step']}")
    median = statistics.median(score[criterion] for score in scores.values())
    print(f"median of {len(scores)} seeds: dev {criterion} {median:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

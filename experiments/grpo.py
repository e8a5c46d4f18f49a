r"""Train on rewards that a function of yours gives to the model's own completions: GRPO.

python -m experiments.grpo --init-from DIR --prompts prompts.jsonl --reward rewards.py:right_answer --run-dir runs/grpo
python -m experiments.grpo --init-from DIR --prompts prompts.jsonl --reward mine.rewards:score --num-generations 16 \
    --max-completion-length 512 --beta 0.04 --num-iterations 2 --pipe 2 --tensor 4

A line of a file is {"prompt": "...", ...}, or has messages as prompt. In each step the decoder continues prompts on the
run's mesh, --num-generations times each; def right_answer(prompts, completions, completion_ids, **columns) returns a number
for each completion, where columns are lists of the rows' other keys, such as answer; and rewards less their group's mean
are the advantages of the clipped objective. A sample of a batch is one completion: --global-batch-size 64 with 8
generations is 8 prompts. The options have TRL's names, meaning and defaults. Every mesh, schedule and option of gpt3 is
legal, except --context and several processes. The log has TRL's reward, reward_std, kl, entropy, clip_ratio/ and
completions/.
"""

import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from experiments import own_options
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import Experiment, Request, parse
from megajax.config.reward import RewardConfig
from megajax.interop.init_from import HUGGING_FACE
from megajax.schedules.errors import exit_code
from megajax.train import command

DEFAULTS: dict[str, Any] = own_options.TRL_DEFAULTS | {"microbatch_size": 1, "log_every": 1}
OPTIONS = "reward.json"
EXPERIMENT = Experiment(
    f"{__doc__}\noptions of its own:\n{own_options.describe(RewardConfig)}",
    DEFAULTS,
    program="python -m experiments.grpo",
    importer=HUGGING_FACE,
    defaults_for_imports=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code (see `megajax.train.command`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """One training."""
    settings, rest = own_options.split(words, RewardConfig, OPTIONS)
    if {"-h", "--help"} & set(rest):
        return command.main(EXPERIMENT, rest)
    parse(rest, EXPERIMENT)  # its mistakes come first
    if not settings.prompts or not settings.reward:
        raise ConfigError("there is nothing to train on: pass --prompts FILE and --reward MODULE:FUNCTION.")
    function = reward_function(settings.reward)
    make = lambda run, request, devices: make_trainer(settings, function, run, request, devices)  # noqa: E731
    return command.main(EXPERIMENT, rest, make=make)


def reward_function(name: str) -> Callable[..., Sequence[float]]:
    """The function of "module:function" or "FILE.py:function".

    Raises:
      ConfigError: there is none, or its module fails.
    """
    module, _, function = name.rpartition(":")
    if not module:
        raise ConfigError(f"reward = {name} names no function: pass --reward MODULE:FUNCTION or FILE.py:FUNCTION.")
    try:
        if module.endswith(".py"):
            names: dict[str, Any] = {"__name__": pathlib.Path(module).stem, "__file__": module}
            exec(compile(pathlib.Path(module).read_text(encoding="utf-8"), module, "exec"), names)
            found = names.get(function)
        else:
            sys.path.insert(0, "")  # as python -m has
            try:
                found = getattr(importlib.import_module(module), function, None)
            finally:
                sys.path.remove("")
    except Exception as error:  # whatever a user's file raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"reward = {name}: {module} cannot be imported ({reason}).") from error
    if not callable(found):
        raise ConfigError(f"reward = {name}: {module} has no function {function}.")
    return found


def make_trainer(
    settings: RewardConfig, function: Callable, run: RunConfig, request: Request, devices: Sequence[Any]
) -> Any:
    """The trainer of rewards."""
    from megajax.data.reward_prompts import PromptBatches, load_prompts
    from megajax.data.source import tokenizer_of_model
    from megajax.data.tokenizers import load_tokenizer
    from megajax.generate.rollouts import RewardTraining
    from megajax.models.preference import policy_model
    from megajax.train.check import model_to_check
    from megajax.train.trainer import Trainer

    generations, size = settings.num_generations, run.train.global_batch_size
    if size % generations:
        raise ConfigError(
            f"global_batch_size = {size} parts a group of num_generations = {generations} completions: pass "
            f"--global-batch-size {size // generations * generations or generations}."
        )
    if run.train.batch_ramp:
        raise ConfigError("batch_ramp is not supported with rollouts: pass --batch-ramp none.")
    if settings.beta and run.train.init_from is None:
        raise ConfigError(f"beta = {settings.beta:g} needs a reference model: pass --init-from DIR, or --beta 0.")
    run.validate(len(devices))
    longest = run.model.sequence_length - settings.max_completion_length
    if longest < 1:
        raise ConfigError(
            f"max_completion_length = {settings.max_completion_length} leaves no room for a prompt in sequence_length = "
            f"{run.model.sequence_length}: pass --max-completion-length {run.model.sequence_length // 2}."
        )
    run.data.validate()
    tokenizer = tokenizer_of_model(run, load_tokenizer(run.data.tokenizer, run.data.end_of_document))
    prompts = load_prompts(settings.prompts, tokenizer, settings.chat_template, longest)
    model = policy_model(settings)
    words = f"{len(prompts):,} prompts of {', '.join(settings.prompts)}; {generations} completions each, reward "
    data = PromptBatches(
        prompts,
        (run.microbatches, run.parallel.microbatch_size * run.parallel.data),
        model_to_check(run, model).batch_shapes(),
        run.train.seed,
        generations,
        tokenizer,
        [f"{words}{settings.reward}"],
    )
    trainer = Trainer(run, output=request, model=model, data=data, devices=devices)
    trainer.training = RewardTraining.of(trainer.training, data, settings, function, HUGGING_FACE.params)
    directory = request.output.run_dir and pathlib.Path(request.output.run_dir).absolute()
    own_options.keep(settings, directory or None, OPTIONS)
    return trainer


if __name__ == "__main__":
    sys.exit(main())

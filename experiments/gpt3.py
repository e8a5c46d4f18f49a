"""Train a GPT with tensor, pipeline and data parallelism.

python -m experiments.gpt3                                     a small GPT on 8 CPU devices, or on the GPUs there are
python -m experiments.gpt3 --data 1 --pipe 4 --tensor 2 --schedule 1f1b
python -m experiments.gpt3 --model gpt3-1.3b --tensor 8 --tokenizer gpt2 --data-path corpus --run-dir runs/1.3b
python -m experiments.gpt3 --config runs/1.3b/config.toml --resume auto                  the same run, where it stopped
python -m experiments.gpt3 --model gpt3-175b --pipe 8 --tensor 8 --chunks 3 --dry-shapes

A model of GPT-3's paper comes with its recipe: 300 billion tokens, Adam, cosine, batch ramp-up (RECIPES).
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.config.cli import Experiment
from megajax.train import command

# What suits eight fake devices on two cores: under three minutes, and the loss visibly falls.
DEFAULTS = {
    "model": "tiny",
    "microbatch_size": 2,
    "global_batch_size": 16,
    "steps": 500,
    "learning_rate": 4e-3,
    "warmup_steps": 25,
    "beta2": 0.98,
    "validation_every": 1000,
}
SEQUENCE = 2048  # tokens in a sample of GPT-3


def recipe(batch_tokens: float, learning_rate: float) -> dict[str, Any]:
    """GPT-3's training (2005.14165 table 2.1 and appendix B), its batch in samples a multiple of 32.

    The batch ramp is Megatron-LM's for the 175B run (16 more samples at a time over 12 billion tokens) where GPT-3 only
    says "from 32k tokens to the full value over 4 to 12 billion tokens, depending on the model size".
    """
    batch = 32 * round(batch_tokens / SEQUENCE / 32)
    return {
        "global_batch_size": batch,
        "steps": round(300e9 / SEQUENCE / batch),
        "learning_rate": learning_rate,
        "learning_rate_decay": "cosine",
        "warmup_samples": round(375e6 / SEQUENCE),
        "decay_samples": round(260e9 / SEQUENCE),
        "batch_ramp": (16, 16, round((4e9 if batch < 1024 else 12e9) / SEQUENCE)),
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "save_every": 500,
        "nonfinite": "skip",
    }


# 2005.14165 table 2.1: batch in tokens, learning rate. The minimum is a tenth of it, as everywhere here.
RECIPES = {
    "gpt3-125m": recipe(0.5e6, 6.0e-4),
    "gpt3-350m": recipe(0.5e6, 3.0e-4),
    "gpt3-760m": recipe(0.5e6, 2.5e-4),
    "gpt3-1.3b": recipe(1e6, 2.0e-4),
    "gpt3-2.7b": recipe(1e6, 1.6e-4),
    "gpt3-6.7b": recipe(2e6, 1.2e-4),
    "gpt3-13b": recipe(2e6, 1.0e-4),
    "gpt3-175b": recipe(3.2e6, 0.6e-4),
}


def main(
    arguments: Sequence[str] | None = None,
    description: str | None = __doc__,
    defaults: Mapping[str, Any] = DEFAULTS,
    recipes: Mapping[str, Mapping[str, Any]] = RECIPES,
) -> int:
    """Runs an experiment; returns the process's exit code: 0, or 2 for an error in what was asked.

    Args:
      arguments: the words of the command line; the process's own if None.
      description: what `--help` says first.
      defaults: what this experiment trains if nothing is typed.
      recipes: by model, what is taken in place of `defaults`.
    """
    return command.main(Experiment(description or "", defaults, recipes), arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Train a GPT with tensor, pipeline and data parallelism.

python -m experiments.gpt3                                     a small GPT on 8 CPU devices, or on the GPUs there are
python -m experiments.gpt3 --data 1 --pipe 4 --tensor 2 --schedule 1f1b
python -m experiments.gpt3 --model gpt3-1.3b --tensor 8 --tokenizer gpt2 --data-path corpus --run-dir runs/1.3b
python -m experiments.gpt3 --config runs/1.3b/config.toml --resume auto                  the same run, where it stopped
python -m experiments.gpt3 --init-from DIR --sequence-length 2048 --learning-rate 2e-5   from a Hugging Face model's weights
python -m experiments.gpt3 --model gpt3-175b --pipe 8 --tensor 8 --chunks 3 --dry-shapes

Every preset has the recipe of its paper; without --model, a toy is trained with its own settings.
"""

import sys
from collections.abc import Sequence
from typing import Any

from megajax.config import PRESETS
from megajax.config.cli import Experiment, Request
from megajax.config.presets import ALIASES, BERTS
from megajax.config.released import RELEASED
from megajax.config.released_others import RELEASED_OTHERS
from megajax.config.sample import SampleConfig
from megajax.interop.init_from import HUGGING_FACE
from megajax.train import command

# The toy on eight CPU devices of a machine with two cores: under three minutes, and the loss falls visibly.
DEFAULTS = {
    "model": "tiny",
    "microbatch_size": 2,
    "global_batch_size": 16,
    "steps": 500,
    "learning_rate": 4e-3,
    "warmup_steps": 25,
    "beta2": 0.98,
    "validation_every": 1000,
    "new_tokens": 120,  # with the prompt, nearly the model's context of 128
}
SEQUENCE = 2048  # tokens in a sample of GPT-3


def recipe(batch_tokens: float, learning_rate: float, tokens: float = 300e9) -> dict[str, Any]:
    """GPT-3's training (2005.14165 table 2.1 and appendix B), its batch in samples a multiple of 32.

    The batch ramp is Megatron-LM's for the 175B run (16 more samples at a time over 12 billion tokens) where GPT-3 only
    says "from 32k tokens to the full value over 4 to 12 billion tokens, depending on the model size".
    """
    batch = 32 * round(batch_tokens / SEQUENCE / 32)
    return {
        "global_batch_size": batch,
        "steps": round(tokens / SEQUENCE / batch),
        "learning_rate": learning_rate,
        "learning_rate_decay": "cosine",
        "warmup_samples": round(375e6 / SEQUENCE),
        "decay_samples": round(260 / 300 * tokens / SEQUENCE),
        "batch_ramp": (16, 16, round((4e9 if batch < 1024 else 12e9) / SEQUENCE)),
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "save_every": 500,
        "nonfinite": "skip",
    }


def llama2(learning_rate: float, sequence: int = 4096) -> dict[str, Any]:
    """Llama 2's training (2307.09288 section 2.2): 2 trillion tokens in batches of 4 million."""
    batch = 2**22 // sequence
    return {
        "global_batch_size": batch,
        "steps": round(2e12 / 2**22),
        "learning_rate": learning_rate,
        "learning_rate_decay": "cosine",
        "warmup_steps": 2000,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-5,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "save_every": 500,
        "nonfinite": "skip",
    }


def llama3(learning_rate: float) -> dict[str, Any]:
    """Llama 3's training (2407.21783 table 3 and section 3.4.1): 1.2M steps, here all with the final 16M tokens a batch.

    Of 15.6 trillion tokens, at most 2**31 samples. The betas and the epsilon, which the paper leaves out, are Llama 2's.
    """
    lengths = {"global_batch_size": 2048, "steps": round(15.6e12 / (2048 * 8192)), "warmup_steps": 8000}
    return llama2(learning_rate) | lengths | {"minimum_learning_rate": learning_rate / 100}


# 1909.08053 section 4.2; its tables and GPT-2's paper have the same shapes of data: 1,024 tokens.
MEGATRON_2019 = {
    "global_batch_size": 512,
    "steps": 300_000,
    "learning_rate": 1.5e-4,
    "minimum_learning_rate": 1e-5,
    "learning_rate_decay": "cosine",
    "warmup_steps": 3000,
    "weight_decay": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "clip_norm": 1.0,
    "recompute": "full",
    "save_every": 5000,
    "nonfinite": "skip",
}
# 1909.08053 section 5.3, for `experiments.bert`: what it does not name is as in 1810.04805. ModernBERT's presets have it
# too; its own recipe has another optimizer, StableAdamW.
BERT_2019 = {
    "global_batch_size": 1024,
    "steps": 2_000_000,
    "learning_rate": 1e-4,
    "minimum_learning_rate": 0.0,
    "learning_rate_decay": "linear",
    "warmup_steps": 10_000,
    "weight_decay": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "clip_norm": 1.0,
    "save_every": 5000,
    "nonfinite": "skip",
}
# 2104.04473 table 1 gives the batch in samples; the paper times steps and does not train. Learning rate and tokens are
# those of GPT-3 175B, the largest of 2005.14165; for the 1T model section 5.1 assumes 450 billion tokens.
MEGATRON_2021 = {
    "megatron-1.7b": 512,
    "megatron-3.6b": 512,
    "megatron-7.5b": 512,
    "megatron-18.4b": 1024,
    "megatron-39.1b": 1536,
    "megatron-76.1b": 1792,
    "megatron-145.6b": 2304,
    "megatron-310.1b": 2160,
    "megatron-529.6b": 2520,
    "megatron-1008b": 3072,
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
    "llama2-7b": llama2(3e-4),
    "llama2-13b": llama2(3e-4),
    "llama2-70b": llama2(1.5e-4),
    "llama3-8b": llama3(3e-4),
    "llama3-70b": llama3(1.5e-4),
    "llama3.1-8b": llama3(3e-4),
    "llama3.1-70b": llama3(1.5e-4),
    "llama3.1-405b": llama3(8e-5),
}
# For the other released models, most of whose recipes are not published: Llama 2's, with the rate of its 7B and 13B.
RECIPES |= {
    name: llama2(3e-4, PRESETS[name].sequence_length) for name in RELEASED | RELEASED_OTHERS if name not in RECIPES
}
for name, batch in MEGATRON_2021.items():
    tokens = 450e9 if name == "megatron-1008b" else 300e9
    sizes = {"global_batch_size": batch, "steps": round(tokens / SEQUENCE / batch), "batch_ramp": ()}
    RECIPES[name] = {**recipe(3.2e6, 0.6e-4, tokens), **sizes}
RECIPES |= {alias: RECIPES[name] for alias, name in ALIASES.items()}
RECIPES |= {name: MEGATRON_2019 for name in PRESETS if name.startswith("gpt2") or name.endswith("-2019")}
RECIPES |= {name: BERT_2019 for name in BERTS if name != "bert-tiny"}
# Only the toy generates text after its training.
RECIPES = {name: {**fields, "new_tokens": 0} for name, fields in RECIPES.items()}


EXPERIMENT = Experiment(__doc__ or "", DEFAULTS, RECIPES, program="python -m experiments.gpt3", importer=HUGGING_FACE)


def main(arguments: Sequence[str] | None = None, experiment: Experiment = EXPERIMENT) -> int:
    """Runs an experiment; returns the process's exit code (see `megajax.train.command`).

    Args:
      arguments: the words of the command line; the process's own if None.
      experiment: its default configuration.
    """
    return command.main(experiment, arguments, text_sampler, task_evaluations)


def text_sampler(trainer: Any, sample: SampleConfig) -> Any:
    """The text after a training; imported late, because --help needs no jax."""
    from megajax.generate.after_training import TextSample

    return TextSample(trainer, sample)


def task_evaluations(trainer: Any, request: Request) -> list[Any]:
    """The task of --evaluate-every; imported late likewise."""
    if request.evaluate is None:
        return []
    from megajax.evaluate.during_training import TaskEvaluation

    return [TaskEvaluation(trainer, request.evaluate)]


if __name__ == "__main__":
    sys.exit(main())

r"""Fine-tune a model on answers: chats, or prompts and completions, with loss on what the assistant says only.

python -m experiments.finetune --init-from DIR --sft-data chats.jsonl --epochs 3 --sequence-length 2048 --run-dir runs/tuned
python -m experiments.finetune --config runs/imported/config.toml --resume runs/imported --run-dir runs/tuned \
    --sft-data chats.jsonl --valid-sft-data held_out.jsonl --epochs 3           from an import, such as a GGUF file's
python -m megajax.interop.hugging_face export runs/tuned --out tuned            for transformers

DIR is the directory of a Hugging Face model with its tokenizer and chat template. A line of a file is {"messages": [{"role":
"user", "content": "..."}, {"role": "assistant", "content": "..."}]} or {"prompt": "...", "completion": "..."}. --epochs E
sets --steps to E times the rows into which the samples are packed, divided by the batch. Every mesh, schedule and option of
gpt3 is legal.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

from experiments import gpt3, own_options
from megajax.config import ConfigError
from megajax.config.cli import Experiment, Request, parse
from megajax.schedules.errors import exit_code

# Full fine-tuning of instruction models: 2e-5 with a cosine and a batch of 64 to 128 chats is common to Llama 2's chat
# models (2307.09288 section 3.1, where weight decay is 0.1 and the batch 64) and the Alpaca and Tulu recipes.
DEFAULTS: dict[str, Any] = {
    "model": "tiny",
    "global_batch_size": 64,
    "microbatch_size": 1,
    "steps": 200,
    "learning_rate": 2e-5,
    "minimum_learning_rate": 0.0,
    "learning_rate_decay": "cosine",
    "warmup_steps": 20,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "clip_norm": 1.0,
    "save_every": 200,
    "new_tokens": 0,
}
EXPERIMENT = Experiment(
    __doc__ or "",
    DEFAULTS,
    program="python -m experiments.finetune",
    importer=gpt3.HUGGING_FACE,
    defaults_for_imports=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code (see `megajax.train.command`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: gpt3.main(complete(words), EXPERIMENT))


def complete(words: Sequence[str]) -> list[str]:
    """The command line with --steps for --epochs, and without a validation if there is no data for it.

    Raises:
      ConfigError: the command line is wrong, there is no --sft-data, or (for --epochs) it cannot be read.
    """
    epochs, rest = own_options.split_epochs(words)
    if {"-h", "--help"} & set(rest):
        return rest
    request = parse(rest, EXPERIMENT)
    if not request.given.get("sft_data"):
        raise ConfigError("there is nothing to fine-tune on: pass --sft-data FILE (JSON lines; --help shows a line).")
    given = {word.partition("=")[0] for word in rest}  # a configuration of --config has all options
    if not request.given.get("valid_sft_data") and "--validation-batches" not in given:
        rest += ["--validation-batches", "0"]
    return rest if epochs is None else [*rest, "--steps", str(steps_of(request, epochs))]


def steps_of(request: Request, epochs: int) -> int:
    """Steps in which every row is trained on `epochs` times; the last step may start another epoch."""
    from megajax.data.source import packed_samples, tokenizer_of_model
    from megajax.data.tokenizers import load_tokenizer

    run = request.run(request.devices_needed or 1, "fp32")
    run.data.validate()
    tokenizer = tokenizer_of_model(run, load_tokenizer(run.data.tokenizer, run.data.end_of_document))
    rows = packed_samples(run.data, run.data.sft_data or (), tokenizer, run.model.sequence_length, None).count
    return math.ceil(epochs * rows / run.train.global_batch_size)


if __name__ == "__main__":
    sys.exit(main())

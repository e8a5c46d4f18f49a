r"""Train BERT as the first Megatron-LM paper did (1909.08053 section 5.3 and table 4): 336M, 1.3B and 3.9B parameters.

python -m experiments.bert                                      a small BERT on 8 CPU devices, or on the GPUs there are
python -m megajax.data.preprocess --input corpus.jsonl --out corpus --tokenizer vocab.txt --split-sentences \
    --no-end-of-document                                        one sequence per sentence
python -m experiments.bert --model bert-336m --data 8 --tokenizer vocab.txt --data-path corpus
python -m experiments.bert --model bert-3.9b --tensor 8 --data 64 --pipe 1 --dry-shapes

1,024 samples of 512 tokens a step, 2 million steps; learning rate 1e-4 after 10,000 steps of warm-up, then linear decay;
weight decay 0.01, clipping at 1.0, dropout 0.1. Masked words and the order of two segments; norms before attention and MLP.
Every mesh, schedule and option of gpt3 is legal. The small BERT reads the bundled text in its own WordPieces (--tokenizer
wordpiece).
"""

import sys
from collections.abc import Sequence

from experiments.gpt3 import RECIPES
from megajax.config.cli import Experiment
from megajax.interop.init_from import HUGGING_FACE
from megajax.train import command

# The small BERT on eight CPU devices of a machine with two cores: under three minutes, and the loss falls visibly.
DEFAULTS = {
    "model": "bert-tiny",
    "tokenizer": "wordpiece",
    "microbatch_size": 4,
    "global_batch_size": 32,
    "steps": 250,
    "learning_rate": 2e-3,
    "warmup_steps": 25,
    "learning_rate_decay": "linear",
    "beta2": 0.98,
    "validation_every": 1000,
}
EXPERIMENT = Experiment(__doc__ or "", DEFAULTS, RECIPES, program="python -m experiments.bert", importer=HUGGING_FACE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code (see `megajax.train.command`)."""
    return command.main(EXPERIMENT, arguments)


if __name__ == "__main__":
    sys.exit(main())

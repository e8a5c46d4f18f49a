"""The first Megatron-LM paper's GPT-2 runs (1909.08053 section 4.2 and table 2): 355M, 2.5B and 8.3B parameters.

python -m experiments.gpt2 --dry-shapes --data 64                      the 355M model on the paper's 64 GPUs
python -m experiments.gpt2 --data 64 --tokenizer gpt2 --text corpus.jsonl.gz --run-dir runs/355m
python -m experiments.gpt2 --model megatron-8.3b-2019 --heads 24 --data 64 --tensor 8 --run-dir runs/8.3b

512 samples of 1,024 tokens a step, 300,000 steps; learning rate 1.5e-4 after 3,000 steps of warm-up, then one cosine to
1e-5; weight decay 0.01, clipping at 1.0, dropout 0.1, every layer recomputed. The paper's 8.3B model has 24 heads.
"""

import sys
from collections.abc import Sequence

from experiments import gpt3
from megajax.config.cli import Experiment

RECIPE = {"model": "gpt2-medium", **gpt3.MEGATRON_2019, "new_tokens": 0}
EXPERIMENT = Experiment(__doc__ or "", RECIPE, program="python -m experiments.gpt2", importer=gpt3.HUGGING_FACE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code (see `megajax.train.command`)."""
    return gpt3.main(arguments, EXPERIMENT)


if __name__ == "__main__":
    sys.exit(main())

"""Train a small sparse model on the bundled text: 8 experts in each block, of which a token passes 2.

python -m experiments.moe                                              8 CPU devices, or the GPUs there are
python -m experiments.moe --balance-loss 0                             the log shows that the experts are used less evenly
python -m experiments.moe --balance-loss 0 --balance-bias-rate 0.003   balanced without a loss (2408.15664)
python -m experiments.moe --expert-capacity 1.25                       an expert takes at most 1.25 times its even share
python -m experiments.moe --data 1 --pipe 4 --tensor 2 --schedule zb_v
python -m experiments.moe --expert 4                                   groups of 4 replicas split the experts

The log has the balance loss (1: the experts of each layer are used equally), the entropy of the experts' load as a fraction
of its largest value, and the largest share that one expert has of its layer's choices (12.5% if even); --log-jsonl and
TensorBoard have them for each layer. Every mesh, schedule and option of gpt3 is legal.
"""

import sys
from collections.abc import Sequence

from experiments import gpt3
from megajax.config.cli import Experiment

# On eight CPU devices of a machine with two cores: under three minutes, and the loss falls visibly.
DEFAULTS = {**gpt3.DEFAULTS, "model": "moe-tiny", "steps": 150}
EXPERIMENT = Experiment(
    __doc__ or "", DEFAULTS, gpt3.RECIPES, program="python -m experiments.moe", importer=gpt3.HUGGING_FACE
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code (see `megajax.train.command`)."""
    return gpt3.main(arguments, EXPERIMENT)


if __name__ == "__main__":
    sys.exit(main())

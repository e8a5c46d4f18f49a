"""What a run measures between two steps: `Evaluation` is the interface, `Validation` the loss of validation sets."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from megajax.config.validation_sets import DEFAULT_SET
from megajax.train.state import TrainState, evaluated_params
from megajax.train.step import Training


@dataclasses.dataclass(frozen=True)
class Scores:
    """The result of an evaluation.

    Attributes:
      lines: of the log, which puts the step before each.
      values: by name, for the step's record in log.jsonl and TensorBoard; names have a prefix, as "validation/loss".
    """

    lines: Sequence[str]
    values: Mapping[str, float | None]


class Evaluation(Protocol):
    """Something that is measured on the state after some steps, and after the last one.

    The loop has suspended the watchdog, and counts the time as validation. Every process calls both methods.
    """

    def due(self, step: int) -> bool:
        """Whether it runs after that step, the first being 1; it also runs after the last step."""

    def run(self, state: TrainState, step: int) -> Scores:
        """Measures the state after the step; `state` must stay as it is."""


class Validation:
    """The mean loss of each validation set, every `validation_every` steps."""

    def __init__(self, training: Training, sets: Mapping[str, Any]):
        """`sets`: batches by the name of the set; see `validation_loss`."""
        self.training, self.sets = training, sets

    def due(self, step: int) -> bool:
        """See `Evaluation`."""
        return step % self.training.run.train.validation_every == 0

    def run(self, state: TrainState, step: int) -> Scores:
        """One line, and "validation/NAME/loss" and "/perplexity", for each set; without /NAME for the `DEFAULT_SET`."""
        lines, values = [], {}
        for name, batches in self.sets.items():
            loss = validation_loss(self.training, state, batches)
            perplexity = float(np.exp(loss))
            shown, prefix = (f" of {name}", f"validation/{name}") if name != DEFAULT_SET else ("", "validation")
            lines.append(f"validation loss{shown} {loss:.4f} per token, perplexity {perplexity:.4g}")
            values |= {f"{prefix}/loss": loss, f"{prefix}/perplexity": perplexity}
        return Scores(lines, values)


def validation_loss(training: Training, state: TrainState, batches: Any) -> float:
    """Mean loss over the tokens that count of a set's first `validation_batches` global batches.

    Batches are weighted by `Training.loss_weight`: the mean is over the labels' weights, of which batches of packed samples,
    masked words or --eod-mask-loss have different sums. A set smaller than that is read once.

    Args:
      batches: a `Loader`, or another object with `batch(consumed_samples)`, `global_batch_size`, and `batches_of_an_epoch`
        unless the set has no end.
    """
    size, most = batches.global_batch_size, training.run.train.validation_batches
    params = evaluated_params(training.run.train, state)
    count = min(most, getattr(batches, "batches_of_an_epoch", most))
    total = weight = 0.0
    for index in range(count):
        batch = batches.batch(index * size)
        own = training.loss_weight(batch)
        # A batch without any label that counts has no mean.
        total += own * float(training.evaluate(params, batch)) if own else 0.0
        weight += own
    return total / weight if weight else float("nan")

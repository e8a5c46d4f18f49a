"""The dev score of classes of sentences, or of choices: accuracy, and F1 where the task has it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from megajax.config import DataConfig
from megajax.config.tasks import TASKS
from megajax.data.classification import ClassificationSamples
from megajax.data.race import RaceSamples

__all__ = ["ClassScores", "metrics"]


def metrics(predicted: np.ndarray, classes: np.ndarray, f1: bool) -> dict[str, float]:
    """Accuracy, and F1 of class 1 (0 without a right one), as GLUE counts them.

    Args:
      predicted, classes: int [samples].
      f1: whether F1 is wanted.
    """
    found = {"accuracy": float((predicted == classes).mean())}
    if f1:
        right = int(((predicted == 1) & (classes == 1)).sum())
        found["f1"] = 2 * right / max(1, int((predicted == 1).sum() + (classes == 1).sum()))
    return found


class ClassScores:
    """The scores of `DevScore` for classes of samples, or the right choices of questions.

    Attributes:
      described: what is scored.
    """

    def __init__(self, samples: ClassificationSamples | RaceSamples, data: DataConfig):
        """`samples`: in the order of their files."""
        self.classes, self.f1 = samples.classes, TASKS[data.task].f1
        self.described = f"{len(samples.classes):,} {'questions' if isinstance(samples, RaceSamples) else 'samples'}"

    def collect(self, model: Any) -> Callable:
        """The model's outputs for a microbatch: losses fp32 [n], and predicted classes int32 [n]."""
        return model.class_scores

    def results(self, losses: np.ndarray, predicted: np.ndarray) -> tuple[dict[str, float], dict[str, Any]]:
        """The scores, and no files, from the outputs for all samples and the padding of the last batch."""
        losses, predicted = losses[: len(self.classes)], predicted[: len(self.classes)]
        return metrics(predicted, self.classes, self.f1) | {"loss": float(losses.mean(dtype=np.float64))}, {}

"""The dev score of BERT's fine-tuning: accuracy, and F1 where the task has it, after each epoch and on the training's mesh.

The step with the best score is written to RUN_DIR/best.json, and its checkpoint is never deleted.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config.tasks import TASKS
from megajax.data.loader import RowLoader
from megajax.data.source import classification_samples
from megajax.evaluate.scorer import sum_over_context
from megajax.runtime.processes import is_first_process
from megajax.train.step import Training, TrainState
from megajax.train.validation import Scores

__all__ = ["BEST", "DevScore", "metrics", "predict"]

BEST = "best.json"


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


class DevScore:
    """A `megajax.train.validation.Evaluation`: the score of --dev-data after each epoch."""

    def __init__(self, trainer: Any, steps: int):
        """Reads the samples.

        Args:
          trainer: a `megajax.train.trainer.Trainer` of a run with `dev_data`.
          steps: of an epoch.

        Raises:
          ConfigError: see `classification_samples`.
        """
        run = trainer.run
        self.steps, self.training, self.f1 = steps, trainer.training, TASKS[run.data.task].f1
        samples = classification_samples(run, run.data.dev_data, trainer.tokenizer, None)
        self.batches = RowLoader(samples, run.train.global_batch_size, run.microbatches)
        self.score = jax.jit(
            lambda params, batch: predict(self.training, params, batch),
            in_shardings=(self.training.params_sharding, self.training.batch_sharding),
            out_shardings=NamedSharding(self.training.mesh, P()),
        )
        directory, self.checkpoints = trainer.directory.directory, trainer.directory.checkpoints
        self.path = pathlib.Path(directory) / BEST if directory else None
        self.best = self._read()
        self._protect()

    def due(self, step: int) -> bool:
        """See `Evaluation`."""
        return step % self.steps == 0

    def run(self, state: TrainState, step: int) -> Scores:
        """A line with the scores, and "dev/accuracy", "dev/f1" and "dev/loss"."""
        samples, size, losses, predicted = self.batches.samples, self.batches.global_batch_size, [], []
        for first in range(0, samples.count, size):
            with jax.set_mesh(self.training.mesh):
                found = self.score(state.params, self.training.place(self.batches.batch(first)))
            for rows, all_rows in zip((losses, predicted), found, strict=True):
                rows.append(np.asarray(all_rows).reshape(-1))
        losses, predicted = (np.concatenate(rows)[: samples.count] for rows in (losses, predicted))
        found = metrics(predicted, samples.classes, self.f1) | {"loss": float(losses.mean(dtype=np.float64))}
        self._keep(found, step)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        best = f"; the best so far is step {self.best['step']}" if self.best["step"] != step else "; the best so far"
        line = f"epoch {step / self.steps:g}: dev {shown} of {samples.count:,} samples{best}"
        return Scores([line], {f"dev/{name}": value for name, value in found.items()})

    def _read(self) -> dict[str, Any]:
        """The best score of the steps before the one that the run resumes from; of a fresh run, none."""
        if self.path is None or not self.path.exists():
            return {}
        return json.loads(self.path.read_text(encoding="utf-8"))

    def _keep(self, found: Mapping[str, float], step: int) -> None:
        """Remembers the step if no earlier one has a better accuracy."""
        if self.best and self.best["step"] < step and found["accuracy"] <= self.best["accuracy"]:
            return
        self.best = {"step": step, **found}
        if self.path and is_first_process():
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self.best, indent=2) + "\n", encoding="utf-8")
            unfinished.replace(self.path)
        self._protect()

    def _protect(self) -> None:
        if self.checkpoints and self.best:
            self.checkpoints.never_deleted = self.best["step"]


def predict(training: Training, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Losses fp32 and predicted classes int32 of a batch's samples, both [microbatches, samples]; to be traced."""
    model, functions = training.evaluation()
    return sum_over_context(training.run.parallel, training.forward(functions, model.class_scores, params, batch))

"""`DevScore`: the score of BERT's fine-tuning on --dev-data, after each epoch and on the training's mesh.

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
from megajax.data.task_samples import task_samples
from megajax.evaluate.classification import ClassScores
from megajax.evaluate.scorer import sum_over_context
from megajax.evaluate.spans import SpanScores
from megajax.runtime.processes import is_first_process
from megajax.train.state import TrainState, evaluated_params
from megajax.train.validation import Scores

__all__ = ["BEST", "DevScore"]

BEST = "best.json"


class DevScore:
    """A `megajax.train.validation.Evaluation`: the score of --dev-data after each epoch."""

    def __init__(self, trainer: Any, steps: int):
        """Reads the samples.

        Args:
          trainer: a `megajax.train.trainer.Trainer` of a run with `dev_data`.
          steps: of an epoch.

        Raises:
          ConfigError: see `task_samples` and `SpanScores`.
        """
        run, task = trainer.run, TASKS[trainer.run.data.task]
        self.steps, self.training, self.criterion = steps, trainer.training, task.criterion
        samples = task_samples(run, run.data.dev_data, trainer.tokenizer, None)
        kind = SpanScores if task.output_heads == "spans" else ClassScores
        self.task = kind(samples, run.data)
        self.batches = RowLoader(samples, run.train.global_batch_size, run.microbatches)
        self.score = jax.jit(
            self._outputs,
            in_shardings=(self.training.params_sharding, self.training.batch_sharding),
            out_shardings=NamedSharding(self.training.mesh, P()),
        )
        directory, self.checkpoints = trainer.directory.directory, trainer.directory.checkpoints
        self.directory = pathlib.Path(directory) if directory else None
        self.best = self._read()
        self._protect()

    def due(self, step: int) -> bool:
        """See `Evaluation`."""
        return step % self.steps == 0

    def run(self, state: TrainState, step: int) -> Scores:
        """A line with the scores, and "dev/loss", "dev/accuracy" and so on."""
        batches = []
        for first in range(0, self.batches.samples.count, self.batches.global_batch_size):
            with jax.set_mesh(self.training.mesh):
                batches.append(
                    self.score(
                        evaluated_params(self.training.run.train, state), self.training.place(self.batches.batch(first))
                    )
                )
        rows = lambda *found: np.concatenate([np.asarray(one).reshape(-1, *one.shape[2:]) for one in found])  # noqa: E731
        found, files = self.task.results(*jax.tree.map(rows, *batches))
        self._keep(found, files, step)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        best = f"; the best so far is step {self.best['step']}" if self.best["step"] != step else "; the best so far"
        line = f"epoch {step / self.steps:g}: dev {shown} of {self.task.described}{best}"
        return Scores([line], {f"dev/{name}": value for name, value in found.items()})

    def _outputs(self, params: Any, batch: Any) -> Any:
        """Traced: the outputs of the task's `collect` for a batch, each [microbatches, samples, ...]."""
        model, functions = self.training.evaluation()
        found = self.training.forward(functions, self.task.collect(model), params, batch)
        return sum_over_context(self.training.run.parallel, found)

    def _read(self) -> dict[str, Any]:
        """The best score of the steps before the one that the run resumes from; of a fresh run, none."""
        if self.directory is None or not (self.directory / BEST).exists():
            return {}
        return json.loads((self.directory / BEST).read_text(encoding="utf-8"))

    def _keep(self, found: Mapping[str, float], files: Mapping[str, Any], step: int) -> None:
        """Remembers the step, and writes its files, if no earlier one has a better score."""
        if self.best and self.best["step"] < step and found[self.criterion] <= self.best[self.criterion]:
            return
        self.best = {"step": step, **found}
        if self.directory and is_first_process():
            for name, content in {**files, BEST: self.best}.items():
                unfinished = (self.directory / name).with_suffix(".unfinished")
                unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
                unfinished.replace(self.directory / name)
        self._protect()

    def _protect(self) -> None:
        if self.checkpoints and self.best:
            self.checkpoints.never_deleted = self.best["step"]

"""`--evaluate-every`: a task of megajax.evaluate on the current weights of a training, on its mesh.

The parameters stay where they are: the forward pass is that of the training's validation, with its layout, chunks and ZeRO
level. Each evaluation takes the time of `python -m megajax.evaluate` without its start, and the first one compiles.
"""

import hashlib
import pathlib
import re
from typing import Any

from megajax.config import ConfigError
from megajax.config.evaluate import EvaluateConfig
from megajax.evaluate.results import describe_numbers
from megajax.evaluate.scorer import Score, Scorer
from megajax.evaluate.tasks import make_task
from megajax.runtime.exchange import require_same
from megajax.train.state import TrainState, evaluated_params
from megajax.train.validation import Scores

__all__ = ["TaskEvaluation"]


class TaskEvaluation:
    """A `megajax.train.validation.Evaluation` by a task of megajax.evaluate."""

    def __init__(self, trainer: Any, config: EvaluateConfig):
        """Reads the task's file before the training. Every process reads its own copy.

        Args:
          trainer: a `megajax.train.trainer.Trainer` with a tokenizer.
          config: complete.

        Raises:
          ConfigError: the file cannot be used or is not the same in all processes, or the model scores no text.
        """
        self.every, self.name = config.evaluate_every, config.evaluate_task
        sizes = {"window": config.evaluate_window, "stride": config.evaluate_stride}
        self.scorer = Scorer(trainer.training, config.evaluate_batch)
        try:
            context = trainer.run.model.sequence_length
            self.task = make_task(self.name, config.evaluate_data, trainer.tokenizer, context, **sizes)
            self._batches = self.scorer.plan(self.task.requests)
        except ConfigError as error:  # the options of megajax.evaluate have shorter names
            raise ConfigError(re.sub(r"--(?:task-)?(data|window|stride)\b", r"--evaluate-\1", str(error))) from None
        data = hashlib.sha256(pathlib.Path(config.evaluate_data).read_bytes()).hexdigest()
        require_same("train/evaluate", {f"the SHA-256 of {config.evaluate_data}": data, "its windows": str(sizes)})

    def due(self, step: int) -> bool:
        """See `Evaluation`."""
        return step % self.every == 0

    def run(self, state: TrainState, step: int) -> Scores:
        """The task's numbers, in a line and as "evaluation/TASK/NUMBER". Losses that are not finite give a warning."""
        scores: dict[int, Score] = {}
        try:
            for batch, found in self.scorer.score(
                evaluated_params(self.scorer.training.run.train, state), self.task.requests, self._batches
            ):
                scores |= dict(zip(batch.numbers, found, strict=True))
        except ConfigError as error:  # the training has its own rules for what is not finite
            return Scores([f"warning: {self.name}: {error}"], {})
        results = self.task.results([scores[number] for number in range(len(scores))])
        values = {f"evaluation/{self.name}/{name}": value for name, value in results.items()}
        return Scores([f"{self.name}: {describe_numbers(results)}"], values)

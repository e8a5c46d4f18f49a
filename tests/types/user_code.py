"""What a user of megajax writes, for a type checker: tests/types/test_types.py. It is not run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import megajax
from megajax import (
    Callback,
    ConfigError,
    Control,
    DataConfig,
    ModelConfig,
    OptimizerContext,
    OutputConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    Trainer,
    preset,
)


class Batches:
    """Batches of a user's."""

    def batch(self, consumed_samples: int) -> Mapping[str, Any]:
        """The batch that starts with that sample."""
        return {"tokens": np.full((1, 8, 16), consumed_samples)}


class StopEarly(Callback):
    """Stops when the validation loss is low, and copies checkpoints."""

    def on_validation(self, control: Control, record: Mapping[str, Any]) -> None:
        if record["validation/loss"] < 2.0:
            control.stop("low enough")

    def on_save(self, control: Control, step: int, path: Path) -> None:
        if control.is_first:
            control.message(f"step {step} is in {path.name}")


def optimizer(context: OptimizerContext) -> optax.GradientTransformation:
    """AdamW with the run's rates."""
    return optax.chain(optax.scale_by_adam(), context.scale_by_rates())


def main() -> float | None:
    """Trains."""
    model: ModelConfig = preset("tiny")
    run = RunConfig(model, ParallelConfig(data=2, pipe=2), TrainConfig(steps=10), DataConfig(text="corpus.txt"))
    output = OutputConfig(run_dir="runs/first", resume="auto", track="wandb")
    try:
        trainer = Trainer(run, output=output, data=Batches(), optimizer=optimizer, callbacks=[StopEarly()])
        result = trainer.fit()
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    leaves: list[jax.Array] = jax.tree.leaves(result.state.params)
    stopped: str | None = result.stopped
    print(megajax.__version__, stopped, len(leaves))
    return result.metrics["loss"]

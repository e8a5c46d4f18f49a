"""Training on preferences: the reference model's log-probabilities, computed once on the run's mesh, and KTO's estimate."""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError
from megajax.data.preferences import PreferenceBatches
from megajax.models.preference import completion_scores
from megajax.train.step import Training, TrainState

__all__ = ["PreferenceTraining"]

Tree = Any
FILE = "reference.npz"


class PreferenceTraining(Training):
    """`Training` of a `PreferenceModel`."""

    data: PreferenceBatches
    directory: pathlib.Path | None  # of the run

    @classmethod
    def of(cls, training: Training, data: PreferenceBatches, directory: pathlib.Path | None) -> "PreferenceTraining":
        """The training of a `Trainer`, with its data and the run's directory."""
        if training.run.parallel.context > 1:
            raise ConfigError(
                "context ranks have parts of completions, whose sums a pair's loss compares: omit --context."
            )
        own = cls(training.program, training.mesh, training.model_class, training.rules)
        own.data, own.directory = data, directory
        replicated = NamedSharding(own.mesh, P())
        shardings = (own.params_sharding, own.batch_sharding)
        own.scores = own.checked(jax.jit(own._scores, in_shardings=shardings, out_shardings=replicated))
        return own

    def refilled(self, state: TrainState, batch: Callable[[int], Tree], consumed_samples: int) -> TrainState:
        """The state as it is; first computes the reference's log-probabilities with it, or reads those of the run.

        Raises:
          ConfigError: the run has trained, and its reference's are missing, or of other pairs: those of the trained model
            are others.
        """
        path = self.directory and self.directory / FILE
        if not consumed_samples:
            scores = {"pairs": np.uint32(self.data.fingerprint()), "reference": self.reference(state.params, False)}
            if self.data.with_mismatched:
                scores["kl"] = self.reference(state.params, mismatched=True)
            if path and jax.process_index() == 0:
                unfinished = path.with_suffix(".unfinished.npz")
                np.savez(unfinished, **scores)
                os.replace(unfinished, path)
        elif path and path.exists():
            with np.load(path) as found:
                scores = dict(found)
            if scores["pairs"] != self.data.fingerprint() or self.data.with_mismatched > ("kl" in scores):
                raise ConfigError(
                    f"{path} is of other pairs, or of another loss: pass the run's --pairs and --loss-type."
                )
        else:
            raise ConfigError(
                f"the run has trained {consumed_samples} samples, and there is no {path or FILE} with the reference's "
                "log-probabilities: export its weights, and start from them with --init-from."
            )
        self.data.reference, self.data.mismatched = scores["reference"], scores.get("kl")
        return state

    def reference(self, params: Tree, mismatched: bool) -> np.ndarray:
        """fp32 [pairs, 2]: the log-probability of each completion by these parameters."""
        places = [(pair, side) for pair in range(len(self.data.pairs)) for side in (0, 1)]
        parallel = self.run.parallel
        shape = (self.run.microbatches, parallel.microbatch_size * parallel.data)
        size, found = shape[0] * shape[1], []
        for first in range(0, len(places), size):
            part = [places[min(number, len(places) - 1)] for number in range(first, first + size)]
            rows = [self.data.row(*place, mismatched=mismatched) for place in part]
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            batch |= {"sample": np.zeros(size, np.uint32)}
            split = {name: array.reshape(*shape, *array.shape[1:]) for name, array in batch.items()}
            with jax.set_mesh(self.mesh):
                found.append(np.asarray(self.scores(params, self.place(split))).reshape(-1))
        return np.concatenate(found)[: len(places)].reshape(-1, 2)

    # The functions below are traced.

    def _scores(self, params: Tree, batch: Tree) -> jax.Array:
        """fp32 [microbatches, samples]."""
        model, functions = self.evaluation()
        collect = lambda shared, y, microbatch: completion_scores(model, shared, y, microbatch)  # noqa: E731
        return self.forward(functions, collect, params, batch)

    def traced_step(
        self, state: TrainState, batch: Mapping[str, jax.Array], hold: jax.Array, *more: Any, **options: Any
    ):
        """With KTO's estimate: the mean over the batch of policy less reference of mismatched completions, at least 0."""
        if self.data.with_mismatched:
            other = {name: batch[f"kl_{name}"] for name in ("tokens", "labels", "weights")} | {
                "sample": batch["sample"]
            }
            scores = self._scores(state.params, other)
            kl = jnp.maximum((scores - batch["kl_reference"]).mean(), 0)
            batch = {name: array for name, array in batch.items() if not name.startswith("kl")}
            batch["kl"] = jnp.broadcast_to(kl, batch["reference"].shape)
        return super().traced_step(state, batch, hold, *more, **options)

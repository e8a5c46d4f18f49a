"""Batches of the user's, checked as they are read: on the host, in the thread that reads ahead."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from megajax.config import BertConfig, ConfigError, ModelConfig, RunConfig
from megajax.config.batch_ramp import batch_size
from megajax.config.validation_sets import DEFAULT_SET
from megajax.data.source import RunData
from megajax.data.user_samples import Samples, UserSamples, gives_batches
from megajax.models.ids import checked_ids
from megajax.models.interface import PipelineModel
from megajax.train.check import check_batch
from megajax.train.loop import Batch, Batches
from megajax.train.same_run import require_same_batch

__all__ = ["UserBatches", "user_data"]


def user_data(data: Any, validation: Any, run: RunConfig, model: PipelineModel) -> RunData:
    """Batches or samples of the user's as the data of a run; for arguments see `Trainer` and `UserBatches`."""
    plain = type(model)(model.config, dataclasses.replace(model.context, teacher=None))  # validation has no teacher
    sets = validation if isinstance(validation, Mapping) else {DEFAULT_SET: validation}
    checked = {
        name: UserBatches(_source(one, run, plain, f"the data of {name}"), run, plain)
        for name, one in sets.items()
        if one is not None
    }
    source = _source(data, run, model, "data")
    if isinstance(source, UserSamples):
        described = [source.description]
    else:
        described = getattr(source, "description", [f"batches of {type(source).__name__}"])
    return RunData(UserBatches(source, run, model), checked, described, tokenizer=getattr(source, "tokenizer", None))


def _source(data: Any, run: RunConfig, model: PipelineModel, name: str) -> Any:
    """An object that gives batches."""
    if not isinstance(data, Samples):
        if gives_batches(data):
            return data
        data = Samples(data, epochs=1 if name == "data" else None)
    elif gives_batches(data.data):
        kind = type(data.data).__name__
        raise ConfigError(f"{kind} gives batches by the samples consumed, not samples: pass it without Samples")
    return UserSamples(data, run, model.batch_shapes(), name)


class UserBatches:
    """Batches of the user's, as `Prefetch` reads them, with their sizes, their types and their ids checked."""

    def __init__(self, data: Batches, run: RunConfig, model: PipelineModel, consumed_samples: int = 0):
        """Checks nothing yet.

        Args:
          data: see `Trainer`.
          run: the run.
          model: the run's, see `check.model_to_check`.
          consumed_samples: where the batch that `global_batch_size` describes starts.
        """
        self.data, self.run, self.model = data, run, model
        self.global_batch_size = batch_size(run.train, consumed_samples)
        self.fitting: set[tuple] = set()  # the types of batches that the model takes
        if hasattr(data, "batches_of_an_epoch"):  # else it has no end
            self.batches_of_an_epoch = data.batches_of_an_epoch

    def at(self, consumed_samples: int) -> "UserBatches":
        """The batches from a sample on."""
        later = UserBatches(self.data, self.run, self.model, consumed_samples)
        later.fitting = self.fitting
        return later

    def state(self, consumed_samples: int) -> str | None:
        """What a checkpoint after that many samples stores of the data; None: nothing."""
        return self.data.state(consumed_samples) if isinstance(self.data, UserSamples) else None

    def restore(self, consumed_samples: int, stored: str | None) -> list[str]:
        """Continues after that many samples, from what `state` returned then; returns messages."""
        return self.data.restore(consumed_samples, stored) if isinstance(self.data, UserSamples) else []

    def batch(self, consumed_samples: int) -> Batch:
        """The batch that starts with sample `consumed_samples`, as NumPy arrays.

        Raises:
          ConfigError: an array does not have the run's microbatches and samples, the model does not take the batch, or an
            id is outside the model's tables.
        """
        batch = {name: np.asarray(array) for name, array in self.data.batch(consumed_samples).items()}
        each = self.run.parallel.microbatch_size * self.run.parallel.data
        expected = (batch_size(self.run.train, consumed_samples) // each, each)
        for name, array in batch.items():
            if array.shape[:2] != expected:
                raise ConfigError(
                    f"batch({consumed_samples})[{name!r}] has shape {tuple(array.shape)}, and the run's batches have "
                    f"[{expected[0]} microbatches, {expected[1]} samples, ...]: return arrays of that shape"
                )
        types = tuple((name, array.shape, array.dtype) for name, array in batch.items())
        if types not in self.fitting:
            check_batch(self.model, batch, f"batch({consumed_samples})", self.run.parallel.data)
            _check_shifted(self.run, batch)
            if not self.fitting:
                require_same_batch(batch)
            self.fitting.add(types)
        return checked_ids(batch, self.model.id_bounds())


def _check_shifted(run: RunConfig, batch: Batch) -> None:
    """Refuses labels that are the tokens themselves, as libraries have them whose models shift the labels."""
    if not isinstance(run.model, ModelConfig) or isinstance(run.model, BertConfig):
        return
    tokens, labels = batch.get("tokens"), batch.get("labels")
    if tokens is None or labels is None or tokens.shape != labels.shape or tokens.shape[-1] < 2:
        return
    counts = labels >= 0  # others are ignored
    if (tokens != tokens.flat[0]).any() and counts.any() and (tokens == labels)[counts].all():
        raise ConfigError(
            "the batch's 'labels' are its 'tokens', which the model does not shift: give tokens = ids[:-1], labels = ids[1:]"
        )

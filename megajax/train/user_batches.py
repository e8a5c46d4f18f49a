"""Batches of the user's, checked as they are read: on the host, in the thread that reads ahead."""

from collections.abc import Mapping

import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.config.batch_ramp import batch_size
from megajax.config.validation_sets import DEFAULT_SET
from megajax.data.source import RunData
from megajax.models.ids import checked_ids
from megajax.models.interface import PipelineModel
from megajax.train.check import check_batch
from megajax.train.loop import Batch, Batches

__all__ = ["UserBatches", "user_data"]


def user_data(
    data: Batches, validation: Batches | Mapping[str, Batches] | None, run: RunConfig, model: PipelineModel
) -> RunData:
    """Batches of the user's as the data of a run; for arguments see `Trainer` and `UserBatches`."""
    sets = validation if isinstance(validation, Mapping) else {DEFAULT_SET: validation}
    checked = {name: UserBatches(one, run, model) for name, one in sets.items() if one is not None}
    described = getattr(data, "description", [f"batches of {type(data).__name__}"])
    return RunData(UserBatches(data, run, model), checked, described, tokenizer=getattr(data, "tokenizer", None))


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

    def at(self, consumed_samples: int) -> "UserBatches":
        """The batches from a sample on."""
        later = UserBatches(self.data, self.run, self.model, consumed_samples)
        later.fitting = self.fitting
        return later

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
            self.fitting.add(types)
        return checked_ids(batch, self.model.id_bounds())

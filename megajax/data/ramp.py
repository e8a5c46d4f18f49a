"""Batches of a run whose batch size grows."""

import numpy as np

from megajax.config import RunConfig
from megajax.data.loader import Loader
from megajax.train.lr_schedule import batch_size, batch_sizes


class RampedLoader:
    """A `Loader` for each batch size of a run; which one is next follows from the samples consumed, the only state."""

    def __init__(self, loader: Loader, run: RunConfig):
        """Takes the loader of full batches; cuts every batch into microbatches of the run's size."""
        at_once = run.parallel.microbatch_size * run.parallel.data
        self.train, self.samples = run.train, loader.samples
        self.loaders = {size: loader.resized(size, size // at_once) for size in batch_sizes(run.train)}

    def at(self, consumed_samples: int) -> Loader:
        """The loader of the batch that begins with sample `consumed_samples`."""
        return self.loaders[batch_size(self.train, consumed_samples)]

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """See `Loader.batch`."""
        return self.at(consumed_samples).batch(consumed_samples)

"""Batches of a run whose batch size grows."""

import numpy as np

from megajax.config import RunConfig
from megajax.data.loader import Loader, TokenSamples
from megajax.train.rates import batch_size, batch_sizes


class RampedLoader:
    """A `Loader` for each batch size of a run; which one is next follows from the samples consumed, the only state."""

    def __init__(self, samples: TokenSamples, run: RunConfig):
        """Cuts every batch into microbatches of the run's size."""
        at_once = run.parallel.microbatch_size * run.parallel.data
        self.train = run.train
        self.loaders = {size: Loader(samples, size, size // at_once) for size in batch_sizes(run.train)}

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """The batch that begins with sample `consumed_samples`; see `Loader.batch`."""
        return self.loaders[batch_size(self.train, consumed_samples)].batch(consumed_samples)

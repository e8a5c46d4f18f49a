"""Batch size ramps (2104.04473 section 5.1, GPT-3's runs): the size and the samples of each batch.

A step is compiled once for each number of microbatches. A ramp of GPT-3 has 98 batch sizes; `padded_sizes` chooses at most
eight of them to compile, and a batch of any other size is padded with microbatches of weight 0 to the next one. These
microbatches add exactly zero to the loss and to the gradients. The samples of a padded batch, their order, microbatches and
replicas are those of the batch without padding. The cost of padding: 98 sizes in equal shares of samples take 12 to 21%
more time than with one program per size (less with a larger pipeline bubble); a ramp is 4% of GPT-3's samples.
"""

import numpy as np

from megajax.config import RunConfig
from megajax.config.batch_ramp import batch_size
from megajax.data.loader import Loader

MAX_PROGRAMS = 8


def padded_sizes(run: RunConfig, most: int = MAX_PROGRAMS) -> dict[int, int]:
    """The padded size of each of the run's batch sizes; there are at most `most` different ones.

    They minimise the time of the ramp: every size gets the same number of samples, so its number of steps is
    proportional to 1 / size, and a step of b samples takes time proportional to b + (pipe - 1) * samples per microbatch.
    The minimum is found by dynamic programming over (number of programs, sizes that they cover).
    """
    sizes = np.array(run.train.batch_sizes)
    bubble = (run.parallel.pipe - 1) * run.parallel.microbatch_size * run.parallel.data
    steps = np.concatenate([[0.0], np.cumsum(1 / sizes)])  # sums over all smaller sizes
    count = len(sizes)
    # times[j] and groups[j]: the minimal time of the first j sizes, and the last size of each of their groups.
    times, groups = np.full(count + 1, np.inf), [()] * (count + 1)
    times[0] = 0.0
    for _ in range(min(most, count)):
        totals = times[:, None] + (sizes[None] + bubble) * (steps[None, 1:] - steps[:, None])  # [first size, last size]
        totals[np.arange(count + 1)[:, None] > np.arange(count)[None]] = np.inf
        first = totals.argmin(0)
        groups = [(), *((*groups[i], j) for j, i in enumerate(first))]
        times = np.concatenate([[np.inf], totals.min(0)])
    ends = np.array(groups[count])
    return {int(size): int(sizes[ends[np.searchsorted(ends, index)]]) for index, size in enumerate(sizes)}


class RampedLoader:
    """A `Loader` for each batch size of a run, selected by the number of samples consumed; it has no state."""

    def __init__(self, loader: Loader, run: RunConfig):
        """`loader` gives batches of the full size; every batch is split into microbatches of the run's size."""
        at_once = run.parallel.microbatch_size * run.parallel.data
        self.train, self.samples = run.train, loader.samples
        self.loaders = {
            size: loader.resized(size, size // at_once, padded // at_once) for size, padded in padded_sizes(run).items()
        }

    def at(self, consumed_samples: int) -> Loader:
        """The loader of the batch that starts at `consumed_samples`."""
        return self.loaders[batch_size(self.train, consumed_samples)]

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """See `Loader.batch`."""
        return self.at(consumed_samples).batch(consumed_samples)

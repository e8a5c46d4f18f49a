"""GPT samples of one indexed dataset, in Megatron's order."""

import os
import pathlib
from typing import Protocol

import numpy as np

from megajax.config import ConfigError
from megajax.data.indexed import IndexedDataset
from megajax.data.sample_indices import SampleIndex, build_sample_index, cached_arrays


class Samples(Protocol):
    """The samples that a loader reads.

    Attributes:
      count: number of samples. A token stream repeats after them in another order; a dataset ends.
      sequence_length: input tokens of a sample.
    """

    count: int
    sequence_length: int

    def window(self, index: int) -> np.ndarray:
        """Tokens of sample `index` >= 0, int32 [sequence_length + 1]: inputs are [:-1], labels [1:]."""


class GPTSamples:
    """Samples of a range of one dataset's sequences."""

    def __init__(
        self,
        dataset: IndexedDataset,
        bounds: tuple[int, int],
        samples: int | None,
        sequence_length: int,
        seed: int,
        cache: str | os.PathLike | None = None,
    ):
        """Builds the index, or loads it from the cache.

        Args:
          dataset: the indexed dataset.
          bounds: (first sequence, last sequence + 1).
          samples: minimum number of samples, rounded up to whole epochs; None: one epoch.
          sequence_length: input tokens of a sample.
          seed: seed of the order.
          cache: folder of the cached index; None: `index_cache` in the dataset's folder.

        Raises:
          ConfigError: see `build_sample_index` and `cached_arrays`; or the dataset's index is damaged.
        """
        if dataset.dtype.kind == "f":
            raise ConfigError(f"{dataset.prefix} has numbers of type {dataset.dtype.name}, which are not token ids")
        self.dataset, self.sequence_length = dataset, sequence_length
        first, last = bounds
        self.tokens = int(dataset.lengths[first:last].sum(dtype=np.int64))
        request = {"first": first, "last": last, "sequence_length": sequence_length, "samples": samples, "seed": seed}

        def build():
            dataset.check()
            return build_sample_index(dataset.lengths, first, last, sequence_length, samples, seed)._asdict()

        folder = pathlib.Path(dataset.prefix).parent / "index_cache" if cache is None else cache
        description = {"index": "GPTDataset", **request}
        try:
            self.index = SampleIndex(**cached_arrays(folder, description, [dataset.lengths[first:last]], build))
        except ConfigError as error:
            raise ConfigError(f"{dataset.prefix}, sequences {first} to {last}: {error}") from None
        self.count = self.index.count

    def window(self, index: int) -> np.ndarray:
        """Tokens of sample `index`, int32 [sequence_length + 1]; see `Samples.window`."""
        check_number(index, self.count)
        documents, offsets, lengths = self.index.document, self.dataset.offsets, self.dataset.lengths
        place = int(self.index.shuffle[index])
        (first, start), (last, end) = self.index.sample[place : place + 2].tolist()
        numbers = documents[first : last + 1]
        begins = offsets[numbers] // self.dataset.dtype.itemsize
        ends = begins + lengths[numbers]
        ends[-1] = begins[-1] + end + 1
        begins[0] += start
        tokens = self.dataset.tokens
        spans = [tokens[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return np.concatenate(spans, dtype=np.int32, casting="same_kind")


def check_number(index: int, count: int) -> None:
    """Raises ConfigError if sample `index` does not exist, as after the end of a blend by size."""
    if not 0 <= index < count:
        raise ConfigError(
            f"the run needs sample {index:,} of {count:,}: lower --steps or --global-batch-size, pass more data, or "
            "weights in --data-path (a blend with weights repeats its datasets)"
        )

"""Samples of one indexed dataset, in Megatron's order."""

import os
import pathlib
from typing import Protocol

import numpy as np

from megajax.config import ConfigError
from megajax.data.indexed import IndexedDataset
from megajax.data.sample_indices import SampleIndex, build_sample_index, cached_arrays


class Samples(Protocol):
    """What a loader needs.

    Attributes:
      count: samples there are; a stream of text then repeats in another order, a dataset has no more.
      sequence_length: inputs of a sample.
    """

    count: int
    sequence_length: int

    def window(self, index: int) -> np.ndarray:
        """int32 [sequence_length + 1] of sample `index` >= 0: inputs are [:-1], labels [1:]."""


class GPTSamples:
    """Samples of a part of one dataset."""

    def __init__(
        self,
        dataset: IndexedDataset,
        bounds: tuple[int, int],
        samples: int | None,
        sequence_length: int,
        seed: int,
        cache: str | os.PathLike | None = None,
    ):
        """Builds the index, or finds it in the cache.

        Args:
          dataset: the pair.
          bounds: first sequence of the part, and the one after its last.
          samples: how many to have at least, in whole epochs; None is one epoch.
          sequence_length: inputs of a sample.
          seed: of the order.
          cache: folder of the stored index; None is `index_cache` beside the pair.

        Raises:
          ConfigError: see `build_sample_index` and `cached_arrays`; or the pair's index is damaged.
        """
        if dataset.dtype.kind == "f":
            raise ConfigError(f"{dataset.prefix} has numbers of type {dataset.dtype.name}: those are no token ids")
        self.dataset, self.sequence_length = dataset, sequence_length
        first, last = bounds
        self._documents = last - first
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

    @property
    def epochs(self) -> int:
        """How often the index goes through the part's documents."""
        return len(self.index.document) // self._documents

    def window(self, index: int) -> np.ndarray:
        """int32 [sequence_length + 1]; `Samples.window`."""
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
    """Raises ConfigError for a sample that there is not: a blend by size ends when all is drawn."""
    if not 0 <= index < count:
        raise ConfigError(
            f"the run asks for sample {index:,} of {count:,}: lower --steps or --global-batch-size, give more data, or "
            "weights after --data-path (a blend with weights repeats its datasets)"
        )

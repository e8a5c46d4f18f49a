"""GPT samples of one indexed dataset, in Megatron's order."""

import os
from typing import Protocol

import numpy as np

from megajax.config import ConfigError
from megajax.data.indexed import IndexedDataset
from megajax.data.sample_indices import SampleIndex, build_sample_index, cached_arrays


class Samples(Protocol):
    """The samples that a loader reads.

    Attributes:
      count: number of samples. A token stream is repeated after them in another order; a dataset is not.
      sequence_length: input tokens of a sample.
    """

    count: int
    sequence_length: int

    def window(self, index: int) -> np.ndarray:
        """Tokens of sample `index` >= 0, int32 [sequence_length + 1]: inputs are [:-1], labels [1:]."""

    def describe_token(self, index: int, position: int) -> str:
        """The id of a token of sample `index` and its place in the data, for messages."""


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
        check_dataset(dataset)
        self.dataset, self.sequence_length = dataset, sequence_length
        first, last = bounds
        self.tokens = int(dataset.lengths[first:last].sum(dtype=np.int64))
        request = {"first": first, "last": last, "sequence_length": sequence_length, "samples": samples, "seed": seed}

        def build():
            return build_sample_index(dataset.lengths, first, last, sequence_length, samples, seed)._asdict()

        folder = dataset.cache_folder if cache is None else cache
        description = {"index": "GPTDataset", **request}
        try:
            self.index = SampleIndex(**cached_arrays(folder, description, [dataset.lengths[first:last]], build))
        except ConfigError as error:
            raise ConfigError(f"{dataset.prefix}, sequences {first} to {last}: {error}") from None
        self.count = self.index.count

    def window(self, index: int) -> np.ndarray:
        """Tokens of sample `index`, int32 [sequence_length + 1]; see `Samples.window`.

        Raises:
          ConfigError: the sample does not exist, or an id of an int64 file does not fit int32.
        """
        parts = [self.dataset.tokens[begin:end] for begin, end in self._spans(index)]
        if self.dataset.dtype.itemsize > 4:
            wide = np.concatenate(parts)
            if (wrong := np.flatnonzero(wide != wide.astype(np.int32))).size:
                raise ConfigError(
                    f"{self.describe_token(index, int(wrong[0]))}; ids must be 0 to {2**31 - 1}: write the pair again with "
                    "the model's tokenizer"
                )
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")

    def describe_token(self, index: int, position: int) -> str:
        """The id of a token of sample `index`, and its byte in the .bin file."""
        places = np.concatenate([np.arange(begin, end) for begin, end in self._spans(index)])
        return self.dataset.describe_token(int(places[position]))

    def sources(self, index: int) -> list[str]:
        """The documents of sample `index`, and its tokens in them."""
        starts = self.dataset.offsets // self.dataset.dtype.itemsize
        starts, found = starts[self.dataset.documents[:-1]], []  # of each document
        for begin, end in self._spans(index):
            document = int(np.searchsorted(starts, begin, side="right")) - 1
            first = int(starts[document])
            found.append(f"{self.dataset.prefix}: document {document}, tokens {begin - first} to {end - first - 1}")
        return found

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """First token and last token + 1, in the .bin file, of each part of sample `index`."""
        check_number(index, self.count)
        documents, offsets, lengths = self.index.document, self.dataset.offsets, self.dataset.lengths
        place = int(self.index.shuffle[index])
        (first, start), (last, end) = self.index.sample[place : place + 2].tolist()
        numbers = documents[first : last + 1]
        begins = offsets[numbers] // self.dataset.dtype.itemsize
        ends = begins + lengths[numbers]
        ends[-1] = begins[-1] + end + 1
        begins[0] += start
        return list(zip(begins.tolist(), ends.tolist(), strict=True))


def check_dataset(dataset: IndexedDataset) -> None:
    """Checks a dataset before training, whether or not its sample index is cached, which depends on the lengths only.

    Raises:
      ConfigError: the dataset's index is damaged, or its numbers are not integers.
    """
    dataset.check_type()
    dataset.check()


def check_number(index: int, count: int) -> None:
    """Raises ConfigError if sample `index` does not exist, as after the end of a blend by size."""
    if not 0 <= index < count:
        raise ConfigError(
            f"the run needs sample {index:,} of {count:,}: pass fewer --steps, a smaller --global-batch-size, more data, or "
            "weights in --data-path (the datasets of a blend with weights are repeated)"
        )

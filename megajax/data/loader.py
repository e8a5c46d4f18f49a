"""Batches of samples. The order is a function of the seed; the only state is the number of samples consumed."""

import dataclasses
import functools

import numpy as np

from megajax.config import ConfigError
from megajax.config.batch_ramp import PADDING
from megajax.data.gpt_samples import Samples


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """Handling of document boundaries within a sample; everything is off by default, as in Megatron.

    Attributes:
      end_of_document: id of the token that ends a document; it belongs to the document.
      reset_positions: positions restart at 0 in every document.
      reset_attention: tokens attend to their own document only.
      mask_loss: the label after an end of document, the next document's first token, has weight 0.
    """

    end_of_document: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def arrays(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays that boundaries add to a batch of tokens int [b, s].

        Returns:
          weights float32; with reset_positions, positions int32; with reset_attention, document int32, the number of the
          token's document within its sample. Each array is [b, s].
        """
        ends = tokens == self.end_of_document
        batch = {"weights": np.where(ends & self.mask_loss, 0, 1).astype(np.float32)}
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        if self.reset_positions:
            place = np.arange(tokens.shape[1], dtype=np.int32)
            batch["positions"] = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        if self.reset_attention:
            batch["document"] = np.cumsum(begins, axis=1, dtype=np.int32)
        return batch


class EpochOrder:
    """The rows of a run whose data is repeated: all of them in each epoch, each time in another random order."""

    def __init__(self, count: int, seed: int | None):
        """The orders of `count` rows; `seed` None keeps theirs in all epochs."""
        self.count, self.seed = count, seed
        self._order = functools.lru_cache(maxsize=2)(self._draw)  # a batch can span two epochs

    def row(self, index: int) -> int:
        """The row of sample `index` >= 0 of the run: `order(epoch)[index % count]` with epoch = index // count."""
        epoch, place = divmod(index, self.count)
        return int(self._order(epoch)[place])

    def _draw(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(self.count)
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.count)


class TokenSamples:
    """Windows of a token stream, in a different random order each epoch.

    Windows overlap by one token: the last label of one is the first input of the next, as in Megatron-LM's GPTDataset.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, seed: int | None):
        """Splits int [tokens] into windows; `seed` None keeps the order of the text.

        Raises:
          ConfigError: the text is shorter than one window.
        """
        self.tokens, self.sequence_length = tokens, sequence_length
        self.count = (len(tokens) - 1) // sequence_length
        if self.count < 1:
            raise ConfigError(
                f"a part of the text (training or validation) has {len(tokens)} tokens and a sample needs "
                f"{sequence_length + 1}: pass a longer --text, or lower --sequence-length"
            )
        self._order = EpochOrder(self.count, seed)

    def window(self, index: int) -> np.ndarray:
        """Tokens of sample `index` >= 0, int32 [sequence_length + 1]: inputs are [:-1], labels [1:]."""
        start = self._start(index)
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int32)

    def describe_token(self, index: int, position: int) -> str:
        """The id of a token of sample `index`, and its place in the text."""
        place = self._start(index) + position
        return f"the text's token {place:,}: token id {self.tokens[place]}"

    def sources(self, index: int) -> list[str]:
        """The tokens of sample `index` in the text."""
        start = self._start(index)
        return [f"the text's tokens {start:,} to {start + self.sequence_length:,}"]

    def _start(self, index: int) -> int:
        return self._order.row(index) * self.sequence_length


class Loader:
    """Global batches, split into microbatches. The loader is stateless: `batch` takes the number of samples consumed."""

    def __init__(
        self,
        samples: Samples,
        global_batch_size: int,
        microbatches: int,
        boundaries: Boundaries | None = None,
        vocabulary: int | None = None,
        padded_microbatches: int | None = None,
    ):
        """`microbatches` must divide `global_batch_size`.

        Args:
          samples: source of the windows.
          global_batch_size: samples per batch.
          microbatches: microbatches per batch.
          boundaries: handling of document boundaries within a sample; None: ignored.
          vocabulary: token ids must be below it; None: not checked.
          padded_microbatches: microbatches per batch including padding of weight 0 at the end; None: no padding.
        """
        self.samples, self.global_batch_size, self.microbatches = samples, global_batch_size, microbatches
        self.boundaries, self.vocabulary = boundaries, vocabulary
        self.padded_microbatches = padded_microbatches or microbatches

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(microbatches including padding, samples per microbatch)."""
        return self.padded_microbatches, self.global_batch_size // self.microbatches

    @property
    def batches_of_an_epoch(self) -> int:
        """Batches of samples that are read once: whole batches, but at least one."""
        return max(1, self.samples.count // self.global_batch_size)

    def numbers(self, consumed_samples: int) -> np.ndarray:
        """Sample numbers of the batch that starts at `consumed_samples`, int64 [microbatches, samples]; PADDING is last."""
        numbers = np.full(self.batch_shape, PADDING)
        numbers[: self.microbatches] = consumed_samples + np.arange(self.global_batch_size).reshape(
            self.microbatches, -1
        )
        return numbers

    def at(self, consumed_samples: int) -> "Loader":
        """The loader of the batch that starts at `consumed_samples`: this one. `RampedLoader` has one per batch size."""
        return self

    def resized(self, global_batch_size: int, microbatches: int, padded_microbatches: int | None = None) -> "Loader":
        """A loader of the same samples in batches of another size."""
        return type(self)(
            self.samples, global_batch_size, microbatches, self.boundaries, self.vocabulary, padded_microbatches
        )

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """The batch that starts with sample `consumed_samples` of the run.

        Its sample j is in microbatch j // (samples per microbatch), so that a step has the same samples on any mesh.

        Returns:
          tokens and labels int32, weights float32 (1 where the label counts), each [microbatches, samples,
          sequence_length], and sample uint32 [microbatches, samples], the samples' numbers in the run. With boundaries
          also the arrays of `Boundaries.arrays`.
        """
        rows = self.rows(self.numbers(consumed_samples).reshape(-1))
        return {name: array.reshape(*self.batch_shape, *array.shape[1:]) for name, array in rows.items()}

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Samples by their numbers in the run, int [rows]: the arrays of `batch` as [rows, ...].

        Raises:
          ConfigError: a sample does not exist, or a token id is outside the vocabulary.
        """
        padding = numbers == PADDING
        windows = np.stack([self.samples.window(0 if number == PADDING else int(number)) for number in numbers])
        if self.vocabulary is not None and not 0 <= windows.min() <= windows.max() < self.vocabulary:
            row, position = np.argwhere((windows < 0) | (windows >= self.vocabulary))[0].tolist()
            raise ConfigError(
                f"{self.samples.describe_token(int(numbers[row]), position)}, but the model has ids 0 to "
                f"{self.vocabulary - 1}: the data was written with another tokenizer; pass the size of its vocabulary as "
                "--vocabulary"
            )
        tokens = windows[:, :-1]
        rows = {
            "tokens": tokens,
            "labels": windows[:, 1:],
            "weights": np.ones(tokens.shape, np.float32),
            "sample": numbers.astype(np.uint32),
        } | (self.boundaries.arrays(tokens) if self.boundaries else {})
        if padding.any():
            rows["weights"] = np.where(padding[:, None], np.float32(0), rows["weights"])
        return rows


class RowLoader(Loader):
    """A `Loader` of samples that make their own rows: packed answers, or labelled sentences."""

    @property
    def batches_of_an_epoch(self) -> int:
        """Batches with every row once; the rows that fill up the last one have weight 0 if the samples have no seed."""
        return -(-self.samples.count // self.global_batch_size)

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Rows by their numbers in the run, int [rows]: the arrays of the samples' `row` as [rows, ...], and "sample"."""
        found = [self.samples.row(0 if number == PADDING else int(number)) for number in numbers]
        rows = {name: np.stack([row[name] for row in found]) for name in found[0]}
        rows["weights"][numbers == PADDING] = 0
        if "padding_mask" in rows:
            rows["padding_mask"][numbers == PADDING] = 1
        return rows | {"sample": numbers.astype(np.uint32)}

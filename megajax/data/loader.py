"""Batches of samples. The order of samples is a function of the seed; the state is one integer, samples consumed."""

import dataclasses
import functools

import numpy as np

from megajax.config import ConfigError
from megajax.data.gpt_samples import Samples

PADDING = 2**32 - 1  # the number, in a batch's "sample", of a sample that pads a smaller batch: its weights are 0


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """Each is off by default, as in Megatron: a sample is one text, whatever it was cut from.

    Attributes:
      end_of_document: id of the token that ends a document and still belongs to it.
      reset_positions: positions begin at 0 in every document.
      reset_attention: a token attends to its own document only.
      mask_loss: what follows an end of document is no label: the next document's first token cannot be known.
    """

    end_of_document: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def of(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """What a batch has beside its tokens int [b, s]; every array is [b, s].

        Returns:
          weights float32; positions int32, if they are reset; document int32, the number of the token's document within
          its sample, if attention is reset.
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


class TokenSamples:
    """Windows of a token stream, in a new random order each epoch.

    Sample i is window `order(epoch)[i % count]` with epoch = i // count. Windows overlap by one token: the last label of
    one is the first input of the next, as in Megatron-LM's GPTDataset.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, seed: int | None):
        """Cuts int [tokens] into windows; `seed` None keeps them in the order of the text.

        Raises:
          ConfigError: there is not one whole window.
        """
        self.tokens, self.sequence_length, self.seed = tokens, sequence_length, seed
        self.count = (len(tokens) - 1) // sequence_length
        if self.count < 1:
            raise ConfigError(
                f"a part of the text (training or validation) has {len(tokens)} tokens and a sample needs "
                f"{sequence_length + 1}: give a longer --text, or "
                "lower --sequence-length"
            )
        self._order = functools.lru_cache(maxsize=2)(self._draw)  # the current epoch's, and the next one's at its end

    def window(self, index: int) -> np.ndarray:
        """int32 [sequence_length + 1] of sample `index` >= 0: inputs are [:-1], labels [1:]."""
        epoch, place = divmod(index, self.count)
        start = int(self._order(epoch)[place]) * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int32)

    def _draw(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(self.count)
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.count)


class Loader:
    """Global batches, cut into microbatches. Its state is an argument: the samples consumed so far, one integer."""

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
          samples: where windows come from.
          global_batch_size: samples of a batch.
          microbatches: that it is cut into.
          boundaries: what the end of a document within a sample does; None is nothing.
          vocabulary: token ids must be below it; None is not checked.
          padded_microbatches: number of microbatches that a batch has with those of weight 0 at its end; None: no padding.
        """
        self.samples, self.global_batch_size, self.microbatches = samples, global_batch_size, microbatches
        self.boundaries, self.vocabulary = boundaries, vocabulary
        self.padded_microbatches = padded_microbatches or microbatches

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(microbatches with padding, samples of each)."""
        return self.padded_microbatches, self.global_batch_size // self.microbatches

    def numbers(self, consumed_samples: int) -> np.ndarray:
        """int64 [microbatches, samples]: the samples of the batch that starts there, PADDING after the last."""
        numbers = np.full(self.batch_shape, PADDING)
        numbers[: self.microbatches] = consumed_samples + np.arange(self.global_batch_size).reshape(
            self.microbatches, -1
        )
        return numbers

    def at(self, consumed_samples: int) -> "Loader":
        """The loader of the batch that begins there: this one. Where the batch size grows, there are several."""
        return self

    def resized(self, global_batch_size: int, microbatches: int, padded_microbatches: int | None = None) -> "Loader":
        """A loader of the same samples in batches of another size."""
        return Loader(
            self.samples, global_batch_size, microbatches, self.boundaries, self.vocabulary, padded_microbatches
        )

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """The batch that begins with sample `consumed_samples` of the run.

        Sample j of it goes to microbatch j // (samples a microbatch): a step sees the same samples on any mesh.

        Returns:
          tokens and labels int32, weights float32 (1 where the label counts), each [microbatches, samples,
          sequence_length], and sample uint32 [microbatches, samples], the samples' numbers in the run. With boundaries
          also what `Boundaries.of` gives.
        """
        rows = self.rows(self.numbers(consumed_samples).reshape(-1))
        return {name: array.reshape(*self.batch_shape, *array.shape[1:]) for name, array in rows.items()}

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Samples by their numbers in the run, int [rows]: as `batch`, each array [rows, ...].

        Raises:
          ConfigError: there is no such sample, or a token id is not in the vocabulary.
        """
        padding = numbers == PADDING
        windows = np.stack([self.samples.window(0 if number == PADDING else int(number)) for number in numbers])
        if self.vocabulary is not None and not 0 <= windows.min() <= windows.max() < self.vocabulary:
            bad = windows[(windows < 0) | (windows >= self.vocabulary)][0]
            raise ConfigError(
                f"the data has token id {bad}, the model knows 0 to {self.vocabulary - 1}: it was made with another "
                "tokenizer; pass the vocabulary that it needs after --vocabulary"
            )
        tokens = windows[:, :-1]
        rows = {
            "tokens": tokens,
            "labels": windows[:, 1:],
            "weights": np.ones(tokens.shape, np.float32),
            "sample": numbers.astype(np.uint32),
        } | (self.boundaries.of(tokens) if self.boundaries else {})
        if padding.any():
            rows["weights"] = np.where(padding[:, None], np.float32(0), rows["weights"])
        return rows

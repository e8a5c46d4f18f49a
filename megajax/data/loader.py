"""Batches of samples. The order of samples is a function of the seed; the state is one integer, samples consumed."""

import dataclasses
import functools

import numpy as np

from megajax.config import ConfigError, RunConfig, TrainConfig
from megajax.data.gpt_samples import Samples


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
    ):
        """`microbatches` must divide `global_batch_size`.

        Args:
          samples: where windows come from.
          global_batch_size: samples of a batch.
          microbatches: that it is cut into.
          boundaries: what the end of a document within a sample does; None is nothing.
          vocabulary: token ids must be below it; None is not checked.
        """
        self.samples, self.global_batch_size, self.microbatches = samples, global_batch_size, microbatches
        self.boundaries, self.vocabulary = boundaries, vocabulary

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(microbatches, samples of each)."""
        return self.microbatches, self.global_batch_size // self.microbatches

    def at(self, consumed_samples: int) -> "Loader":
        """The loader of the batch that begins there: this one. Where the batch size grows, there are several."""
        return self

    def resized(self, global_batch_size: int, microbatches: int) -> "Loader":
        """A loader of the same samples in batches of another size."""
        return Loader(self.samples, global_batch_size, microbatches, self.boundaries, self.vocabulary)

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """The batch that begins with sample `consumed_samples` of the run.

        Sample j of it goes to microbatch j // (samples a microbatch): a step sees the same samples on any mesh.

        Returns:
          tokens and labels int32, weights float32 (1 where the label counts), each [microbatches, samples,
          sequence_length], and sample uint32 [microbatches, samples], the samples' numbers in the run. With boundaries
          also what `Boundaries.of` gives.
        """
        numbers = consumed_samples + np.arange(self.global_batch_size)
        return {name: array.reshape(*self.batch_shape, *array.shape[1:]) for name, array in self.rows(numbers).items()}

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Samples by their numbers in the run, int [rows]: as `batch`, each array [rows, ...].

        Raises:
          ConfigError: there is no such sample, or a token id is not in the vocabulary.
        """
        windows = np.stack([self.samples.window(int(number)) for number in numbers])
        if self.vocabulary is not None and not 0 <= windows.min() <= windows.max() < self.vocabulary:
            bad = windows[(windows < 0) | (windows >= self.vocabulary)][0]
            raise ConfigError(
                f"the data has token id {bad}, the model knows 0 to {self.vocabulary - 1}: it was made with another "
                "tokenizer; pass the vocabulary that it needs after --vocabulary"
            )
        tokens = windows[:, :-1]
        return {
            "tokens": tokens,
            "labels": windows[:, 1:],
            "weights": np.ones(tokens.shape, np.float32),
            "sample": numbers.astype(np.uint32),
        } | (self.boundaries.of(tokens) if self.boundaries else {})


def batch_size(train: TrainConfig, consumed: int) -> int:
    """The batch of the step that begins after `consumed` samples.

    START,INCREMENT,SAMPLES: the (global batch - START) / INCREMENT smaller sizes get an equal share of SAMPLES each.
    """
    if not train.batch_ramp:
        return train.global_batch_size
    start, increment, samples = train.batch_ramp
    sizes = (train.global_batch_size - start) // increment
    return min(train.global_batch_size, start + consumed * sizes // samples * increment)


def batch_sizes(train: TrainConfig) -> list[int]:
    """Every batch size of a run, ascending: the step is compiled once for each."""
    if not train.batch_ramp:
        return [train.global_batch_size]
    start, increment, _ = train.batch_ramp
    return list(range(start, train.global_batch_size + 1, increment))


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

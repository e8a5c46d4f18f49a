"""Token streams to batches: the order of samples is a function of the seed, the state one integer, samples consumed."""

import functools

import numpy as np

from megajax.config import ConfigError


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
    """Global batches, cut into microbatches."""

    def __init__(self, samples: TokenSamples, global_batch_size: int, microbatches: int):
        """`microbatches` must divide `global_batch_size`."""
        self.samples, self.global_batch_size, self.microbatches = samples, global_batch_size, microbatches

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """The batch that begins with sample `consumed_samples` of the run.

        Sample j of it goes to microbatch j // (samples a microbatch): a step sees the same samples on any mesh.

        Returns:
          tokens and labels int32, weights float32 (all 1), each [microbatches, samples, sequence_length], and sample
          uint32 [microbatches, samples], the samples' numbers in the run.
        """
        numbers = consumed_samples + np.arange(self.global_batch_size)
        windows = np.stack([self.samples.window(int(number)) for number in numbers])
        batch = {
            "tokens": windows[:, :-1],
            "labels": windows[:, 1:],
            "weights": np.ones((self.global_batch_size, self.samples.sequence_length), np.float32),
            "sample": numbers.astype(np.uint32),
        }
        return {name: array.reshape(self.microbatches, -1, *array.shape[1:]) for name, array in batch.items()}

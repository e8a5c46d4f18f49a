"""From the words after --data-path and --split to samples, with Megatron's sizes and bounds.

--data-path PREFIX                     one dataset
--data-path 0.3 PREFIX 0.7 PREFIX ...  a blend by weight
--data-path PREFIX PREFIX PREFIX       a blend by size: of each what an epoch gives

--split 969,30,1 cuts every dataset in training, validation and test. With --train-data-path and --valid-data-path, each
in the same forms, a split has datasets of its own.

`blend_order` is the order in which a blend draws from its datasets, equal to Megatron's.

Sample i comes from the dataset that is furthest behind its share: the largest w_d * max(i, 1) - (samples drawn from d), in
float64, the first of equals. Each dataset's own samples come in their order.

That loop is sequential: each draw depends on the counts before it. Here it is cut into stretches that run in parallel, one
a lane, each from a guess of the counts at its start. A stretch whose guess differs from the counts at the end of the
stretch before it is run again from those, so the result does not depend on the guesses. A guess rounds the shares, then
runs RUN_UP draws before the stretch: wrong counts converge to the right ones, as the dataset furthest behind is drawn.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence

import numpy as np

from megajax.config import ConfigError
from megajax.data.gpt_samples import GPTSamples, Samples, check_number
from megajax.data.indexed import IndexedDataset

LANES = 1 << 14
LEAST_STRETCH = 512  # samples a lane: below that, fewer lanes
RUN_UP = 4  # turns before a stretch, for each dataset


def blend_order(weights: np.ndarray, size: int, limits: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draws `size` samples.

    Args:
      weights: float64 [datasets], that add up to 1.
      size: number of samples.
      limits: int64 [datasets], the samples each dataset has; who has given all of them is passed over. None: no limit.

    Returns:
      dataset, int16 [size], and that dataset's sample, int64 [size].
    """
    weights = np.asarray(weights, np.float64)
    stretch = max(-(-size // LANES), LEAST_STRETCH)
    starts = np.arange(0, size, stretch)
    dataset = np.empty((len(starts), stretch), np.int16)
    sample = np.empty((len(starts), stretch), np.int64)
    run_up = np.minimum(starts, RUN_UP * len(weights))
    begins = _rounded(weights, starts - run_up)
    _run(weights, limits, starts - run_up, begins, run_up.max(initial=0), until=starts)
    begins[0] = 0
    ends = np.empty_like(begins)
    wrong = np.arange(len(starts))
    while len(wrong):
        counts = begins[wrong]
        dataset[wrong], sample[wrong] = _run(weights, limits, starts[wrong], counts, stretch)
        ends[wrong] = counts
        wrong = 1 + np.flatnonzero((begins[1:] != ends[:-1]).any(1))
        begins[wrong] = ends[wrong - 1]
    return dataset.reshape(-1)[:size], sample.reshape(-1)[:size]


def exhaustive_order(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws every sample of every dataset once, in proportion to their sizes, int [datasets]."""
    sizes = np.asarray(sizes, np.int64)
    return blend_order(sizes / float(sizes.sum()), int(sizes.sum()), sizes)


def _rounded(weights: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Counts near weights * turns that add up to turns: [lanes, datasets], whole numbers in float64."""
    shares = turns[:, None] * weights
    counts = np.floor(shares)
    missing = (turns - counts.sum(1)).astype(int)
    rank = np.argsort(np.argsort(counts - shares, axis=1), axis=1)  # 0: the largest part was cut off
    return counts + (rank < missing[:, None])


def _run(weights, limits, starts, counts, turns, until=None):
    """Runs lanes from turn `starts` [lanes] on, for `turns` turns or up to `until` [lanes]; updates counts.

    Returns:
      The datasets drawn from, and the sample of each: [lanes, turns].
    """
    lanes = np.arange(len(starts))
    dataset, sample = np.empty((len(starts), turns), np.int16), np.empty((len(starts), turns), np.int64)
    for turn in range(turns):
        now = starts + turn
        behind = weights * np.maximum(now, 1)[:, None] - counts
        if limits is not None:
            behind[counts >= limits] = -np.inf
        drawn = behind.argmax(1)
        before = counts[lanes, drawn]
        dataset[:, turn], sample[:, turn] = drawn, before
        counts[lanes, drawn] = before + (1 if until is None else now < until)
    return dataset, sample


SURPLUS = 0.005  # share of samples that a blended dataset has more than its weight says: the order is not exact
MOST_DATASETS = 32767  # a blend's order is int16
Bounds = tuple[float, float]


class BlendedSamples:
    """Samples of several datasets, mixed by weight."""

    def __init__(self, parts: Sequence[GPTSamples], weights: Sequence[float] | None, samples: int | None):
        """Fixes the order; nothing is stored, it takes a second for 10 M samples.

        Args:
          parts: the datasets.
          weights: of each, above 0; None is the number of its samples.
          samples: how many to draw; None draws every sample of every part once.

        Raises:
          ConfigError: more samples are drawn from a part than it has.
        """
        self.parts, self.sequence_length = parts, parts[0].sequence_length
        sizes = np.array([part.count for part in parts], np.int64)
        if samples is None:
            self.dataset, self.sample = exhaustive_order(sizes)
        else:
            self.dataset, self.sample = blend_order(normalised(sizes if weights is None else weights), samples)
        self.count = len(self.dataset)
        self.drawn = np.bincount(self.dataset, minlength=len(parts))
        for part, drawn in zip(parts, self.drawn.tolist(), strict=True):
            if drawn > part.count:
                raise ConfigError(
                    f"the blend draws {drawn} samples from {part.dataset.prefix}, which has {part.count}: give it a lower "
                    "weight in --data-path, or more data"
                )

    def window(self, index: int) -> np.ndarray:
        """int32 [sequence_length + 1]; `Samples.window`."""
        check_number(index, self.count)
        return self.parts[self.dataset[index]].window(int(self.sample[index]))


@dataclasses.dataclass(frozen=True)
class Blend:
    """Datasets by prefix, and their weights; None blends by size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Blend":
        """Reads the words after --data-path.

        Raises:
          ConfigError: weights and prefixes do not take turns, or a weight is not above 0.
        """
        weights = [_number(word) for word in words[::2]]
        if len(words) % 2 or all(weight is None for weight in weights):
            for word in words:
                if _number(word) is not None:
                    raise ConfigError(
                        f"--data-path {' '.join(words)}: weights and prefixes must take turns, beginning with a weight: "
                        "--data-path 0.3 PREFIX 0.7 PREFIX"
                    )
            blend = cls(tuple(words), None)
        elif any(weight is None for weight in weights):
            raise ConfigError(
                f"--data-path {' '.join(words)}: {words[2 * weights.index(None)]!r} stands where a weight should; give "
                "every prefix a weight before it, or none"
            )
        else:
            blend = cls(tuple(words[1::2]), tuple(weights))
        bad = [weight for weight in blend.weights or () if not 0 < weight < math.inf]
        if bad:
            raise ConfigError(f"--data-path has weight {bad[0]:g}; weights must be above 0: leave that dataset out")
        if len(blend.prefixes) > MOST_DATASETS:
            raise ConfigError(f"--data-path has {len(blend.prefixes)} datasets; at most {MOST_DATASETS}: merge some")
        return blend

    def samples(
        self,
        bounds: Bounds,
        samples: int | None,
        sequence_length: int,
        seed: int,
        cache: str | os.PathLike | None = None,
    ) -> Samples:
        """The samples of one split.

        Args:
          bounds: the split's part of every dataset, as shares of its sequences.
          samples: how many are needed; None is one epoch, and then no weights.
          sequence_length: inputs of a sample.
          seed: of the order within each dataset.
          cache: see GPTSamples.

        Raises:
          ConfigError: a dataset cannot be read, has no sample in the split, or runs out.
        """

        def part(prefix: str, count: int | None) -> GPTSamples:
            dataset = IndexedDataset(prefix)
            first, last = (round(share * float(len(dataset))) for share in bounds)
            return GPTSamples(dataset, (first, last), count, sequence_length, seed, cache)

        if self.weights is None and len(self.prefixes) == 1:
            return part(self.prefixes[0], samples)
        if self.weights is None:
            parts = [part(prefix, None) for prefix in self.prefixes]
            total = sum(part.count for part in parts)
            return BlendedSamples(parts, None, samples if samples is None else min(samples, total))
        assert samples is not None
        shares = normalised(self.weights).tolist()
        drawn = [math.ceil(samples * share) for share in shares]
        built = [math.ceil(count * (1 + SURPLUS)) for count in drawn]
        parts = [part(prefix, count) for prefix, count in zip(self.prefixes, built, strict=True)]
        return BlendedSamples(parts, shares, sum(drawn))

    def whole(
        self, samples: int | None, sequence_length: int, seed: int, cache: str | os.PathLike | None = None
    ) -> Samples:
        """The samples of a split that has datasets of its own. A weight means nothing if there is only one."""
        blend = self if len(self.prefixes) > 1 else dataclasses.replace(self, weights=None)
        return blend.samples((0.0, 1.0), samples, sequence_length, seed, cache)


def split_bounds(split: str) -> list[Bounds | None]:
    """Bounds of training, validation and test from "969,30,1"; None for a split with no share.

    Raises:
      ConfigError: not one to three numbers, none of them above 0.
    """
    numbers = [_number(word) for word in split.split(",")]
    if not 1 <= len(numbers) <= 3 or any(number is None or not 0 <= number < math.inf for number in numbers):
        raise ConfigError(f"--split {split}: give shares of training, validation and test, as in --split 969,30,1")
    if not sum(numbers):
        raise ConfigError(f"--split {split}: a share must be above 0, as in --split 969,30,1")
    ends = list(itertools.accumulate(normalised(numbers + [0.0] * (3 - len(numbers))).tolist(), initial=0))
    return [(begin, end) if begin < end else None for begin, end in itertools.pairwise(ends)]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalised(weights: Sequence[float]) -> np.ndarray:
    """Weights divided by their sum, float64: the same bits as Megatron's."""
    weights = np.array(weights, np.float64)
    return weights / np.sum(weights)

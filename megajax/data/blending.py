"""Blended datasets: parses --data-path and --split, and orders the samples as Megatron does.

--data-path PREFIX                     one dataset
--data-path 0.3 PREFIX 0.7 PREFIX ...  a blend by weight
--data-path PREFIX PREFIX PREFIX       a blend by size: one epoch of each dataset

--split 969,30,1 divides every dataset into training, validation and test. --train-data-path and --valid-data-path, in the
same forms, give each split separate datasets.

`blend_order` is the order in which a blend draws from its datasets; it equals Megatron's. Sample i comes from the dataset d
with the largest deficit, w_d * max(i, 1) - (samples drawn from d) in float64, or the lowest such d if several are equal.
The samples of each dataset keep their order.

That loop is sequential: each draw depends on the counts before it. Here it is divided into stretches that are computed in
parallel (one lane each), from estimated counts. A stretch whose estimate differs from the final counts of the previous
stretch is computed again from those, so the result does not depend on the estimates. An estimate rounds the shares, then
simulates RUN_UP draws per dataset before the stretch; this corrects most errors, because the dataset with the largest
deficit is drawn first.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.data.gpt_samples import GPTSamples, check_number
from megajax.data.indexed import IndexedDataset

LANES = 1 << 14
LEAST_STRETCH = 512  # minimum number of samples per lane; small blends use fewer lanes
RUN_UP = 4  # draws simulated before a stretch, per dataset


def blend_order(weights: np.ndarray, size: int, limits: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The dataset and the sample of each of `size` draws.

    Args:
      weights: float64 [datasets]; they sum to 1.
      size: number of samples.
      limits: int64 [datasets], the number of samples of each dataset; an exhausted dataset is skipped. None: no limit.

    Returns:
      dataset, int16 [size], and the sample's number in that dataset, int64 [size].
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
    """`blend_order` that draws every sample of every dataset once, with weights proportional to `sizes`, int [datasets]."""
    sizes = np.asarray(sizes, np.int64)
    return blend_order(sizes / float(sizes.sum()), int(sizes.sum()), sizes)


def _rounded(weights: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """weights * draws, rounded to whole numbers that sum to `draws` [lanes]: float64 [lanes, datasets]."""
    shares = draws[:, None] * weights
    counts = np.floor(shares)
    missing = (draws - counts.sum(1)).astype(int)
    rank = np.argsort(np.argsort(counts - shares, axis=1), axis=1)  # 0: the largest fraction was truncated
    return counts + (rank < missing[:, None])


def _run(weights, limits, starts, counts, draws, until=None):
    """Makes `draws` draws per lane from draw number `starts` [lanes], or up to `until` [lanes]; updates `counts` in place.

    Returns:
      The dataset and the sample of each draw, both [lanes, draws].
    """
    lanes = np.arange(len(starts))
    dataset, sample = np.empty((len(starts), draws), np.int16), np.empty((len(starts), draws), np.int64)
    for draw in range(draws):
        now = starts + draw
        deficit = weights * np.maximum(now, 1)[:, None] - counts
        if limits is not None:
            deficit[counts >= limits] = -np.inf
        drawn = deficit.argmax(1)
        before = counts[lanes, drawn]
        dataset[:, draw], sample[:, draw] = drawn, before
        counts[lanes, drawn] = before + (1 if until is None else now < until)
    return dataset, sample


SURPLUS = 0.005  # extra samples built per dataset, as a share: the order follows the weights only approximately
MOST_DATASETS = 32767  # a blend's order is int16
Bounds = tuple[float, float]


class BlendedSamples:
    """Samples of several datasets, mixed by weight."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float] | None, samples: int | None):
        """Computes the order, which is not cached: 10 M samples take about a second.

        Args:
          parts: samples of each dataset, GPT's or BERT's.
          weights: weight of each dataset, above 0; None: its number of samples.
          samples: number of samples; None: every sample of every dataset once.

        Raises:
          ConfigError: the blend draws more samples from a dataset than it has.
        """
        self.parts, self.sequence_length = parts, parts[0].sequence_length
        sizes = np.array([part.count for part in parts], np.int64)
        if samples is None:
            self.dataset, self.place = exhaustive_order(sizes)
        else:
            self.dataset, self.place = blend_order(normalised(sizes if weights is None else weights), samples)
        self.count = len(self.dataset)
        self.drawn = np.bincount(self.dataset, minlength=len(parts))
        for part, drawn in zip(parts, self.drawn.tolist(), strict=True):
            if drawn > part.count:
                raise ConfigError(
                    f"the blend draws {drawn} samples from {part.dataset.prefix}, which has {part.count}: pass a "
                    "lower weight for it in --data-path, or more data"
                )

    def window(self, index: int) -> np.ndarray:
        """Tokens of sample `index`, int32 [sequence_length + 1]; see `Samples.window`."""
        check_number(index, self.count)
        return self.parts[self.dataset[index]].window(int(self.place[index]))

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index` of a blend of `megajax.data.bert.BertSamples`."""
        check_number(index, self.count)
        return self.parts[self.dataset[index]].sample(int(self.place[index]))

    def sources(self, index: int) -> list[str]:
        """Where sample `index` is from, as its part says."""
        part = self.parts[self.dataset[index]]
        return part.sources(int(self.place[index])) if hasattr(part, "sources") else [part.dataset.prefix]

    def describe_token(self, index: int, position: int) -> str:
        """See `GPTSamples.describe_token`."""
        return self.parts[self.dataset[index]].describe_token(int(self.place[index]), position)


def gpt_samples(dataset: IndexedDataset, bounds: Bounds, *settings: Any) -> GPTSamples:
    """The samples of a share of a dataset's sequences; `settings`: the other arguments of GPTSamples."""
    first, last = (round(share * float(len(dataset))) for share in bounds)
    return GPTSamples(dataset, (first, last), *settings)


@dataclasses.dataclass(frozen=True)
class Blend:
    """Prefixes of datasets, and their weights; None blends by size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Blend":
        """Parses the words of --data-path.

        Raises:
          ConfigError: weights and prefixes do not alternate, or a weight is not above 0.
        """
        weights = [_number(word) for word in words[::2]]
        if len(words) % 2 or all(weight is None for weight in weights):
            for word in words:
                if _number(word) is not None:
                    raise ConfigError(
                        f"--data-path {' '.join(words)}: weights and prefixes must alternate, starting with a weight: "
                        "pass --data-path 0.3 PREFIX 0.7 PREFIX"
                    )
            blend = cls(tuple(words), None)
        elif any(weight is None for weight in weights):
            raise ConfigError(
                f"--data-path {' '.join(words)}: expected a weight instead of {words[2 * weights.index(None)]!r}; pass a "
                "weight before every prefix, or none"
            )
        else:
            blend = cls(tuple(words[1::2]), tuple(weights))
        bad = [weight for weight in blend.weights or () if not 0 < weight < math.inf]
        if bad:
            raise ConfigError(f"--data-path has weight {bad[0]:g}; weights must be above 0: omit that dataset")
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
        make: Callable[..., Any] = gpt_samples,
    ) -> Any:
        """The samples of one split.

        Args:
          bounds: (start, end) of the split in every dataset, as fractions of its sequences.
          samples: number of samples needed; None: one epoch (only without weights).
          sequence_length: input tokens of a sample.
          seed: seed of the order within each dataset.
          cache: see GPTSamples.
          make: (dataset, bounds, number of samples, sequence_length, seed, cache) -> its samples.

        Raises:
          ConfigError: a dataset cannot be read, has no sample in the split, or has too few.
        """

        def part(prefix: str, count: int | None) -> Any:
            return make(IndexedDataset(prefix, cache=cache), bounds, count, sequence_length, seed, cache)

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

    def whole(self, samples: int | None, *settings: Any) -> Any:
        """The samples of a split with separate datasets; `settings`: see `samples`. A single one's weight is ignored."""
        blend = self if len(self.prefixes) > 1 else dataclasses.replace(self, weights=None)
        return blend.samples((0.0, 1.0), samples, *settings)


def split_bounds(split: str) -> list[Bounds | None]:
    """Bounds of training, validation and test from "969,30,1"; None for an empty split.

    Raises:
      ConfigError: not one to three numbers of at least 0, or all are 0.
    """
    numbers = [_number(word) for word in split.split(",")]
    if not 1 <= len(numbers) <= 3 or any(number is None or not 0 <= number < math.inf for number in numbers):
        raise ConfigError(f"--split {split}: pass shares of training, validation and test, as in --split 969,30,1")
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
    """Weights divided by their sum, float64, bitwise equal to Megatron's."""
    weights = np.array(weights, np.float64)
    return weights / np.sum(weights)

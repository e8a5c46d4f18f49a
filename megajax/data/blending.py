"""From the words after --data-path and --split to samples, with Megatron's sizes and bounds.

--data-path PREFIX                     one dataset
--data-path 0.3 PREFIX 0.7 PREFIX ...  a blend by weight
--data-path PREFIX PREFIX PREFIX       a blend by size: of each what an epoch gives

--split 969,30,1 cuts every dataset in training, validation and test. With --train-data-path and --valid-data-path, each
in the same forms, a split has datasets of its own.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence

from megajax.config import ConfigError
from megajax.data.gpt_samples import BlendedSamples, GPTSamples, Samples, normalised
from megajax.data.indexed import IndexedDataset

SURPLUS = 0.005  # share of samples that a blended dataset has more than its weight says: the order is not exact
MOST_DATASETS = 32767  # a blend's order is int16
Bounds = tuple[float, float]


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

"""BERT's samples (1810.04805 section 3.1): two pieces of a document, in order or swapped, some words masked.

The same numbers as Megatron's BERTMaskedWordPieceDataset, from files written with --split-sentences --no-end-of-document.

`build_sentence_index` chooses the sentences of each sample, with the same result as Megatron's masked datasets: sentences
of one document, never of two, are taken in turn until they have the wanted number of tokens, now and then a
smaller number. The samples of all epochs are then shuffled. The random numbers are C++'s mt19937 for the lengths and
mt19937_64 for the shuffle.
"""

import dataclasses
import os
import pathlib

import numpy as np

from megajax.config import ConfigError
from megajax.data.gpt_samples import check_number
from megajax.data.indexed import IndexedDataset
from megajax.data.loader import Loader
from megajax.data.sample_indices import cached_arrays
from megajax.data.tokenizers import HuggingFaceTokenizer

LONG_SENTENCE = 512  # tokens: a document with a longer sentence is left out
DRAWN_AT_ONCE = 1 << 16


def build_sentence_index(
    documents: np.ndarray,
    lengths: np.ndarray,
    samples: int | None,
    longest: int,
    short_probability: float,
    seed: int,
    least_sentences: int,
) -> np.ndarray:
    """Samples as rows (first sentence, the one after the last, tokens wanted), shuffled: [samples, 3].

    Args:
      documents: int [documents + 1], the sentences they begin with.
      lengths: int [sentences], tokens, of all sentences of the file.
      samples: how many are wanted; whole epochs are made until there are as many. None: one epoch.
      longest: tokens of a sample.
      short_probability: share of samples that are to be shorter, by a random length.
      seed: at least 1.
      least_sentences: of a sample; documents with fewer are left out.

    Raises:
      ConfigError: no document has as many sentences.
    """
    eligible = []
    for first, last in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        sentences = lengths[first:last].tolist()
        if len(sentences) >= max(1, least_sentences) and (len(sentences) == 1 or max(sentences) <= LONG_SENTENCE):
            eligible.append((first, sentences))
    if not eligible:
        raise ConfigError(
            f"no document has {least_sentences} sentences of at most {LONG_SENTENCE} tokens: preprocess with "
            "--split-sentences"
        )
    lengths_drawn = _target_lengths(seed, longest, short_probability)
    rows: list[tuple[int, int, int]] = []
    while True:
        for first, sentences in eligible:
            rows += _cut(first, sentences, least_sentences, lengths_drawn)
        if samples is None or len(rows) >= samples:
            break
    kind = np.uint32 if len(lengths) <= np.iinfo(np.uint32).max else np.uint64
    return np.array(rows, kind)[_shuffled(len(rows), seed + 1)]


def _cut(first: int, sentences: list[int], least: int, targets) -> list[tuple[int, int, int]]:
    """The samples of one document."""
    rows, begin, tokens, taken, left = [], first, 0, 0, len(sentences)
    target = next(targets)
    for number, length in enumerate(sentences, first + 1):
        tokens, taken, left = tokens + length, taken + 1, left - 1
        if (tokens >= target and left > 1 and taken >= least) or left == 0:
            rows.append((begin, number, target))
            begin, tokens, taken, target = number, 0, 0, next(targets)
    return rows


def _target_lengths(seed: int, longest: int, short_probability: float):
    """Yields the tokens wanted of one sample after another."""
    if short_probability == 0:
        while True:
            yield longest
    one_in = int(1 / short_probability + 0.5)  # C++ rounds halves up
    generator = np.random.MT19937()
    generator._legacy_seeding(seed)  # the standard's own seeding; a SeedSequence would mix the seed first
    while True:
        for drawn in generator.random_raw(DRAWN_AT_ONCE).tolist():
            yield 2 + drawn % (longest - 1) if drawn % one_in == 0 else longest


def _shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of `count` by swaps from the end, drawn with C++'s mt19937_64 modulo the places left."""
    drawn = mt19937_64(seed, max(count - 1, 0))
    swaps = (drawn % np.arange(count, 1, -1, dtype=np.uint64)).tolist()
    order = list(range(count))
    for last, other in zip(range(count - 1, 0, -1), swaps, strict=True):
        order[last], order[other] = order[other], order[last]
    return np.array(order, np.int64)


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of C++'s std::mt19937_64, uint64 (Nishimura 2000)."""
    word, half = (1 << 64) - 1, 156
    state = [seed & word]
    for place in range(1, 2 * half):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + place) & word)
    state = np.array(state, np.uint64)
    upper, lower, matrix = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF), np.uint64(0xB5026F5AA96619E9)
    one = np.uint64(1)

    def twisted(these: np.ndarray, following: np.ndarray, across: np.ndarray) -> np.ndarray:
        mixed = (these & upper) | (following & lower)
        return across ^ (mixed >> one) ^ np.where(mixed & one, matrix, np.uint64(0))

    parts = []
    for _ in range(-(-count // (2 * half))):
        first = twisted(state[:half], state[1 : half + 1], state[half:])
        state = np.append(first, twisted(state[half:], np.append(state[half + 1 :], first[0]), first))
        parts.append(state)
    drawn = np.concatenate(parts)[:count] if parts else np.empty(0, np.uint64)
    drawn ^= (drawn >> np.uint64(29)) & np.uint64(0x5555555555555555)
    drawn ^= (drawn << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    drawn ^= (drawn << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return drawn ^ (drawn >> np.uint64(43))


@dataclasses.dataclass(frozen=True)
class WordPieces:
    """What masking must know of a vocabulary.

    Attributes:
      begin: [CLS].
      separator: [SEP].
      mask: [MASK].
      padding: [PAD].
      continues: bool [vocabulary], of the pieces that go on with a word: their text begins with ##.
    """

    begin: int
    separator: int
    mask: int
    padding: int
    continues: np.ndarray

    @classmethod
    def of(cls, tokenizer: HuggingFaceTokenizer) -> "WordPieces":
        """Of a tokenizer of BERT's; raises ConfigError if it has not BERT's special tokens."""
        vocabulary = tokenizer.inner.get_vocab(with_added_tokens=True)
        names = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
        missing = [name for name in names if name not in vocabulary]
        if missing:
            raise ConfigError(f"tokenizer {tokenizer.name} has no {missing[0]}: BERT needs a vocab.txt of WordPieces")
        continues = np.zeros(tokenizer.vocabulary, bool)
        continues[[number for piece, number in vocabulary.items() if piece.startswith("##")]] = True
        return cls(*(vocabulary[name] for name in names), continues)


@dataclasses.dataclass(frozen=True)
class Masking:
    """How samples are made; the defaults are Megatron's for BERT.

    Attributes:
      pairs: a sample is two segments, in half of the samples swapped; else it is one.
      probability: share of tokens that are masked.
      longest_ngram: words that are masked together: n with a weight of 1 / n.
      short_probability: share of samples that are shorter than they could be.
    """

    pairs: bool = True
    probability: float = 0.15
    longest_ngram: int = 3
    short_probability: float = 0.1


class BertSamples:
    """Samples of some documents of a dataset."""

    def __init__(
        self,
        dataset: IndexedDataset,
        bounds: tuple[int, int],
        samples: int | None,
        sequence_length: int,
        seed: int,
        pieces: WordPieces,
        masking: Masking = Masking(),  # noqa: B008 (it is frozen)
        cache: str | os.PathLike | None = None,
    ):
        """Builds the index of sentences, or finds it in the cache.

        Args:
          dataset: the pair, a sequence for each sentence.
          bounds: first document, and the one after the last.
          samples: how many to have at least, in whole epochs; None is one epoch.
          sequence_length: tokens of a sample, [CLS], two [SEP] and padding included.
          seed: of the order, the lengths and the masks; at least 1.
          pieces: of the vocabulary.
          masking: how samples are made.
          cache: folder of the stored index; None is `index_cache` beside the pair.

        Raises:
          ConfigError: no document will do; see `build_sentence_index` and `cached_arrays`.
        """
        self.dataset, self.sequence_length, self.seed = dataset, sequence_length, seed
        self.pieces, self.masking = pieces, masking
        first, last = bounds
        documents, lengths = np.array(dataset.documents[first : last + 1]), np.array(dataset.lengths)
        room, least = sequence_length - 3, 2 if masking.pairs else 1
        settings = (samples, room, masking.short_probability, seed, least)

        def build():
            dataset.check()
            return {"sentences": build_sentence_index(documents, lengths, *settings)}

        folder = pathlib.Path(dataset.prefix).parent / "index_cache" if cache is None else cache
        used = [documents, lengths[documents[0] : documents[-1]]]
        self.sentences = cached_arrays(folder, {"index": "BERT", "settings": settings}, used, build)["sentences"]
        self.count = len(self.sentences)

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`.

        Returns:
          tokens, labels (0 where nothing is asked for), types (which segment) int32 and weights (1 where a label is) and
          attended (0 on padding) float32, all [sequence_length]; swapped int32 [], 1 if the segments are.
        """
        check_number(index, self.count)
        random = np.random.RandomState((self.seed + index) % 2**32)
        first, last, room = self.sentences[index].tolist()
        sentences = [self.dataset.sequence(number).tolist() for number in range(first, last)]
        segments, swapped = self._segments(sentences, random)
        _trim(segments, room, random)
        tokens, types = [self.pieces.begin, *segments[0], self.pieces.separator], [0] * (len(segments[0]) + 2)
        if segments[1]:
            tokens += [*segments[1], self.pieces.separator]
            types += [1] * (len(segments[1]) + 1)
        masked = self._mask(tokens, room, random)
        sample = {name: np.zeros(self.sequence_length, np.int32) for name in ("tokens", "labels", "types")}
        sample["tokens"][len(tokens) :] = self.pieces.padding
        for place, shown in masked.items():
            sample["labels"][place], tokens[place] = tokens[place], shown
        sample["tokens"][: len(tokens)], sample["types"][: len(types)] = tokens, types
        weights, attended = np.zeros((2, self.sequence_length), np.float32)
        weights[list(masked)], attended[: len(tokens)] = 1, 1
        return sample | {"weights": weights, "attended": attended, "swapped": np.int32(swapped)}

    def _segments(self, sentences: list[list[int]], random: np.random.RandomState) -> tuple[list[list[int]], bool]:
        """The two segments, and whether the second of the text comes first."""
        pivot, swapped = len(sentences), False
        if self.masking.pairs:
            pivot = random.randint(1, len(sentences)) if len(sentences) >= 3 else 1
            swapped = random.random_sample() < 0.5
        segments = [sum(part, []) for part in (sentences[:pivot], sentences[pivot:])]
        return segments[::-1] if swapped else segments, swapped

    def _mask(self, tokens: list[int], room: int, random: np.random.RandomState) -> dict[int, int]:
        """Which places are asked for, and what is shown there: [MASK] 80%, any token 10%, the right one 10%."""
        words = self._words(tokens)
        wanted = min(self.masking.probability * room, max(1, round(len(tokens) * self.masking.probability)))
        weights = 1 / np.arange(1, self.masking.longest_ngram + 1)
        weights /= weights.sum()
        weights /= weights.sum()
        shares = weights.cumsum()
        shares /= shares[-1]
        order = np.arange(len(words))
        random.shuffle(order)
        masked: dict[int, int] = {}
        for word in order.tolist():
            if len(masked) >= wanted:
                break
            count = 1 + int(shares.searchsorted(random.random_sample(), side="right"))
            while count and len(masked) + sum(map(len, words[word : word + count])) > wanted:
                count -= 1
            places = sum(words[word : word + count], [])
            if not any(place in masked for place in places):
                for place in places:
                    masked[place] = self._shown(tokens[place], random)
        return masked

    def _words(self, tokens: list[int]) -> list[list[int]]:
        """The places of each word's pieces."""
        words: list[list[int]] = []
        for place, token in enumerate(tokens):
            if token in (self.pieces.begin, self.pieces.separator):
                continue
            if words and self.pieces.continues[token]:
                words[-1].append(place)
            else:
                words.append([place])
        return words

    def _shown(self, token: int, random: np.random.RandomState) -> int:
        if random.random_sample() < 0.8:
            return self.pieces.mask
        return random.randint(0, len(self.pieces.continues)) if random.random_sample() >= 0.5 else token


class BertLoader(Loader):
    """Batches of BERT's samples; all else is as for GPT's."""

    samples: BertSamples

    def resized(self, global_batch_size: int, microbatches: int) -> "BertLoader":
        """A loader of the same samples in batches of another size."""
        return BertLoader(self.samples, global_batch_size, microbatches)

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """As `Loader.rows`, with what `BertSamples.sample` gives."""
        samples = [self.samples.sample(int(number)) for number in numbers]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        return batch | {"sample": numbers.astype(np.uint32)}


def _trim(segments: list[list[int]], room: int, random: np.random.RandomState) -> None:
    """Takes tokens off the longer segment, from either end, until both fit."""
    while len(segments[0]) + len(segments[1]) > room:
        longer = segments[0] if len(segments[0]) > len(segments[1]) else segments[1]
        del longer[0 if random.random_sample() < 0.5 else -1]

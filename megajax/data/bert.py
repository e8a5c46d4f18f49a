"""BERT's samples (1810.04805 section 3.1): two segments of a document, in order or swapped, with masked words.

The samples equal those of Megatron's BERTMaskedWordPieceDataset. They are read from files written with --split-sentences
--no-end-of-document; `megajax.data.bert_text` makes them of a text.

`megajax.data.sentence_index` chooses the sentences of each sample.
"""

import dataclasses
import os

import numpy as np

from megajax.config import ConfigError
from megajax.data.gpt_samples import check_dataset, check_number
from megajax.data.indexed import IndexedDataset
from megajax.data.loader import PADDING, Loader
from megajax.data.sample_indices import cached_arrays
from megajax.data.sentence_index import build_sentence_index
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class WordPieces:
    """Ids of BERT's special tokens, and which pieces continue a word.

    Attributes:
      begin: [CLS].
      separator: [SEP].
      mask: [MASK].
      padding: [PAD].
      continues: bool [vocabulary], true for pieces that continue a word: their text starts with ##.
    """

    begin: int
    separator: int
    mask: int
    padding: int
    continues: np.ndarray

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "WordPieces":
        """The pieces of a BERT tokenizer; raises ConfigError if one of BERT's special tokens is missing."""
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ConfigError(f"tokenizer {tokenizer.name} has no [CLS]: BERT needs a vocab.txt of WordPieces")
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
    """Settings of the samples; the defaults are Megatron's for BERT.

    Attributes:
      pairs: a sample has two segments, swapped in half of the samples; False: one segment.
      probability: share of tokens that are masked.
      longest_ngram: maximum number of words masked together; n words have a weight of 1 / n.
      short_probability: share of samples with a random shorter length.
    """

    pairs: bool = True
    probability: float = 0.15
    longest_ngram: int = 3
    short_probability: float = 0.1


class BertSamples:
    """BERT's samples from a range of a dataset's documents."""

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
        """Builds the index of sentences, or loads it from the cache.

        Args:
          dataset: the indexed dataset, one sequence per sentence.
          bounds: (first document, last document + 1).
          samples: minimum number of samples, rounded up to whole epochs; None: one epoch.
          sequence_length: tokens of a sample, including [CLS], two [SEP] and padding.
          seed: seed of the order, the lengths and the masks; at least 1.
          pieces: special tokens of the vocabulary.
          masking: settings of the samples.
          cache: folder of the cached index; None: `index_cache` in the dataset's folder.

        Raises:
          ConfigError: no document is usable, the seed is 0, or the dataset's index is damaged; see
            `build_sentence_index` and `cached_arrays`.
        """
        if seed < 1:
            raise ConfigError(
                f"seed = {seed}, but samples of BERT need a seed of 1 or more: pass --seed with such a value."
            )
        self.dataset, self.sequence_length, self.seed = dataset, sequence_length, seed
        self.pieces, self.masking = pieces, masking
        first, last = bounds
        documents, lengths = np.array(dataset.documents[first : last + 1]), np.array(dataset.lengths)
        room, least = sequence_length - 3, 2 if masking.pairs else 1
        settings = (samples, room, masking.short_probability, seed, least)

        def build():
            return {"sentences": build_sentence_index(documents, lengths, *settings)}

        self.sentences = self.index({"index": "BERT", "settings": settings}, build, documents, lengths, cache)
        self.count, self.tokens = len(self.sentences), int(lengths[documents[0] : documents[-1]].sum(dtype=np.int64))

    def index(self, description, build, documents, lengths, cache) -> np.ndarray:
        """The rows of `build_sentence_index`, which `build` returns by the name "sentences", built or from the cache."""
        check_dataset(self.dataset)
        folder = self.dataset.cache_folder if cache is None else cache
        used = [documents, lengths[documents[0] : documents[-1]]]
        return cached_arrays(folder, description, used, build)["sentences"]

    def place(self, index: int) -> int:
        """The row of `sentences` that sample `index` is made of."""
        check_number(index, self.count)
        return index

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`.

        Returns:
          tokens, labels (0 where no token is masked) and types (segment 0 or 1), int32 [sequence_length]; weights (1 at
          masked tokens) and attended (0 at padding), float32 [sequence_length]; swapped, int32 [], 1 if the segments are
          swapped.
        """
        first, last, room = self.sentences[self.place(index)].tolist()
        random = np.random.RandomState((self.seed + index) % 2**32)
        sentences = [self.sentence(number) for number in range(first, last)]
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

    def sources(self, index: int) -> list[str]:
        """The sentences of sample `index`."""
        first, last, _ = self.sentences[self.place(index)].tolist()
        prefix = getattr(self.dataset, "prefix", "the text")
        return [f"{prefix}: sentences {first} to {last - 1}"]

    def sentence(self, number: int) -> list[int]:
        """The ids of a sentence.

        Raises:
          ConfigError: an id is outside the vocabulary.
        """
        tokens, known = self.dataset.sequence(number), len(self.pieces.continues)
        if (wrong := np.flatnonzero((tokens < 0) | (tokens >= known))).size:
            place = int(self.dataset.offsets[number]) // self.dataset.dtype.itemsize + int(wrong[0])
            raise ConfigError(
                f"{self.dataset.describe_token(place)}, but the vocabulary has ids 0 to {known - 1}: pass the tokenizer "
                "that the data was written with"
            )
        return tokens.tolist()

    def _segments(self, sentences: list[list[int]], random: np.random.RandomState) -> tuple[list[list[int]], bool]:
        """The two segments, and whether they are swapped."""
        pivot, swapped = len(sentences), False
        if self.masking.pairs:
            pivot = random.randint(1, len(sentences)) if len(sentences) >= 3 else 1
            swapped = random.random_sample() < 0.5
        segments = [sum(part, []) for part in (sentences[:pivot], sentences[pivot:])]
        return segments[::-1] if swapped else segments, swapped

    def _mask(self, tokens: list[int], room: int, random: np.random.RandomState) -> dict[int, int]:
        """The masked positions, and the token shown at each: [MASK] 80%, a random token 10%, the original 10%."""
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
        """The positions of each word's pieces."""
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
    """Batches of BERT's samples."""

    samples: BertSamples

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Samples by their numbers, int [rows].

        Returns:
          The arrays of `BertSamples.sample` as [rows, ...], of which "padding" int32 [rows], the number of tokens at the
          end that are not attended to, replaces "attended"; and "sample" uint32 [rows], the samples' numbers in the run.
        """
        unused = numbers == PADDING
        samples = [self.samples.sample(0 if number == PADDING else int(number)) for number in numbers]
        rows = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        rows["padding"] = (rows.pop("attended") == 0).sum(1, dtype=np.int32)
        if unused.any():
            rows["weights"] = np.where(unused[:, None], np.float32(0), rows["weights"])
        return rows | {"sample": numbers.astype(np.uint32)}


def _trim(segments: list[list[int]], room: int, random: np.random.RandomState) -> None:
    """Removes tokens from a random end of the longer segment until both segments together have at most `room`."""
    while len(segments[0]) + len(segments[1]) > room:
        longer = segments[0] if len(segments[0]) > len(segments[1]) else segments[1]
        del longer[0 if random.random_sample() < 0.5 else -1]

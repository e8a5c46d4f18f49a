"""The sentences of each of BERT's samples, as Megatron's masked datasets choose them.

A sample takes consecutive sentences of one document until it has its target number of tokens, which is shorter than the
maximum in a random share of the samples. The samples of all epochs are then shuffled. The random numbers are those of C++'s
mt19937 (lengths) and mt19937_64 (shuffle).

Which sentence a sample begins with depends on all samples before it, through their random targets, so the samples are
walked through one by one. But the end of a sample of the usual target is computed for all sentences at once, and a step of
the walk is a look-up. Memory while it is built: 12 bytes a sample and about 60 a sentence.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from megajax.config import ConfigError

__all__ = ["build_sentence_index", "mt19937_64"]

LONG_SENTENCE = 512  # tokens: documents with a longer sentence are skipped
DRAWN_AT_ONCE = 1 << 16  # random numbers
TWISTS = 64  # states of mt19937_64, of 312 numbers each, that are computed together
ONE_BY_ONE = 1 << 16  # rows that are shuffled one by one, which is as fast as blocks of as few


def build_sentence_index(
    documents: np.ndarray,
    lengths: np.ndarray,
    samples: int | None,
    longest: int,
    short_probability: float,
    seed: int,
    least_sentences: int,
) -> np.ndarray:
    """Shuffled samples as rows (first sentence, last sentence + 1, target number of tokens): [samples, 3].

    Args:
      documents: int [documents + 1], the first sentence of each document.
      lengths: int [sentences], tokens of every sentence of the file.
      samples: minimum number of samples, rounded up to whole epochs. None: one epoch.
      longest: maximum number of tokens of a sample.
      short_probability: probability that a sample is shorter, with a random target.
      seed: at least 1.
      least_sentences: minimum number of sentences of a sample; documents with fewer are skipped.

    Raises:
      ConfigError: no document has that many sentences.
    """
    places = Places.of(documents, lengths, longest, max(1, least_sentences))
    if not len(places.sentence):
        raise ConfigError(
            f"no document has {least_sentences} sentences of at most {LONG_SENTENCE} tokens: pass longer documents, and "
            "preprocess them with --split-sentences"
        )
    kind = np.uint32 if len(lengths) <= np.iinfo(np.uint32).max else np.uint64
    # At most: an epoch has no more samples than sentences. Memory that is not written to is not used.
    rows = np.empty(((samples or 0) + len(places.sentence), 3), kind)
    count = 0
    for begins, ends, targets in _epochs(places, _targets(seed, longest, short_probability), longest, samples):
        part = rows[count : count + len(begins)]
        part[:, 0], part[:, 1], part[:, 2] = places.sentence[begins], places.sentence[ends], targets
        count += len(begins)
    rows = rows[:count]
    _shuffle(rows, seed + 1)
    return rows


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a sample can begin or end: before each sentence, and after the last one, of every document that is used.

    Attributes:
      sentence: int [places], the sentence that follows; after a document's last one, its number + 1.
      tokens: int64 [places], tokens before the place; it ascends.
      end: int [places], the last place of the document.
      following: int [places], the end of a sample of the longest target that begins there. After the last place of a
        document, the first one of the next.
      least: sentences of a sample.
    """

    sentence: np.ndarray
    tokens: np.ndarray
    end: np.ndarray
    following: np.ndarray
    least: int

    @classmethod
    def of(cls, documents: np.ndarray, lengths: np.ndarray, longest: int, least: int) -> "Places":
        """The places of documents with `least` sentences or more and none that is too long, unless it is the only one."""
        documents = np.asarray(documents, np.int64)
        lengths = np.append(np.asarray(lengths), 0)
        used = np.diff(documents) >= least
        first, last = documents[:-1][used], documents[1:][used]
        if len(first):
            most = np.maximum.reduceat(lengths, np.stack([first, last], 1).ravel())[::2]
            used = (last - first == 1) | (most <= LONG_SENTENCE)
            first, last = first[used], last[used]
        counts = last - first + 1
        ends = np.cumsum(counts) - 1
        kind = np.uint32 if counts.sum() <= np.iinfo(np.uint32).max else np.int64
        place = np.arange(counts.sum())
        sentence = place - np.repeat(ends - last, counts)
        tokens = lengths[sentence].astype(np.int64)
        tokens[ends] = 0
        tokens = np.cumsum(tokens) - tokens
        end = np.repeat(ends, counts)
        following = np.maximum(np.searchsorted(tokens, tokens + longest), place + least)
        following = np.where(following <= end - 2, following, end)
        following[ends] = np.append(ends[:-1] + 1, 0)[: len(ends)]
        return cls(sentence, tokens, end.astype(kind), following.astype(kind), least)


def _epochs(
    places: Places, targets: Iterator[np.ndarray], longest: int, samples: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Whole epochs of at least that many samples, in parts: (first place, last place, target) of each sample."""
    following, end, tokens, least = *map(memoryview, (places.following, places.end, places.tokens)), places.least
    place, count, last = 0, 0, len(places.end) - 1
    for part in targets:
        path: list[int] = []
        for drawn in [*np.flatnonzero(part != longest).tolist(), len(part)]:
            for _ in range(drawn - len(path)):
                path.append(place)
                place = following[place]
            if drawn < len(part):
                path.append(place)
                stop, wanted = end[place], tokens[place] + int(part[drawn])
                if place == stop:
                    place = following[place]
                else:
                    found = max(bisect_left(tokens, wanted, place + 1, stop), place + least)
                    place = found if found <= stop - 2 else stop
        path.append(place)
        begins = np.array(path)
        begins, ends = begins[:-1], begins[1:]
        is_sample = places.end[begins] != begins  # the target that is drawn at the end of a document is not used
        for epoch in np.flatnonzero(begins == last).tolist():
            if samples is None or count + np.count_nonzero(is_sample[:epoch]) >= samples:
                is_sample = is_sample[:epoch]
                yield tuple(array[:epoch][is_sample] for array in (begins, ends, part))
                return
        yield begins[is_sample], ends[is_sample], part[is_sample]
        count += np.count_nonzero(is_sample)


def _targets(seed: int, longest: int, short_probability: float) -> Iterator[np.ndarray]:
    """Yields the target numbers of tokens of the samples, many at once."""
    if short_probability == 0:
        while True:
            yield np.full(DRAWN_AT_ONCE, longest)
    one_in = int(1 / short_probability + 0.5)  # C++ rounds half up
    generator = np.random.MT19937()
    generator._legacy_seeding(seed)  # the seeding of the C++ standard; a SeedSequence would hash the seed first
    while True:
        drawn = generator.random_raw(DRAWN_AT_ONCE).astype(np.int64)
        yield np.where(drawn % one_in == 0, 2 + drawn % (longest - 1), longest)


def _shuffle(rows: np.ndarray, seed: int) -> None:
    """A Fisher-Yates shuffle in place, from the last row down: row i is swapped with row (mt19937_64 modulo i + 1).

    Swaps of different rows are made together: a block ends before the first swap with a row that the block has used.
    """
    random, last = _random_blocks(seed), len(rows) - 1
    rows = rows.view(np.dtype((np.void, rows.itemsize * 3)))[:, 0]  # numpy moves whole items faster than rows
    drawn = np.empty(0, np.uint64)
    while last >= ONE_BY_ONE:
        size = int(last**0.5 / 2)  # so that two of three blocks are whole
        while len(drawn) < size:
            drawn = np.concatenate([drawn, next(random)])
        own = np.arange(last, last - size, -1)
        others = (drawn[:size] % (own + 1).astype(np.uint64)).astype(np.int64)
        whole = _distinct(others, own)
        own, others, drawn = own[:whole], others[:whole], drawn[whole:]
        kept = rows[others]
        rows[others] = rows[own]
        rows[own] = kept
        last -= whole
    while len(drawn) < last:
        drawn = np.concatenate([drawn, next(random)])
    swaps = (drawn[: max(last, 0)] % np.arange(last + 1, 1, -1, dtype=np.uint64)).tolist()
    order = list(range(last + 1))
    for place, other in zip(range(last, 0, -1), swaps, strict=True):
        order[place], order[other] = order[other], order[place]
    rows[: last + 1] = rows[order]


def _distinct(others: np.ndarray, own: np.ndarray) -> int:
    """How many of the first swaps (own, other) use a row in one of them only; at least 1."""
    whole = len(own)
    if (used := np.flatnonzero((others >= own[-1]) & (others != own))).size:
        whole = int(used[0])
    ordered = np.sort(others)
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(others, kind="stable")
        again = order[1:][others[order[1:]] == others[order[:-1]]]
        whole = min(whole, int(again.min()))
    return max(1, whole)


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of C++'s std::mt19937_64, uint64 (Nishimura 2000)."""
    blocks = _random_blocks(seed)
    return np.concatenate([next(blocks) for _ in range(count // (312 * TWISTS) + 1)])[:count]


def _random_blocks(seed: int) -> Iterator[np.ndarray]:
    """The numbers of std::mt19937_64, many at once."""
    word, half = (1 << 64) - 1, 156
    values = [seed & word]
    for place in range(1, 2 * half):
        values.append((6364136223846793005 * (values[-1] ^ (values[-1] >> 62)) + place) & word)
    state = np.array(values, np.uint64)
    upper, lower, matrix = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF), np.uint64(0xB5026F5AA96619E9)
    one = np.uint64(1)

    def twisted(these: np.ndarray, following: np.ndarray, across: np.ndarray) -> np.ndarray:
        mixed = (these & upper) | (following & lower)
        return across ^ (mixed >> one) ^ ((mixed & one) * matrix)

    while True:
        states = np.empty((TWISTS, 2 * half), np.uint64)
        for row in states:
            row[:half] = twisted(state[:half], state[1 : half + 1], state[half:])
            row[half:-1] = twisted(state[half:-1], state[half + 1 :], row[: half - 1])
            row[-1:] = twisted(state[-1:], row[:1], row[half - 1 : half])
            state = row
        drawn = states.ravel()
        drawn = drawn ^ ((drawn >> np.uint64(29)) & np.uint64(0x5555555555555555))
        drawn ^= (drawn << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        drawn ^= (drawn << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        yield drawn ^ (drawn >> np.uint64(43))

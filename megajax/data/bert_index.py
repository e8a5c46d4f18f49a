"""Which sentences make a BERT sample: the mapping of Megatron's masked datasets, number for number.

Sentences of one document, never of two, are taken in turn until they have the wanted number of tokens, now and then a
smaller number. The samples of all epochs are then shuffled. The random numbers are C++'s mt19937 for the lengths and
mt19937_64 for the shuffle.
"""

import numpy as np

from megajax.config import ConfigError

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

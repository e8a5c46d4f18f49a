"""BERT's samples, compared with megatron-core's, C++'s random numbers, and the paper's rules."""

import json

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data import sentence_index
from megajax.data.bert import BertLoader, BertSamples, Masking, WordPieces
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.sentence_index import build_sentence_index, mt19937_64
from megajax.data.tokenizers import load_tokenizer
from tests.data import make_golden as made

PIECES = WordPieces(*made.PIECES.values(), np.array([made.continues(token) for token in range(200)]))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("bert") / "bert"
    with IndexedWriter(prefix, np.uint16) as writer:
        for sentences in made.bert_documents():
            writer.add_document(sum(sentences, []), [len(sentence) for sentence in sentences])
    return IndexedDataset(prefix)


def built(dataset, name) -> BertSamples:
    pairs, length, samples, short = made.BERT[name]
    masking = Masking(pairs=pairs, short_probability=short)
    return BertSamples(dataset, (0, dataset.document_count), samples, length, 1234, PIECES, masking)


def test_mt19937_64_gives_the_10000th_number_of_the_standard():
    """ISO C++, [rand.predef]: the 10000th number of a default mt19937_64, whose seed is 5489."""
    assert int(mt19937_64(5489, 10000)[-1]) == 9981545732273789042


@pytest.mark.parametrize("name", made.BERT)
def test_samples_equal_megatrons(dataset, name):
    samples = built(dataset, name)
    drawn = [samples.sample(i) for i in range(made.BERT[name][2])]
    names = {"text": "tokens", "labels": "labels", "types": "types", "loss_mask": "weights", "is_random": "swapped"}
    golden = json.loads(made.GOLDEN.read_text())["bert"][name]
    columns = {key: np.stack([part[value] for part in drawn]) for key, value in names.items()}
    # Megatron also treats a token that masking has replaced by id 0 as padding; megajax does not.
    columns["padding_mask"] = columns["text"] != PIECES.padding
    ours = {key: made.digest(column.astype(np.int64)) for key, column in columns.items()}
    assert ours | {"index": made.digest(samples.sentences)} == golden


def naive_index(documents, lengths, samples, longest, short_probability, seed, least):
    """Megatron's loops: a target is drawn at the start of a document and after each sample, sentence by sentence."""
    lengths_drawn, swaps = np.random.MT19937(), iter(mt19937_64(seed + 1, 10**5).tolist())
    lengths_drawn._legacy_seeding(seed)

    def target():
        if not short_probability:
            return longest
        drawn = int(lengths_drawn.random_raw())
        return 2 + drawn % (longest - 1) if drawn % int(1 / short_probability + 0.5) == 0 else longest

    rows, complete = [], False
    while not complete:
        for first, last in zip(documents[:-1], documents[1:], strict=True):
            own = lengths[first:last].tolist()
            if len(own) < least or (len(own) > 1 and max(own) > 512):
                continue
            begin, tokens, taken, wanted = first, 0, 0, target()
            for place, length in enumerate(own):
                tokens, taken, left = tokens + length, taken + 1, len(own) - place - 1
                if (tokens >= wanted and left > 1 and taken >= least) or left == 0:
                    rows.append((begin, first + place + 1, wanted))
                    begin, tokens, taken, wanted = first + place + 1, 0, 0, target()
        complete = samples is None or len(rows) >= samples
    for place in range(len(rows) - 1, 0, -1):
        other = next(swaps) % (place + 1)
        rows[place], rows[other] = rows[other], rows[place]
    return np.array(rows)


@pytest.mark.parametrize("case", range(40))
def test_the_index_is_that_of_loops_over_sentences(case, monkeypatch):
    """With documents that are empty, too short, or have a long sentence; empty sentences; swaps in blocks."""
    monkeypatch.setattr(sentence_index, "ONE_BY_ONE", 30)
    monkeypatch.setattr(sentence_index, "DRAWN_AT_ONCE", 100)
    random = np.random.default_rng(case)
    lengths = random.poisson(12, 300) * (random.random(300) > 0.05)
    lengths[random.random(300) < 0.01] = 600
    documents = np.sort(np.append(random.integers(0, 301, 300 // random.integers(2, 20)), [0, 0, 300]))
    samples, least = [None, 1, 400, 3000][case % 4], int(random.integers(1, 4))
    settings = (samples, int(random.integers(8, 200)), [0, 0.1, 0.5, 1][case // 4 % 4], case + 1, least)
    expected = naive_index(documents.tolist(), lengths, *settings)
    np.testing.assert_array_equal(build_sentence_index(documents, lengths.astype(np.int32), *settings), expected)


def test_masks_and_swaps_have_the_papers_shares(dataset):
    """15% of the tokens, of these 80% [MASK], 10% random, 10% unchanged; half of the pairs swapped; whole words."""
    samples = built(dataset, "pairs")
    masked = kept = predicted = tokens = swapped = continued = 0
    for index in range(samples.count):
        sample = samples.sample(index)
        places = np.flatnonzero(sample["weights"])
        shown, right = sample["tokens"][places], sample["labels"][places]
        masked += (shown == PIECES.mask).sum()
        kept += (shown == right).sum()
        predicted, tokens, swapped = (
            predicted + len(places),
            tokens + sample["attended"].sum(),
            swapped + sample["swapped"],
        )
        whole = np.where(sample["weights"] > 0, sample["labels"], sample["tokens"])
        for place in range(2, len(whole)):
            special = whole[place - 1] in (PIECES.begin, PIECES.separator)
            if PIECES.continues[whole[place]] and not special:
                assert sample["weights"][place] == sample["weights"][place - 1]
                continued += 1
    assert continued > 100  # pieces that continue a word
    assert 0.12 < predicted / tokens < 0.16
    assert 0.76 < masked / predicted < 0.84
    assert 0.07 < kept / predicted < 0.13
    assert 0.4 < swapped / samples.count < 0.6


def test_a_batch_stacks_the_samples(dataset):
    loader = BertLoader(built(dataset, "pairs"), 8, 2)
    batch = loader.batch(4)
    assert batch["tokens"].shape == (2, 4, 64) and batch["swapped"].shape == (2, 4)
    np.testing.assert_array_equal(batch["tokens"][1, 0], loader.samples.sample(8)["tokens"])
    np.testing.assert_array_equal(loader.resized(4, 1).batch(8)["labels"][0], batch["labels"][1])


def test_word_pieces_are_read_from_the_tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##able"]))
    pieces = WordPieces.from_tokenizer(load_tokenizer(str(tmp_path / "vocab.txt")))
    assert (pieces.padding, pieces.begin, pieces.separator, pieces.mask) == (0, 2, 3, 4)
    assert np.flatnonzero(pieces.continues).tolist() == [6]
    with pytest.raises(ConfigError, match=r"gpt2 has no \[CLS\]"):
        WordPieces.from_tokenizer(load_tokenizer("gpt2"))


def test_damaged_data_is_refused_with_and_without_a_cached_index(tmp_path):
    def sentences(tokens, dtype=np.int64):
        with IndexedWriter(tmp_path / "a", dtype, overwrite=True) as writer:
            writer.add_document(tokens, [2, len(tokens) - 2])
        return BertSamples(IndexedDataset(tmp_path / "a"), (0, 1), 5, 16, 1, PIECES)

    sentences([5, 6, 7, 8, 9]).sample(0)
    for token in (-1, 200, 2**40):
        with pytest.raises(
            ConfigError, match=rf"a\.bin, byte 32: token id {token} .*, but the vocabulary has ids 0 to 199"
        ):
            sentences([5, 6, 7, 8, token]).sample(0)
    with pytest.raises(ConfigError, match="type float32, which are not token ids"):
        sentences([5, 6, 7, 8, 9], np.float32)
    sentences([5, 6, 7, 8, 9])
    raw = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(raw[:42] + b"\x08" + raw[43:])
    with pytest.raises(ConfigError, match="a.idx, byte 42: the first sequence begins at byte 8"):
        BertSamples(IndexedDataset(tmp_path / "a"), (0, 1), 5, 16, 1, PIECES)


def test_documents_of_one_sentence_give_no_pairs(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([5, 6, 7])
    with pytest.raises(ConfigError, match="--split-sentences"):
        BertSamples(IndexedDataset(tmp_path / "a"), (0, 1), 5, 16, 1, PIECES)

"""The .bin/.idx pair: the layout by hand, round trips, and damaged pairs."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data.indexed import DTYPES, IndexedDataset, IndexedWriter, dtype_for

# Documents [1, 2, 3] and [4, 5] of uint16, written from the format's description.
INDEX = bytes.fromhex(
    "4d4d494449445800000100000000000000"  # MMIDIDX, version 1
    "0802000000000000000300000000000000"  # uint16, 2 sequences, 3 boundaries of documents
    "0300000002000000"
    "00000000000000000600000000000000"
    "000000000000000001000000000000000200000000000000"
)
TOKENS = bytes.fromhex("01000200030004000500")


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "a.idx").write_bytes(INDEX)
    (tmp_path / "a.bin").write_bytes(TOKENS)
    return tmp_path / "a"


def opened(prefix) -> IndexedDataset:
    """Opens the pair and runs every check."""
    dataset = IndexedDataset(prefix)
    dataset.check()
    return dataset


def test_the_file_layout_by_hand(pair, tmp_path):
    assert len(INDEX) == 82
    dataset = opened(pair)
    assert dataset.dtype == np.uint16
    assert (len(dataset), dataset.document_count) == (2, 2)
    assert [dataset.sequence(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5]]
    assert dataset.sequence(0, 1, 1).tolist() == [2]
    with IndexedWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5])
    assert (tmp_path / "b.idx").read_bytes() == INDEX
    assert (tmp_path / "b.bin").read_bytes() == TOKENS
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx", "b.bin", "b.idx", "b.sums.json"]


def test_reading_copies_nothing(pair):
    view = IndexedDataset(pair).sequence(1)
    assert not view.flags.owndata and not view.flags.writeable


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_truncated_and_extended_files_are_refused(pair, ending):
    path = pair.with_suffix(f".{ending}")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=rf"\.{ending}, byte {length}: "):
            IndexedDataset(pair)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ConfigError, match=rf"byte {len(whole)}: "):
        IndexedDataset(pair)


def test_any_wrong_byte_of_the_index_is_detected(pair):
    """Only changes that give another legal file can pass: a type of the same size, another document boundary."""
    legal = {(17, code) for code in (3,)} | {(66, boundary) for boundary in (0, 2)}
    for place in range(len(INDEX)):
        for value in {0, 1, 2, 3, 255, INDEX[place] ^ 1, INDEX[place] ^ 128} - {INDEX[place]}:
            pair.with_suffix(".idx").write_bytes(INDEX[:place] + bytes([value]) + INDEX[place + 1 :])
            if (place, value) in legal:
                opened(pair)
                continue
            with pytest.raises(ConfigError, match=r"byte \d+") as error:
                opened(pair)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"TNTIDX\0\0" + INDEX[8:], "byte 0.*before 2020"),
        (b"PK\x03\x04" * 30, "byte 0.*not an index of Megatron"),
        (INDEX[:9] + b"\x02" + INDEX[10:], "byte 9: version 2"),
        (INDEX[:17] + b"\x09" + INDEX[18:], "byte 17: unknown type code 9.*8 uint16"),
        (INDEX + b"\0\0", "byte 82.*may be a multimodal dataset"),
        (INDEX[:42] + (9).to_bytes(8, "little") + INDEX[50:], "byte 42: the first sequence begins at byte 9"),
    ],
    ids=["old", "zip", "version", "type", "modes", "start"],
)
def test_the_message_names_the_byte_and_the_reason(pair, index, message):
    pair.with_suffix(".idx").write_bytes(index)
    with pytest.raises(ConfigError, match=message):
        IndexedDataset(pair)


def test_ids_of_a_fraction_of_their_size_are_refused(pair):
    """The type is int32, the offsets end at byte 10 of .bin: two and a half ids."""
    pair.with_suffix(".idx").write_bytes(INDEX[:17] + b"\x04" + INDEX[18:50] + b"\x02" + INDEX[51:])
    with pytest.raises(ConfigError, match="byte 10: the file ends inside an id of int32"):
        IndexedDataset(pair)


def test_missing_files_and_prefixes_with_an_ending_are_refused(pair, tmp_path):
    with pytest.raises(ConfigError, match=r"no\.idx: No such file.*without .bin and .idx"):
        IndexedDataset(tmp_path / "no")
    with pytest.raises(ConfigError, match=r"did you mean .*/a\?"):
        IndexedDataset(f"{pair}.bin")


def test_the_bin_of_another_pair_is_refused(pair, tmp_path):
    with IndexedWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_document([7] * 9)
    os.replace(tmp_path / "b.bin", tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="byte 10: the file has 18 bytes, but a.idx gives 10.*not a pair"):
        IndexedDataset(pair)


def test_a_token_outside_the_vocabulary_is_refused(pair):
    IndexedDataset(pair).check_tokens(6)
    with pytest.raises(ConfigError, match=r"byte 8: token id 5 .*ids 0 to 4"):
        IndexedDataset(pair).check_tokens(5)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=5), max_size=4), max_size=6),
    st.sampled_from(list(DTYPES.values())),
)
def test_written_documents_are_read_back(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("pair") / "a"
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add_document(sum(sequences, []), [len(sequence) for sequence in sequences])
    dataset = opened(prefix)
    assert [dataset.document(i).tolist() for i in range(dataset.document_count)] == [sum(d, []) for d in documents]
    assert [dataset.sequence(i).tolist() for i in range(len(dataset))] == sum(documents, [])


def test_an_error_leaves_no_files(tmp_path):
    with pytest.raises(ConfigError, match="token id 70000 does not fit uint16"):
        with IndexedWriter(tmp_path / "a", np.uint16) as writer:
            writer.add_document([1])
            writer.add_document([70000])
    with pytest.raises(KeyboardInterrupt):
        with IndexedWriter(tmp_path / "a", np.uint16) as writer:
            writer.add_document([1])
            raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_an_existing_pair_is_not_overwritten(pair):
    with pytest.raises(ConfigError, match="already exists: pass --overwrite"):
        IndexedWriter(pair, np.uint16)
    with IndexedWriter(pair, np.int32, overwrite=True) as writer:
        writer.add_document([70000])
    assert opened(pair).sequence(0).tolist() == [70000]


def test_pairs_of_different_types_cannot_be_merged(pair, tmp_path):
    with pytest.raises(ConfigError, match="uint16, the output int32"):
        with IndexedWriter(tmp_path / "b", np.int32) as writer:
            writer.add_pair(IndexedDataset(pair))


def test_the_type_follows_the_vocabulary_as_in_megatron():
    """Megatron's preprocessing uses uint16 only below 65,500, not up to 65,536."""
    assert [dtype_for(size).name for size in (257, 65499, 65500, 128256)] == ["uint16", "uint16", "int32", "int32"]
    with pytest.raises(ConfigError, match="uint64 cannot be stored"):
        IndexedWriter("nowhere/a", np.uint64)

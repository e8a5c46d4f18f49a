"""Checksums of .bin and .idx, and --verify-data."""

import zlib

import numpy as np
import pytest

from megajax.config import ConfigError, DataConfig
from megajax.data import preprocess
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.pair_sums import sums_path, verify_pairs
from megajax.data.source import make_samples
from megajax.data.tokenizers import load_tokenizer


@pytest.fixture
def pair(tmp_path):
    """A pair of two documents, and its prefix."""
    prefix = str(tmp_path / "corpus")
    with IndexedWriter(prefix, np.uint16) as writer:
        for size in (300, 500):
            writer.add_document(np.arange(size) % 250)
    return prefix


def test_the_checksums_are_those_of_the_files(pair, tmp_path):
    import json

    found = json.loads(sums_path(pair).read_text())
    for end in ("bin", "idx"):
        data = (tmp_path / f"corpus.{end}").read_bytes()
        assert found[end] == [len(data), zlib.crc32(data)]
    verify_pairs([pair])


def test_merged_and_overwritten_pairs_have_their_own(pair, tmp_path):
    merged = str(tmp_path / "merged")
    assert preprocess.main(["merge", "--input", pair, pair, "--out", merged]) == 0
    verify_pairs([pair, merged])
    assert preprocess.main(["merge", "--input", pair, "--out", merged, "--overwrite"]) == 0
    verify_pairs([merged])
    assert len(IndexedDataset(merged)) == 2 and not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("end", ["bin", "idx"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_found(pair, tmp_path, end, damage):
    path = tmp_path / f"corpus.{end}"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[:-2] if damage == "cut" else data)
    if damage == "gone":
        path.unlink()
    message = {"flip": "its content has changed", "cut": "bytes, and .* were written", "gone": "cannot read"}[damage]
    with pytest.raises(ConfigError, match=message):
        verify_pairs([pair])
    verify_pairs([pair], share=(1, 2))  # another process's part


def samples(pair, **options):
    data = DataConfig(data_path=(pair,), **options)
    return make_samples(data, load_tokenizer("byte", None), 16, 1, 10, 0)


def test_a_flipped_bit_is_found_by_the_option_alone(pair, tmp_path):
    path = tmp_path / "corpus.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    samples(pair)  # any bytes are token ids
    with pytest.raises(ConfigError, match="corpus.bin is damaged: its content has changed since it was written"):
        samples(pair, verify_data=True)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"bin": [1, 2]}', '{"bin": "ab", "idx": [1, 2]}'])
def test_without_checksums_the_option_is_refused_and_the_data_is_read(pair, content):
    sums_path(pair).unlink() if content is None else sums_path(pair).write_text(content)
    samples(pair)
    with pytest.raises(ConfigError, match="omit --verify-data"):
        samples(pair, verify_data=True)


def test_preprocess_verify_compares_them(pair, tmp_path, capsys):
    words = ["verify", pair, "--tokenizer", "byte"]
    assert preprocess.main(words) == 0
    (tmp_path / "corpus.bin").write_bytes(bytes(1600))
    assert preprocess.main(words) == 2
    assert "corpus.bin is damaged" in capsys.readouterr().err

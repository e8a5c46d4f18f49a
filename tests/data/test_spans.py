"""Pieces of files of lines: every line is in exactly one of them, and documents are those of whole files."""

import gzip
import itertools
import pathlib

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data import read_file
from megajax.data.blocks import documents_of
from megajax.data.sources import source_kind
from megajax.data.spans import Place, Span, place_of_part, spans_between, units_of_lines
from megajax.data.text import read_blocks

LINE = st.sampled_from([b"", b"a", b"bc ", b"\xef\xbb\xbfd", b"e" * 9, b"f\r", b" ", b"\xff"])
END = st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"])
FILE = st.tuples(st.lists(st.tuples(LINE, END), max_size=12), LINE).map(
    lambda found: b"".join([*sum(found[0], ()), found[1]])
)


def spans_of(paths, sizes, count, is_divided=lambda number: True):
    places = [place_of_part(index, count, paths, sizes, is_divided) for index in range(count + 1)]
    assert places == sorted(places) and places[0] == (0, 0) and places[-1] == (len(paths), 0)
    return [spans_between(*ends, paths, sizes, lambda number: "line") for ends in itertools.pairwise(places)]


def documents(spans):
    found, bad = [], []
    for span in spans:
        for block in read_blocks(span.path, "line", span=span):
            texts, problems = documents_of(block, ("text",))
            found += texts
            bad += [(span.path, line.reason) for line in problems]
    return found, bad


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spans")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(files=st.lists(FILE, min_size=1, max_size=4), count=st.integers(1, 9), part=st.integers(1, 9), data=st.data())
def test_every_line_is_read_exactly_once(folder, files, count, part, data):
    paths = [str(folder / f"{number}.txt") for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        pathlib.Path(path).write_bytes(content)
    whole = {number for number in range(len(files)) if data.draw(st.booleans())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_file, "PART", part)
        patch.setattr(read_file, "_check_content", lambda *_: None)  # of binary files
        pieces = spans_of(paths, [len(content) for content in files], count, lambda number: number not in whole)
        read = {path: [] for path in paths}
        for span in sum(pieces, []):
            size = len(files[paths.index(span.path)])
            read[span.path].append((span.start, size if span.stop is None else span.stop))
        for content, path in zip(files, paths, strict=True):
            ends = [0, *(stop for _, stop in read[path])]
            assert [start for start, _ in read[path]] == ends[:-1] and ends[-1] == len(content)
            assert all(content[stop - 1 : stop] == b"\n" for stop in ends[1:-1])
            assert len(read[path]) <= 1 or paths.index(path) not in whole
        assert documents(sum(pieces, [])) == documents([Span(path) for path in paths])


def test_pieces_are_of_about_the_same_bytes():
    sizes = [1000, 3, 0, 4000]
    lines = lambda number: number in (0, 3)  # noqa: E731
    paths = ["none"] * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megajax.data.spans._line_start", lambda path, place, size: place)
        places = [place_of_part(index, 5, paths, sizes, lines) for index in range(6)]
    assert places == [Place(0, 0), Place(1, 0), Place(3, 998), Place(3, 1998), Place(3, 2999), Place(4, 0)]


def test_divided_are_uncompressed_files_of_lines(folder):
    rows = b'{"text": "a"}\n{"text": "b"}\n'
    for name, content, as_file, as_lines, as_paragraphs in (
        ("a.jsonl", rows, "jsonl", "jsonl", "jsonl"),
        ("a.txt", rows, "jsonl", "line", ""),
        ("b.txt", b"text\nmore", "", "line", ""),
        ("a.csv", b"text\na\n", "", "", ""),
        ("b.jsonl", gzip.compress(rows), "", "", ""),
    ):
        (folder / name).write_bytes(content)
        fsspec.filesystem("memory").pipe_file(f"spans/{name}", content)
        for place in (str(folder / name), f"memory://spans/{name}"):
            kinds = [source_kind(place, unit) for unit in ("file", "line", "paragraph")]
            assert [units_of_lines(place, kind) for kind in kinds] == [as_file, as_lines, as_paragraphs], place


def test_a_file_that_has_become_shorter_is_an_error(folder):
    (folder / "short.txt").write_bytes(b"a\nb\n")
    with pytest.raises(ConfigError, match=r"short.txt: it ends at byte 4, and had 9; pass --input a readable file"):
        documents([Span(str(folder / "short.txt"), 2, 9, "line")])

"""The pictures of the pages: apart labels, text that is text, one style, and a command under each that draws it."""

import pathlib
import re

import pytest

from megajax.schedules import pictures
from megajax.schedules.errors import UserError
from megajax.schedules.pictures import LINE, SOFT, spread
from tests.svg import Picture, crossed, overlapping

ROOT = pathlib.Path(__file__).parents[1]
SVGS = sorted([*(ROOT / "docs" / "images").glob("*.svg"), *(ROOT / "benchmarks" / "results").glob("*.svg")])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GREY = {LINE, SOFT, "#ffffff"}  # grid and axes


@pytest.mark.parametrize("path", SVGS, ids=lambda path: path.name)
def test_labels_are_apart_and_no_line_goes_through_one(path):
    picture = Picture(path)
    assert len(picture.texts) > 5, "text as paths"
    assert overlapping(picture.texts) == []
    lines = [line for colour, several in picture.lines.items() if colour not in GREY for line in several]
    assert crossed(picture.texts, lines) == set()
    # Estimated widths are up to a tenth above those by which matplotlib laid the texts out.
    assert max(text.area.right for text in picture.texts if not text.turned) <= 1.06 * picture.width
    assert "http" not in re.sub(r'"http://(www\.w3\.org|purl\.org|creativecommons\.org)[^"]*"', "", path.read_text())


def test_every_picture_has_a_command_that_draws_it():
    """In its page: with the file's name, or of a benchmark, which writes to benchmarks/results."""
    shown = []
    for page in PAGES:
        text = page.read_text()
        words = re.sub(r"\s+", " ", text)
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            file = (page.parent / name).resolve()
            shown.append(file)
            assert file.exists(), (page.name, name)
            option = (
                f"{file.relative_to(ROOT)}" if "images" in name else f"python -m benchmarks.{file.stem.split('_')[0]}"
            )
            assert option in words.replace(f"]({name})", ""), (page.name, name)
        shown += [(page.parent / name).resolve() for name in re.findall(r"\]\(([^)]+\.svg)\)", text)]  # linked to
    assert set(SVGS) <= set(shown)


def test_labels_are_spread_by_hand():
    assert spread([0.1, 0.5, 0.9], [0.1] * 3) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5], [0.2, 0.2]) == pytest.approx([0.4, 0.6])
    assert spread([0.1, 0.5, 0.52, 0.54], [0.1] * 4) == pytest.approx([0.1, 0.42, 0.52, 0.62])
    assert spread([0.3, 0.35], [0.1, 0.3]) == pytest.approx([0.225, 0.425])
    assert spread([], []) == []


def test_a_picture_is_the_same_file_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        with pictures.picture(tmp_path / name, 200, 100) as figure:
            figure.subplots().plot([1, 2], [3, 4], label="two & <three>")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"DejaVu" in (tmp_path / "a.svg").read_bytes()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "x.svg").mkdir()
    with (
        pytest.raises(UserError, match="cannot write .*x.svg: Is a directory"),
        pictures.picture(tmp_path / "x.svg", 50, 50),
    ):
        pass
    with pytest.raises(UserError, match="end it in .svg, .png or .pdf"), pictures.picture("x.jpeg", 50, 50):
        pass

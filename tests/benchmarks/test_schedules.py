"""benchmarks/schedules.py: what it simulates, its file and its picture agree with the tables of README and docs."""

import json
import pathlib
import re

import pytest

from benchmarks.schedules import lines_of, plot, simulated_rows
from tests.svg import Picture, crossed, overlapping

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "schedules.json").read_text())["simulated"]


def formulas(page, head):
    """{schedule: (bubble, in flight)} of a page's table as the text of its cells."""
    table = (ROOT / page).read_text().partition(head)[2].partition("\n\n")[0]
    return {
        name: (bubble, live) for name, bubble, live in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", table, re.M)
    }


def value(formula, **sizes):
    """A formula such as (v-1)p + 2(p-r) - 1; words around it are left out."""
    text = re.sub(r"at most|on rank r|, and .*", "", formula).replace("1/2", "0.5").strip()
    for _ in range(2):
        text = re.sub(r"([\dpmvr)]) ?(?=[pmvr(])", r"\1*", text)
    return eval(re.sub(r"/\((\d*\*?[mv][mv*]*)\)", r"/(\1)", text), sizes)


def test_formulas_by_hand():
    assert value("(v-1)p + 2(p-r) - 1", p=4, v=2, r=1) == 4 + 6 - 1
    assert value("at most (p(v+1) - 1)/v", p=4, v=2) == 5.5
    assert value("(p-1)/(3mv)", p=4, m=8, v=2) == 3 / 48
    assert value("2p - 1, and two versions of the weights", p=4) == 7
    assert value("p + 1/2", p=4) == 4.5


@pytest.mark.parametrize("rows", [RESULTS, simulated_rows((2, 4))], ids=["the file", "now"])
def test_the_tables_hold(rows):
    readme = formulas("README.md", "| `--schedule` | bubble")
    docs = formulas("docs/schedules.md", "| schedule | bubble")
    assert {row["schedule"] for row in rows} == (set(readme) & set(docs)) - {
        "pipedream_2bw",
        "hanayo",
    }  # whose bubble is a bound
    for row in rows:
        sizes = {"p": row["stages"], "m": row["microbatches"], "v": row["chunks"], "r": 0}
        for bubble, live, chunks in ((*readme[row["schedule"]], row["chunks"]), (*docs[row["schedule"]], 1)):
            assert row["bubble"] == pytest.approx(value(bubble, **sizes)), row
            assert row["in_flight"] * chunks == value(live, **sizes), row
        # the program's slot for a rank without a microbatch
        assert (row["slots"] - row["in_flight"]) * row["chunks"] == (row["schedule"] in ("gpipe", "looped_bfs")), row


def test_the_picture_has_a_line_for_each_value(tmp_path):
    names = [
        ", ".join(several)
        for value in ("lockstep_bubble", "in_flight")
        for several in lines_of(RESULTS, value).values()
    ]
    assert "gpipe, looped_bfs\u00a0v=2" in names  # m microbatches in flight, both
    plot(RESULTS, tmp_path / "x.svg")
    for path in (tmp_path / "x.svg", ROOT / "benchmarks" / "results" / "schedules.svg"):
        picture = Picture(path)
        words = " ".join(picture.words())
        assert all(name in words for name in names)
        assert overlapping(picture.texts) == []
        assert crossed(picture.texts, [line for several in picture.lines.values() for line in several]) == set()

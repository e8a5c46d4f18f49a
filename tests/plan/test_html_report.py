"""The planner's page, read by a parser: its structure, that it needs no other file, and its figures."""

import re
from html.parser import HTMLParser

import pytest

from megajax import __version__
from megajax.estimate.gpus import find_gpu
from megajax.plan.__main__ import main


class Page(HTMLParser):
    """Checks that tags nest, and collects rows, attributes and texts by section."""

    def __init__(self, text):
        super().__init__()
        self.open, self.section, self.rows, self.attributes, self.paths, self.styles = [], "", {}, [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag == "section":
            self.section = found["id"]
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        if tag == "path":
            self.paths.append(found["d"])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[self.section][-1][-1] += data


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    words = "--model gpt3-6.7b --gpus 16 --gpu a100-80gb --global-batch-size 64 --schedule 1f1b zb_h1 --top 4"
    words += f" --microbatch-size 1 2 --zero 0 --context 1 --out {folder / 'plan.toml'} --html {folder / 'report.html'}"
    assert main(words.split()) == 0
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_tags_nest_and_nothing_else_is_loaded(page, text):
    assert text.startswith("<!DOCTYPE html>") and not page.open
    loading = {"src", "href", "xlink:href", "srcset", "data", "action"}
    assert not [one for one in page.attributes if one[1] in loading or one[0] in ("script", "link", "iframe", "img")]
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")] == [
        *("layouts", "time", "timeline", "meshes", "why", "terms"),
    ]


def test_the_page_says_how_it_was_made(text):
    """The command with its options, the version, the date, the rates of the links, and the columns' terms."""
    command = re.search(r'<pre class="command"><code>(.*?)</code>', text)[1]
    assert command.startswith("python -m megajax.plan --model gpt3-6.7b --gpus 16 --gpu a100-80gb ")
    assert f"megajax {__version__} on " in text and re.search(r"on \d{4}-\d\d-\d\d with", text)
    gpu = find_gpu("a100-80gb")
    assert (
        f"{gpu.host_bandwidth / 1e9:.0f} GB/s between the 8 GPUs of a host, {gpu.network_bandwidth / 1e9:.1f} GB/s"
        in text
    )
    for term in ("microbatch", "bubble", "recompute", "ZeRO", "MFU"):
        assert f"<dt>{term}</dt>" in text
    topics = ("Tensor parallelism", "Model parallelism", "Microbatch size", "Schedule", "Recomputation")
    assert all(f"<li><b>{topic}.</b>" in text for topic in topics)


def test_the_table_has_the_layouts(page):
    head, *rows = page.rows["layouts"]
    assert len(rows) == 4 and all(len(row) == len(head) for row in rows)
    by_name = [dict(zip(head, row, strict=True)) for row in rows]
    for row in by_name:
        assert int(row["tensor"]) * int(row["pipe"]) * int(row["data"]) == 16
        assert int(row["data"]) * int(row["microbatch"]) * int(row["microbatches"]) == 64
    assert by_name[0]["tie"] == "="


def test_the_heat_maps_best_is_the_first_layout(page, text):
    head, *rows = page.rows["meshes"]
    values = {
        (int(row[0]), int(pipe)): int(cell)
        for row in rows
        for pipe, cell in zip(head[1:], row[1:], strict=True)
        if cell.isdigit()
    }
    first = dict(zip(page.rows["layouts"][0], page.rows["layouts"][1], strict=True))
    assert values[int(first["tensor"]), int(first["pipe"])] == pytest.approx(int(first["TFLOP/s"]), rel=0.1)
    assert text.count('class="best"') == 1 and max(values.values()) > 0


def test_the_timeline_has_every_operation(page):
    """A box for each operation of each rank: forward, and backward in two parts."""
    first = dict(zip(page.rows["layouts"][0], page.rows["layouts"][1], strict=True))
    boxes = sum(path.count("M") for path in page.paths)
    forwards = int(first["pipe"]) * int(first["chunks"]) * int(first["microbatches"])
    assert boxes in (2 * forwards, 3 * forwards) if int(first["pipe"]) > 1 else boxes == 0


def test_bars_stay_within_their_width(text):
    for svg in re.findall(r'<svg class="bar".*?</svg>', text):
        widths = [float(width) for width in re.findall(r'width="([\d.]+)%"', svg)]
        assert widths and sum(widths) <= 100.5


def test_a_path_that_cannot_be_written_is_one_line(tmp_path, capsys):
    words = "--model gpt2 --gpus 4 --gpu a100-80gb --global-batch-size 8 --schedule 1f1b --recompute none"
    assert main([*words.split(), "--out", str(tmp_path / "p"), "--html", "/no/such/report.html"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pass --html with a writable path" in error

"""The drawing command: its outputs, and its errors."""

import json
import re
import sys
import xml.etree.ElementTree

import pytest

from megajax.schedules.draw import main


def test_json(capsys):
    assert (
        main(["--schedule", "interleaved_1f1b", "--pipe", "4", "--microbatches", "8", "--chunks", "2", "--json"]) == 0
    )
    got = json.loads(capsys.readouterr().out)
    assert {name: got[name] for name in ("schedule", "stages", "microbatches", "chunks", "placement", "ticks")} == {
        "schedule": "interleaved_1f1b",
        "stages": 4,
        "microbatches": 8,
        "chunks": 2,
        "placement": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "ticks": 8 * 2 + 4 + 2 * 3,
    }
    assert got["orders"][3][:6] == [["F", 0, 0], ["F", 0, 1], ["F", 0, 2], ["F", 0, 3], ["F", 1, 0], ["B", 1, 0]]
    # 16 chunk forwards of 1 and backwards of 2, and a bubble of (p - 1)/(mv).
    assert got["simulated"] == {"ideal": 48, "event": 57, "lockstep": 57, "bubble": 3 / 16, "peak_live": [11, 9, 7, 5]}


def test_pictures(tmp_path):
    picture = tmp_path / "x.svg"
    assert (
        main(["--compare", "gpipe", "1f1b", "zb_v", "--pipe", "3", "--microbatches", "5", "--out", str(picture)]) == 0
    )
    text = picture.read_text()
    xml.etree.ElementTree.fromstring(text)
    for name in ("gpipe", "1f1b", "zb_v"):
        assert f">{name}</text>" in text
    # microbatch 4 in every row: F B, F B, and F I W twice; and in the column of what is in flight nowhere
    assert len(re.findall(">4</text>", text)) == 3 * (2 + 2 + 6)
    assert main(["--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_text_and_trace(tmp_path, capsys):
    trace = tmp_path / "x.json"
    sizes = ["--schedule", "1f1b", "--pipe", "2", "--microbatches", "2", "--text", "--trace", str(trace)]
    assert main([*sizes, "--costs", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[2:6] == ["F0.0", "F1.0", ".", "."]
    spans = [event for event in json.loads(trace.read_text()) if event["ph"] == "X"]
    assert len(spans) == 2 * 2 * 3  # a forward and two halves of a backward
    assert max(span["ts"] + span["dur"] for span in spans) == 1000 * (2 + 1) * 3


def test_a_pipeline_that_never_drains(tmp_path, capsys):
    """PipeDream-2BW at p = 3, m = 4 = 2(p - 1): 2(p - r) - 1 microbatches in flight, no bubble, no first order."""
    sizes = ["--schedule", "pipedream_2bw", "--pipe", "3", "--microbatches", "4"]
    assert main(sizes) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "bubble 0.0%" in head
    assert [row.split()[-3:] for row in rows] == [[str(count), "in", "flight"] for count in (5, 3, 1)]
    assert main([*sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulated"]["bubble"] == 0
    assert main([*sizes, "--save", str(tmp_path / "x.csv")]) == 2
    assert "never drains: it cannot be saved as orders" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "says"), [("MOST_RANKS", "on 1 ranks, not 16 on 2"), ("MOST_BOXES", "at most 1 op")])
def test_a_picture_has_a_largest_size(limit, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"megajax.schedules.timeline.{limit}", 1)
    assert main(["--schedule", "gpipe", "--pipe", "2", "--microbatches", "4", "--out", str(tmp_path / "x.svg")]) == 2
    error = capsys.readouterr().err
    assert says in error and "pass fewer --microbatches or --pipe, or --text" in error and error.count("\n") == 1


def test_a_pipe_that_closes_is_no_file(monkeypatch):
    """As in `draw | head`: `exit_code` ends it without a word, and nothing is blamed on a file."""

    def write(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", write)
    with pytest.raises(BrokenPipeError):  # since this process's own output is open
        main(["--text"])


def test_only_pictures_need_matplotlib(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    others = ["--text", "--json", str(tmp_path / "x.json"), "--trace", str(tmp_path / "t.json")]
    assert main([*others, "--save", str(tmp_path / "x.csv")]) == 0
    capsys.readouterr()
    assert main(["--out", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err == (
        "error: pictures need matplotlib, which is not installed: pip install 'megajax[plot]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "1f2b"], "did you mean 1f1b?"),
        (["--pipe", "four"], "--pipe: 'four' is not a whole number"),
        (["--pipe", "0"], "--pipe: 0 must be a whole number, 1 or more"),
        (["--microbatches", "6"], "interleaved_1f1b takes a multiple of the 4 stages as microbatches, not 6"),
        (["--schedule", "gpipe", "--chunks", "2"], "gpipe has one chunk on each rank, not 2"),
        (["--costs", "1,2,3"], "give F,B or F,B,I,W"),
        (["--costs", "1,-2"], "give F,B or F,B,I,W"),
        (["--latency", "-1"], "--latency: -1.0 must be a number, 0 or more"),
        (["--latency", "nan"], "--latency: nan must be a number, 0 or more"),
        (["--costs", "inf,nan"], "give F,B or F,B,I,W as numbers from 1e-06 to 1e+06"),
        (["--microbatches", "100000000"], "at most 262144 forwards, not stages * chunks * microbatches = 4 * 2 * 1000"),
        (["--schedule", "auto", "--microbatches", "5000"], "at most 16384 forwards"),
        (["--out", ""], "--out: '' must not be empty"),
        (["--microbatches", "9" * 5000], "is not a whole number"),
        (["--out", "x.bmp"], "end it in .svg, .png or .pdf"),
        (["--out", "x.SVG"], "'x.SVG' is not the name of a picture: end it in .svg, .png or .pdf"),
        (["--out", "svg"], "end it in .svg, .png or .pdf"),
        (["--out", ".svg"], "end it in .svg, .png or .pdf"),
        (["--out", "x.html"], "end it in .svg, .png or .pdf"),
        (["--out", "/nowhere/x.svg"], "'/nowhere/x.svg' cannot be written: there is no folder /nowhere"),
        (["--out", "s3://bucket/x.svg"], "is in an object store"),
        (["--save", "/nowhere/x.csv"], "cannot write /nowhere/x.csv: No such file or directory"),
        (["--nonsense"], "there is no option --nonsense: --help lists"),
    ],
)
def test_wrong_arguments_are_one_clear_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1

"""A large log at a resume: read line by line, without parsing what looks whole."""

import json
import time
import tracemalloc

from megajax.train.sinks import LONGEST, JsonLines

LINE = '{{"step": {}, "time": "2026-01-31T12:00:00.123Z", "loss": 1.5, "grad_norm": 0.25, "experts": [{}]}}\n'


def test_a_large_log_is_continued_fast_and_in_little_memory(tmp_path, monkeypatch):
    """20 MB, of which the last fifth is dropped; 215 MB took 36 s and 1.5 GB."""
    path, wide = tmp_path / "log.jsonl", ", ".join(["0.125"] * 250)
    path.write_text("".join(LINE.format(step, wide) for step in range(1, 10_001)))
    parsed, loads = [], json.loads
    monkeypatch.setattr("megajax.train.sinks.json.loads", lambda text: parsed.append(text) or loads(text))
    start = time.process_time()
    tracemalloc.start()
    JsonLines(path, after=8000).file.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parsed == [] and peak < 4 * LONGEST and time.process_time() - start < 10
    lines = path.read_text().splitlines()
    assert len(lines) == 8000 and json.loads(lines[-1])["step"] == 8000


def test_a_line_without_end_is_damaged_and_not_read_into_memory(tmp_path):
    path = tmp_path / "log.jsonl"
    good = LINE.format(1, "0.5")
    for bad in (
        '{"a": [' + "[" * (3 * LONGEST),
        '{"step": 2, "time": "now", ' + " " * (3 * LONGEST) + "}\n",
        '{"step": 2, "ti',
    ):
        path.write_text(good + bad)
        tracemalloc.start()
        JsonLines(path, after=5).file.close()
        assert tracemalloc.get_traced_memory()[1] < 4 * LONGEST
        tracemalloc.stop()
        assert path.read_text() == good


def test_damaged_lines_between_whole_ones_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    first, third = LINE.format(1, "0.5"), LINE.format(3, "0.5")
    path.write_text(first + '{"step": 2, "time": "now", "lo\n' + third + LINE.format(9, "1"))
    JsonLines(path, after=5).file.close()
    assert path.read_text() == first + third

"""The log of a run, complete on a terminal, in files and on redirected output."""

import datetime
import io
import json
import math

import pytest
from rich.console import Console

from megajax.train.logging import RunLog, Throughput, step_record
from megajax.train.sinks import JsonLines

THROUGHPUT = Throughput(tokens_per_step=4096, flops_per_step=8e12, devices=4, peak_flops=10e12)
METRICS = {"loss": 2.5, "grad_norm": 0.75, "learning_rate": 1e-3, "loss_scale": 1.0, "tokens": 4096.0}
FIELDS = [
    "step",
    "time",
    "loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped_steps",
    "bad_steps",
    "batch",
    "samples",
    "step_seconds",
    "compiled",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
]


def record(step: int = 1, compiled: bool = False, **metrics):
    return step_record(
        step, METRICS | metrics, samples=32 * step, seconds=0.5, throughput=THROUGHPUT, batch=32, compiled=compiled
    )


def log_of(tmp_path, *, terminal: bool, steps: int = 25, every: int = 10):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=140, color_system=None)
    path = tmp_path / "log.jsonl"
    return RunLog(steps, every, console=console, sinks=[JsonLines(path)]), text, path


def test_rates_are_per_second_and_per_device():
    """8 TFLOP in half a second on 4 devices are 4 TFLOP/s each, of 10."""
    assert THROUGHPUT.rates(0.5) == pytest.approx({"tokens_per_second": 8192, "tflops_per_device": 4.0, "mfu": 0.4})


@pytest.mark.parametrize("terminal", [True, False])
def test_the_file_has_every_step_on_any_console(tmp_path, terminal):
    log, _, path = log_of(tmp_path, terminal=terminal)
    with log:
        for step in range(1, 26):
            log.step(record(step))
            assert len(path.read_text().splitlines()) == step  # a killed run keeps its log
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 26))
    assert all(list(row) == FIELDS for row in rows)
    times = [datetime.datetime.fromisoformat(row.pop("time")) for row in rows]
    assert times == sorted(times) and all(one.tzinfo == datetime.UTC for one in times)
    assert rows[2] == pytest.approx(record(3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_values_that_are_not_finite_are_written_and_warned_of(tmp_path, name, bad):
    log, text, path = log_of(tmp_path, terminal=False)
    with log:
        log.step(record(3, **{name: bad}))
    read = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert list(read) == FIELDS
    assert str(float(read[name])) == str(bad)
    assert f"warning: step 3: {name} is {bad}" in text.getvalue()


def test_a_skipped_step_has_a_warning(tmp_path):
    log, text, path = log_of(tmp_path, terminal=False)
    with log:
        log.step(record(3, grad_norm=math.inf, loss_scale=65536.0) | {"skipped_steps": 1}, skipped=True)
        log.step(record(10) | {"skipped_steps": 1})
    lines = text.getvalue().splitlines()
    assert "loss scale 65536  skipped 1" in lines[0] and "not finite" not in text.getvalue()
    assert lines[1] == "warning: step 3: gradient norm is inf, step skipped; loss scale 65536"
    assert "skipped 1" in lines[2] and "loss scale" not in lines[2] and len(lines) == 3
    assert [row["skipped_steps"] for row in map(json.loads, path.read_text().splitlines())] == [1, 1]


def test_plain_lines_show_the_first_the_last_and_every_tenth_step(tmp_path):
    log, text, _ = log_of(tmp_path, terminal=False)
    with log:
        for step in range(1, 26):
            log.step(record(step))
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    for number in ("loss 2.5000", "8,192 tokens/s", "4 TFLOP/s", "40.0% MFU", "grad norm 0.75", "lr 0.001", "500.0 ms"):
        assert number in lines[0]
    assert "\x1b" not in text.getvalue()


def test_a_terminal_shows_a_bar_with_loss_and_rates(tmp_path):
    log, text, _ = log_of(tmp_path, terminal=True)
    with log:
        log.compiling(1)
        for step in range(1, 26):
            log.step(record(step))
        log.message("[bold] is not markup")
    shown = text.getvalue()
    for part in ("compiling", "25/25", "loss 2.5000", "8,192 tokens/s", "40.0% MFU", "[bold] is not markup"):
        assert part in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_that_compiled_is_marked_and_has_no_rates(tmp_path, terminal):
    log, text, path = log_of(tmp_path, terminal=terminal, every=1)
    with log:
        for step, compiled in ((1, True), (2, False), (3, True)):
            before = len(text.getvalue())
            log.step(record(step, compiled=compiled))
            shown = text.getvalue()[before:]
            assert ("(with compilation)" in shown) == compiled
            if compiled or not terminal:  # the bar is drawn ten times a second
                assert ("tokens/s" in shown) != compiled
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["compiled"] for row in rows] == [1, 0, 1]
    assert [row["tokens_per_second"] for row in rows] == [None, 8192, None]
    assert [row["mfu"] for row in rows] == [None, 0.4, None]

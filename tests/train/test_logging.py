"""The log of a run, complete on a terminal, in files and on redirected output."""

import io
import json
import math
import struct

import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from megajax.config import ConfigError
from megajax.train.logging import JsonLines, RunLog, TensorBoard, Throughput, step_record

THROUGHPUT = Throughput(tokens_per_step=4096, flops_per_step=8e12, devices=4, peak_flops=10e12)
METRICS = {"loss": 2.5, "grad_norm": 0.75, "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": 0, "tokens": 4096.0}
FIELDS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
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
        log.step(record(3, skipped=1, grad_norm=math.inf, loss_scale=65536.0))
    assert "warning: step 3: gradient norm is inf, step skipped; loss scale 65536" in text.getvalue()
    assert json.loads(path.read_text())["skipped"] == 1


def test_plain_lines_show_the_first_the_last_and_every_tenth_step(tmp_path):
    log, text, _ = log_of(tmp_path, terminal=False)
    with log:
        for step in range(1, 26):
            log.step(record(step))
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    for number in ("loss 2.5000", "8,192 tokens/s", "4 TFLOP/s", "40.0% MFU", "grad norm 0.75", "learning rate 0.001"):
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


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="cannot write the log .*No such file.*--log-jsonl"):
        JsonLines(tmp_path / "missing" / "log.jsonl")
    with pytest.raises(ConfigError, match="--log-jsonl"):
        JsonLines(tmp_path)


def test_a_new_run_replaces_the_log(tmp_path):
    for step in (1, 2):
        file = JsonLines(tmp_path / "log.jsonl")
        file.write(record(step))
        file.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 2


def test_tensorboard_has_the_same_values(tmp_path):
    """Read back from the event files, NaN included; a resumed run's events say which old ones to drop."""
    for after, steps in ((0, range(1, 4)), (2, range(3, 5))):
        board = TensorBoard(tmp_path, after=after)
        for step in steps:
            board.write(record(step, loss=math.nan if step == 2 else float(step)))
        board.close()
    values, starts = {}, []
    for path in sorted(tmp_path.iterdir()):
        for event in read_events(path):
            starts += [event.step] if event.session_log.status == 1 else []
            values |= {(event.step, v.tag): v.simple_value for v in event.summary.value}
    assert starts == [3]
    for step in (1, 2, 3, 4):
        for name, value in record(step, loss=math.nan if step == 2 else float(step)).items():
            if name != "step":
                assert values[step, name] == pytest.approx(value, nan_ok=True), (step, name)


def read_events(path):
    """The records of an event file: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack("<Q", data[place : place + 8])
        yield event_pb2.Event.FromString(data[place + 12 : place + 12 + length])
        place += 16 + length

"""The line of a step: on terminals of all widths, and plain, of at most 120 columns."""

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from megajax.train.logging import RunLog
from megajax.train.step_line import StepBar, plain_line
from tests.train.test_logging import record

LARGE = {"tokens_per_second": 1_204_123.0, "tflops_per_device": 412.3, "mfu": 0.417, "step_seconds": 2.5}
TINY = {"tokens_per_second": 3192.0, "tflops_per_device": 0.00228, "mfu": None, "step_seconds": 0.6}


def screen(width: int, bar: StepBar) -> str:
    """What a terminal of that width shows."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)
    console.print(bar, end="")
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("steps", [500, 300_000])
@pytest.mark.parametrize("rates", [LARGE, TINY], ids=["gpu", "cpu"])
def test_a_terminal_of_any_width_shows_one_line_with_step_time_and_loss(width, steps, rates):
    bar = StepBar(steps)
    for step in (1, 2, steps // 2):
        bar.update(record(step, loss=2.1234) | rates)
    line = screen(width, bar)
    assert "\n" not in line and cell_len(line) < width
    assert f"step {steps // 2}/{steps}" in line and "loss 2.1234" in line
    assert "ETA" in line or (width == 40 and steps == 300_000)
    if width >= 60:
        assert "━" in line
    shown = [name in line for name in ("tokens/s", "MFU", "TFLOP/s") if name != "MFU" or rates["mfu"]]
    assert shown == sorted(shown, reverse=True)  # TFLOP/s is dropped first, then MFU, then tokens/s
    if steps == 500:
        assert sum(shown) == {40: 0, 60: 0, 80: 1}.get(width, len(shown))


def test_without_room_the_bar_goes_before_the_time_and_the_time_before_the_loss():
    bar = StepBar(500)
    bar.update(record(250, loss=2.1234))
    lines = {width: screen(width, bar) for width in range(26, 80)}
    parts = ["step 250/500", "loss 2.1234", "ETA", "━", "tokens/s"]
    for width, line in lines.items():
        assert cell_len(line) < width
        shown = [part in line for part in parts]
        assert shown == sorted(shown, reverse=True), line
    assert [next(width for width in lines if part in lines[width]) for part in parts] == [26, 26, 39, 45, 67]


def test_a_window_that_is_resized_during_the_run_has_lines_of_the_new_width():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, legacy_windows=False)
    sizes = {1: 120, 4: 60, 7: 100}
    with RunLog(9, console=console) as log:
        for step in range(1, 10):
            console.size = (sizes.get(step, console.width), 25)
            before = len(console.file.getvalue())
            log._shown = 0.0
            log.step(record(step))
            drawn = console.file.getvalue()[before:]
            assert ("TFLOP/s" in drawn) == (console.width > 60) and "loss 2.5000" in drawn


def test_the_time_left_is_the_median_step_times_the_steps_that_are_left():
    bar = StepBar(1000)
    assert bar.time_left == "ETA -:--:--"
    bar.update(record(1, compiled=True) | {"step_seconds": 900.0})
    assert bar.time_left == "ETA -:--:--"
    for step, seconds in ((2, 4.0), (3, 4.0), (4, 60.0)):
        bar.update(record(step) | {"step_seconds": seconds})
    assert bar.time_left == "ETA 1:06:24"  # 996 steps of 4 s
    bar.update(record(5) | {"step_seconds": 4.0})
    bar.steps = 100_000
    assert bar.time_left == "ETA 4d15h"


def test_compiling_is_shown_in_place_of_the_loss():
    bar = StepBar(500)
    bar.message = "compiling the first step"
    for width in (40, 80, 200):
        line = screen(width, bar)
        assert "step 0/500" in line and "compiling the first step" in line and cell_len(line) < width


def test_what_never_changes_is_not_in_a_plain_line():
    line = plain_line(record(12), 500)
    assert line.startswith("step 12/500  loss 2.5000  ")
    assert not any(word in line for word in ("loss scale", "skipped", "not finite", "batch", "samples"))
    changed = plain_line(
        record(12) | {"loss_scale": 1024.0, "skipped_steps": 3, "bad_steps": 2}, 500, batch_changes=True
    )
    assert "loss scale 1024  batch 32  skipped 3  not finite 2" in changed


def test_a_batch_is_shown_from_its_first_change():
    text = io.StringIO()
    with RunLog(4, console=Console(file=text, width=200)) as log:
        for step, size in enumerate((16, 16, 32, 32), 1):
            log.step(record(step) | {"batch": size})
    assert [("batch 16" in line, "batch 32" in line) for line in text.getvalue().splitlines()] == [
        *[(False, False)] * 2,
        *[(False, True)] * 2,
    ]


@pytest.mark.parametrize("rates", [LARGE, TINY, {"compiled": 1}], ids=["gpu", "cpu", "compiled"])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_a_plain_line_has_at_most_120_columns_and_its_most_important_numbers(rates, experts, changed):
    found = record(299_990, loss=math.nan if changed else 2.1234) | rates
    if experts:
        found |= {"balance_loss": 1.019, "expert_entropy": 0.977, "worst_expert_share": 0.198, "dropped_share": 0.012}
    if changed:
        found |= {"loss_scale": 65536.0, "skipped_steps": 1234, "bad_steps": 1234, "batch": 3072}
    line = plain_line(found, 300_000, batch_changes=changed)
    assert len(line) <= 120 and line.startswith(f"step 299990/300000  loss {found['loss']:.4f}  ")
    if changed:
        assert "loss scale 65536  batch 3072  skipped 1234  not finite 1234" in line
    else:
        assert "grad norm 0.75  lr 0.001" in line
    if rates is LARGE and not (experts or changed):
        assert "1,204,123 tokens/s  41.7% MFU  412 TFLOP/s  grad norm 0.75  lr 0.001  2500.0 ms" in line

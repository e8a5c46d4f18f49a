"""The code and the commands in docs/schedules.md run as printed there."""

import pathlib
import re

import pytest

from megajax.schedules.registry import SPECS, make_schedule, names
from megajax.schedules.schedule import ScheduleError

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def test_the_example_of_a_user_schedule(monkeypatch):
    monkeypatch.setattr("megajax.schedules.registry.SPECS", dict(SPECS))
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert make_schedule("one_at_a_time", stages=4, microbatches=2).name == "one_at_a_time"
    with pytest.raises(ScheduleError, match="one_at_a_time has one chunk on each rank, not 2"):
        make_schedule("one_at_a_time", stages=4, microbatches=2, chunks=2)
    chosen = make_schedule("auto", stages=2, microbatches=3, chunks=2)  # the example, of one chunk, is no candidate
    assert chosen.chunks == 2


def test_the_page_has_every_schedule_that_trains():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(names()) - {"auto"} <= set(rows)

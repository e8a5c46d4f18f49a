"""What docs/schedules.md shows must run as it stands there."""

import pathlib
import re

import pytest

from megajax.schedules.draw import main
from megajax.schedules.registry import SPECS, make_schedule
from megajax.schedules.schedule import ScheduleError

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def test_the_schedule_that_a_user_adds(monkeypatch):
    monkeypatch.setattr("megajax.schedules.registry.SPECS", dict(SPECS))
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert make_schedule("one_at_a_time", stages=4, microbatches=2).name == "one_at_a_time"
    with pytest.raises(ScheduleError, match="one_at_a_time has one chunk on each rank, not 2"):
        make_schedule("one_at_a_time", stages=4, microbatches=2, chunks=2)
    assert make_schedule("auto", stages=2, microbatches=3, chunks=2).chunks == 2  # which would like half the work


def test_the_table_in_the_page_is_what_the_command_prints(capsys):
    shown = re.search(r"    \$ python -m megajax\.schedules\.draw (.*)\n((?:    .*\n)+)", PAGE)
    assert main(shown[1].split()) == 0
    # The page wraps the first line.
    printed = [line.rstrip() for line in capsys.readouterr().out.replace("; ", ";\n").splitlines()]
    assert printed == [line[4:].rstrip() for line in shown[2].splitlines()]

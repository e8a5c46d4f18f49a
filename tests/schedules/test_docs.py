"""The code and the commands in docs/schedules.md run as printed there."""

import pathlib
import re

import pytest

from megajax.schedules.draw import main
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


def test_the_table_in_the_page_is_what_the_command_prints(capsys):
    shown = re.search(r"    \$ python -m megajax\.schedules\.draw (.*)\n((?:    .*\n)+)", PAGE)
    assert main(shown[1].split()) == 0
    # The page wraps the first line.
    printed = [line.rstrip() for line in capsys.readouterr().out.replace("; ", ";\n").splitlines()]
    assert printed == [line[4:].rstrip() for line in shown[2].splitlines()]

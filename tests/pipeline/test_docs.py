"""What docs/schedules.md shows must run as it stands there."""

import pathlib
import re

from megajax.pipeline.draw import main
from megajax.pipeline.schedules import SCHEDULES

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def test_the_schedule_that_a_user_adds(monkeypatch):
    monkeypatch.setattr("megajax.pipeline.schedules.SCHEDULES", dict(SCHEDULES))
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})


def test_the_table_in_the_page_is_what_the_command_prints(capsys):
    shown = re.search(r"    \$ python -m megajax\.pipeline\.draw (.*)\n((?:    .*\n)+)", PAGE)
    assert main(shown[1].split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [line[4:].rstrip() for line in shown[2].splitlines()]

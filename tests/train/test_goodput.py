"""The account of a run's time: categories without overlap, and what later sessions lose."""

import json

import pytest

from megajax.train.goodput import CATEGORIES, Goodput, read_lines, totals


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def session(path, clock: Clock, first: int, last: int, seconds: float = 1.0, keep: bool = True) -> Goodput:
    """A session of steps `first` to `last`, each taking `seconds`, which ends without a last line, as if killed."""
    goodput = Goodput(clock(), path, keep, clock, clock)
    clock.now += 5
    goodput.begin(first - 1)
    for step in range(first, last + 1):
        clock.now += seconds
        goodput.finish_step(step)
    return goodput


def test_every_second_is_in_one_category(tmp_path):
    clock = Clock()
    goodput = Goodput(clock() - 7, tmp_path / "goodput.jsonl", True, clock, clock)
    clock.now += 3
    goodput.begin(0)
    clock.now += 20
    for category, seconds in {"data": 1, "compiling": 30, "saving": 2, "validation": 4, "checking": 0.5}.items():
        with goodput.during(category):
            clock.now += seconds
    with pytest.raises(KeyError), goodput.during("saving"):  # an error ends the category too
        clock.now += 1
        raise KeyError
    clock.now += 2
    assert goodput.finish_step(1) == {"goodput": pytest.approx(22 / 70.5)}
    expected = {
        "start": 10,
        "steps": 22,
        "compiling": 30,
        "data": 1,
        "validation": 4,
        "checking": 0.5,
        "saving": 3,
        "callbacks": 0,
    }
    assert goodput.seconds == expected
    text = goodput.describe()
    assert text.startswith("goodput   31.2% of 70.5 s in 1 session: compiling 30.0 s, steps 22.0 s, start 10.0 s, ")
    assert text.endswith("data 1.0 s, checking 0.5 s")  # and not what took no time


def test_repeated_steps_and_the_time_between_sessions_are_lost(tmp_path):
    clock, path = Clock(), tmp_path / "goodput.jsonl"
    session(path, clock, 1, 100)  # ends at 1105; its account is written to the end, as intervals are 2% of the time
    clock.now += 40
    goodput = session(path, clock, 61, 80)  # steps 61 to 100 are lost
    total = goodput.totals()
    assert total["redone"] == pytest.approx(40, abs=3) and total["between_sessions"] == pytest.approx(40, abs=3)
    assert total["steps"] == pytest.approx(60 + 20, abs=0.1) and total["start"] == 10
    assert sum(total.values()) == pytest.approx(clock() - 1000)
    assert goodput.share() == pytest.approx(80 / 170, abs=0.01)
    clock.now += 10
    third = session(path, clock, 41, 50)  # steps 41 to 60 of the first session, and all of the second
    total = third.totals()
    assert total["steps"] == pytest.approx(40 + 10, abs=0.1) and total["redone"] == pytest.approx(80, abs=3)
    assert sum(total.values()) == pytest.approx(clock() - 1000)
    assert "in 3 sessions" in third.describe() and "steps repeated " in third.describe()


def test_a_new_run_in_the_same_directory_has_a_new_account(tmp_path):
    clock, path = Clock(), tmp_path / "goodput.jsonl"
    session(path, clock, 1, 10)
    session(path, clock, 1, 5, keep=False)
    assert [line["event"] for line in read_lines(path)].count("start") == 1


def test_the_file_is_written_within_two_percent_of_the_time(tmp_path):
    clock, path = Clock(), tmp_path / "goodput.jsonl"
    session(path, clock, 1, 1000, seconds=10)
    lines = read_lines(path)
    assert len(lines) < 250  # at most one a minute, and few in the first minutes
    assert lines[-1]["step"] >= 994
    times = [line["time"] for line in lines]
    assert all(later - earlier <= 70 for earlier, later in zip(times, times[1:], strict=False))


def test_damaged_lines_are_ignored(tmp_path):
    path = tmp_path / "goodput.jsonl"
    good = {"event": "account", "time": 5.0, "step": 3, "seconds": {"steps": 2.0}}
    start = {"event": "start", "time": 1.0, "step": 0}
    texts = [json.dumps(start), json.dumps(good), "\0\0\0", "[]", '{"event": "start"}', '{"event": 3, "ti']
    path.write_text("\n".join(texts))
    assert [line["event"] for line in read_lines(path)] == ["start", "account"]
    again = {"event": "start", "time": 10.0, "step": 3}
    total = totals([*read_lines(path), again])
    assert total["steps"] == 2 and total["between_sessions"] == 5 and set(CATEGORIES) < set(total)


def test_a_directory_that_cannot_be_written_does_not_end_the_run(tmp_path):
    clock = Clock()
    goodput = session(tmp_path / "absent" / "goodput.jsonl", clock, 1, 10)
    goodput.write()
    assert goodput.share() == pytest.approx(10 / 15)


def test_a_session_without_a_step_writes_nothing(tmp_path):
    """A run that is started again after its last step."""
    clock, path = Clock(), tmp_path / "goodput.jsonl"
    session(path, clock, 1, 10)
    before = path.read_text()
    again = Goodput(clock(), path, True, clock, clock)
    again.write()
    assert path.read_text() == before
    assert again.describe() == "goodput   no step in this session of 0.0 s, which does not count"

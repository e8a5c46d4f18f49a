"""The files that receive the records: their content, resumption, and full disks."""

import datetime
import errno
import io
import json
import math
import os
import shutil
import struct

import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from megajax.config import ConfigError
from megajax.train import log_file
from megajax.train.log_file import LogFile
from megajax.train.logging import Output, RunLog
from megajax.train.sinks import JsonLines, TensorBoard, read_steps
from tests.train.test_logging import record


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="cannot write the log .*No such file.*--log-jsonl"):
        JsonLines(tmp_path / "missing" / "log.jsonl")
    with pytest.raises(ConfigError, match="--log-jsonl"):
        JsonLines(tmp_path)


def test_a_new_run_replaces_the_log(tmp_path):
    for step in (1, 2):
        lines = JsonLines(tmp_path / "log.jsonl")
        lines.write(record(step))
        lines.file.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 2


def test_tensorboard_has_the_same_values(tmp_path):
    """Read back from the event files, NaN included; a resumed run's events say which old ones to drop."""
    for after, steps in ((0, range(1, 4)), (2, range(3, 5))):
        board = TensorBoard(tmp_path, after=after)
        for step in steps:
            board.write(record(step, loss=math.nan if step == 2 else float(step)))
        board.file.close()
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


def test_each_session_of_a_run_begins_with_its_configuration(tmp_path):
    """A session none of whose steps is kept leaves no record; a log of an earlier version has none, and is continued."""
    path = tmp_path / "log.jsonl"
    for after, steps in ((0, range(1, 6)), (3, range(4, 8)), (3, range(4, 6))):
        lines = JsonLines(path, after=after, session={"megajax": "0.1.0", "config": {"train": {"steps": steps.stop}}})
        for step in steps:
            lines.write(record(step))
        lines.file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row.get("after_step"), row.get("step")) for row in rows] == [
        *[(0, None), (None, 1), (None, 2), (None, 3)],
        *[(3, None), (None, 4), (None, 5)],
    ]
    assert [row["config"]["train"]["steps"] for row in rows if "config" in row] == [6, 6]
    assert all(datetime.datetime.fromisoformat(row["time"]).tzinfo for row in rows)
    assert [row["step"] for row in read_steps(path)] == [1, 2, 3, 4, 5]
    path.write_text(lines_of([1, 2, 3]))
    JsonLines(path, after=2, session={"config": {}}).file.close()
    assert path.read_text().startswith(lines_of([1, 2]) + '{"after_step": 2, "time": ')
    assert [row["step"] for row in read_steps(path)] == [1, 2]


def test_tensorboard_has_the_configuration_as_text(tmp_path):
    board = TensorBoard(tmp_path, config="[train]\nsteps = 3\n")
    board.write(record(1))
    board.file.close()
    (path,) = tmp_path.iterdir()
    (value,) = [one for event in read_events(path) for one in event.summary.value if one.tag.startswith("config")]
    assert value.metadata.plugin_data.plugin_name == "text"
    assert value.tensor.string_val[0].decode() == "    [train]\n    steps = 3\n"  # Markdown shows it as it is


def read_events(path):
    """The records of an event file: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack("<Q", data[place : place + 8])
        yield event_pb2.Event.FromString(data[place + 12 : place + 12 + length])
        place += 16 + length


class Disk:
    """The module `os` for log files, on a disk with room for a number of bytes."""

    def __init__(self, room: int):
        self.room = room

    def __getattr__(self, name: str):
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        """As os.write: the bytes beyond the room are not written."""
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch):
    """Has room until a test says otherwise."""
    found = Disk(10**9)
    monkeypatch.setattr(log_file, "os", found)
    return found


def test_a_record_is_written_whole_or_not_at_all(tmp_path, disk):
    file = LogFile(tmp_path / "log")
    file.append(b"first\n")
    disk.room = 3
    for _ in range(2):
        file.append(b"second\n")
        assert file.problem == "No space left on device" and file.path.read_bytes() == b"first\n"
    disk.room = 10**9
    file.append(b"third\n")
    assert file.problem is None and file.dropped == 2
    assert file.path.read_bytes() == b"first\nthird\n"
    file.close()


def test_a_full_disk_at_the_start_is_no_error_and_the_header_is_written_later(tmp_path, disk):
    disk.room = 0
    file = LogFile(tmp_path / "log", header=b"header")
    assert file.problem == "No space left on device"
    disk.room = 10**9
    file.append(b" record")
    assert file.path.read_bytes() == b"header record" and file.dropped == 0
    file.close()


def test_a_removed_or_replaced_file_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "PATH_CHECK_SECONDS", 0.0)
    (tmp_path / "logs").mkdir()
    file = LogFile(tmp_path / "logs" / "log")
    file.append(b"1\n")
    file.path.rename(tmp_path / "log.old")  # as logrotate does
    file.append(b"2\n")
    assert [path.read_text() for path in (tmp_path / "log.old", file.path)] == ["1\n", "2\n"]
    shutil.rmtree(file.path.parent)
    file.append(b"3\n")
    assert file.path.read_text() == "3\n" and file.dropped == 0
    file.close()


def test_a_run_continues_on_a_full_disk_and_reports_it_once(tmp_path, disk):
    """Lines of all files are dropped while there is no room, and none is cut in two."""
    text = io.StringIO()
    sinks = [JsonLines(tmp_path / "log.jsonl"), TensorBoard(tmp_path / "tensorboard")]
    console, process = Console(file=text, width=200), LogFile(tmp_path / "process_0.log")
    with RunLog(100, 1, console=console, sinks=sinks, file=process) as log:
        for step in range(1, 101):
            disk.room = {20: 1000, 60: 10**9}.get(step, disk.room)
            log.step(record(step))
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (events,) = (tmp_path / "tensorboard").iterdir()
    for found in (steps, [event.step for event in read_events(events) if event.summary.value]):
        assert 20 <= len(found) < 65 and found[:19] == [*range(1, 20)] and found[-41:] == [*range(60, 101)]
    lines = [line for line in text.getvalue().splitlines() if not line.startswith("step ")]
    assert len(lines) == 2 and "No space left on device: log records are dropped" in lines[0]
    dropped = 100 - len(steps)
    assert lines[1].startswith(f"logs are written again; records dropped so far: {dropped} of log.jsonl, ")
    assert text.getvalue().count("\nstep ") == 99
    assert "step 100/100" in process.path.read_text()


def test_a_log_and_output_that_are_never_writable_do_not_stop_a_run():
    """/dev/full fails each write with ENOSPC."""
    with open("/dev/full", "w") as full:
        console = Console(file=Output(full), width=200)
        with RunLog(3, 1, console=console, sinks=[JsonLines("/dev/full")]) as log:
            for step in range(1, 4):
                log.step(record(step))
            assert log._files[0].dropped == 3
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # closing flushes once more


def lines_of(steps) -> str:
    return "".join(f'{{"step": {step}}}\n' for step in steps)


DAMAGE = {
    "intact": lines_of(range(1, 10)),
    "last line cut": lines_of(range(1, 10)) + '{"step": 10, "lo',
    "last newline missing": lines_of(range(1, 8)) + '{"step": 8}',
    "NUL bytes": lines_of([1, 2]) + "\0" * 5000 + lines_of([4]) + "\0\n" + lines_of([5, 9]),
    "nested": lines_of([1, 2]) + "[" * 100_000 + "\n[]\n7\n{}\n" + lines_of([4]),
    "unsorted": lines_of([1, 2, 8, 9, 3, 4]),
    "empty": "",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_lines_up_to_a_step_are_kept_at_any_moment(tmp_path, monkeypatch, damage):
    """A kill during the removal of later lines would lose none: they are in the file before and after every change."""
    path = tmp_path / "log.jsonl"
    path.write_text(DAMAGE[damage])
    want = [
        json.loads(line) for line in DAMAGE[damage].splitlines() if line.startswith('{"step": ') and line[-1] == "}"
    ]
    want = [row for row in want if row["step"] <= 5]

    def kept():
        rows = [line for line in path.read_text().splitlines() if line.startswith('{"step": ') and line[-1] == "}"]
        return [row for row in map(json.loads, rows) if row["step"] <= 5]

    changes = {name: getattr(os, name) for name in ("truncate", "replace", "write", "open", "ftruncate")}
    for name in changes:

        def watched(*arguments, change=changes[name], **kwargs):
            assert kept() == want
            result = change(*arguments, **kwargs)
            assert kept() == want
            return result

        monkeypatch.setattr(os, name, watched)
    lines = JsonLines(path, after=5)
    assert [json.loads(line) for line in path.read_text().splitlines()] == want
    lines.write({"step": 6})
    monkeypatch.undo()
    lines.file.close()
    last = json.loads(path.read_text().splitlines()[-1])
    assert last.keys() == {"step", "time"} and last["step"] == 6 and path.read_text().endswith("}\n")
    assert [found.name for found in tmp_path.iterdir()] == ["log.jsonl"]

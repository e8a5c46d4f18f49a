"""A schedule in a user's file works by its name: it is drawn, trained, estimated and searched."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.pipeline.program import StepProgram
from megajax.pipeline.slots import slot_tables
from megajax.plan import dryrun
from megajax.plan.search import Question, search
from megajax.schedules import draw, registry
from megajax.schedules.registry import find, import_user_files, make_schedule, names
from megajax.schedules.schedule import ScheduleError
from tests import small
from tests.pipeline.test_executor import check

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
BACKWARDS_FIRST = """
from megajax.schedules.registry import Slots, register
from megajax.schedules.schedule import BACKWARD, FORWARD, Operation, pack


@register("reversed_gpipe", chunks="any", fewest_microbatches=lambda stages: stages)
def reversed_gpipe(stages, microbatches, chunks):
    \"\"\"GPipe whose backwards take the microbatches in reverse, over any number of chunks.\"\"\"
    order = [Operation(FORWARD, chunk, m) for m in range(microbatches) for chunk in range(chunks)]
    order = sorted(order, key=lambda operation: (operation.chunk, operation.microbatch))
    order += [Operation(BACKWARD, chunk, m) for _, chunk, m in reversed(order)]
    return pack("reversed_gpipe", [order] * stages, microbatches=microbatches, chunks=chunks, paired=False, parts={"B":
    2})
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))


@pytest.fixture
def example(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE + BACKWARDS_FIRST)
    return str(path)


def run_of(name, pipe=2, chunks=1, batch=4, model="gpt2"):
    return RunConfig(
        preset(model), ParallelConfig(pipe=pipe, chunks=chunks, schedule=name), TrainConfig(global_batch_size=batch)
    )


def test_it_is_drawn(example, capsys):
    assert draw.main(["--import", example, "--schedule", "one_at_a_time", "--pipe", "2", "--microbatches", "2"]) == 0
    rows = [line.split()[2:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0] == ["F0.0", ".", "B0.0", "F1.0", ".", "B1.0", "1", "in", "flight"]
    assert rows[1] == [".", "F0.0", "B0.0", ".", ".", "F1.0", "B1.0", ".", "1", "in", "flight"]


def test_it_is_in_the_help_with_its_note(example, capsys):
    with pytest.raises(SystemExit):
        draw.main(["--import", example, "--help"])
    note = re.search('"""(.*)', EXAMPLE)[1].removesuffix('"""')
    assert re.search(f"one_at_a_time +{re.escape(note)}", capsys.readouterr().out)


USERS = pytest.mark.parametrize(("name", "chunks"), [("one_at_a_time", 1), ("reversed_gpipe", 2)])


@pytest.mark.parametrize(
    ("name", "chunks"), [("one_at_a_time", 1), pytest.param("reversed_gpipe", 2, marks=pytest.mark.slow)]
)
def test_it_is_executed(example, name, chunks):
    """On a small model of the executor's own tests, whose loss and gradients are the unpipelined model's."""
    import_user_files([example])
    check(name, 2, 4, chunks)


@pytest.mark.slow
@USERS
def test_it_trains(example, name, chunks):
    """Loss and gradients equal the unpipelined model's."""
    import_user_files([example])
    training = small.training_of(small.make_run((1, 2, 1), schedule=name, chunks=chunks))
    loss, gradients = training.loss_and_gradients(
        small.place(training, small.busy_params(small.MODEL)), small.make_batch(training.run)
    )
    want_loss, want = small.expected(small.MODEL)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


def test_its_memory_is_that_of_its_table(example):
    import_user_files([example])
    run = run_of("one_at_a_time")
    table = slot_tables(make_schedule("one_at_a_time", stages=2, microbatches=4))
    slots = StepProgram.of(run).schedule_slots
    assert (slots.stash, slots.kept) == (table.stash_slots, table.kept_slots)
    others = [dataclasses.replace(run.parallel, schedule=name) for name in ("gpipe", "eager_1f1b")]
    stash = [bytes_per_device(dataclasses.replace(run, parallel=parallel))["stash"] for parallel in others]
    assert bytes_per_device(run)["stash"] < min(stash)


def test_its_time_has_the_bubble_of_one_microbatch_at_a_time(example):
    """Two ranks alternate: each idles while the other computes, including the other's share of the head."""
    import_user_files([example])
    gpu = find_gpu("h100-80gb")
    times = {name: step_time(run_of(name), gpu) for name in ("one_at_a_time", "gpipe")}
    ideal = times["gpipe"].bubble * 4  # gpipe's bubble at p = 2 is one microbatch's forward and backward
    assert times["one_at_a_time"].bubble == pytest.approx(ideal)
    assert times["one_at_a_time"].blocks == times["gpipe"].blocks


def test_the_dry_run_prices_it(example, capsys):
    import_user_files([example])
    words = "--model gpt2 --gpu h100-80gb --pipe 2 --global-batch-size 4 --model-only --schedule one_at_a_time"
    assert dryrun.main(words.split()) == 0
    assert "one_at_a_time" in capsys.readouterr().out


@pytest.mark.parametrize("limits", [{}, {"schedules": ("one_at_a_time", "reversed_gpipe")}])
def test_it_is_searched(example, limits):
    import_user_files([example])
    found = search(
        Question(preset("gpt2"), 4, find_gpu("h100-80gb"), 8, microbatches=(1,), tensor_sizes=(1,), **limits)
    )
    layouts = {(one.run.parallel.schedule, one.run.parallel.chunks) for one in found if one.run.parallel.pipe > 1}
    assert {("one_at_a_time", 1), ("reversed_gpipe", 1), ("reversed_gpipe", 2)} <= layouts
    if limits:
        assert {name for name, _ in layouts} == set(limits["schedules"])
    else:
        assert {"interleaved_1f1b", "1f1b", "gpipe"} <= {name for name, _ in layouts}


def test_its_rules_are_the_configurations(example):
    import_user_files([example])
    with pytest.raises(ConfigError, match="chunks = 2, but one_at_a_time has one chunk on each rank.*pass --chunks 1"):
        run_of("one_at_a_time", chunks=2).validate()
    with pytest.raises(
        ConfigError, match="reversed_gpipe takes at least 4 microbatches on 4 stages, not 2.*size 4 or more"
    ):
        run_of("reversed_gpipe", pipe=4, batch=2).validate()
    with pytest.raises(ConfigError, match="schedule = 'one_at_a_tim' is not known: did you mean one_at_a_time"):
        run_of("one_at_a_tim").validate()


def test_a_file_is_imported_once(example):
    import_user_files([example])
    first = find("one_at_a_time")
    import_user_files([example])
    assert find("one_at_a_time") is first
    assert names()[-2:] == ("one_at_a_time", "reversed_gpipe")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot import .*mine.py: there is no such file; pass --import FILE.py"),
        ("import nothing_of_the_kind", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("\nprint(undefined)", r"NameError: name 'undefined' is not defined \(raised in .*mine.py, line 2\)"),
        ("def f(:", "SyntaxError: invalid syntax"),
        (
            "from megajax.schedules.registry import register\n@register('1f1b')\ndef mine(): pass",
            "schedule '1f1b' is registered already, in .*one_f_one_b.py: choose another name",
        ),
        (
            "from megajax.schedules.registry import register\n@register('mine', chunk=2)\ndef mine(): pass",
            r"register\('mine'\) has no field 'chunk': choose from chunks, rounds",
        ),
        (
            "from megajax.schedules.registry import register\n@register('mine', chunks=2)\ndef mine(): pass",
            r"register\('mine'\) has chunks=2: choose from 'one', 'two', 'even', 'any'",
        ),
        (
            "from megajax.schedules.registry import register\n@register('mine.csv')\ndef mine(): pass",
            "schedule 'mine.csv' has the name of a file",
        ),
    ],
)
def test_a_broken_file_is_one_line(text, message, tmp_path, capsys):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        import_user_files([str(path)])
    assert draw.main(["--import", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot import ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "chunks", "message"),
    [
        ("", 2, "mine has one chunk on each rank, not 2"),
        (", chunks='any'", 2, "mine made a schedule with chunks=1, but chunks=2 was requested"),
        (", split=True", 1, "mine made a schedule with split=False, but is registered with split=True"),
        (", trains=False", 1, "mine made a schedule that is registered with trains=False"),
    ],
)
def test_a_table_that_is_not_what_its_spec_says_is_refused(fields, chunks, message, tmp_path):
    path = tmp_path / "mine.py"
    text = EXAMPLE.replace('@register("one_at_a_time")', f'@register("mine"{fields})')
    path.write_text(text.rpartition("make_schedule(")[0])
    import_user_files([str(path)])
    with pytest.raises(ScheduleError, match=message):
        make_schedule("mine", stages=2, microbatches=3, chunks=chunks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data.csv", "cannot import .*data.csv: its name does not end in .py; pass --import FILE.py"),
        ("no_such_package", "cannot import no_such_package: there is no module no_such_package; pass"),
        ("json.no_such_part", "cannot import json.no_such_part: there is no module json.no_such_part; pass"),
    ],
)
def test_what_is_no_python_file_is_one_line(given, message, tmp_path):
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(ScheduleError, match=message):
        import_user_files([str(tmp_path / given) if given.endswith(".csv") else given])

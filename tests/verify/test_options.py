"""The command line of megajax.verify, its files, and the order of comparison; no step is compiled."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.metadata import Progress
from megajax.config import ConfigError
from megajax.pipeline.program import StepProgram
from megajax.verify import __main__ as command
from megajax.verify import compare, options, record_file, report
from megajax.verify.certify import StepRow, Verdict
from megajax.verify.programs import differences, facts
from megajax.verify.replay import Replay, StepRecord
from megajax.verify.sketch import WIDTH, sketch
from tests import small
from tests.verify import planted

A, B = ["--a", "--data 2"], ["--b", "--pipe 2 --chunks 1"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "there is no layout a: pass --a"),
        (A, "there is no layout b: pass --b"),
        ([*A, *B, "--deterministic"], "--deterministic takes one layout, --a: omit --b"),
        ([*A, *B, "--record", "x.npz"], "--record takes one layout, --a: omit --b"),
        ([*A, "--against", "x.npz"], "--against takes one layout, --b: omit --a"),
        ([*A, "--deterministic", "--record", "x.npz"], "two kinds of comparison"),
        ([*A, *B, "--steps", "0"], "--steps: 0 must be a whole number, 1 or more"),
        ([*A, *B, "--steps", "x"], "--steps: 'x' is not a whole number; --help lists every option"),
        ([*A, *B, "--step", "3"], "there is no option --step: did you mean --steps?"),
        (["--a", "--datum 2", *B], "there is no option --datum: did you mean --data"),
        (["--a", "--data '2", *B], "cannot be split into words"),
        ([*A, *B, "--experiment", "nowhere.at_all"], "nowhere.at_all cannot be imported"),
        ([*A, *B, "--experiment", "json"], "json has neither EXPERIMENT nor RUN and DATA"),
        (["--a", "--width 2", "--experiment", "experiments.own_model", *B], "there is no option --width"),
    ],
)
def test_wrong_command_lines(words, match, capsys):
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and match in error


def test_layouts_and_shared_options():
    given = options.read([*A, *B, "--steps", "2", "--", "--layers", "4", "--model", "tiny"])
    a, b = (layout.run(8) for layout in given.layouts)
    assert (a.parallel.data, b.parallel.data, b.parallel.pipe) == (2, 1, 2)
    assert a.model == b.model and a.model.layers == 4 and a.train.precision == "fp32"
    assert given.layouts[0].devices_needed == 2
    options.check_pair(a, b)
    other = dataclasses.replace(b, train=dataclasses.replace(b.train, seed=5))
    with pytest.raises(
        ConfigError, match="seed is 1234 in layout a and 5 in b: pass options other than the layout's once"
    ):
        options.check_pair(a, other)


def test_an_experiment_with_a_run_and_data():
    given = options.read(["--a", "--data 4", "--deterministic", "--experiment", "experiments.own_model"])
    assert given.a.run(8) == given.b.run(8) and given.a.run(8).parallel.data == 4
    assert given.a.run(8).train.precision == "fp32"
    assert given.data.batch(0).keys() == {"clean", "noisy"}


def test_pipedream_2bw_is_refused():
    run = small.make_run((1, 2, 1), schedule="pipedream_2bw")
    with pytest.raises(ConfigError, match="pipedream_2bw .* those of no other layout: pass --schedule 1f1b"):
        Replay(run, [])


def make_record(layers=2, samples=4, group=1, each=2, change=None) -> StepRecord:
    """Random sketches, the same for the same sizes; `change(record)` edits them."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=(*shape, WIDTH)).astype(np.float32)  # noqa: E731
    blocks = {name: draw(layers, samples) for name in ("input", "output", "output_gradient", "input_gradient")}
    names = ("blocks/w", "shared/head")
    tensors = {
        kind: {name: draw(layers if "blocks" in name else 1) for name in names}
        for kind in ("gradient", "update", "optimizer_state")
    }
    metrics = {"tokens": 4.0, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1}
    losses = np.arange(1, 5, dtype=np.float32).reshape(-1, each).sum(1)
    batch = {"tokens": np.arange(samples, dtype=np.uint32)}
    if group > 1:
        last = slice(group - 1, None, group)
        blocks = {name: a[last] if name.startswith("output") else a[::group] for name, a in blocks.items()}
    record = StepRecord(batch, samples, losses, metrics, blocks, group, tensors)
    if change:
        change(record)
    return record


def scaled(*path):
    """A change that multiplies the entry at a path by 2."""

    def change(record):
        part = getattr(record, path[0])
        for key in path[1:-1]:
            part = part[key]
        part[path[-1]] = 2 * part[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (scaled("batch", "tokens", 1), "batch/tokens"),
        (scaled("blocks", "input", (0, 1)), "input/0"),
        (scaled("blocks", "output", (1, 3)), "output/1"),
        (scaled("metrics", "tokens"), "metric/tokens"),
        (scaled("losses", 1), "losses"),
        (scaled("blocks", "output_gradient", (1, 0)), "output_gradient/1"),
        (scaled("blocks", "input_gradient", (1, 2)), "input_gradient/1"),
        (scaled("tensors", "gradient", "blocks/w", 1), "gradient/blocks/w/1"),
        (scaled("tensors", "gradient", "shared/head", 0), "gradient/shared/head"),
        (scaled("metrics", "grad_norm"), "metric/grad_norm"),
        (scaled("metrics", "learning_rate"), "metric/learning_rate"),
        (scaled("tensors", "update", "blocks/w", 0), "update/blocks/w/0"),
        (scaled("tensors", "optimizer_state", "shared/head", 0), "optimizer_state/shared/head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_difference_is_the_one_that_is_computed_first(change, key):
    """The cases are in the order of the computation: each is found first, also if all after it differ too."""
    tolerances = compare.tolerances_of(())
    entries = compare.entries_of_step(make_record(), make_record(change=change))
    found = compare.first_difference(5, entries, tolerances)
    assert found.entry.key == key and found.step == 5 and found.others == 0
    keys = [entry.key for entry in entries]
    assert keys.index("input/0") < keys.index("output/0") < keys.index("input/1") < keys.index("output/1")
    assert keys.index("losses") < keys.index("output_gradient/1") < keys.index("gradient/blocks/w/1")
    assert keys.index("gradient/blocks/w/1") < keys.index("input_gradient/0") < keys.index("gradient/shared/head")


def test_groups_and_microbatches_of_different_sizes():
    """One side recomputes two layers together and has microbatches of four samples."""
    grouped = make_record(layers=4, group=2, each=4)
    entries = compare.entries_of_step(make_record(layers=4), grouped)
    assert compare.first_difference(1, entries, compare.tolerances_of(())) is None
    keys = [entry.key for entry in entries]
    assert [key for key in keys if key.startswith("output/")] == ["output/1", "output/3"]
    assert [key for key in keys if key.startswith("input/")] == ["input/0", "input/2"]


def test_tolerances_are_of_the_perturbed_runs():
    entries = compare.entries_of_step(make_record(), make_record(change=scaled("blocks", "output", (1, 3))))
    tolerances = compare.tolerances_of([entries])
    assert tolerances["output/1"] > compare.FACTOR * 0.3
    assert tolerances["output/0"] == tolerances[""] == compare.FACTOR * 2.0**-23
    assert compare.first_difference(1, entries, tolerances) is None


def test_updates_that_are_rounded_otherwise_are_equal():
    """Updates that differ by 1e-7 of their size, each next to the middle of two numbers: every sum is rounded otherwise."""
    old, random = np.float32(1.5) * np.ones((300, 64), np.float32), np.random.default_rng(0)
    middle = (random.integers(4000, 9000, old.shape) + 0.5) * 2.0**-23  # updates of about 1e-3
    new = [(old + middle * (1 + sign * 5e-8)).astype(np.float32) for sign in (1, -1)]
    after, *updates = (np.asarray(sketch(jnp.asarray(a), 1)) for a in (new[0], *(a - old for a in new)))
    records = [make_record() for _ in new]
    for record, update in zip(records, updates, strict=True):
        record.tensors["update"] = {"blocks/w": update}
    rounding = compare.rounding_of_updates(records[0], {"params/blocks/w": after})
    apart = [entry for entry in compare.entries_of_step(*records) if entry.key.startswith("update/blocks/w")]
    assert len(apart) == 300 and min(entry.distance for entry in apart) > 2 * compare.tolerances_of(())[""]
    assert compare.first_difference(1, apart, compare.tolerances_of((), rounding)) is None
    assert max(rounding.values()) < 4 * max(entry.distance for entry in apart)


def test_a_record_file_is_read_as_it_was_written(tmp_path):
    run, path = planted.make_run(data=2), str(tmp_path / "a.npz")
    reference = record_file.Reference(
        record_file.header_of(StepProgram.of(run), "--data 2", 7),
        {"params/w": np.ones((2, WIDTH), np.float32)},
        [make_record()],
        [{"": 1e-5}],
    )
    record_file.save(path, reference)
    read = record_file.load(path)
    assert read.header["layout"] == "--data 2" and "steps 8 to 8" in read.describe()
    entries = compare.entries_of_step(read.steps[0], make_record())
    assert compare.first_difference(1, entries, compare.EXACT) is None
    np.testing.assert_array_equal(read.start["params/w"], reference.start["params/w"])
    assert differences(read.header["program"], facts(StepProgram.of(run))) == []
    record_file.check(read, planted.make_run(pipe=2), 1, Progress(7), path)
    other = dataclasses.replace(run, train=dataclasses.replace(run.train, seed=1))
    for arguments, match in [
        ((other, 1, Progress(7)), "of another run: seed was 1234, is 1"),
        ((run, 2, Progress(7)), "has 1 steps: pass --steps 1 or less"),
        ((run, 1, Progress(0)), "starts after step 7, and this run after step 0: pass the same --resume"),
    ]:
        with pytest.raises(ConfigError, match=match):
            record_file.check(read, *arguments, path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_a_file_that_is_no_record_is_refused(content, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="pass --against FILE"):
        record_file.load(str(path))
    with pytest.raises(ConfigError, match="cannot read .*No such file"):
        record_file.load(str(tmp_path / "none.npz"))


def test_the_verdict_as_text_and_json():
    entries = compare.entries_of_step(make_record(), make_record(change=scaled("blocks", "output", (1, 3))))
    tolerances = compare.tolerances_of(())
    difference = compare.first_difference(2, entries, tolerances)
    row = StepRow(2, (2.0, float("nan")), compare.largest(entries, tolerances))
    verdict = Verdict([row], difference, ["layer 1 is on pipe rank 1"])
    text = report.text(verdict, exact=False)
    assert "\ndiffers: step 2: the output of layer 1 differs by " in text and "layer 1 is on pipe rank 1" in text
    programs = differences(*(facts(StepProgram.of(planted.make_run(data=data))) for data in (1, 2)))
    header = report.header(("--data 1", "--data 2"), programs)
    assert header.startswith("a  --data 1\nb  --data 2\n\nprogram ") and header.count("\n") == 3 + len(programs) + 1
    stored = json.loads(report.to_json(verdict, ("--data 2", "--pipe 2"), False, programs))
    assert stored["programs"]["parameters"]["b"]["replicas"] == 2
    assert stored["equal"] is False and stored["first_difference"]["layer"] == 1
    assert stored["first_difference"]["samples"] == [3] and stored["steps"][0]["loss"] == [2.0, "nan"]
    same = dataclasses.replace(verdict, difference=None, details=[])
    assert "equal: every bit of step 2 is the same" in report.text(same, exact=True)

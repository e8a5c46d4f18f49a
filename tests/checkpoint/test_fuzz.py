"""Damaged checkpoint directories: one error line or the values that were saved, never a traceback and never other values."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megajax.checkpoint import inspect, reader
from megajax.checkpoint.directory import NAME, choose
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.metadata import run_meta
from megajax.config import ConfigError, OutputConfig
from tests import small
from tests.train import runs

RUN = runs.make_run((1, 1, 1), schedule="1f1b")
META = run_meta(RUN, runs.Letters())
STEPS = (3, 6)


def state_of(step: int):
    """The layout, and a state whose numbers differ between steps."""
    target, state = small.small_state()
    return target, jax.tree.map(lambda leaf: leaf + np.asarray(step, leaf.dtype), state)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run's directory with checkpoints of two steps."""
    directory = tmp_path_factory.mktemp("written")
    checkpoints = Checkpoints(directory / "checkpoints", OutputConfig(), META)
    for step in STEPS:
        checkpoints.save(*state_of(step), Progress(step=step, samples=16 * step))
    assert "saved" in checkpoints.close()[-1]
    return directory


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
places = st.floats(0, 1, exclude_max=True)  # which file, or which byte of it
garbage = st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000)
names = st.text("abc./_0\u0661", min_size=1, max_size=12).map(lambda name: name.strip("./"))
CHECKPOINTS = ["step_00000009", "step_9", "step_\u0663", "step_", "step_-1", "step_9e9"]
DAMAGE = st.one_of(
    st.tuples(st.just("truncate"), places, places),
    st.tuples(st.just("flip"), places, places),
    st.tuples(st.just("replace"), places, garbage),
    st.tuples(st.just("insert"), places, garbage),
    st.tuples(
        st.just("edit JSON"), places, places, json_values | st.sampled_from(["../../log", "/etc/passwd", "a\0b"])
    ),
    st.tuples(st.just("delete"), places),
    st.tuples(st.just("swap"), places, places),
    st.tuples(st.just("copy"), places, places),
    st.tuples(st.just("to directory"), places),
    st.tuples(st.just("to link"), places, st.sampled_from(["/nowhere", ".", "/etc/passwd"])),
    st.tuples(st.just("delete directory"), places),
    st.tuples(st.just("swap directories"), places, places),
    st.tuples(st.just("add file"), places, names, garbage),
    st.tuples(st.just("add checkpoint"), st.sampled_from(CHECKPOINTS)),
    st.tuples(st.just("add file as checkpoint"), st.sampled_from(["step_00000009", "step_00000006.unfinished"])),
)


def damage(root: pathlib.Path, kind: str, *how) -> None:
    """Damages a directory in one place. Does nothing if that place is gone already."""
    paths = sorted(root.rglob("*"))
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    directories = [path for path in paths if path.is_dir() and not path.is_symlink()]
    if kind == "edit JSON":
        files = [path for path in files if path.suffix == ".json" or path.name == "metadata"]
    of_directory = kind in ("delete directory", "swap directories", "add file")
    found = directories if of_directory else files
    if not found:
        return
    one = found[int(how[0] * len(found))] if isinstance(how[0], float) else root
    with contextlib.suppress(OSError, ValueError):
        if kind == "truncate":
            os.truncate(one, int(how[1] * one.stat().st_size))
        elif kind == "flip" and one.stat().st_size:
            place, data = int(how[1] * 8 * one.stat().st_size), bytearray(one.read_bytes())
            data[place // 8] ^= 1 << place % 8
            one.write_bytes(data)
        elif kind == "replace":
            one.write_bytes(how[1])
        elif kind == "insert":
            one.write_bytes(one.read_bytes() + how[1])
        elif kind == "edit JSON":
            one.write_text(json.dumps(edited(json.loads(one.read_text()), how[1], how[2])))
        elif kind == "delete":
            one.unlink()
        elif kind in ("swap", "copy", "swap directories"):
            other = found[int(how[1] * len(found))]
            if kind == "copy":
                other.write_bytes(one.read_bytes())
            elif not (other.is_relative_to(one) or one.is_relative_to(other)):
                one.rename(root / "third")
                other.rename(one)
                (root / "third").rename(other)
        elif kind == "to directory":
            one.unlink()
            one.mkdir()
        elif kind == "to link":
            one.unlink()
            one.symlink_to(how[1])
        elif kind == "delete directory":
            shutil.rmtree(one)
        elif kind == "add file":
            (one / how[1]).write_bytes(how[2])
        elif kind == "add checkpoint":
            (root / how[0]).mkdir()
        elif kind == "add file as checkpoint":
            (root / how[0]).write_text("")


def edited(value, place: float, new):
    """JSON with one key or value replaced."""
    if not isinstance(value, dict | list) or not value:
        return new
    index = int(place * len(value))
    rest = place * len(value) - index
    if isinstance(value, list):
        return [edited(old, rest, new) if number == index else old for number, old in enumerate(value)]
    key = list(value)[index]
    if rest > 0.8:
        return {str(new) if old == key else old: content for old, content in value.items()}
    return value | {key: edited(value[key], rest, new)}


def check(written: pathlib.Path, damages) -> str:
    """Resumes from a damaged copy, and inspects it. Returns the error, or "" where the state was restored."""
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(shutil.copytree(written, pathlib.Path(directory) / "run"))
        for one in damages:
            damage(root / "checkpoints", *one)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert inspect.main([str(root), "--verify", "--arrays"]) in (0, 2)
        assert err.getvalue().count("\n") <= 1
        try:
            path, _ = choose(root / "checkpoints", "auto")
            if path is None:
                return "no checkpoint"
            state, progress, _ = reader.load(path, RUN, state_of(0)[0], META["tokenizer"])
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500
            return str(error)
        assert progress == Progress(step=progress.step, samples=16 * progress.step) and progress.step in STEPS
        jax.tree.map(np.testing.assert_array_equal, state, state_of(progress.step)[1])
        assert path.name == NAME.format(progress.step)
        return ""


# Without shrinking, which takes minutes: the cases are small.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SETTINGS = settings(phases=PHASES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@given(st.lists(DAMAGE, min_size=1, max_size=3))
@settings(SETTINGS, max_examples=12)
def test_a_damaged_directory_is_refused_or_restored(written, damages):
    check(written, damages)


@pytest.mark.slow
@given(st.lists(DAMAGE, min_size=1, max_size=3))
@settings(SETTINGS, max_examples=400)
def test_400_damaged_directories_are_refused_or_restored(written, damages):
    check(written, damages)

"""Files that a user writes or that were damaged: read, or refused in one line that is the whole message."""

import json
import pathlib
import shutil

import pytest
import tomli_w
from hypothesis import strategies as st

from experiments import gpt3
from megajax.checkpoint import inspect, metadata
from megajax.config.cli import parse
from megajax.config.compare import stored_differences
from megajax.config.sections import SAVED
from megajax.config.toml import MOVED
from megajax.pipeline.program import StepProgram
from megajax.schedules import draw, io
from tests.checkpoint.test_metadata import FORMAT_1, TOKENIZER, make_run
from tests.fuzz.values import error_of, fuzz, outcome_of, texts, values
from tests.schedules.cases import named_schedules

# Every name of every section, and the names of format 1.
NAMES = [(section, name) for section, names in SAVED.items() for name in names]
NAMES += list(MOVED)


def toml_of(tables) -> str:
    """As TOML, with what it does not have left out: None, and integers that Python does not print."""

    def clean(value):
        if isinstance(value, dict):
            return {str(name).encode(errors="replace").decode(): clean(v) for name, v in value.items() if v is not None}
        if isinstance(value, list):
            return [clean(one) for one in value if one is not None]
        return value.encode(errors="replace").decode() if isinstance(value, str) else value

    return tomli_w.dumps(clean(tables))


def fields_of(tables) -> dict:
    """A dictionary of sections from ((section, name), value) pairs."""
    found: dict = {}
    for (section, name), value in tables:
        found.setdefault(section, {})[name] = value
    return found


configurations = (
    st.lists(st.tuples(st.sampled_from(NAMES), values), min_size=1, max_size=5).map(fields_of).map(toml_of)
    | st.dictionaries(st.sampled_from(list(SAVED)) | texts, values, max_size=3).map(toml_of)
    | st.text(max_size=30)
    | st.tuples(
        st.sampled_from(["x = ", "[train]\nsteps = "]), st.integers(1, 3000), st.sampled_from(["[", "{a="])
    ).map(lambda deep: deep[0] + deep[1] * deep[2] + deep[1] * {"[": "]", "{a=": "}"}[deep[2]])
    | st.sampled_from(
        ["[train]\nsteps = " + number for number in ("9" * 5000, "0x" + "f" * 5000, "1e999", "1979-05-27")]
    )
)


@fuzz(configurations)
def test_a_configuration_is_read_or_refused(text):
    pathlib.Path("config.toml").write_bytes(text.encode(errors="surrogatepass"))
    words = ["--config", "config.toml"]

    def read() -> None:
        request = parse(words, gpt3.EXPERIMENT)
        request.run(request.devices_needed or 8, "fp32").validate()

    error_of(read)


@pytest.mark.parametrize(
    "each", [pytest.param(1, id="all", marks=pytest.mark.slow), pytest.param(2, id="every second")]
)
def test_every_field_of_a_configuration_refuses_every_other_kind_of_value(tmp_path, monkeypatch, each):
    """All fields; the value is of a type that no field with this type of default has."""
    monkeypatch.chdir(tmp_path)
    several = ([[1]], {"a": 1}, [{"a": 1}], 10**4400, "\0", -(2**70))
    for number, (section, name) in enumerate(NAMES):
        if (section, name) in MOVED:
            continue
        for value in several[number % each :: each]:
            if isinstance(value, int):
                text = f"[{section}]\n{name} = {'-' if value < 0 else ''}{hex(abs(value))}"
                text = text.replace("-0x", "-1" + 30 * "0") if value < 0 else text
            else:
                text = toml_of({section: {name: value}})
            pathlib.Path("config.toml").write_text(text)
            message = error_of(parse, ["--config", "config.toml"], gpt3.EXPERIMENT)
            assert message is not None and f"{name} = " in message and "config.toml" in message, (text[:200], message)


operations = st.tuples(st.sampled_from("FBIW") | texts, st.integers(-1, 3) | values, st.integers(-1, 4) | values)
orders = st.lists(st.lists(operations.map(list) | values, max_size=8) | values, max_size=4) | values
placed = {"placement": st.just("v") | st.just([[0]]) | values, "layers": values, "paired": values}
schedules = (st.fixed_dictionaries({"orders": orders}, optional=placed) | values).map(json.dumps)
cells = (
    st.builds("{}{}{}".format, st.integers(0, 5) | texts, st.sampled_from("FBIWX"), st.integers(0, 5) | texts) | texts
)
pairs = st.builds("({};{})OVERLAP_F_B".format, cells, cells)
deep_pairs = st.integers(1, 3000).map(lambda n: "(" * n + "0F0" + ")OVERLAP_F_B" * n)
rows = st.lists(st.lists(cells | pairs | deep_pairs, max_size=6).map(",".join), max_size=5).map("\n".join)
spoilers = st.sampled_from(["", "9", ",", "F", "\n"])
spoiled = st.tuples(named_schedules(most_stages=3).map(io.to_csv), st.integers(0, 400), spoilers)
long_cells = st.just("0F0," + "x" * 140_000) | st.just('"' * 3) | st.just("9" * 5000 + "F0") | st.just("99999999F0")
csv_files = rows | spoiled.map(lambda s: s[0][: s[1]] + s[2] + s[0][s[1] + 1 :]) | long_cells
deep_json = st.integers(1, 200_000).map(lambda n: '{"orders": ' + "[" * n + "]" * n + "}")
json_files = schedules | deep_json | st.text(max_size=20) | st.just('{"orders": [[["F", 0, %s]]]}' % ("9" * 5000))


@fuzz(st.tuples(st.just("x.csv"), csv_files) | st.tuples(st.just("x.json"), json_files))
def test_a_schedules_file_is_read_or_refused(example):
    path, text = example
    pathlib.Path(path).write_bytes(text.encode(errors="surrogatepass"))
    schedule = []
    message = error_of(lambda: schedule.append(io.load(path)))
    assert message is None or path in message
    if schedule:  # it is valid, so it can be drawn, and a run of its sizes trains with it
        assert outcome_of(draw.main, ["--schedule", path]).code == 0
        if schedule[0].has_backward:
            batch = schedule[0].microbatches
            layers = schedule[0].stages * schedule[0].chunks
            words = f"--schedule {path} --microbatch-size 1 --global-batch-size {batch} --layers {layers}"
            request = parse(words.split(), gpt3.EXPERIMENT)
            error_of(lambda: StepProgram.of(request.run(schedule[0].stages, "fp32")).schedule)


RAW = json.loads((FORMAT_1 / "meta" / "metadata").read_text())
PATHS = [(), *((name,) for name in [*RAW, "other"])]
PATHS += [(part, name) for part in ("progress", "config", "tokenizer") for name in [*RAW[part], "data", "other"]]
PATHS += [("config", part, name) for part in RAW["config"] for name in [*RAW["config"][part], "offload"]]


def changed(edits, version: int):
    """The metadata of the stored checkpoint, in format 1 or 2, with other values at some paths."""
    raw = json.loads(json.dumps(RAW)) | {"format": version}
    if version == 2:
        raw["progress"]["nonfinite"] = raw["progress"].pop("bad", 0)
    for path, value in edits:
        if not path:
            raw = value
            continue
        table = raw
        for name in path[:-1]:
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table[path[-1]] = value
    return raw


metadatas = st.builds(changed, st.lists(st.tuples(st.sampled_from(PATHS), values), max_size=4), st.sampled_from([1, 2]))


@fuzz(metadatas)
def test_metadata_are_read_or_refused(raw):
    raw = json.loads(json.dumps(raw))  # as read from a file
    try:
        meta = metadata.parse(raw)
    except ValueError as error:  # a ConfigError, or an error that reader.read_meta makes one
        assert str(error)
        return
    error_of(metadata.differences, meta, make_run(), TOKENIZER)
    stored_differences(meta["config"]["train"], make_run().train)


deep_metadata = st.integers(1, 100_000).map(lambda n: '{"format": 2, "config": ' + "[" * n + "]" * n + "}")


@fuzz(metadatas.map(json.dumps) | deep_metadata | st.text(max_size=20) | st.just('{"format": %s}' % ("9" * 5000)))
def test_a_checkpoint_is_shown_or_refused(text):
    path = pathlib.Path("step_00000002")
    if not path.is_dir():
        shutil.copytree(FORMAT_1, path)
    (path / "meta" / "metadata").write_bytes(text.encode(errors="surrogatepass"))
    assert outcome_of(inspect.main, [str(path)]).code in (0, 2)


paths = st.sampled_from(["state/_METADATA", "meta/metadata", "digests/process_0.json", "/etc/passwd"]) | texts
sums = st.dictionaries(paths, values | st.tuples(values, values), max_size=3)


@fuzz((sums | values).map(json.dumps))
def test_lists_of_checksums_are_read_or_refused(text):
    path = pathlib.Path("step_00000002")
    if not path.is_dir():
        shutil.copytree(FORMAT_1, path)
    (path / "digests" / "rest.json").write_bytes(text.encode(errors="surrogatepass"))
    assert outcome_of(inspect.main, [str(path), "--verify"], reported=True).code in (0, 2)

"""The command line: an option for every field, derived defaults, saved configurations, and error messages."""

import dataclasses
import itertools
import pathlib
import re

import pytest

from megajax.config import (
    BertConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    TrainConfig,
    preset,
)
from megajax.config.cli import Experiment, SampleConfig, mesh_for, parse
from megajax.config.compare import changed_options
from megajax.config.toml import config_tables, toml_text
from megajax.pipeline.program import StepProgram
from megajax.schedules import registry
from megajax.schedules.io import save
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import ScheduleError

DEFAULTS = {"model": "tiny", "global_batch_size": 32, "steps": 300, "learning_rate": 3e-3, "warmup_steps": 30}


def run_of(words: str = "", device_count: int = 8, precision: str = "fp32"):
    return parse(words.split(), "An experiment.", DEFAULTS).run(device_count, precision)


def help_text(capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"], "An experiment.\n\n    python -m experiments.it", DEFAULTS)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_without_options_the_run_is_the_experiments():
    run = run_of()
    run.validate(8)
    assert run.model == preset("tiny")
    assert run.parallel == ParallelConfig(data=2, pipe=2, tensor=2, chunks=2)
    assert run.train == TrainConfig(
        global_batch_size=32,
        steps=300,
        learning_rate=3e-3,
        minimum_learning_rate=3e-3 / 10,
        warmup_steps=30,
        precision="fp32",
    )


def text_and_value(field: dataclasses.Field):
    """The text of an option and its value, legal and not the default."""
    if field.name == "schedule":
        return "1f1b", "1f1b"
    if field.metadata["choices"]:
        value = next(choice for choice in reversed(field.metadata["choices"]) if choice != field.default)
        return value, value
    if field.metadata["list_style"] == "repeat":
        pattern = "blocks=0.5" if field.name == "lr_multiplier" else "shared/*"
        return pattern, (pattern,)
    return {
        int: ("3", 3),
        int | None: ("5", 5),
        float: ("0.25", 0.25),
        float | None: ("0.25", 0.25),
        str: ("4", "4"),
        str | None: ("4", "4"),
        tuple[int, ...]: ("8,4,100", (8, 4, 100)),
        tuple[str, ...]: ("tensor,pipe,data", ("tensor", "pipe", "data")),
    }[field.type]


FIELDS = [
    (part, field)
    for part, config in (("model", ModelConfig), ("parallel", ParallelConfig), ("train", TrainConfig))
    for field in dataclasses.fields(config)
    # that read a directory: tests/interop
    if (part, field.name) not in (("model", "name"), ("train", "init_from"), ("train", "init_adapters"))
]


@pytest.mark.parametrize(("part", "field"), FIELDS, ids=[field.name for _, field in FIELDS])
def test_every_field_is_an_option_and_in_the_help(part, field, capsys):
    flag = "--" + field.name.replace("_", "-")
    if field.type in (bool, bool | None):
        for passed, value in ((flag, True), (flag.replace("--", "--no-", 1), False)):
            assert getattr(getattr(run_of(passed), part), field.name) is value
    else:
        text, value = text_and_value(field)
        assert getattr(getattr(run_of(f"{flag} {text}"), part), field.name) == value
    words = " ".join(help_text(capsys).split())
    assert flag in words and " ".join(field.metadata["help"].split()) in words


def test_an_option_that_may_be_repeated_is_a_tuple_and_none_is_an_empty_one(tmp_path):
    words = "--lr-multiplier blocks=0.5 --lr-multiplier */bias=2"
    run = run_of(words)
    assert run.train.lr_multiplier == ("blocks=0.5", "*/bias=2")
    assert "--lr-multiplier blocks=0.5 --lr-multiplier '*/bias=2'" in changed_options(
        run, OutputConfig(), run_of(""), OutputConfig()
    )
    saved = tmp_path / "config.toml"
    saved.write_text(toml_text(config_tables(run, OutputConfig(), {"model": "tiny"}), ""))
    assert run_of(f"--config {saved}").train.lr_multiplier == run.train.lr_multiplier
    assert run_of(f"--config {saved} --lr-multiplier none").train.lr_multiplier == ()


def test_the_help_starts_with_the_ten_options_most_used_and_lists_each_once(capsys):
    groups = re.split(r"\n(?=[a-z][^\n]*:\n)", help_text(capsys))
    first = next(group for group in groups if group.startswith("most used:"))
    assert len(re.findall(r"^  --", first, re.M)) == 10
    flags = re.findall(r"^  (--[a-z0-9-]+)", "\n".join(groups), re.M)
    assert len(flags) == len(set(flags))
    formats = {
        "--profile START:STOP",
        "--coordinator HOST:PORT",
        "--split A,B,C",
        "--batch-ramp START,INCREMENT,SAMPLES",
    }
    assert all(f"  {form}" in "\n".join(groups) for form in formats)


def options_of(text: str) -> dict[str, str]:
    """The help of each option, on one line, by its first flag."""
    entries = re.finditer(r"^  (--[a-z0-9-]+)[^\n]*(?:\n {10,}[^\n]*)*", text, re.M)
    return {entry.group(1): " ".join(entry.group().split()) for entry in entries}


def test_the_help_says_every_default_once_and_how_to_start(capsys):
    text = help_text(capsys)
    assert "python -m experiments.it" in text
    options = options_of(text)
    assert len(options) > len(FIELDS)
    flags_only = {"--dry-shapes"}
    of_the_preset = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(BertConfig)}
    for flag, body in options.items():
        assert body.count("(default: ") == (flag not in flags_only | of_the_preset), flag
    assert text.count("the preset's") == 1
    for flag, ending in {
        "--steps": "(default: 300)",  # the experiment's own, not the dataclass's
        "--warmup-steps": "(default: 30, or a tenth of --steps if that is less)",
        "--minimum-learning-rate": "(default: a tenth of --learning-rate)",
        "--beta2": "(default: 0.95)",
        "--start-timeout": "(default: 300)",
        "--axis-order": "(default: data,pipe,tensor)",
    }.items():
        assert options[flag].endswith(ending)


def test_the_help_of_an_option_is_not_repeated(capsys):
    """No two options have the same text, and no default is also in the text before it."""
    helps = {flag: re.sub(r"^(--\S+,? )+", "", body) for flag, body in options_of(help_text(capsys)).items()}
    texts = [body.rpartition(" (default: ")[0] or body for body in helps.values()]
    assert len(set(texts)) == len(texts)
    for flag, body in helps.items():
        text, _, default = body.rpartition(" (default: ")
        assert len(default.split()) < 2 or default[:-1] not in text, flag


@pytest.mark.parametrize(
    ("words", "warmup_steps", "minimum"),
    [
        ("", 30, 3e-4),
        ("--steps 50", 5, 3e-4),
        ("--steps 3", 0, 3e-4),
        ("--steps 1000", 30, 3e-4),
        ("--steps 50 --warmup-steps 40", 40, 3e-4),
        ("--learning-rate 1e-4", 30, 1e-5),
        ("--learning-rate 1e-4 --minimum-learning-rate 0", 30, 0.0),
    ],
)
def test_defaults_derived_from_steps_and_learning_rate(words, warmup_steps, minimum):
    train = run_of(words).train
    assert (train.warmup_steps, train.minimum_learning_rate) == (warmup_steps, pytest.approx(minimum))


@pytest.mark.parametrize(
    ("devices", "given", "mesh"),
    [
        (1, {}, (1, 1, 1)),
        (2, {}, (1, 1, 2)),
        (4, {}, (1, 2, 2)),
        (6, {}, (3, 1, 2)),
        (8, {}, (2, 2, 2)),
        (7, {}, (7, 1, 1)),
        (16, {}, (4, 2, 2)),
        (8, {"tensor": 4}, (2, 1, 4)),
        (8, {"pipe": 4}, (2, 4, 1)),
        (8, {"data": 2}, (2, 1, 1)),
        (8, {"data": 1, "tensor": 8}, (1, 1, 8)),
        (8, {"tensor": 3}, (1, 1, 3)),  # does not fit: left for `validate` to explain
        (8, {"tensor": 0}, (1, 1, 0)),  # the same
    ],
)
def test_the_mesh_uses_all_devices(devices, given, mesh):
    assert tuple(mesh_for(devices, given).values()) == mesh


@pytest.mark.parametrize(
    ("expert", "mesh"), [(1, (2, 2, 2)), (2, (2, 2, 2)), (4, (4, 1, 2)), (8, (8, 1, 1)), (3, (8, 1, 1))]
)
def test_the_mesh_has_replicas_for_the_groups_that_split_experts(expert, mesh):
    assert tuple(mesh_for(8, {}, expert).values()) == mesh


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("", None),
        ("--chunks 2", None),
        ("--tensor 4", 4),
        ("--data 3 --pipe 2 --tensor 2", 12),
        ("--data 0", 1),
        ("--pipe 2 --expert 4", 8),
        ("--data 4 --pipe 2 --expert 4", 8),
        ("--pipe 2 --context 2 --expert 4", 8),
    ],
)
def test_the_device_count_is_known_before_jax_starts(words, needed):
    assert parse(words.split(), "", DEFAULTS).devices_needed == needed


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        ("", 2),
        ("--schedule 1f1b", 1),
        ("--schedule gpipe", 1),
        ("--layers 8 --pipe 4", 2),
        ("--layers 4 --pipe 4", 1),  # a stage has one layer
        ("--pipe 1", 1),
        ("--pipe 4 --chunks 1", 1),
        ("--layers 8 --pipe 2 --chunks 4", 4),
    ],
)
def test_default_chunks_depend_on_schedule_and_pipe(words, chunks):
    run = run_of(words)
    run.validate(8)
    assert run.parallel.chunks == chunks


def test_default_precision_depends_on_the_devices():
    assert run_of("", precision="bf16").train.precision == "bf16"
    assert run_of("--precision fp16", precision="bf16").train.precision == "fp16"


def test_options_of_data_output_and_sampling():
    words = "--devices cpu:4 --text a.txt --tokenizer gpt2 --log-jsonl log --dry-shapes --prompt Hi --new-tokens 3 --top-k 2"
    request = parse(words.split(), "", DEFAULTS)
    data = request.run(8, "fp32").data
    assert (request.devices, data.text, data.tokenizer, request.output.log_jsonl) == ("cpu:4", "a.txt", "gpt2", "log")
    assert (request.dry_shapes, request.sample) == (True, SampleConfig("Hi", 3, 0.8, 2))
    assert parse(["--new-tokens", "0"], "", DEFAULTS).sample is None


def test_a_recipe_may_set_output_options():
    experiment = Experiment("", DEFAULTS, {"gpt2": {"steps": 100, "global_batch_size": 8, "save_every": 7}})
    assert parse(["--model", "gpt2"], experiment).output.save_every == 7
    assert parse(["--model", "gpt2", "--save-every", "9"], experiment).output.save_every == 9
    assert parse([], experiment).output.save_every == OutputConfig().save_every


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("", ""),
        ("--steps 300 --learning-rate 3e-3", ""),  # as in the defaults
        ("--pipe 4 --steps 50 --save-every 7", "--pipe 4 --steps 50 --save-every 7"),
        ("--model gpt2 --layers 8", "--layers 8"),
        ("--model gpt2 --steps 100 --warmup-steps 3", "--warmup-steps 3"),
        ("--schedule 1f1b --no-sequence-parallel", "--schedule 1f1b --no-sequence-parallel"),
    ],
)
def test_the_start_lists_what_differs_from_the_experiments_defaults(words, changed, tmp_path):
    experiment = Experiment("", DEFAULTS, {"gpt2": {"steps": 100, "global_batch_size": 8, "save_every": 7}})
    request = parse(words.split(), experiment)
    run = request.run(8, "fp32")
    assert request.changed(run) == changed
    path = tmp_path / "config.toml"  # the same after a replay
    path.write_text(toml_text(config_tables(run, request.output, request.others), "A run."))
    replay = parse(["--config", str(path)], experiment)
    assert replay.run(8, "fp32") == run
    if "--steps" not in words and "--schedule" not in words:  # else warmup or chunks, derived before, are passed now
        assert replay.changed(run) == changed


def test_imports_of_the_file_and_of_the_command_line_are_added(tmp_path):
    paths = [tmp_path / name for name in ("a.py", "b.py")]
    for path in paths:
        path.write_text("")
    run = run_of(f"--import {paths[0]}")
    file = tmp_path / "config.toml"
    file.write_text(toml_text(config_tables(run, OutputConfig(), {"model": "tiny"}), ""))
    assert run_of(f"--config {file}").imports == (str(paths[0]),)
    assert run_of(f"--config {file} --import {paths[1]} --import {paths[0]}").imports == tuple(map(str, paths))


def test_users_files_are_imported_before_the_options_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    path = tmp_path / "mine.py"
    path.write_text(
        "from megajax.schedules.registry import find, register\n"
        "@register('mine_of_cli')\ndef mine(stages, microbatches, chunks):\n"
        "    return find('gpipe').generate(stages, microbatches, chunks)\n"
    )
    run = run_of(f"--import {path} --schedule mine_of_cli")
    assert (run.imports, run.parallel.schedule, run.parallel.chunks) == ((str(path),), "mine_of_cli", 1)
    run.validate(8)


def test_clip_norm_can_be_off_and_is_saved_so(tmp_path):
    run = run_of("--clip-norm none")
    assert run.train.clip_norm is None
    path = tmp_path / "config.toml"
    path.write_text(toml_text(config_tables(run, OutputConfig(), {"model": "tiny"}), ""))
    assert run_of(f"--config {path}") == run


def test_a_configuration_of_format_1_is_read():
    """The file was written by the version of commit 74d2b5a."""
    path = pathlib.Path(__file__).parent / "format_1.toml"
    request = parse(["--config", str(path)], "", {"model": "gpt2"})
    run = request.run(8, "fp32")
    run.validate(8)
    assert (run.train.nonfinite, run.train.nonfinite_limit, run.train.matmul_dtype) == ("skip", 7, None)
    assert (run.parallel.offload_activations, request.output.max_to_keep, request.output.log_jsonl) == (
        True,
        5,
        "a.jsonl",
    )
    assert run.data == DataConfig(data_path=("0.3", "a", "0.7", "b"), split="90,10,0", reset_position_ids=True)
    assert (run.model, run.train.steps, run.parallel.pipe) == (dataclasses.replace(preset("tiny"), hidden=64), 11, 2)


# Mistakes, and the text that the error must contain.
WRONG = [
    ("--pip 2", "--pipe"),
    ("--micro-batch-size 2", "--microbatch-size"),
    ("--num-layers 2", "--layers"),
    ("--xyz 2", "--help"),
    ("--modle tiny", "--model"),
    ("--pip=2", "--pipe"),
    ("tiny", "--model NAME"),
    ("--steps", "--steps"),
    ("--steps many", "'many' is not a whole number"),
    ("--steps 1.5", "'1.5' is not a whole number"),
    ("--learning-rate fast", "'fast' is not a number"),
    ("--sequence-parallel=yes", "--sequence-parallel"),
]


@pytest.mark.parametrize(("words", "expected"), WRONG, ids=[words for words, _ in WRONG])
def test_a_mistake_is_one_line_with_a_remedy(words, expected):
    with pytest.raises(ConfigError) as error:
        run_of(words)
    message = str(error.value)
    assert expected in message and "\n" not in message


def test_abbreviations_are_refused():
    with pytest.raises(ConfigError, match="did you mean --global-batch-size"):
        run_of("--global-batch 8")


@pytest.mark.parametrize(
    ("model", "schedule"), list(itertools.product(["tiny", "gpt2", "llama2-7b"], ["1f1b", "gpipe"]))
)
def test_presets_start_without_further_options(model, schedule):
    run_of(f"--model {model} --schedule {schedule}").validate(8)


def test_stages_and_chunks_default_to_the_schedule_files(tmp_path):
    path = tmp_path / "mine.csv"
    save(make_schedule("zb_v", stages=2, microbatches=8, chunks=2), str(path))
    run = run_of(f"--schedule {path} --microbatch-size 4", device_count=2)
    run.validate(2)
    assert (run.parallel.pipe, run.parallel.chunks) == (2, 2)
    assert StepProgram.of(run).schedule.placement.name == "v"
    for words, message in [
        ("--chunks 1", "has 2 chunks and the run 1: pass --chunks 2"),
        ("--global-batch-size 16", "has 8 microbatches and the run 4: pass --global-batch-size 32"),
        ("--pipe 1", "has 2 stages and the run 1: pass --pipe 2"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            _ = StepProgram.of(run_of(f"--schedule {path} --microbatch-size 4 {words}", device_count=2)).schedule


def test_auto_takes_full_recompute_into_account():
    """Full recompute makes the input gradient slower, and zb_h1 in lockstep is then not the fastest."""
    words = "--schedule auto --pipe 4 --chunks 1 --recompute"
    assert StepProgram.of(run_of(f"{words} selective", device_count=4)).schedule.name == "auto:zb_h1"
    assert StepProgram.of(run_of(f"{words} full", device_count=4)).schedule.name != "auto:zb_h1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[options]\ndry_shapes = 'no'",
            "dry_shapes = 'no' in config.toml must be True or False: change it in the file",
        ),
        ("[options]\nmodel = 3", "model = 3 in config.toml must be a text"),
        ("[options]\nnew_tokens = true", "new_tokens = True in config.toml must be a whole number"),
        ("[options]\nimports = 'mine.py'", "imports = 'mine.py' in config.toml must be a list"),
        ("[parallel]\nschedule = 3", "schedule = 3 in config.toml must be a text"),
        ("[parallel]\ndata = 'two'", "data = 'two' in config.toml must be a whole number"),
        ("[train]\nlearning_rate = [1, 2]", "learning_rate = (1, 2) in config.toml must be a number"),
        ("[output]\nrun_dir = 3", "run_dir = 3 in config.toml must be a text"),
        ("[data]\ndata_path = 'a'", "data_path = 'a' in config.toml must be a list of texts"),
        ("train = 3", "train = 3 must be a section"),
        ("x = " + 5000 * "[" + 5000 * "]", "nested too deeply"),
    ],
    ids=lambda text: text[:30],
)
def test_wrong_types_in_a_saved_configuration_are_one_line(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("config.toml")
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse(["--config", str(path)], "", DEFAULTS)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_context_alone_is_a_mesh_without_pipe_and_tensor():
    """As any degree that is given alone: the others are 1, and data is what is left of the devices."""
    request = parse(["--context", "4"], "", {})
    assert request.devices_needed == 4 and request.mesh(4) == {"data": 1, "pipe": 1, "tensor": 1}
    assert request.mesh(16) == {"data": 4, "pipe": 1, "tensor": 1}
    assert parse(["--context", "4", "--pipe", "2"], "", {}).devices_needed == 8

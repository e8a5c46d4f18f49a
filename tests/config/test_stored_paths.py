"""A run's configuration is read from any directory, and from where its directory was moved to."""

import dataclasses
import shutil

import pytest

from megajax.checkpoint.directory import NAME
from megajax.config import ConfigError, DataConfig, OutputConfig
from megajax.config.cli import parse
from megajax.config.compare import data_differences
from megajax.config.stored_paths import PATH_FIELDS, absolute_paths, resolve_paths, store_paths
from megajax.interop.weight_source import RunDirectorySource
from megajax.train.run_directory import RunDirectory
from tests import small
from tests.train import runs

LAYOUT = "--layers 1 --hidden 4 --heads 1 --sequence-length 8 --global-batch-size 4 --microbatch-size 1 --devices cpu:1"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a text, datasets, a tokenizer, a schedule and a model's directory; and another one."""
    folder = tmp_path / "here"
    for name in ("data", "model", "tok", "auto", "gpt2", "../elsewhere"):
        (folder / name).mkdir(parents=True)
    for name in ("a.txt", "data/web.idx", "data/web.bin", "books.idx", "books.bin", "mine.csv", "0.7"):
        (folder / name).write_text("")
    (folder / "tok" / "vocab.txt").write_text("\n".join(PIECES))
    (folder / "tok" / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(folder)
    return folder


def test_paths_are_stored_absolute_and_names_and_weights_as_they_are(here):
    values = {
        "text": "a.txt",
        "data_path": ("0.7", "data/web", "0.3", "books"),
        "valid_data_path": ("web=0.7", "data/web", "books=./books"),
        "tokenizer": "gpt2",
        "schedule": "gpipe",
        "resume": "auto",
        "init_from": "model",
        "data_cache": "cache",
        "imports": ("my.module",),
        "steps": 3,
        "profile": None,
    }
    assert absolute_paths(values) == values | {
        "text": f"{here}/a.txt",
        "data_path": ("0.7", f"{here}/data/web", "0.3", f"{here}/books"),
        "valid_data_path": ("web=0.7", f"{here}/data/web", f"books={here}/books"),
        "init_from": f"{here}/model",
        "data_cache": f"{here}/cache",
    }
    for name in ("tok/vocab.txt", "./gpt2"):
        assert absolute_paths({"tokenizer": name}) == {"tokenizer": str(here / name)}
    assert absolute_paths({"schedule": "mine.csv"}) == {"schedule": f"{here}/mine.csv"}
    assert {"imports", "run_dir", "evaluate_data", "sft_data", "task_data", "chat_template"} <= PATH_FIELDS


def test_paths_inside_the_run_directory_are_relative_to_it(here):
    values = {"run_dir": "run", "log_jsonl": "run/log.jsonl", "text": "a.txt"}
    stored = store_paths(values, here / "run")
    assert stored == {"run_dir": ".", "log_jsonl": "log.jsonl", "text": f"{here}/a.txt"}
    moved = here.parent / "moved"
    moved.mkdir()
    (moved / "log.jsonl").write_text("")
    assert resolve_paths(stored, moved) == {
        "run_dir": str(moved),
        "log_jsonl": str(moved / "log.jsonl"),
        "text": f"{here}/a.txt",
    }


def test_a_relative_path_of_an_older_file_is_relative_to_the_working_directory(here):
    values = {"text": "a.txt", "data_path": ("1", "data/web"), "tokenizer": "byte", "run_dir": "runs/old"}
    assert resolve_paths(values, here.parent / "elsewhere") == values
    assert resolve_paths(values, here) == values | {"text": f"{here}/a.txt", "data_path": ("1", f"{here}/data/web")}


@pytest.mark.parametrize("value", [3, None, True, ("a", 3), {"a": 1}])
def test_values_of_another_type_are_left_to_the_checks_of_their_fields(here, value):
    assert resolve_paths({"text": value, "data_path": value}, here) == {"text": value, "data_path": value}


def test_the_same_data_by_another_path_is_no_other_data(here):
    run = dataclasses.replace(runs.make_run((1, 1, 1), schedule="1f1b"), data=DataConfig(text=f"{here}/a.txt"))
    assert data_differences({"text": "a.txt"}, run) == []
    assert data_differences({"text": "b.txt"}, run) == [f"text was b.txt, is {here}/a.txt"]


@pytest.mark.parametrize("tokenizer", ["tok/vocab.txt", "./tok/vocab.txt"])
def test_a_run_is_read_from_any_directory_and_where_it_was_moved_to(here, monkeypatch, tokenizer):
    """With the copy of its tokenizer: the original one, and the directory in which the run was started, are gone."""
    words = f"{LAYOUT} --tokenizer {tokenizer} --vocabulary 13 --text a.txt --run-dir run".split()
    request = parse(words, "", {"model": "tiny"})
    from megajax.data.tokenizers import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    directory = RunDirectory(request.run(1, "fp32"), request.output, loaded, request)
    (here / "run" / "checkpoints" / NAME.format(3)).mkdir(parents=True)
    directory.close()
    load_tokenizer.cache_clear()
    copied = {path.name for path in (here / "run" / "tokenizer").iterdir()}
    assert copied == {"vocab.txt", "chat_template.jinja"}
    monkeypatch.chdir(here.parent / "elsewhere")
    assert RunDirectorySource(str(here / "run"), None).request.given["text"] == f"{here}/a.txt"
    shutil.move(here / "run", here.parent / "moved")
    shutil.rmtree(here)
    source = RunDirectorySource("../moved", None)
    assert source.tokenizer.vocabulary == len(PIECES) and source.tokenizer.decode([5, 6]) == loaded.decode([5, 6])
    assert source.request.output.run_dir == str(here.parent / "moved")
    assert source.run("fp32").data.tokenizer == str(here.parent / "moved" / "tokenizer" / "vocab.txt")
    again = parse(["--config", "../moved/config.toml", "--resume", "auto"], "", {"model": "tiny"})
    assert again.output == dataclasses.replace(request.output, run_dir=str(here.parent / "moved"), resume="auto")


def test_a_run_of_an_earlier_version_without_a_copy_is_read(here):
    run = here / "run"
    (run / "checkpoints" / NAME.format(1)).mkdir(parents=True)
    (run / "config.toml").write_text('[data]\ntokenizer = "tok/vocab.txt"\n[output]\nrun_dir = "run"\n')
    source = RunDirectorySource("run", None)
    assert source.tokenizer.name == "tok" and source.request.output.run_dir == "run"


FOREIGN = {
    "a Hugging Face model (config.json, model.safetensors, tokenizer.json)": [
        *("config.json", "model.safetensors", "tokenizer.json"),
    ],
    "a Megatron-LM checkpoint (iter_0000001, latest_checkpointed_iteration.txt)": [
        *("iter_0000001", "latest_checkpointed_iteration.txt"),
    ],
    "no run of megajax (a.txt, b.txt, c.txt and 2 more)": ["a.txt", "b.txt", "c.txt", "d", "e"],
    "no run of megajax (site)": ["config.toml", "site"],
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("resume", ["no", "auto"])
def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path, kind, resume):
    for name in FOREIGN[kind]:
        (tmp_path / name).write_text("title = 'mine'")
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    with pytest.raises(ConfigError) as caught:
        RunDirectory(run, OutputConfig(run_dir=str(tmp_path), resume=resume), runs.Letters())
    message = str(caught.value)
    assert message.startswith(
        f"run_dir = {tmp_path} holds {kind}: pass --run-dir with a directory that is new or empty"
    )
    assert ("--init-from" in message) == ("Hugging Face" in kind) and "\n" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == FOREIGN[kind]
    assert (tmp_path / FOREIGN[kind][0]).read_text() == "title = 'mine'"


def test_a_run_that_was_stopped_early_and_files_beside_it_are_no_obstacle(tmp_path):
    """A job's output, a script and the planner's file may be there before the first start."""
    for name in ("slurm-12.out", "train.sh", "plan.toml", ".gitignore", "log.jsonl", "run.log"):
        (tmp_path / name).write_text("")
    (tmp_path / "launch").mkdir()
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    RunDirectory(run, OutputConfig(run_dir=str(tmp_path)), runs.Letters()).close()
    (tmp_path / "notes.txt").write_text("")
    RunDirectory(run, OutputConfig(run_dir=str(tmp_path)), runs.Letters()).close()


def test_a_refused_resumption_leaves_the_configuration_as_it_was(tmp_path):
    """It is stored when the checkpoint has been found to be of this run's model and tokenizer."""
    run = runs.make_run((1, 1, 1), schedule="1f1b")
    RunDirectory(run, OutputConfig(run_dir=str(tmp_path)), runs.Letters()).close()
    before = (tmp_path / "config.toml").read_text()
    (tmp_path / "checkpoints" / NAME.format(3)).mkdir(parents=True)
    other = dataclasses.replace(run, train=dataclasses.replace(run.train, seed=7))
    directory = RunDirectory(other, OutputConfig(run_dir=str(tmp_path), resume="auto"), runs.Letters())
    with pytest.raises(ConfigError, match="is not a complete megajax checkpoint|is damaged"):
        directory.resume(small.training_of(run))
    directory.close()
    assert (tmp_path / "config.toml").read_text() == before

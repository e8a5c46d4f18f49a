"""Names of object stores, URLs and hubs are refused in every option of every command that takes a path, in one line."""

import dataclasses
import importlib
import re

import pytest

from experiments import gpt3
from megajax import OutputConfig
from megajax.config import (
    ConfigError,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    preset,
)
from megajax.config.evaluate import EvaluateConfig
from megajax.config.options import make_parser
from megajax.config.sample import SampleConfig
from megajax.schedules.paths import hub_advice, path_problem

CONFIGS = (
    *(RunConfig, ModelConfig, ParallelConfig, TrainConfig, DataConfig, OutputConfig, LaunchConfig, EvaluateConfig),
    SampleConfig,
)
REMOTE = {  # a word: what the message says to do
    "s3://bucket/run": "aws s3 sync",
    "s3:/bucket/run": "aws s3 sync",
    "S3://bucket/run": "aws s3 sync",
    "gs://bucket/run": "gcloud storage rsync",
    "az://container/run": "azcopy sync",
    "abfs://container@account.dfs.core.windows.net/run": "azcopy sync",
    "hdfs://node/run": "hdfs dfs -get",
    "https://host/a.jsonl": "curl -L -O 'https://host/a.jsonl'",
    "file:///data/a": "pass the path alone, /data/a",
    "file:/data/a": "pass the path alone, /data/a",
    "hub:org/name": "hf download org/name --local-dir name",
    "hf://datasets/org/name/a.parquet": "hf download org/name --repo-type dataset --local-dir name",
    "https://huggingface.co/org/name/tree/main": "hf download org/name --local-dir name",
    "user@host:/data/run": "rsync",
    "weird+scheme://x": "a path of this machine",
    "books=s3://bucket/books": "aws s3 sync",
    "~/run": "the whole path",
    "$HOME/run": "the whole path",
}


@pytest.mark.parametrize("word", REMOTE)
def test_what_is_not_on_this_machine_is_refused_with_a_remedy(word):
    rule, remedy = path_problem(word)
    assert REMOTE[word] in f"pass {remedy}", (rule, remedy)


@pytest.mark.parametrize(
    "word",
    ("runs/first", "/abs/run", "a:b", "2024-01-01T10:00:00", "C:/data", "books=./a", "lang=en/a", "auto", "gpt2", "0.3")
    + ("run$1", "a~b", "./s3:/bucket", "./~", "name@host", "step:100"),
)
def test_paths_of_this_machine_are_paths(word):
    assert path_problem(word) is None


def test_every_field_that_takes_a_path_is_declared_as_one():
    fields = {field.name: field for config in CONFIGS for field in dataclasses.fields(config)}
    taken = {
        name: field.metadata["text_kind"] in ("path", "store")
        for name, field in fields.items()
        if re.search("FILE|DIR|PREFIX", field.metadata.get("metavar") or "")
    }
    assert all(taken.values()), [name for name, path in taken.items() if not path]
    assert len(taken) >= 17


IN_STORES = ("--run-dir", "--resume")  # may be gs:// or s3://
PAIRS_IN_STORES = ("--data-path", "--train-data-path", "--valid-data-path")


def test_every_option_of_a_training_that_takes_a_path_refuses_a_remote_one(capsys):
    actions = [one for one in make_parser("", {})._actions if re.search("FILE|DIR|PREFIX", str(one.metavar))]
    assert len(actions) >= 18
    for action in actions:
        flag = action.option_strings[0]
        word = "az://bucket/run" if flag in (*IN_STORES, *PAIRS_IN_STORES, "--config") else "s3://bucket/run"
        assert gpt3.main([flag, word]) == 2
        out, error = capsys.readouterr()
        assert not out and error.count("\n") == 1
        if flag == "--config":  # may be of a run in a store
            assert "az://bucket/run" in error
            continue
        if word.startswith("az:"):
            assert f"{flag}: 'az://bucket/run' is in a store that megajax does not read or write: pass " in error
            continue
        assert f"{flag}: 's3://bucket/run' is in an object store" in error and "aws s3 sync" in error


WRONG_PLACES = {  # a place: what the message says
    "s3://": "names no bucket: pass --run-dir s3://BUCKET/FOLDER",
    "s3:///folder": "names no bucket",
    "s3://bucket": "names no folder in its bucket: pass --run-dir s3://bucket/FOLDER",
    "gs://bucket/": "names no folder in its bucket",
    "s3:/bucket/run": "is no name of a place in an object store: pass --run-dir s3://bucket/run",
    "s3a://bucket/run": "is no name of a place in an object store: pass --run-dir s3://bucket/run",
    "gcs://bucket/run": "is no name of a place in an object store: pass --run-dir gs://bucket/run",
    "S3://bucket/run": "is no name of a place in an object store: pass --run-dir s3://bucket/run",
    "s3://Bucket_/run": "is not the name of a bucket",
    "s3://bucket/../run": "names no folder in its bucket",
    "s3://bucket//run": "names no folder in its bucket",
    "s3://bucket/run*": "names no folder in its bucket",
    "s3://key:SECRET@bucket/run": "has credentials or a query in it",
    "s3://bucket/run?X-Amz-Signature=SECRET": "has credentials or a query in it",
    "gs://bucket/run#SECRET": "has credentials or a query in it",
    "az://container/run": "is in a store that megajax does not read or write",
    "hdfs://node/run": "is in a store that megajax does not read or write",
    "https://bucket.s3.amazonaws.com/run": "is a URL, and megajax reads and writes none",
    "file:///data/run": "is a URL: pass",
    "hub:org/name": "is a URL of a hub",
    "user@host:/data/run": "is on another host",
}


@pytest.mark.parametrize("word", WRONG_PLACES)
def test_what_is_no_place_in_a_store_is_refused_without_its_secrets(word, capsys):
    for flag in IN_STORES:
        assert gpt3.main([flag, word, *(["--run-dir", "a"] if flag == "--resume" else [])]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "SECRET" not in error, error
        assert WRONG_PLACES[word].replace("pass --run-dir ", "pass ") in error.replace("pass --run-dir ", "pass "), (
            error
        )
        with pytest.raises(ConfigError) as caught:
            OutputConfig(run_dir=word).validate()
        assert "SECRET" not in str(caught.value) and WRONG_PLACES[word].partition(":")[0] in str(caught.value)


@pytest.mark.parametrize("word", ("s3://bucket/run", "gs://my.bucket-1/a/b.c_d", "runs/first", "./s3:/bucket"))
def test_places_in_stores_are_places(word):
    OutputConfig(run_dir=word).validate()


COMMANDS = {  # the words of a command, with a path in the place of X
    "megajax.data.preprocess": [
        "--input a --out b --tokenizer X",
        "merge --input a X --out b",
        "merge --input a --out X",
        "inspect X",
        "inspect a --tokenizer X",
        "verify X --tokenizer byte",
    ],
    "megajax.evaluate.__main__": [
        "--init-from X",
        "--init-from a --task-data X",
        "--init-from a --out X",
        "--init-from a --include-path X",
    ],
    "megajax.evaluate.squad": [
        "--task-data X --predictions a",
        "--task-data a --predictions X",
        "--task-data a --predictions a --out X",
        "--task-data a --predictions a --no-answer X",
    ],
    "megajax.generate.__main__": [
        "--init-from X",
        "--init-from a --prompts X",
        "--init-from a --prompt b --out X",
    ],
    "megajax.interop.hugging_face.__main__": [
        "import X --run-dir a",
        "import a --run-dir X",
        "import a --run-dir b --tokenizer X",
    ],
    "megajax.interop.megatron.__main__": [
        "import X --run-dir a",
        "import a --run-dir X",
        "import a --run-dir b --tokenizer X",
    ],
    "megajax.launch.__main__": ["--rendezvous X -- experiments.gpt3 --run-dir a"],
    "megajax.plan.__main__": [
        f"--model gpt3-1.3b --gpus 8 --global-batch-size 512 {option} X"
        for option in ("--cluster", "--compare", "--out", "--html", "--plot")
    ],
    "megajax.plan.dryrun": ["--cluster X", "--gpu h100-80gb --save-hlo X", "--gpu h100-80gb --run X"],
    "experiments.failures": ["--plot X"],
    "experiments.slow_links": ["--plot X"],
    "megajax.schedules.draw": [f"{option} X" for option in ("--out", "--save", "--trace", "--json", "--schedule")],
    "megajax.verify.__main__": [f"--a= --b= {option} X" for option in ("--resume", "--record", "--against")],
    "benchmarks.loss_curve": ["X --out a.svg", "a.jsonl --out X"],
    "experiments.papers": ["--plot X"],
}


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_refuses_a_remote_path(module, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = importlib.import_module(module)
    for words in COMMANDS[module]:
        try:
            code = command.main(words.replace("X", "gs://bucket/x.json").split())
        except SystemExit as stopped:
            code = stopped.code
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1, (words, error)
        assert "'gs://bucket/x.json' is in an object store" in error and "gcloud storage rsync" in error, (words, error)
    assert not list(tmp_path.iterdir())


def test_the_library_and_a_saved_configuration_refuse_them_too(tmp_path, capsys):
    with pytest.raises(ConfigError, match="log_jsonl = 's3://bucket/run' is in an object store"):
        OutputConfig(log_jsonl="s3://bucket/run").validate()
    run = RunConfig(
        preset("tiny"), ParallelConfig(), TrainConfig(), DataConfig(data_path=("0.5", "a", "0.5", "az://b"))
    )
    with pytest.raises(ConfigError, match=r"data_path = .* is in a store that .*: pass --data-path a path of this"):
        run.validate()
    (tmp_path / "config.toml").write_text('[output]\nlog_jsonl = "s3://bucket/run"\n')
    assert gpt3.main(["--config", str(tmp_path / "config.toml")]) == 2
    assert "config.toml is in an object store" in capsys.readouterr().err


def test_a_name_of_the_hub_has_the_command_that_downloads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "hf download org/name --local-dir name" in hub_advice("org/name")
    assert hub_advice("/a/b") == hub_advice("a/b/c") == ""
    for words in ("--init-from org/name", "--init-from=org/name --dry-shapes"):
        assert gpt3.main(words.split()) == 2
        message = capsys.readouterr().err
        assert (
            message.count("\n") == 1
            and "--init-from org/name: there is no such directory, and huggingface_hub" in message
        )
        assert "hf download org/name --local-dir name" in message
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_advice("org/name") == ""

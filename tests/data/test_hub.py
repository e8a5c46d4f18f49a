"""Names on the Hugging Face Hub, offline: a model in the cache works, another one is one line."""

import pathlib
import shutil
import sys

import pytest

from experiments import gpt3
from megajax.config import ConfigError
from megajax.data.hub import _download, local_directory
from megajax.interop.weight_source import HuggingFaceSource
from tests.interop.hugging_face import convert, golden

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """A cache with a model org/llama; the test runs in an empty directory."""
    folder = tmp_path / "cache" / "models--org--llama"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    shutil.copytree(golden("llama"), folder / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    _download.cache_clear()
    return folder / "snapshots" / COMMIT


def test_a_cached_model_is_its_directory(cache):
    assert local_directory("org/llama", "--init-from") == str(cache)


def test_paths_and_other_words_stay(cache, tmp_path):
    for word in ("gpt2", "a/b/c", "../a", "/a/b", str(tmp_path), "model.gguf", ""):
        assert local_directory(word, "--tokenizer") == word
    (tmp_path / "work" / "org" / "llama").mkdir(parents=True)
    assert local_directory("org/llama", "--init-from") == "org/llama"


def test_the_commands_take_the_name(cache, tmp_path, capsys):
    assert convert("import", "org/llama", "--run-dir", tmp_path / "run", "--sequence-length", "16") == 0
    source = HuggingFaceSource("org/llama")
    assert source.path == cache and source.model.layers == 4
    assert gpt3.main(["--init-from", "org/llama", "--sequence-length", "16", "--dry-shapes"]) == 0
    assert not list((tmp_path / "work").iterdir())


def test_another_name_is_one_line(cache, capsys):
    assert convert("import", "org/other", "--run-dir", "run") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: import org/other: there is no such directory") and message.count("\n") == 1
    assert "run `hf download org/other --local-dir other` and pass that directory" in message


def test_without_the_library_it_is_one_line(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ConfigError, match=r"no such directory, and names on the Hub need huggingface_hub .*megajax\[hf\]"
    ):
        local_directory("org/new", "--tokenizer")

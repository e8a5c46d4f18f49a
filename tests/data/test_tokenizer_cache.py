"""preprocess imports transformers for a directory's tokenizer once: it is kept as a file in the user's cache."""

import json

import pytest

from megajax.data import tokenizer_cache, tokenizers
from megajax.data.recipe import Recipe
from tests.data.test_tokenizer_directories import TEXT, hugging_face


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizers.load_tokenizer.cache_clear()
    yield tmp_path / "cache" / "megajax" / "tokenizers"
    tokenizers.load_tokenizer.cache_clear()


def shared(recipe: Recipe, folder) -> tuple[Recipe, int]:
    found, vocabulary = recipe.for_workers(str(folder))
    assert found.load().encode(TEXT).tolist() == recipe.load().encode(TEXT).tolist()
    assert (found.load().end_of_document, vocabulary) == (recipe.load().end_of_document, recipe.load().vocabulary)
    return found, vocabulary


def test_a_second_run_reads_the_kept_file(tmp_path, cache, monkeypatch):
    folder = hugging_face(tmp_path / "one", tokenizer_config={"eos_token": "<s>"})
    recipe = Recipe(str(folder))
    first, vocabulary = shared(recipe, tmp_path)
    assert first.file == str(tmp_path / "tokenizer.json")
    kept, same = shared(recipe, tmp_path)
    assert kept.file.startswith(str(cache)) and same == vocabulary and kept.end_of_document == "<s>"
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "load_directory", lambda directory: 1 / 0)
        tokenizers.load_tokenizer.cache_clear()
        assert recipe.for_workers(str(tmp_path)) == (kept, vocabulary)

    with open(kept.file, "a") as file:  # a damaged file is not used
        file.write(" ")
    assert shared(recipe, tmp_path)[0].file == first.file
    assert shared(recipe, tmp_path)[0] == kept


def test_a_tokenizer_is_kept_under_all_that_decides_on_it(tmp_path, cache, monkeypatch):
    folder = hugging_face(tmp_path / "one", tokenizer_config={"eos_token": "<s>"})
    keys = {tokenizer_cache.key_of(str(folder), end) for end in (None, "<s>", "</s>")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    keys.add(tokenizer_cache.key_of(str(folder), None))
    monkeypatch.setattr(tokenizer_cache.importlib.metadata, "version", lambda name: "0")
    keys.add(tokenizer_cache.key_of(str(folder), None))
    assert len(keys) == 5 and None not in keys
    assert [tokenizer_cache.key_of(name, None) for name in ("gpt2", "byte", str(folder.parent / "a.model"))] == [
        None
    ] * 3


def test_the_cache_is_bounded_and_may_be_missing(tmp_path, cache, monkeypatch):
    folder = hugging_face(tmp_path / "one", tokenizer_config={})
    inner = tokenizers.load_tokenizer(str(folder)).inner
    for number in range(tokenizer_cache.MOST + 2):
        tokenizer_cache.keep(str(number), inner, 5, "<s>")
    assert len(list(cache.iterdir())) == 2 * tokenizer_cache.MOST
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "tokenizer.json"))  # a file: no folder can be made in it
    assert shared(Recipe(str(folder)), tmp_path)[0].file == str(tmp_path / "tokenizer.json")

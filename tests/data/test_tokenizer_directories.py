"""--tokenizer with a directory of Hugging Face or of a run; what is no tokenizer is named in one line."""

import json
import pathlib
import shutil

import pytest

from megajax.config import ConfigError
from megajax.data.tokenizers import _packaged, load_tokenizer

CHAT = pathlib.Path(__file__).parent / "chat"
TEXT = "Hello w\u00f6rld, 123\n"


def hugging_face(folder: pathlib.Path, **settings) -> pathlib.Path:
    folder.mkdir()
    shutil.copy(CHAT / "tokenizer.json", folder)
    for name, content in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_directory_is_its_tokenizer_with_the_end_that_its_settings_name(tmp_path):
    """The bare file has one of the usual names; eos_token comes first, a text or an AddedToken, of either file."""
    inner = load_tokenizer(str(CHAT / "tokenizer.json")).inner
    end = inner.id_to_token(5)
    cases = {
        "none": {},
        "text": {"tokenizer_config": {"eos_token": end}},
        "token": {"tokenizer_config": {"eos_token": {"content": end}}},
        "map": {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": {"content": end}}},
        "unknown": {"tokenizer_config": {"eos_token": "<not there>"}},
    }
    usual = load_tokenizer(str(hugging_face(tmp_path / "plain") / "tokenizer.json")).end_of_document
    for name, settings in cases.items():
        found = load_tokenizer(str(hugging_face(tmp_path / name, **settings)))
        assert found.end_of_document == (5 if name in ("text", "token", "map") else usual), name
        assert found.name == str(tmp_path / name / "tokenizer.json")
        assert {file.name for file in found.files} == {"tokenizer.json", *(f"{one}.json" for one in settings)}
        assert load_tokenizer(found.name).end_of_document == found.end_of_document  # as a run directory keeps it


def test_a_directory_with_vocab_and_merges_is_gpt2s(tmp_path):
    (tmp_path / "vocab.json").write_text(_packaged("encoder.json.gz"))
    with pytest.raises(ConfigError, match=r"vocab.json needs merges.txt beside it"):
        load_tokenizer(str(tmp_path / "vocab.json"))
    (tmp_path / "merges.txt").write_text(_packaged("vocab.bpe.gz"))
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode(TEXT).tolist() == load_tokenizer("gpt2").encode(TEXT).tolist() and ours.end_of_document == 50256
    assert [file.name for file in ours.files] == ["vocab.json", "merges.txt"]


def test_a_cased_vocabulary_is_read_as_its_settings_say(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Hello", "hello"]
    for name, settings in (("cased", {"do_lower_case": False}), ("uncased", {"do_lower_case": True}), ("bare", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.txt").write_text("\n".join(pieces))
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(settings))
        assert load_tokenizer(str(tmp_path / name)).encode("Hello").tolist() == [5 if name == "cased" else 6]


def test_a_run_directory_has_the_tokenizer_of_its_configuration(tmp_path):
    for name, tokenizer in (("named", "gpt2"), ("own", "tokenizer/tokenizer.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f'[data]\ntokenizer = "{tokenizer}"\n')
    hugging_face(tmp_path / "own" / "tokenizer")
    assert load_tokenizer(str(tmp_path / "named")).name == "gpt2"
    assert load_tokenizer(str(tmp_path / "own")).name == str(tmp_path / "own" / "tokenizer" / "tokenizer.json")


WRONG = {  # what --tokenizer is given: a part of the message
    "org/name": "hf download org/name --local-dir name",
    "bert-base-uncased": "hf download bert-base-uncased --local-dir bert-base-uncased",
    "gpt-2": "did you mean gpt2?",
    "missing.json": "no such file; pass a tokenizer.json",
    "link.json": "this symbolic link points to gone.json",
    "empty": "the directory has no file, but none of tokenizer.json",
    "weights": "the directory has config.json, but none of tokenizer.json",
    "weights/config.json": "has settings, not a tokenizer: pass the directory, --tokenizer weights",
    "run": "its config.toml has no tokenizer",
    "array.json": "is not a tokenizer.json of Hugging Face",
    "utf16.json": "is not a tokenizer.json of Hugging Face",
    "text.txt": "is not BERT's list of WordPieces",
    "llama3.model": "is tiktoken's",
    "noise.model": "is not a sentencepiece model",
    "merges.txt": "has the merges of a tokenizer alone: pass the directory",
    "broken": "tokenizer_config.json beside the tokenizer: not JSON",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tokenizer_is_named_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "weights", "run"):
        pathlib.Path(folder).mkdir()
    hugging_face(tmp_path / "broken")
    files = {"array.json": "[1]", "text.txt": "a text\n", "llama3.model": "IQ== 0\nIg== 1\n", "noise.model": "noise"}
    files |= {"weights/config.json": "{}", "run/config.toml": "", "merges.txt": "", "broken/tokenizer_config.json": "{"}
    for file, content in files.items():
        pathlib.Path(file).write_text(content)
    pathlib.Path("utf16.json").write_bytes("{}".encode("utf-16"))
    pathlib.Path("link.json").symlink_to("gone.json")
    load_tokenizer.cache_clear()
    with pytest.raises(ConfigError) as error:
        load_tokenizer(name)
    message = str(error.value)
    assert WRONG[name] in message and message.startswith(("tokenizer", "cannot read broken")) and "\n" not in message

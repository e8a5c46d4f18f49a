"""--tokenizer with a directory of Hugging Face or of a run; what is no tokenizer is named in one line."""

import json
import pathlib
import shutil

import pytest
import transformers

from megajax.config import ConfigError
from megajax.data.tokenizers import _packaged, load_tokenizer, with_vocabulary

CHAT = pathlib.Path(__file__).parent / "chat"
TEXT = "Hello w\u00f6rld, 123\n"


def hugging_face(folder: pathlib.Path, **settings) -> pathlib.Path:
    folder.mkdir()
    shutil.copy(CHAT / "tokenizer.json", folder)
    for name, content in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def judge(folder: pathlib.Path):
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def test_a_directory_is_its_tokenizer_with_the_end_that_transformers_finds(tmp_path):
    """The bare file has one of the usual names; eos_token comes first, a text or an AddedToken."""
    inner = load_tokenizer(str(CHAT / "tokenizer.json")).inner
    end = inner.id_to_token(5)
    cases = {
        "none": {"tokenizer_config": {}},
        "text": {"tokenizer_config": {"eos_token": end}},
        "token": {"tokenizer_config": {"eos_token": {"content": end, "__type": "AddedToken"}}},
        "new": {"tokenizer_config": {"eos_token": "<not there>"}},
        "model": {"config": {"model_type": "qwen2"}},
    }
    usual = load_tokenizer(str(hugging_face(tmp_path / "plain") / "tokenizer.json")).end_of_document
    for name, settings in cases.items():
        found, wanted = load_tokenizer(str(hugging_face(tmp_path / name, **settings))), judge(tmp_path / name)
        end = usual if wanted.eos_token_id is None else wanted.eos_token_id
        assert (found.end_of_document, found.vocabulary) == (end, len(wanted)), name
        assert found.name == str(tmp_path / name)
        assert {file.name for file in found.files} == {"tokenizer.json", *(f"{one}.json" for one in settings)}
        assert load_tokenizer(f"{found.name}/tokenizer.json").end_of_document == end  # the file is its directory's
        assert found.encode_prompt(TEXT).tolist() == wanted(TEXT)["input_ids"]
        assert found.text(found.encode(TEXT)) == wanted.decode(found.encode(TEXT), skip_special_tokens=True)


def test_what_stands_before_a_text_is_what_transformers_puts_there(tmp_path):
    folder = hugging_face(tmp_path / "one", tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    inner = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    special = {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pair = [begin, text, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": [begin, text], "pair": pair, "special_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(inner | {"post_processor": template}))
    bare = shutil.copy(folder / "tokenizer.json", tmp_path / "bare.json")
    wanted = judge(folder)(TEXT)["input_ids"]
    for name in (folder, bare):
        found = load_tokenizer(str(name))
        assert found.start == (3,) and found.encode_prompt(TEXT).tolist() == wanted == [3, *found.encode(TEXT)]
        assert found.text(wanted) == TEXT and found.decode(wanted) == "<s>" + TEXT


def test_added_tokens_beyond_a_model_are_refused_in_texts_only(tmp_path):
    """Such as the <pad> that many tuned models have; transformers takes them."""
    folder = hugging_face(tmp_path / "one", tokenizer_config={"eos_token": "</s>", "pad_token": "<pad>"})
    found = load_tokenizer(str(folder))
    assert found.vocabulary == 401
    model = with_vocabulary(found, 400)
    assert model.vocabulary == 400 and model.encode(TEXT).tolist() == found.encode(TEXT).tolist()
    for encode in (model.encode, model.encode_prompt, lambda text: list(model.encode_with_offsets([text]))):
        with pytest.raises(
            ConfigError, match=r"a text has '<pad>', id 400 of tokenizer .* and the model has ids 0 to 399"
        ):
            encode("a <pad>")
    assert found.encode("a <pad>")[-1] == 400
    assert with_vocabulary(found, 399) is None and with_vocabulary(found, 400) is model


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
    (tmp_path / "own" / "tokenizer" / "tokenizer_config.json").write_text("{}")
    load_tokenizer.cache_clear()
    assert load_tokenizer(str(tmp_path / "own")).name == str(tmp_path / "own" / "tokenizer")


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
    assert (
        WRONG[name] in message
        and message.startswith(("tokenizer", "--tokenizer", "cannot read broken"))
        and "\n" not in message
    )

"""A directory of Hugging Face comes out of a fine-tuning, an import or a resumed run as whole as it went in."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import transformers

from megajax.checkpoint.run_files import copy_model, copy_tokenizer
from megajax.data.tokenizers import load_tokenizer
from megajax.interop.hugging_face.export import _ends, _write_tokenizer
from megajax.interop.safetensors import open_tensors
from tests.interop.hugging_face import change_config, convert, golden
from tests.interop.variants import arrays_of, write_arrays
from tests.test_finetune import SMALL, TEMPLATE, chats, train


def source(folder: pathlib.Path) -> pathlib.Path:
    """A tuned Llama in bf16, whose tokenizer begins texts, and which has two ends and templates for tools."""
    directory = pathlib.Path(shutil.copytree(golden("llama"), folder / "source"))
    inner = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = inner["model"]["vocab"]
    first, last = (next(word for word, number in vocabulary.items() if number == one) for one in (0, 1))
    begin = {"SpecialToken": {"id": first, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    inner["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first: {"id": first, "ids": [0], "tokens": [first]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(inner))
    config = json.loads((directory / "config.json").read_text())
    ends = {"bos_token_id": 0, "eos_token_id": [2, 3]}
    settings = {"bos_token": first, "eos_token": last, "model_max_length": 64}
    files = {
        "config.json": config | {"dtype": "bfloat16", "torch_dtype": None} | ends,
        "tokenizer_config.json": settings,
        "generation_config.json": ends | {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.1},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools" + TEMPLATE)
    return directory


def read(directory: pathlib.Path) -> dict:
    """What transformers reads of a directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config = transformers.AutoConfig.from_pretrained(directory).to_dict()
    generation = transformers.GenerationConfig.from_pretrained(directory).to_dict()
    for values in (config, generation):
        del values["transformers_version"]
        values.pop("_name_or_path", None)
    return {
        "class": type(tokenizer).__name__,
        "ids": tokenizer("w1 w2 w3")["input_ids"],
        "tokens": tokenizer.special_tokens_map,
        "templates": tokenizer.chat_template,
        "length": tokenizer.model_max_length,
        "config": config,
        "generation": generation,
    }


def test_an_import_and_its_export(tmp_path):
    directory = source(tmp_path)
    assert convert("import", directory, "--run-dir", tmp_path / "run", "--sequence-length", 24) == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    assert read(tmp_path / "out") == read(directory)


def test_a_source_in_fp16_comes_out_in_fp16(tmp_path, capsys):
    directory = pathlib.Path(shutil.copytree(golden("llama"), tmp_path / "llama"))
    change_config(directory, dtype="float16")
    assert convert("import", directory, "--run-dir", tmp_path / "run") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    assert str(transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype).endswith("float16")
    was, found = arrays_of(directory), arrays_of(tmp_path / "out")
    assert all(np.array_equal(found[name], array.astype(np.float16)) for name, array in was.items())
    name = "model.layers.1.mlp.up_proj.weight"
    was[name][3, 2] = 7e4
    write_arrays(directory, was)
    assert convert("import", directory, "--run-dir", tmp_path / "large") == 0
    capsys.readouterr()
    assert convert("export", tmp_path / "large", "--out", tmp_path / "no") == 2
    assert f"{name} has weights beyond the range of fp16: pass --dtype bf16" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert convert("export", tmp_path / "large", "--out", tmp_path / "no", "--dtype", "bf16") == 0


@pytest.mark.parametrize(("family", "wanted"), [("bert", 24), ("gpt2", 24), ("llama", None)])
def test_shorter_samples_cut_a_table_of_positions_and_its_size(family, wanted, tmp_path):
    words = ["--tokenizer", golden("bert") / "vocab.txt"] if family == "bert" else []
    length = ["--sequence-length", "24"]
    assert convert("import", golden(family), "--run-dir", tmp_path / "run", *length, *words) == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    was, found = (transformers.AutoConfig.from_pretrained(one) for one in (golden(family), tmp_path / "out"))
    assert found.max_position_embeddings == (wanted or was.max_position_embeddings)
    rows = [
        one.shape[0] for name, one in open_tensors(tmp_path / "out").items() if "position_emb" in name or "wpe" in name
    ]
    assert rows == [wanted] * (wanted is not None)


@pytest.mark.slow
def test_a_fine_tuning_and_a_run_from_it(tmp_path):
    """With a template of one's own it is the only one; what a sample ends with is an end of texts."""
    directory, data = source(tmp_path), chats(tmp_path)
    wanted = read(directory)
    few = [*SMALL, "--steps", "1", "--devices", "cpu:1"]
    train(["--init-from", directory, *data[:2], *few, "--run-dir", tmp_path / "one"])
    assert convert("export", tmp_path / "one", "--out", tmp_path / "first") == 0
    ends = {"eos_token_id": [2, 3, 1]}
    wanted["generation"] |= ends
    assert read(tmp_path / "first") == wanted
    resume = ["--config", tmp_path / "one" / "config.toml", "--resume", tmp_path / "one", "--run-dir", tmp_path / "two"]
    own = tmp_path / "own.jinja"
    own.write_text("w7 " + TEMPLATE)
    train([*resume, "--chat-template", own, *few[:-4], "--steps", "2", "--devices", "cpu:1"])
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(directory)
    own.unlink()
    assert convert("export", tmp_path / "two", "--out", tmp_path / "second") == 0
    assert read(tmp_path / "second") == wanted | {"templates": "w7 " + TEMPLATE}


@pytest.mark.parametrize("stored", [{}, {"eos_token_id": 7}, {"eos_token_id": [7, 9]}])
def test_what_samples_end_with_is_an_end(tmp_path, stored):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"eos_token_id": 5, "vocab_size": 10}))
    (model / "generation_config.json").write_text(json.dumps(stored | {"top_k": 3}))
    copy_model(sorted(model.iterdir()), tmp_path / "run", end=9)
    found = json.loads((tmp_path / "run" / "hugging_face" / "generation_config.json").read_text())
    ends = stored.get("eos_token_id", 5)
    ends = ends if isinstance(ends, list) else [ends]
    assert found == {"top_k": 3, "eos_token_id": [*ends, *([9] if 9 not in ends else [])]}
    copy_model([], tmp_path / "other", end=9)
    assert not (tmp_path / "other").exists()


def test_a_template_in_place_of_the_tokenizers(tmp_path):
    folder = source(tmp_path)
    files = [folder / "tokenizer.json", folder / "additional_chat_templates" / "tool_use.jinja"]
    copy_tokenizer(files, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").is_file()
    copy_tokenizer(files, tmp_path / "own", "own")
    assert {path.name for path in (tmp_path / "own" / "tokenizer").rglob("*.*")} == {
        "tokenizer.json",
        "chat_template.jinja",
    }


def test_an_import_with_another_tokenizer_has_that_one(tmp_path):
    """And nothing of the source's."""
    directory, other = source(tmp_path), tmp_path / "other"
    other.mkdir()
    inner = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = {word: len(inner["model"]["vocab"]) - 1 - number for word, number in inner["model"]["vocab"].items()}
    inner["model"]["vocab"], inner["post_processor"] = vocabulary, None
    for token in inner["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    (other / "tokenizer.json").write_text(json.dumps(inner))
    assert convert("import", directory, "--run-dir", tmp_path / "run", "--tokenizer", other / "tokenizer.json") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("w1 w2")["input_ids"] == [vocabulary["w1"], vocabulary["w2"]] and found.chat_template is None


def test_a_run_from_nothing_says_how_texts_begin_and_end(tmp_path):
    """Its config.json would else have the ends of transformers' defaults."""
    directory = source(tmp_path)
    run = tmp_path / "run"
    assert convert("import", directory, "--run-dir", run) == 0
    shutil.rmtree(run / "hugging_face")  # as a run has none that began from nothing
    assert convert("export", run, "--out", tmp_path / "out") == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    wanted, found = (transformers.AutoTokenizer.from_pretrained(one) for one in (directory, tmp_path / "out"))
    assert (config.bos_token_id, config.eos_token_id) == (wanted.bos_token_id, wanted.eos_token_id)
    assert found("w1 w2")["input_ids"] == wanted("w1 w2")["input_ids"] and found.chat_template == wanted.chat_template


@pytest.mark.parametrize("normalized", [False, True])
def test_a_sentencepiece_model_is_llamas_or_nobodys(tmp_path, normalized):
    """Not one that transformers would read as another tokenizer."""
    import sentencepiece

    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    options = dict(model_type="bpe", byte_fallback=True, vocab_size=300, bos_id=1, eos_id=2, minloglevel=2)
    if not normalized:
        options |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    prefix = str(tmp_path / "mine")
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=prefix, **options)
    ours, out = load_tokenizer(f"{prefix}.model"), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"model_type": "llama"} | _ends(ours)))
    _write_tokenizer(tmp_path / "run", out, ours)
    if normalized:
        assert not (out / "tokenizer.model").exists() and (out / "other.tokenizer.model").is_file()
        return
    found = transformers.AutoTokenizer.from_pretrained(out)
    text = "the lazy fox  \u4e2d jumps\n"
    assert found(text)["input_ids"] == ours.encode_prompt(text).tolist() and found.eos_token_id == 2


@pytest.mark.parametrize("tokenizer", ["gpt2", "wordpiece"])
def test_a_built_in_tokenizer_becomes_files(tmp_path, tokenizer):
    ours = load_tokenizer(tokenizer)
    _write_tokenizer(tmp_path / "run", tmp_path, ours)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | _ends(ours)))
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello w\u00f6rld, 123 \U0001f600"
    assert found(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
    assert found.eos_token_id == ours.end_of_document == transformers.AutoConfig.from_pretrained(tmp_path).eos_token_id

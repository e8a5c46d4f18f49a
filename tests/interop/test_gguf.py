"""GGUF files that llama.cpp's converter wrote (make_gguf_golden.py), compared with the directories that it read."""

import dataclasses
import json
import re
import struct
import sys

import numpy as np
import pytest

from megajax.interop.gguf.config import config_keys
from megajax.interop.gguf.file import open_gguf
from megajax.interop.gguf.tokenizer import write_tokenizer
from megajax.interop.hugging_face.config import read_config
from megajax.interop.safetensors import open_tensors
from tests.interop.hugging_face import convert, golden, model_of
from tests.interop.make_gguf_golden import FAMILIES as FILES
from tests.interop.make_golden import GOLDEN, LENGTH

gguf = pytest.importorskip("gguf")
files = pytest.mark.parametrize("family", FILES)


def path_of(family: str):
    return GOLDEN / f"{family}.gguf"


@files
def test_tensors_are_those_that_were_converted(family):
    """Bit for bit: in one piece, and in parts of one key and value head."""
    found, wanted = open_gguf(path_of(family)).tensors, open_tensors(golden(family))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        count = tensor.shape[0]
        part = 2 * found[name].head if found[name].head else max(1, count // 3)
        for step in (count, part):
            for start in range(0, count, step):
                stop = min(start + step, count)
                np.testing.assert_array_equal(found[name].rows(start, stop), tensor.rows(start, stop), err_msg=name)


@files
def test_the_metadata_is_the_model(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_keys(open_gguf(path_of(family)))))
    fields = vars(read_config(tmp_path)[1])
    wanted = model_of(family)
    for name, value in fields.items():
        if name not in ("name", "sequence_length", "dropout", "init_deviation", "head_size", "kv_heads"):
            assert value == getattr(wanted, name), name
    for name in ("head_dimension", "key_value_heads", "feedforward_size"):
        assert getattr(dataclasses.replace(wanted, **fields), name) == getattr(wanted, name)


def test_an_import_is_exported_as_the_converted_directory(tmp_path):
    words = ("--tokenizer", golden("llama") / "tokenizer.json", "--sequence-length", LENGTH)
    assert convert("import", path_of("llama"), "--run-dir", tmp_path / "run", *words) == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    was, found = open_tensors(golden("llama")), open_tensors(tmp_path / "out")
    assert was.keys() == found.keys()
    for name, tensor in was.items():
        assert tensor.rows(0, tensor.shape[0]).tobytes() == found[name].rows(0, tensor.shape[0]).tobytes(), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "llama3" and config["rms_norm_eps"] == 1e-5


def test_quantised_rows_are_the_librarys(tmp_path):
    """Q8_0 and F16, read in parts; the norm stays fp32."""
    file, weights = written(tmp_path, {"blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q8_0})
    tensor = open_gguf(file).tensors["model.layers.0.self_attn.q_proj.weight"]
    quantised = gguf.quantize(weights["blk.0.attn_q.weight"], gguf.GGMLQuantizationType.Q8_0)
    whole = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    order = np.arange(32).reshape(2, 8, 2).swapaxes(1, 2).ravel()  # two heads of 16: even elements, then odd ones
    np.testing.assert_array_equal(tensor.rows(0, 32), whole[order])
    np.testing.assert_array_equal(tensor.rows(16, 32), whole[order][16:])


def written(tmp_path, kinds, tokens=None, **metadata):
    """A Llama of one layer in a file by the library; `kinds`: quantisations of tensors that are not fp32."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    sizes = dict(block_count=1, context_length=64, embedding_length=32, feed_forward_length=64)
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (64, 32), "output_norm": (32,)}
    layer = {"attn_norm": (32,), "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    layer |= {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    weights = {f"{name}.weight": draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, array in weights.items():
        kind = kinds.get(name)
        writer.add_tensor(name, array if kind is None else gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, weights


def test_every_token_that_ends_what_is_said_is_an_end(tmp_path):
    """Instruction models end turns with another token than texts."""
    for ids, wanted in (({"eos": 3}, 3), ({"eos": 3, "eot": 5, "eom": 3}, [3, 5]), ({"eot": 5}, 5), ({}, None)):
        file, _ = written(tmp_path, {}, **{f"{name}_token_id": token for name, token in ids.items()})
        assert config_keys(open_gguf(file)).get("eos_token_id") == wanted


def retyped(data: bytes, name: bytes, kind: int) -> bytes:
    """The file with another type for a vector."""
    place = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8
    return data[:place] + struct.pack("<I", kind) + data[place + 4 :]


BAD = {
    "empty": (lambda data: b"", "truncated, damaged, not GGUF or newer"),
    "another format": (lambda data: b"PK" + data[2:], "GGUF .*magic"),
    "cut in the metadata": (lambda data: data[:500], "truncated, damaged, not GGUF or newer"),
    "cut in the tensors": (lambda data: data[:-100], "truncated, damaged, not GGUF or newer"),
    "an architecture": (lambda data: data.replace(b"llama", b"mamba"), "architecture 'mamba' is not supported: give a"),
    "an unknown type": (
        lambda data: retyped(data, b"output_norm.weight", 99),
        "99.* is not a valid GGMLQuantizationType",
    ),
    "integers": (
        lambda data: retyped(data, b"output_norm.weight", 26),
        "output_norm.weight is quantised as I32, which",
    ),
    "a missing size": (
        lambda data: data.replace(b"llama.block_count", b"other.block_count"),
        "has no llama.block_count: the model's size is unknown",
    ),
    "an unknown setting": (
        lambda data: data.replace(b"llama.feed_forward_length", b"llama.feed_forward_lengtx"),
        "llama.feed_forward_lengtx = 24 is not supported by megajax's block",
    ),
    "other rotary factors": (
        lambda data: data.replace(struct.pack("<f", 4.0), struct.pack("<f", 5.0)),
        "rotary factors .* are not those of Llama 3",
    ),
    "no tokenizer": (lambda data: data, "tokenizer of kind 'no_vocab' .* cannot be rebuilt .*: pass --tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_line_and_writes_nothing(case, tmp_path, capsys):
    damage, words = BAD[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(damage(path_of("llama").read_bytes()))
    assert convert("import", file, "--run-dir", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ") and re.search(words, message), message
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_missing_file_a_missing_library_and_a_file_for_a_directory(tmp_path, capsys, monkeypatch):
    from experiments import gpt3

    assert convert("import", tmp_path / "no.gguf", "--run-dir", tmp_path / "run") == 2
    assert "cannot read" in capsys.readouterr().err
    assert gpt3.main(["--init-from", str(path_of("llama"))]) == 2
    assert "is a GGUF file, and a directory is needed: import it first" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert convert("import", path_of("llama"), "--run-dir", tmp_path / "run") == 2
    assert "pip install 'megajax[gguf]'" in capsys.readouterr().err


TEXT = "Line 1:\tHe didn't pay 12345.67 for 3 apples, she'LL say\r\n  "
TEXT += "\u4e2d\u6587 nai\u0308ve \U0001f600  end <|end|>go<|end|> 2 "
# Pieces before the merges, by hand: what differs between the four.
PIECES = {
    "gpt-2": ["\u0120pay", "\u012012345", ".", "67", "\u0120for"],
    "smollm": ["\u0120pay", "\u0120", "1", "2", "3", "4", "5", ".", "6", "7", "\u0120for"],
    "llama-bpe": ["\u0120pay", "\u0120", "123", "45", ".", "67", "\u0120for"],
    "qwen2": ["\u0120pay", "\u0120", "1", "2", "3", "4", "5", ".", "6", "7", "\u0120for"],
}


@pytest.mark.parametrize("words", PIECES)
def test_the_tokenizer_is_rebuilt(words, tmp_path):
    """Merges that join every word at once show the pieces; special tokens are found in the text, and text returns."""
    from tokenizers import Tokenizer

    from megajax.data.tokenizers import load_tokenizer

    alphabet = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
    tokens = [*alphabet, "<|end|>", "\u0120p", "ay", "\u0120pay", "12"]
    kinds = [1] * len(alphabet) + [3, 1, 1, 1, 1]
    merges = ["\u0120 p", "a y", "\u0120p ay", "1 2"]
    metadata = {f"tokenizer.ggml.{name}": value for name, value in dict(model="gpt2", pre=words, tokens=tokens).items()}
    metadata |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": kinds}
    metadata |= {"tokenizer.ggml.eos_token_id": tokens.index("<|end|>"), "tokenizer.chat_template": "{{ messages }}"}
    write_tokenizer(metadata, tmp_path / "x.gguf", tmp_path)
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pieces = [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(TEXT)]
    start = pieces.index("\u0120pay")
    assert pieces[start : start + len(PIECES[words])] == PIECES[words]
    assert ("'LL" in pieces) == (words in ("llama-bpe", "qwen2"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|end|>" and settings["chat_template"] == "{{ messages }}"
    ours = load_tokenizer(str(tmp_path / "tokenizer.json"), "<|end|>")
    ids = ours.encode(TEXT).tolist()
    found = [tokens[one] for one in ids]
    assert found.count("<|end|>") == 2 and ("12" in found) == (words in ("gpt-2", "llama-bpe"))
    composed = TEXT.replace("i\u0308", "\u00ef") if words == "qwen2" else TEXT
    assert ours.inner.decode(ids, skip_special_tokens=False) == composed


def test_a_damaged_tokenizer_is_one_line(tmp_path, capsys):
    file, _ = written(
        tmp_path, {}, tokenizer_model="gpt2", tokenizer_pre="smollm", token_list=["a"], token_merges=["a b"]
    )
    assert convert("import", file, "--run-dir", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert "has a damaged tokenizer" in message and message.count("\n") == 1

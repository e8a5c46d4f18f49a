"""The directories of variants.py: read as transformers reads them, exported so that it reads the same, or refused."""

import dataclasses
import re
import sys

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.interop.hugging_face.config import family_of_model, merge_config, read_config
from megajax.interop.hugging_face.keys import read_json
from megajax.interop.hugging_face.quantized import BlockScaled, MicroScaled, dequantized, open_weights
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.safetensors import open_tensors
from tests.interop.hugging_face import convert, golden, logits_of, training_of
from tests.interop.make_golden import LENGTH, tokens
from tests.interop.variants import (
    CONFIGS,
    DECODER,
    F8,
    QUANTIZED,
    REFUSED,
    TENSORS,
    arrays_of,
    change_keys,
    move,
    variant,
    write_arrays,
)

pytest.importorskip("transformers")
READ = CONFIGS | TENSORS | QUANTIZED


@pytest.mark.parametrize("name", READ)
def test_the_fields_are_those_that_transformers_computes_with(name, tmp_path):
    model = read_config(variant(READ[name], tmp_path))[1]
    for field, value in READ[name][3].items():
        assert getattr(model, field) == value, field


@pytest.mark.parametrize("name", READ)
def test_an_exported_config_is_read_back_as_the_same_model(name, tmp_path):
    """By transformers: from the imported config.json, and from none."""
    directory = variant(READ[name], tmp_path)
    family, model = read_config(directory)
    original, keys = read_json(directory / "config.json"), family_of_model(model, family.name)[1]
    (tmp_path / "out").mkdir()
    for known in (original, {}):
        merged = merge_config(known, dict(keys), "float32")
        assert "quantization_config" not in merged
        change_keys(directory, {})
        (tmp_path / "out" / "config.json").write_text("{}")
        change_keys(tmp_path / "out", merged)
        back = read_config(tmp_path / "out")[1]
        left_out = {"name": model.name, "dropout": model.dropout, "init_deviation": model.init_deviation}
        left_out |= {"head_size": model.head_size, "rotary_original_length": model.rotary_original_length}
        assert dataclasses.replace(back, **left_out) == model
        assert back.head_dimension == model.head_dimension


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_one_line(name, tmp_path, capsys):
    directory = variant(REFUSED[name], tmp_path / "in")
    assert convert("import", directory, "--run-dir", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and re.search(REFUSED[name][3], message), message
    assert not (tmp_path / "run").exists()


def test_the_bias_of_bert_may_have_its_other_name(tmp_path):
    directory = variant(("bert", {}, move("cls.predictions.bias", DECODER + "bias")), tmp_path / "in")
    assert convert("import", directory, "--run-dir", tmp_path / "run", "--tokenizer", directory / "vocab.txt") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    name = "cls.predictions.bias"
    np.testing.assert_array_equal(arrays_of(tmp_path / "out")[name], arrays_of(golden("bert"))[name])


def test_a_config_is_read_by_transformers_and_written_without_it(tmp_path, monkeypatch):
    directory = variant(("llama", {}, None), tmp_path)
    model = read_config(directory)[1]
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", None)
    family, keys = family_of_model(model)
    assert merge_config({}, keys, "float32")["rope_scaling"]["rope_type"] == "llama3" and family.name == "llama"
    with pytest.raises(ConfigError, match=r"needs the library transformers .*: pip install 'megajax\[hf\]'"):
        read_config(directory)


def test_an_adapter_beside_a_model_is_one_line(tmp_path, capsys):
    directory = variant(("llama", {}, None), tmp_path)
    (directory / "adapter_config.json").write_text("{}")
    assert convert("import", directory, "--run-dir", tmp_path / "run") == 2
    assert "has an adapter of PEFT: merge it" in capsys.readouterr().err


def test_one_file_goes_before_shards_as_in_transformers(tmp_path):
    """A directory that was written twice, in two ways."""
    directory = variant(("llama", {}, None), tmp_path)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "old.safetensors"}}')
    assert len(open_tensors(directory)) == 39


@pytest.mark.parametrize("name", ["unequal rates", "dropout of attention", "noise of the router"])
def test_what_changes_training_only_is_a_note(name, tmp_path, capsys):
    directory = variant(CONFIGS[name], tmp_path)
    for _ in range(2):
        read_config(directory)
    message = capsys.readouterr().err
    assert message.startswith("note: ") and message.count("\n") == 1, message


@pytest.mark.parametrize("name", ["tied, but two tables", "tied, and two equal tables"])
def test_an_export_says_whether_the_tables_are_tied(name, tmp_path):
    directory = variant(TENSORS[name], tmp_path)
    assert convert("import", directory, "--run-dir", tmp_path / "run") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    tied = TENSORS[name][3]["tied_embeddings"]
    assert read_json(tmp_path / "out" / "config.json")["tie_word_embeddings"] == tied
    found, was = arrays_of(tmp_path / "out"), arrays_of(directory)
    assert ("lm_head.weight" in found) == (not tied)
    for key, array in found.items():
        np.testing.assert_array_equal(array, was[key])


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_export_of_quantised_weights_is_not_quantised(name, tmp_path):
    directory = variant(QUANTIZED[name], tmp_path)
    assert convert("import", directory, "--run-dir", tmp_path / "run") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out", "--dtype", "fp32") == 0
    assert "quantization_config" not in read_json(tmp_path / "out" / "config.json")
    found, wanted = open_tensors(tmp_path / "out"), open_weights(directory)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        whole = tensor.rows(0, tensor.shape[0])
        np.testing.assert_array_equal(found[key].rows(0, tensor.shape[0]), whole)
        parts = [tensor.rows(start, min(start + 3, len(whole))) for start in range(0, len(whole), 3)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_blocks_at_the_edges_are_smaller(tmp_path):
    """[300, 200] in blocks of 128, as DeepSeek's kernels have them."""
    draw = np.random.default_rng(0)
    weight, scale = draw.standard_normal((300, 200)).astype(F8), draw.uniform(0.1, 2, (3, 2)).astype(np.float32)
    write_arrays(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale})
    tensor = dequantized(open_tensors(tmp_path), {"quant_method": "fp8"}, tmp_path)["a.weight"]
    assert isinstance(tensor, BlockScaled) and tensor.shape == (300, 200)
    wanted = weight.astype(np.float32)
    for row in range(3):
        for column in range(2):
            wanted[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] *= scale[row, column]
    for start, stop in ((0, 300), (100, 150), (128, 129), (255, 300)):
        np.testing.assert_array_equal(tensor.rows(start, stop), wanted[start:stop])


def packed(tmp_path, shape=(3, 10, 4)) -> MicroScaled:
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (*shape, 16), np.uint8)
    scales = draw.integers(110, 130, shape, np.uint8)
    write_arrays(tmp_path, {"experts.up_blocks": blocks, "experts.up_scales": scales})
    return dequantized(open_tensors(tmp_path), {"quant_method": "mxfp4"}, tmp_path)["experts.up"]


def test_mxfp4_is_two_numbers_in_a_byte(tmp_path):
    """The low bits first; the exponent is of 32 numbers."""
    blocks, scales = np.zeros((1, 2, 16), np.uint8), np.uint8([[127, 125]])
    blocks[0, 0, 0], blocks[0, 1, 15] = 0x71, 0xF9  # 0.5 and 6; -0.5 and -6, each a fourth
    write_arrays(tmp_path, {"x_blocks": blocks, "x_scales": scales})
    tensor = dequantized(open_tensors(tmp_path), {"quant_method": "mxfp4"}, tmp_path)["x"]
    row = tensor.rows(0, 1)[0]
    assert tensor.shape == (1, 64) and row[:2].tolist() == [0.5, 6] and row[62:].tolist() == [-0.125, -1.5]
    assert not row[2:62].any()


@pytest.mark.slow
def test_mxfp4_is_that_of_transformers(tmp_path):
    torch, mxfp4 = pytest.importorskip("torch"), pytest.importorskip("transformers.integrations.mxfp4")
    tensor = packed(tmp_path)
    blocks, scales = (torch.from_numpy(one.rows(0, 3)) for one in (tensor.blocks, tensor.scales))
    wanted = mxfp4._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    np.testing.assert_array_equal(tensor.rows(0, 3), wanted)
    np.testing.assert_array_equal(tensor.rows(1, 2), wanted[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_the_logits_are_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    directory = variant(READ[name], tmp_path)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens())).logits.float().numpy()
    found = dataclasses.replace(read_config(directory)[1], sequence_length=LENGTH, dropout=0.0)
    training = training_of(found)
    np.testing.assert_allclose(
        logits_of(training, initial_params(str(directory), training)), wanted, atol=2e-5, rtol=1e-5
    )

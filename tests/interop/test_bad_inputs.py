"""Damaged directories and wrong options: one line that names the cause, and nothing half-written."""

import json
import re
import shutil

import numpy as np
import pytest

from megajax.interop.safetensors import INDEX, SINGLE, Shards, open_tensors
from tests.interop.hugging_face import change_config, convert, copy_of, golden


def rewrite(directory, change):
    """Writes model.safetensors again, with `change` applied to the dictionary of arrays."""
    arrays = {name: one.rows(0, one.shape[0]) for name, one in open_tensors(directory).items()}
    change(arrays)
    shards = Shards(directory, {name: array.shape for name, array in arrays.items()}, np.dtype(np.float32), 10**9)
    shards.create()
    for name, array in arrays.items():
        shards.write(name, 0, array)


def truncate(directory):
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:-100])


def shard(directory, **wrong):
    """Splits the weights into two files with an index, of which entries are replaced."""
    tensors = open_tensors(directory)
    arrays = {name: one.rows(0, one.shape[0]) for name, one in tensors.items()}
    shards = Shards(directory, {name: one.shape for name, one in tensors.items()}, np.dtype(np.float32), 25_000)
    shards.create()
    for name, array in arrays.items():
        shards.write(name, 0, array)
    (directory / SINGLE).unlink()
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= wrong
    (directory / INDEX).write_text(json.dumps(index))


def header(directory, text: bytes):
    (directory / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


NORM = "model.norm.weight"
W2, UP = "model.layers.2.block_sparse_moe.experts.3.w2.weight", "model.layers.1.mlp.experts.4.up_proj.weight"
F4 = b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 8]}}'
IMPORTS = {  # (family, what is wrong, words of the message)
    "no config": ("llama", lambda d: (d / "config.json").unlink(), "cannot read .*config.json: No such file"),
    "config no JSON": ("llama", lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
    "config a list": ("llama", lambda d: (d / "config.json").write_text("[]"), "JSON list, not an object"),
    "unknown family": (
        "llama",
        lambda d: change_config(d, model_type="mamba"),
        "model_type = 'mamba' is not supported",
    ),
    "no family": ("llama", lambda d: change_config(d, model_type=None), "model_type = '' is not supported"),
    # transformers has a default for each size, of a released model
    "no size": ("llama", lambda d: change_config(d, hidden_size=None), "has shape .*, and this model's is .*4096"),
    "size a text": (
        "qwen2",
        lambda d: change_config(d, hidden_size="16"),
        "config.json: transformers refuses it .*'hidden_size' expected int, got str",
    ),
    "illegal size": ("qwen2", lambda d: change_config(d, num_key_value_heads=3), "not a legal model: kv_heads = 3"),
    "activation": ("llama", lambda d: change_config(d, hidden_act="relu"), "hidden_act = 'relu' is not supported"),
    "scaling": (
        "llama",
        lambda d: change_config(d, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope_parameters: rope_type = 'dynamic' is not supported",
    ),
    "setting of a scaling": (
        "llama",
        lambda d: change_config(d, rope_parameters={"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}),
        "rope_parameters: partial_rotary_factor = 0.5 is not supported",
    ),
    "quantized": (
        "mistral",
        lambda d: change_config(d, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised by 'gptq' are not read, only fp8 and mxfp4: dequantise it with GPTQModel",
    ),
    "windows in some layers": (
        "mistral",
        lambda d: change_config(d, layer_types=["full_attention"] * 2 + ["sliding_attention"] * 2),
        "layer_types = .* is not supported",
    ),
    "scaled by the layer": (
        "gpt2",
        lambda d: change_config(d, scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx = True is not supported",
    ),
    "no weights": ("llama", lambda d: (d / SINGLE).unlink(), "has neither model.safetensors nor"),
    "torch's weights": (
        "llama",
        lambda d: (d / SINGLE).rename(d / "pytorch_model.bin"),
        "but pytorch_model.bin: convert it",
    ),
    "truncated": ("gpt2", truncate, "model.safetensors is truncated: it ends before the end of"),
    "empty": ("gpt2", lambda d: (d / SINGLE).write_bytes(b""), "truncated, or not in the safetensors format"),
    "no header": ("gpt2", lambda d: header(d, b"{]"), "model.safetensors has a damaged header"),
    "unknown dtype": ("gpt2", lambda d: header(d, F4), "dtype 'F4': only F32, BF16, F16, .* are read"),
    "missing shard": (
        "llama",
        lambda d: (shard(d), (d / "model-00002-of-00003.safetensors").unlink()),
        "cannot read .*model-00002-of-00003.safetensors: No such file",
    ),
    "wrong index": (
        "llama",
        lambda d: shard(d, **{NORM: "model-00002-of-00003.safetensors"}),
        f"says that {NORM} is in model-00002-of-00003.safetensors, which does not have it",
    ),
    "index without a name": (
        "llama",
        lambda d: ((d / SINGLE).unlink(), (d / INDEX).write_text("{}")),
        "has no weight_map",
    ),
    "index outside": ("llama", lambda d: shard(d, **{NORM: "../x"}), "names the file '../x'"),
    "missing tensor": ("qwen3", lambda d: rewrite(d, lambda a: a.pop(NORM)), f"has no tensor {NORM}: did you mean"),
    "left-over tensor": (
        "qwen3",
        lambda d: rewrite(d, lambda a: a.update({"model.extra.weight": np.zeros(3, np.float32)})),
        "has a tensor model.extra.weight, which qwen3",
    ),
    "wrong shape": (
        "qwen3",
        lambda d: rewrite(d, lambda a: a.update({NORM: np.zeros(17, np.float32)})),
        rf"{NORM} has shape \(17,\), and this model's is \(16,\)",
    ),
    "more layers than weights": (
        "llama",
        lambda d: change_config(d, num_hidden_layers=5),
        r"has no tensor model.layers.4.*: did you mean",
    ),
    "vocabulary of another model": (
        "llama",
        lambda d: change_config(d, vocab_size=65),
        r"lm_head.weight has shape \(64, 16\), and this model's is \(65, 16\)",
    ),
    "tokenizer of a larger vocabulary": (
        "llama",
        lambda d: (change_config(d, vocab_size=60), rewrite(d, lambda a: cut_vocabulary(a, 60))),
        "has 64 tokens, but model llama knows 60",
    ),
    "no number of experts": (  # transformers' default is 8
        "mixtral",
        lambda d: change_config(d, num_local_experts=None),
        "has no tensor model.layers.0.block_sparse_moe.experts.4.w2.weight",
    ),
    "no experts": (
        "qwen3_moe",
        lambda d: change_config(d, num_local_experts=0),
        "num_experts = 0 is not supported",
    ),
    "more experts for a token than there are": (
        "olmoe",
        lambda d: change_config(d, num_experts_per_tok=6),
        "not a legal model: experts_per_token = 6 is above experts = 5",
    ),
    "only dense layers": (
        "qwen3_moe",
        lambda d: change_config(d, mlp_only_layers=[0, 1, 2, 3]),
        r"mlp_only_layers = \[0, 1, 2, 3\] is not supported",
    ),
    "a step of zero between sparse layers": (
        "qwen3_moe",
        lambda d: change_config(d, decoder_sparse_step=0),
        "decoder_sparse_step = 0 is not supported",
    ),
    "dense layers without tensors": (
        "qwen3_moe",
        lambda d: change_config(d, decoder_sparse_step=2),
        "has no tensor model.layers.0.mlp",
    ),
    "latent attention": (
        "qwen3_moe",
        lambda d: change_config(d, model_type="deepseek_v3", num_key_value_heads=1),
        "num_key_value_heads = 1 is not supported",  # latents have keys of all heads
    ),
    "clipped queries": ("olmoe", lambda d: change_config(d, clip_qkv=8.0), "clip_qkv = 8.0 is not supported"),
    "a norm of another size": ("olmoe", lambda d: change_config(d, head_dim=8), "head_dim = 8 is not supported"),
    "one expert's tensor missing": (
        "mixtral",
        lambda d: rewrite(d, lambda a: a.pop(W2)),
        f"has no tensor {W2}: did you mean",
    ),
    "one expert's tensor of another shape": (
        "qwen3_moe",
        lambda d: rewrite(d, lambda a: a.update({UP: np.zeros((8, 15), np.float32)})),
        rf"{UP} has shape \(8, 15\), and this model's is \(8, 16\)",
    ),
    "one expert too many": (
        "mixtral",
        lambda d: change_config(d, num_local_experts=3),
        r"gate.weight has shape \(4, 16\), and this model's is \(3, 16\)|has a tensor .*experts.3.* mixtral",
    ),
    "no tokenizer": ("llama", lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer, such as tokenizer.json"),
    "damaged tokenizer": (
        "llama",
        lambda d: (d / "tokenizer.json").write_text("{}"),
        "tokenizer .*llama is not a tokenizer that",
    ),
}


def cut_vocabulary(arrays, rows):
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[name] = arrays[name][:rows]


@pytest.mark.parametrize("case", IMPORTS)
def test_a_bad_directory_is_one_line_and_writes_nothing(case, tmp_path, capsys):
    family, damage, words = IMPORTS[case]
    directory = copy_of(family, tmp_path)
    damage(directory)
    assert convert("import", directory, "--run-dir", tmp_path / "run") == 2
    check_message(capsys, words)
    assert [path.name for path in tmp_path.iterdir()] == [family]


def check_message(capsys, words):
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    assert re.search(words, message), message


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("imported") / "run"
    assert convert("import", golden("llama"), "--run-dir", path) == 0
    return path


OPTIONS = {
    "a run directory with files": ("import {golden} --run-dir {golden}", "exists and is not an empty directory"),
    "an unknown tokenizer": ("import {golden} --run-dir {new} --tokenizer gpt3", "tokenizer = 'gpt3' is not known"),
    "no such end of document": ("import {golden} --run-dir {new} --end-of-document <x>", "has no token '<x>'"),
    "a table that is too short": ("import {gpt2} --run-dir {new} --sequence-length 81", "table has 80 positions"),
    "no directory": ("import {new} --run-dir {new}", "cannot read .*config.json: No such file"),
    "a run that does not exist": ("export {new} --out {new}", "has no checkpoint: give the --run-dir of a run"),
    "a step that does not exist": (
        "export {run} --out {new} --step 7",
        "has no checkpoint of step 7: pass --step with .* 0",
    ),
    "an output with files": ("export {run} --out {golden}", "exists and is not an empty directory: pass another --out"),
    "no size": ("export {run} --out {new} --max-shard-size 5XB", "must be a size such as 5GB"),
    "no dtype": ("export {run} --out {new} --dtype int8", "int8"),
    "no command": ("convert {run}", "convert"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_one_line_and_write_nothing(case, run_dir, tmp_path, capsys):
    words, message = OPTIONS[case]
    places = {"golden": golden("llama"), "gpt2": golden("gpt2"), "new": tmp_path / "new", "run": run_dir}
    assert convert(*words.format(**places).split()) == 2
    check_message(capsys, message)
    assert not list(tmp_path.iterdir())


def changed_meta(path, **fields):
    """Sets fields of the model in a checkpoint's metadata, and deletes its checksums, which would no longer fit."""
    meta = path / "checkpoints" / "step_00000000" / "meta" / "metadata"
    values = json.loads(meta.read_text())
    values["config"]["model"] |= fields
    meta.write_text(json.dumps(values))


CHECKPOINTS = {
    "damaged": (
        lambda run: next((run / "checkpoints").rglob("d/*")).write_bytes(b"x"),
        "checkpoint .* is damaged",
    ),
    "a user's model": (lambda run: changed_meta(run, width=3), "is of a model with width, not of a ModelConfig"),
    "no family": (
        lambda run: changed_meta(run, rotary_fraction=0.5),
        "rotary_fraction = 0.5 has no place in a config.json of .*the nearest is llama",
    ),
    "an illegal model": (lambda run: changed_meta(run, heads=3), "does not store a legal model"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_bad_checkpoint_is_one_line_and_exports_nothing(case, run_dir, tmp_path, capsys):
    damage, words = CHECKPOINTS[case]
    run = shutil.copytree(run_dir, tmp_path / "run")
    damage(run)
    assert convert("export", run, "--out", tmp_path / "out") == 2
    check_message(capsys, words)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

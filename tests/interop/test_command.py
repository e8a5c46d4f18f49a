"""The commands: --init-from, a run from an import, several processes, and the memory that they take."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from experiments import gpt3
from megajax.config import ConfigError
from megajax.config.cli import parse
from megajax.interop.hugging_face.config import read_config
from megajax.interop.safetensors import Shards, open_tensors
from tests.interop.described import write_tokenizer
from tests.interop.hugging_face import convert, copy_of, golden

ROOT = pathlib.Path(__file__).parents[2]


def run_of(*words):
    return parse([str(word) for word in words], gpt3.EXPERIMENT).run(1, "fp32")


def test_init_from_takes_the_model_and_the_tokenizer_and_not_the_toys_settings():
    directory = golden("qwen3")
    run = run_of("--init-from", directory, "--sequence-length", 16, "--dropout", 0.1)
    run.validate()
    model = read_config(directory)[1]
    assert (run.model.query_key_norm, run.model.head_size, run.model.hidden) == (True, 12, 16)
    assert (run.model.name, run.model.sequence_length, run.model.dropout) == (model.name, 16, 0.1)
    assert run.data.tokenizer == str(directory)
    assert run.train.learning_rate != gpt3.DEFAULTS["learning_rate"] and run.train.init_from == str(directory)
    assert run_of("--init-from", directory, "--tokenizer", "gpt2").data.tokenizer == "gpt2"


def test_init_from_a_wrong_directory_is_one_line(tmp_path, capsys):
    assert gpt3.main(["--init-from", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: cannot read") and message.count("\n") == 1


def test_an_experiment_without_an_importer_says_so():
    with pytest.raises(ConfigError, match="cannot import a model: use experiments.gpt3"):
        parse(["--init-from", "somewhere"], "test", {"model": "tiny"})


def test_the_configuration_of_an_import_is_its_model(tmp_path):
    assert convert("import", golden("llama"), "--run-dir", tmp_path / "run") == 0
    run = run_of("--config", tmp_path / "run" / "config.toml", "--resume", "auto", "--steps", 10)
    run.validate()
    model = read_config(golden("llama"))[1]
    for name in ("layers", "rotary_scaling", "rotary_factor", "rotary_original_length", "sequence_length", "kv_heads"):
        assert getattr(run.model, name) == getattr(model, name)
    assert run.train.learning_rate == 2e-5 and run.train.warmup_steps <= 1
    assert pathlib.Path(run.data.tokenizer) == tmp_path / "run" / "tokenizer"


RATES = (
    "--steps 2 --global-batch-size 8 --microbatch-size 1 --learning-rate 1e-3 --warmup-steps 0 --validation-batches 1"
)


def train(words: str, text: pathlib.Path) -> str:
    """The output of experiments.gpt3."""
    command = [sys.executable, "-m", "experiments.gpt3", "--text", str(text), *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_same_losses_from_init_from_on_any_mesh_and_from_an_import(tmp_path):
    """And a run that was started with --init-from resumes from its own checkpoint."""
    directory, text = copy_of("qwen3", tmp_path), tmp_path / "text.txt"
    write_tokenizer(directory)  # that of Qwen, which transformers takes otherwise, has no such words
    text.write_text("w1 w5 w7 w3 w60 w8 w9 w1 w2 " * 300)
    assert convert("import", directory, "--run-dir", tmp_path / "imported", "--sequence-length", 16) == 0
    start = f"--init-from {directory} --sequence-length 16"
    runs = {
        "one": f"{start} --devices cpu:1 --run-dir {tmp_path / 'one'}",
        "four": f"{start} --devices cpu:4 --pipe 2 --tensor 2 --schedule zb_v --run-dir {tmp_path / 'four'}",
        "import": f"--config {tmp_path / 'imported' / 'config.toml'} --resume auto --devices cpu:2 --pipe 2 --beta2 0.95",
    }
    losses = {}
    for name, words in runs.items():
        train(f"{words} {RATES}", text)
        lines = (tmp_path / ("imported" if name == "import" else name) / "log.jsonl").read_text().splitlines()
        losses[name] = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert len(losses["one"]) == 2
    np.testing.assert_allclose(losses["four"], losses["one"], rtol=1e-5)
    np.testing.assert_allclose(losses["import"], losses["one"], rtol=1e-5)
    config = tmp_path / "one" / "config.toml"
    out = train(f"--config {config} --resume auto --steps 3 --devices cpu:1", text)
    assert "after step 2" in out and "weights   from" not in out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_two_processes_write_what_one_writes(family, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def both(*words):
        flags = f"--coordinator 127.0.0.1:{port} --processes 2 --process-id".split()
        command = [sys.executable, "-m", "megajax.interop.hugging_face", *map(str, words), *flags]
        started = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(2)]
        assert [process.wait(120) for process in started] == [0, 0]

    both("import", golden(family), "--run-dir", tmp_path / "run")
    both("export", tmp_path / "run", "--out", tmp_path / "out", "--max-shard-size", "20KB")
    was, found = open_tensors(golden(family)), open_tensors(tmp_path / "out")
    for name, tensor in was.items():
        assert tensor.rows(0, tensor.shape[0]).tobytes() == found[name].rows(0, tensor.shape[0]).tobytes()


HIDDEN, INNER, VOCABULARY, LAYERS = 2048, 8192, 64000, 16  # 1.1 billion parameters, 2.2 GB in bf16


def large_model(directory: pathlib.Path) -> int:
    """Writes a Llama of random weights; returns the bytes of its largest two tensors."""
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes((golden("llama") / "tokenizer.json").read_bytes())
    keys = dict(model_type="llama", num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INNER)
    keys |= dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=VOCABULARY, max_position_embeddings=2048)
    (directory / "config.json").write_text(json.dumps(keys | dict(tie_word_embeddings=True, torch_dtype="bfloat16")))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    square, keys_or_values = (HIDDEN, HIDDEN), (8 * HIDDEN // 32, HIDDEN)
    for layer in range(LAYERS):
        own = {"self_attn.q_proj": square, "self_attn.k_proj": keys_or_values, "self_attn.v_proj": keys_or_values}
        own |= {"self_attn.o_proj": square, "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
        own |= {"mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    shards = Shards(directory, shapes, np.dtype(ml_dtypes.bfloat16), 10**9)
    shards.create()
    draw = np.random.default_rng(0)
    for name, (rows_, *rest) in shapes.items():
        for start in range(0, rows_, 2048):
            size = (min(2048, rows_ - start), *rest)
            shards.write(name, start, 0.02 * draw.standard_normal(size, dtype=np.float32))
    return sum(sorted(2 * int(np.prod(shape)) for shape in shapes.values())[-2:])


PEAK = """
import re, sys
from megajax.interop.hugging_face.__main__ import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""


def peak(*words) -> int:
    """The largest resident memory of a command, in bytes."""
    command = [sys.executable, "-c", PEAK, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.slow
def test_the_memory_of_import_and_export_does_not_grow_with_the_model(tmp_path):
    """At most 1.5 times the largest two tensors of a 2 GB model, above a process that converts a tiny one."""
    largest = large_model(tmp_path / "model")
    idle = peak("import", golden("llama"), "--run-dir", tmp_path / "small")
    assert peak("import", tmp_path / "model", "--run-dir", tmp_path / "run") - idle < 1.5 * largest
    assert peak("export", tmp_path / "run", "--out", tmp_path / "out", "--max-shard-size", "1GB") - idle < 1.5 * largest
    was, found = open_tensors(tmp_path / "model"), open_tensors(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.layers.7.mlp.up_proj.weight"):
        rows_ = was[name].shape[0]
        assert was[name].rows(rows_ - 9, rows_).tobytes() == found[name].rows(rows_ - 9, rows_).tobytes()

"""Leaves of experts, each made of many tensors: which of them are read, and the memory that this takes."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from megajax.interop.hugging_face import weights
from megajax.interop.hugging_face.tables import TABLES
from megajax.interop.hugging_face.weights import Weights, regions
from megajax.interop.safetensors import Shards, open_tensors
from megajax.train.sinks import read_steps
from tests.interop.described import write_tokenizer
from tests.interop.hugging_face import SPARSE, convert, copy_of, golden, initial, model_of
from tests.interop.test_command import peak, train

UP, DOWN = "blocks/feedforward/up", "blocks/feedforward/down"


def test_regions_are_parts_of_one_expert(monkeypatch):
    pieces = TABLES["mixtral"].leaves[UP]
    chunk, boxes = regions((3, 4, 16, 2, 12), pieces)
    assert chunk == (1, 1, 16, 2, 12) and len(boxes) == 12
    monkeypatch.setattr(weights, "PART_BYTES", 4 * 16 * 2 * 5)
    chunk, boxes = regions((3, 4, 16, 2, 12), pieces)
    assert chunk == (1, 1, 16, 2, 5) and len(boxes) == 36
    assert boxes[-1] == (slice(2, 3), slice(3, 4), slice(0, 16), slice(0, 2), slice(10, 12))
    assert regions((3, 4), ()) == ((3, 4), [(slice(0, 3), slice(0, 4))])


class Watched:
    """A tensor that notes which rows are read."""

    def __init__(self, name, tensor, reads):
        self.name, self.tensor, self.shape, self.reads = name, tensor, tensor.shape, reads

    def rows(self, start, stop):
        self.reads.append((self.name, start, stop))
        return self.tensor.rows(start, stop)


def pieces_in(tensors, pieces):
    return all(piece.tensor.format(0, 0) in tensors for piece in pieces)


def test_only_the_rows_of_a_region_are_read():
    """Half of the inner width of two of the golden Mixtral's four experts, as a tensor and an expert rank would hold it."""
    directory, reads, model = golden("mixtral"), [], model_of("mixtral")
    tensors = {name: Watched(name, tensor, reads) for name, tensor in open_tensors(directory).items()}
    leaves = [name for name, pieces in TABLES["mixtral"].leaves.items() if pieces_in(tensors, pieces)]
    weights = Weights(directory, tensors, "mixtral", model, leaves)
    wanted = slice(1, 2), slice(2, 4), slice(0, 16), slice(0, 2), slice(6, 12)
    found = weights.region(UP, wanted, (4, 4, 16, 2, 12))
    names = {
        f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight" for expert in (2, 3) for name in ("w1", "w3")
    }
    assert sorted(reads) == sorted((name, 6, 12) for name in names)
    for place, expert in enumerate((2, 3)):
        for gate, name in enumerate(("w1", "w3")):
            tensor = tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"].tensor.rows(0, 12)
            np.testing.assert_array_equal(found[0, place, :, gate], tensor[6:].T)


@pytest.mark.slow
@pytest.mark.parametrize("family", SPARSE)
def test_the_routers_measured_leaves_are_zero(family):
    params = initial(family, pipe=2)[1]
    router = params["blocks"]["feedforward"]["router"]
    assert not np.asarray(router["bias"]).any() and not np.asarray(router["losses"]).any()
    assert np.asarray(router["kernel"]).all()


@pytest.mark.slow
def test_training_from_a_sparse_model_balances_it(tmp_path):
    """And its export is of the same family, although the run has a balance loss."""
    source, text, run = copy_of("qwen3_moe", tmp_path), tmp_path / "text.txt", tmp_path / "run"
    write_tokenizer(source)  # that of Qwen, which transformers takes otherwise, has no such words
    text.write_text("w1 w5 w7 w3 w60 w8 w9 w1 w2 " * 300)
    words = f"--init-from {source} --sequence-length 16 --devices cpu:4 --pipe 2 --data 2 --schedule zb_h1"
    words += f" --steps 20 --global-batch-size 8 --microbatch-size 1 --learning-rate 3e-3 --run-dir {run}"
    train(f"{words} --balance-loss 0.1", text)
    records = read_steps(run / "log.jsonl")
    losses = [record["balance_loss"] for record in records if "balance_loss" in record]
    assert losses[-1] < losses[0]
    assert convert("export", run, "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert open_tensors(tmp_path / "out").keys() == open_tensors(golden("qwen3_moe")).keys()


HIDDEN, VOCABULARY, LAYERS, EXPERTS = 1024, 32000, 8, 48  # 1.3 billion parameters, 2.6 GB in bf16


def large_model(directory: pathlib.Path) -> int:
    """Writes an OLMoE of random weights; returns its bytes."""
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes((golden("olmoe") / "tokenizer.json").read_bytes())
    keys = dict(model_type="olmoe", num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=HIDDEN)
    keys |= dict(num_attention_heads=16, num_experts=EXPERTS, num_experts_per_tok=4, max_position_embeddings=2048)
    (directory / "config.json").write_text(json.dumps(keys | dict(vocab_size=VOCABULARY, torch_dtype="bfloat16")))
    norm, square, table = (HIDDEN,), (HIDDEN, HIDDEN), (VOCABULARY, HIDDEN)
    shapes = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": norm}
    for layer in range(LAYERS):
        own = {f"self_attn.{name}_proj": square for name in "qkvo"} | {f"self_attn.{name}_norm": norm for name in "qk"}
        own |= {"input_layernorm": norm, "post_attention_layernorm": norm, "mlp.gate": (EXPERTS, HIDDEN)}
        own |= {
            f"mlp.experts.{expert}.{name}_proj": square for expert in range(EXPERTS) for name in ("gate", "up", "down")
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    shards = Shards(directory, shapes, np.dtype(ml_dtypes.bfloat16), 10**9)
    shards.create()
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        shards.write(name, 0, 0.02 * draw.standard_normal(shape, dtype=np.float32))
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())


@pytest.mark.slow
def test_the_memory_of_import_and_export_does_not_grow_with_the_experts(tmp_path):
    """At most 0.7 GB for a model of 2.6 GB, above a process that converts a tiny one; the result is equal."""
    assert large_model(tmp_path / "model") > 2.5e9
    idle = peak("import", golden("olmoe"), "--run-dir", tmp_path / "small")
    assert peak("import", tmp_path / "model", "--run-dir", tmp_path / "run") - idle < 0.7e9
    assert peak("export", tmp_path / "run", "--out", tmp_path / "out", "--max-shard-size", "1GB") - idle < 0.7e9
    was, found = open_tensors(tmp_path / "model"), open_tensors(tmp_path / "out")
    assert was.keys() == found.keys()
    for name in ("lm_head.weight", "model.layers.7.mlp.experts.47.down_proj.weight"):
        assert was[name].rows(100, 900).tobytes() == found[name].rows(100, 900).tobytes()

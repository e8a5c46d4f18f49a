"""Megatron-LM's checkpoints without torch: the arguments as a model, shards merged, and one model's logits from arrays."""

import re
import sys

import ml_dtypes
import numpy as np
import pytest

from megajax.config import ConfigError, DataConfig
from megajax.interop.hugging_face.read_model import Source, write_run
from megajax.interop.megatron import __main__ as megatron
from megajax.interop.megatron.config import added_biases, model_of, padded_rows
from megajax.interop.megatron.tensors import (
    Merged,
    canonical_name,
    for_model,
    merge,
    reordered_qkv,
    split_gated,
    zero_centred,
)
from tests.interop.hugging_face import convert, golden, logits_of, restored, training_of
from tests.interop.make_golden import VOCABULARY
from tests.interop.make_megatron_golden import CASES, DIRECTORY, arguments_of


class Held:
    """An array as a tensor in a file, which counts the rows that are read."""

    def __init__(self, array):
        self.array, self.shape, self.read = array, array.shape, 0

    def rows(self, start, stop):
        assert 0 <= start <= stop <= self.shape[0]
        self.read += stop - start
        return self.array[start:stop]


def arguments(case: str = "gpt", **changes) -> dict:
    return vars(arguments_of(CASES[case])) | changes


def model(tmp_path, case="gpt", **changes):
    return model_of(arguments(case, **changes), tmp_path / "save" / "iter_0000007", VOCABULARY)


def whole(tensor) -> np.ndarray:
    return tensor.rows(0, tensor.shape[0])


def test_logits_of_arrays_are_megatrons(tmp_path):
    """Group queries, SwiGLU, RMS norms and rotary positions, from stacked layers; also a directory that exports."""
    stored = {}
    for name, bits in np.load(DIRECTORY / "rotary.npz").items():
        array = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        if name.startswith("decoder.layers."):
            parts = {name.replace("layers.", f"layers.{layer}."): one for layer, one in enumerate(array)}
        else:
            parts = {name: array}
        stored |= {canonical_name(one): [Held(part)] for one, part in parts.items()}
    wanted = np.load(DIRECTORY / "rotary.npy")
    model = model_of(arguments("rotary"), tmp_path / "save" / "iter_0000007", VOCABULARY)
    tensors = for_model(merge(stored, gated=True), VOCABULARY, tied=False, added={})
    data = DataConfig(tokenizer=str(golden("llama") / "tokenizer.json"))
    source = Source(tmp_path, "megatron_gated", model, tensors, [golden("llama") / "tokenizer.json"])
    run = write_run(source, tmp_path / "run", data, wanted.shape[1])
    assert run.data.tokenizer == str(tmp_path / "run" / "tokenizer" / "tokenizer.json")
    training = training_of(run.model, pipe=2, tensor=2)
    np.testing.assert_allclose(
        logits_of(training, restored(tmp_path / "run", training).params), wanted, rtol=0, atol=1e-4
    )
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}


def split(name: str, array: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """A rank's part of a tensor, by hand."""
    if "layernorm" in name or name.endswith(("proj.bias", "fc2.bias")):
        return array
    if name.endswith(("proj.weight", "fc2.weight")):
        columns = array.shape[1] // ranks
        return array[:, rank * columns : (rank + 1) * columns]
    rows = array.shape[0] // ranks
    return array[rank * rows : (rank + 1) * rows]


def test_ranks_of_tensor_parallelism_are_merged():
    draw, ranks = np.random.default_rng(0), 3
    layer = "decoder.layers.0."
    shapes = {
        layer + "self_attention.linear_qkv.weight": (48, 5),
        layer + "self_attention.linear_qkv.bias": (48,),
        layer + "self_attention.linear_proj.weight": (5, 24),
        layer + "self_attention.linear_proj.bias": (5,),
        layer + "self_attention.q_layernorm.weight": (4,),
        layer + "mlp.linear_fc2.weight": (5, 12),
        layer + "mlp.linear_fc1.weight": (12, 5),
        "output_layer.weight": (21, 5),
        "embedding.word_embeddings.weight": (21, 5),
    }
    wanted = {name: draw.standard_normal(shape) for name, shape in shapes.items()}
    shards = {name: [Held(split(name, one, rank, ranks)) for rank in range(ranks)] for name, one in wanted.items()}
    found = merge(shards, gated=False)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape
        for step in (1, 5, len(array)):
            parts = [found[name].rows(start, min(start + step, len(array))) for start in range(0, len(array), step)]
            np.testing.assert_array_equal(np.concatenate(parts), array)


def test_only_the_rows_that_are_asked_for_are_read():
    shards = [Held(np.zeros((4, 2))) for _ in range(3)]
    Merged(shards).rows(5, 7)
    assert [shard.read for shard in shards] == [0, 2, 0]


@pytest.mark.parametrize("suffix", ["weight", "bias"])
def test_gates_and_values_of_all_ranks_come_together(suffix):
    """A rank has [its gate; its value]; megatron-core's one-device fc1 has [gate; value]."""
    draw = np.random.default_rng(0)
    gate, up = (draw.standard_normal((8, 3) if suffix == "weight" else 8) for _ in range(2))
    ranks = [Held(np.concatenate([gate[rank : rank + 2], up[rank : rank + 2]])) for rank in range(0, 8, 2)]
    name = f"decoder.layers.3.mlp.linear_fc1.{suffix}"
    found = merge({name: ranks}, gated=True)
    np.testing.assert_array_equal(whole(found[f"{name}_w"]), gate)
    np.testing.assert_array_equal(found[f"{name}_v"].rows(3, 7), up[3:7])
    one = split_gated(Held(np.concatenate([gate, up])))
    np.testing.assert_array_equal([whole(half) for half in one], [gate, up])


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_old_orders_of_queries_keys_and_values(version):
    """Rows are labelled 100 head + 10 (0 query, 1 key, 2 value) + element, and stored as the version does."""
    heads, size = 3, 4
    label = lambda head, kind, element: 100 * head + 10 * kind + element  # noqa: E731
    wanted = [label(a, q, e) for a in range(heads) for q in range(3) for e in range(size)]
    if version < 1:
        stored = [label(a, q, e) for q in range(3) for a in range(heads) for e in range(size)]
    elif version < 2:
        stored = [label(a, q, e) for a in range(heads) for e in range(size) for q in range(3)]
    else:
        stored = wanted
    tensor = reordered_qkv(Held(np.array(stored)), heads, version)
    assert whole(tensor).tolist() == wanted
    assert tensor.rows(5, 20).tolist() == wanted[5:20]


NAMES = {
    "decoder.layers.3.input_layernorm.weight": "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.3.pre_mlp_layernorm.bias": "decoder.layers.3.mlp.linear_fc1.layer_norm_bias",
    "decoder.layers.3.mlp.linear_fc1.layer_norm_bias": "decoder.layers.3.mlp.linear_fc1.layer_norm_bias",
    "decoder.layers.0.mlp.linear_fc1._extra_state": None,
    "decoder.layers.self_attention.core_attention._extra_state/shard_0_1": None,
    "language_model.encoder.layers.0.input_norm.weight": "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    "language_model.transformer.layers.11.attention.query_key_value.bias": (
        "decoder.layers.11.self_attention.linear_qkv.bias"
    ),
    "language_model.encoder.layers.0.self_attention.dense.weight": "decoder.layers.0.self_attention.linear_proj.weight",
    "language_model.encoder.layers.0.post_attention_layernorm.weight": (
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    ),
    "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight": "decoder.layers.0.mlp.linear_fc1.weight",
    "language_model.encoder.layers.0.mlp.dense_4h_to_h.bias": "decoder.layers.0.mlp.linear_fc2.bias",
    "language_model.encoder.final_layernorm.bias": "decoder.final_layernorm.bias",
    "language_model.encoder.final_norm.weight": "decoder.final_layernorm.weight",
    "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "language_model.output_layer.weight": "output_layer.weight",
    "language_model.rotary_pos_emb.inv_freq": None,
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": None,
    "chained_0.optimizer.state.fp32_param.embedding.word_embeddings.weight": None,
    "decoder.layers.0.mlp.router.weight": "decoder.layers.0.mlp.router.weight",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert canonical_name(name) == NAMES[name]


def test_norms_without_their_one_padding_and_copies():
    norm, table = "decoder.layers.0.self_attention.q_layernorm.weight", "embedding.word_embeddings.weight"
    held = {
        norm: Held(np.full(4, 0.5)),
        table: Held(np.arange(12.0).reshape(6, 2)),
        "output_layer.weight": Held(np.ones(1)),
    }
    held["decoder.layers.0.mlp.linear_fc1.weight"] = Held(np.zeros((2, 2)))
    found = for_model(zero_centred(held), vocabulary=5, tied=True, added={"b": (3,)})
    assert whole(found[norm]).tolist() == [1.5] * 4
    assert found[table].shape == (5, 2) and whole(found[table]).tolist() == held[table].array[:5].tolist()
    assert not whole(found["decoder.layers.0.mlp.linear_fc1.weight"]).any()
    assert "output_layer.weight" not in found and whole(found["b"]).tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="vocabulary = 7, but embedding.word_embeddings.weight has 6 rows"):
        for_model(held, 7, tied=True, added={})


YARN = dict(
    yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=16, yarn_beta_fast=16.0, yarn_beta_slow=2
)
LLAMA3 = {"rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_length": 8192}
FIELDS = {  # (changes of the arguments, fields of the model)
    "sizes": ({}, {"layers": 4, "hidden": 16, "heads": 4, "head_size": 4, "kv_heads": 4, "feedforward": 24}),
    "defaults": ({}, {"norm": "layernorm", "activation": "gelu", "biases": True, "positions": "learned"}),
    "tied": ({}, {"tied_embeddings": True, "sequence_length": 24, "vocabulary": VOCABULARY}),
    "groups": ({"group_query_attention": True, "num_query_groups": 2}, {"kv_heads": 2}),
    "groups not used": ({"num_query_groups": 2}, {"kv_heads": 4}),
    "untied": ({"untie_embeddings_and_output_weights": True}, {"tied_embeddings": False}),
    "rms norm": ({"normalization": "RMSNorm", "layernorm_epsilon": 1e-6}, {"norm": "rmsnorm", "norm_epsilon": 1e-6}),
    "old epsilon": ({"layernorm_epsilon": None, "norm_epsilon": 1e-3}, {"norm_epsilon": 1e-3}),
    "gelu by erf": ({"bias_gelu_fusion": False}, {"activation": "gelu_exact"}),
    "no biases for the fusion": (
        {"normalization": "RMSNorm", "add_bias_linear": False},
        {"activation": "gelu_exact", "biases": False, "qkv_biases": False},
    ),
    "old name of no biases": (
        {"normalization": "RMSNorm", "add_bias_linear": None, "disable_bias_linear": True},
        {"biases": False},
    ),
    "biases of qkv": (
        {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True},
        {"biases": False, "qkv_biases": True},
    ),
    "a layer norm's biases": ({"add_bias_linear": False}, {"biases": True, "qkv_biases": True}),
    "swiglu": (
        {"swiglu": True, "ffn_hidden_size": None, "hidden_size": 64},
        {"activation": "swiglu", "feedforward": 128},
    ),
    "geglu": ({"gated_linear_unit": True}, {"activation": "geglu"}),
    "query and key norms": ({"normalization": "RMSNorm", "qk_layernorm": True}, {"query_key_norm": True}),
    "rotary": (
        {"position_embedding_type": "rope", "rotary_base": 500, "rotary_percent": 0.5},
        {"positions": "rotary", "rotary_base": 500.0, "rotary_fraction": 0.5, "rotary_scaling": "none"},
    ),
    "old rotary": ({"use_rotary_position_embeddings": True}, {"positions": "rotary"}),
    "llama 3": ({"position_embedding_type": "rope", "use_rope_scaling": True}, LLAMA3),
    "interpolated": (
        {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 4},
        {"rotary_scaling": "linear", "rotary_factor": 4.0},
    ),
    "yarn": (
        {"position_embedding_type": "yarn", **YARN},
        {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 16, "rotary_attention_factor": None},
    ),
    "yarn with mscale": (
        {"position_embedding_type": "yarn", **YARN, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 1.0},
        {"rotary_attention_factor": 1.0, "rotary_beta_fast": 16.0, "rotary_beta_slow": 2.0},
    ),
    "window": ({"window_size": (5, 0)}, {"sliding_window": 6}),
    "no window": ({"window_size": (-1, -1)}, {"sliding_window": None}),
    "dropout": ({"hidden_dropout": 0.1, "attention_dropout": 0.1}, {"dropout": 0.1}),
    "two dropouts": ({"hidden_dropout": 0.1, "attention_dropout": 0.0}, {"dropout": 0.0}),
}


@pytest.mark.parametrize("case", FIELDS)
def test_arguments_are_fields(case, tmp_path):
    changes, fields = FIELDS[case]
    found = model(tmp_path, **changes)
    assert {name: getattr(found, name) for name in fields} == fields


def test_arguments_of_the_first_versions(tmp_path):
    """They have neither norms nor positions to choose."""
    few = dict(num_layers=2, hidden_size=8, num_attention_heads=2, max_position_embeddings=32, model_parallel_size=2)
    found = model_of(few, tmp_path / "save" / "release", 100)
    assert (found.name, found.activation, found.biases, found.feedforward_size) == ("save", "gelu", True, 32)
    assert padded_rows(few, 257) == 512


def test_biases_that_are_zero(tmp_path):
    args = arguments(add_bias_linear=False, swiglu=True, group_query_attention=True, num_query_groups=2)
    added = added_biases(args, model_of(args, tmp_path, VOCABULARY))
    assert len(added) == 4 * 5 and added["decoder.layers.3.self_attention.linear_qkv.bias"] == (32,)
    assert added["decoder.layers.0.mlp.linear_fc1.bias_v"] == (24,)
    assert not added_biases(arguments(), model(tmp_path))


REFUSED = {
    "num_experts": 8,
    "multi_latent_attention": True,
    "mtp_num_layers": 1,
    "hybrid_override_pattern": "M*M*",
    "heterogeneous_layers_config_path": "x.json",
    "experimental_attention_variant": "gated_delta_net",
    "apply_residual_connection_post_layernorm": True,
    "squared_relu": True,
    "quick_geglu": True,
    "qk_layernorm": True,
    "qk_l2_norm": True,
    "softmax_type": "learnable",
    "attention_output_gate": True,
    "rotary_interleaved": True,
    "normalization": "DeepNorm",
    "position_embedding_type": "none",
    "window_attn_skip_freq": 2,
    "window_size": (4, 4),
    "use_mup": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_block_does_not_have_is_named(name, tmp_path):
    with pytest.raises(ConfigError, match=f"iter_0000007: args: {name} = .* is not supported by megajax's block"):
        model(tmp_path, **{name: REFUSED[name]})


def test_a_missing_size_and_an_illegal_model_are_named(tmp_path):
    with pytest.raises(ConfigError, match="args has no hidden_size"):
        model(tmp_path, hidden_size=None)
    with pytest.raises(ConfigError, match="args are not a legal model: kv_heads = 3"):
        model(tmp_path, group_query_attention=True, num_query_groups=3)


def save(tmp_path, tracker: str | None, *folders: str):
    """A directory of --save with empty files."""
    for folder in folders:
        (tmp_path / "save" / folder).mkdir(parents=True)
        (tmp_path / "save" / folder / "model_optim_rng.pt").write_bytes(b"")
    (tmp_path / "save").mkdir(exist_ok=True)
    if tracker is not None:
        (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text(tracker)
    return tmp_path / "save"


BAD = {  # (tracker, folders, options, words of the message)
    "no directory": (None, (), ("--step", "3"), "--step says 3, and .* has no iter_0000003"),
    "not a checkpoint": (None, (), (), "has neither mp_rank_00 nor metadata.json"),
    "tracker": ("seven", (), (), "latest_checkpointed_iteration.txt: 'seven' is neither a number nor release"),
    "tracker of another": (
        "8",
        ("iter_0000007/mp_rank_00",),
        (),
        "says 8, and .* has no iter_0000008: it has iter_0000007; pass --step",
    ),
    "release": ("release", (), (), "says release, and .* has no release"),
    "no torch": ("7", ("iter_0000007/mp_rank_00",), (), r"needs torch 2.6 .*pip install 'megajax\[megatron\]'"),
    "experts": ("7", ("iter_0000007/mp_rank_00_000_000",), (), "expert parallelism .* experts are not supported"),
    "iteration": ("7", (), ("--step", "../x"), r"--step: '../x' is neither a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_directory_is_one_line_and_writes_nothing(case, tmp_path, capsys, monkeypatch):
    tracker, folders, options, words = BAD[case]
    monkeypatch.setitem(sys.modules, "torch", None)
    given = ["import", str(save(tmp_path, tracker, *folders)), "--run-dir", str(tmp_path / "run"), *options]
    assert megatron.main(given) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ") and re.search(words, message), message
    assert [one.name for one in tmp_path.iterdir()] == ["save"]


def test_it_is_not_a_directory_of_hugging_face(tmp_path, capsys):
    assert convert("import", save(tmp_path, "7"), "--run-dir", tmp_path / "run") == 2
    assert (
        "is a checkpoint of Megatron-LM: import it first, with python -m megajax.interop.megatron"
        in capsys.readouterr().err
    )

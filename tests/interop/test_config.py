"""config.json with the keys and values of released models, written down here, give the presets; and back."""

import dataclasses
import json

import pytest

from megajax.config import PRESETS, ConfigError, preset
from megajax.interop.hugging_face.config import check_written, family_of_model, merge_config, read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN = {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "rms_norm_eps": 1e-06}
RELEASED = {
    "llama3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "smollm2-135m": LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "qwen2.5-0.5b": QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": QWEN
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_the_preset(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
    family, model = read_config(tmp_path)
    preset = PRESETS[name]
    same = dataclasses.replace(model, name=preset.name, sequence_length=preset.sequence_length)
    if preset.head_size is None and same.head_size == preset.head_dimension:
        same = dataclasses.replace(same, head_size=None)
    kept = {field: getattr(preset, field) for field in ("kv_heads", "feedforward")}  # None or the value it stands for
    kept["balance_loss"] = preset.balance_loss  # not in the file
    assert (same.key_value_heads, same.feedforward_size) == (preset.key_value_heads, preset.feedforward_size)
    assert dataclasses.replace(same, **kept) == preset
    again, keys = family_of_model(model)
    assert again == family
    merged = merge_config(RELEASED[name], keys, "bfloat16")
    assert {key: merged[key] for key in RELEASED[name]} == RELEASED[name]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm": "layernorm"}, "norm = layernorm"),
        ({"attention_sinks": True}, "attention_sinks = True"),
        ({"rotary_fraction": 0.5, "rotary_scaling": "linear", "rotary_factor": 2.0}, "rotary_fraction = 0.5"),
        ({"activation": "gelu"}, "activation = gelu"),
        ({"query_key_norm": True, "qkv_biases": True}, "query_key_norm = True"),
        ({"query_key_norm": True, "query_key_norm_over": "projection"}, "query_key_norm_over = projection"),
    ],
)
def test_a_model_of_no_family_names_the_field(fields, words):
    model = dataclasses.replace(PRESETS["llama3-8b"], **fields)
    with pytest.raises(ConfigError, match=f"{words} has no place in a config.json"):
        family_of_model(model)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("mixtral-8x7b", {"shared_feedforward": 1024, "sliding_window": 4096}, "shared_feedforward = 1024"),
        ("mixtral-8x7b", {"router_softmax": "before", "router_normalize": False}, "router_normalize = False"),
        ("qwen3-30b-a3b", {"balance_bias_rate": 0.001}, "balance_bias_rate = 0.001"),
        ("qwen3-30b-a3b", {"query_key_norm": False, "router_normalize": False}, "router_normalize = False"),
        ("olmoe-1b-7b", {"head_size": 64}, "query_key_norm_over = projection"),  # the nearest is Qwen3's
        ("olmoe-1b-7b", {"norm": "layernorm"}, "norm = layernorm"),
    ],
)
def test_a_sparse_model_of_no_family_names_the_field(name, fields, words):
    with pytest.raises(ConfigError, match=f"{words} has no place in a config.json"):
        family_of_model(dataclasses.replace(PRESETS[name], **fields))


@pytest.mark.parametrize(
    ("name", "fields", "family"),
    [
        ("mixtral-8x7b", {"router_softmax": "before"}, "mixtral"),  # normalized: the same weights
        ("mixtral-8x7b", {"query_key_norm": True}, "qwen3_moe"),
        ("mixtral-8x7b", {"shared_feedforward": 1024}, "granitemoehybrid"),
        ("llama3-8b", {"logit_multiplier": 0.5}, "granite"),
        ("mixtral-8x7b", {"balance_loss": 0.3, "router_z_loss": 0.1, "sliding_window": 4096}, "mixtral"),
        ("qwen3-30b-a3b", {"router_softmax": "after", "router_normalize": False}, "qwen3_moe"),
        ("qwen3-30b-a3b", {"sliding_window": 4096}, "qwen3_moe"),
        ("olmoe-1b-7b", {"router_normalize": True, "kv_heads": 4}, "olmoe"),
        ("llama3-8b", {"rotary_fraction": 0.5}, "phi3"),
        ("llama3-8b", {"experts_per_token": 4, "router_softmax": "after"}, "llama"),  # without experts they do nothing
    ],
)
def test_models_that_a_family_computes_too(name, fields, family):
    assert family_of_model(dataclasses.replace(PRESETS[name], **fields))[0].name == family


def test_the_name_of_the_number_of_experts_is_that_of_the_file():
    """Released files of Qwen3 have num_experts; transformers 5 writes num_local_experts."""
    keys = family_of_model(PRESETS["qwen3-30b-a3b"])[1]
    assert keys["num_experts"] == 128 and "num_local_experts" not in keys
    merged = merge_config({"model_type": "qwen3_moe", "num_local_experts": 128}, keys, "bfloat16")
    assert merged["num_local_experts"] == 128 and "num_experts" not in merged


@pytest.mark.parametrize("name", [name for name in PRESETS if "gpt2" in name or name in RELEASED])
def test_presets_have_a_family(name):
    assert name.startswith(("gpt2", "llama", "smollm2", family_of_model(PRESETS[name])[0].name[:5]))


def test_a_model_without_mlps_is_of_a_family_that_has_such_layers():
    """Others have an MLP's tensors in each layer: Granite's hybrids read the same fields as mamba2."""
    assert family_of_model(preset("mamba2-2.7b"))[0].name == "mamba2"
    for name in ("smollm2-135m", "gpt2", "granite4-h-micro"):
        with pytest.raises(
            ConfigError, match="feedforward = 0 .* which mamba2 and nemotron_h have, .* see --feedforward"
        ):
            family_of_model(dataclasses.replace(preset(name), feedforward=0))


def test_an_export_without_a_scaling_has_none_in_transformers(tmp_path):
    """transformers scales the positions of a gpt_oss whose config.json has no scaling."""
    plain = {"rotary_scaling": "none", "rotary_factor": None, "rotary_truncate": True}
    keys = family_of_model(dataclasses.replace(preset("gpt-oss-20b"), **plain))[1]
    (tmp_path / "config.json").write_text(json.dumps(merge_config({}, keys, "float32")))
    assert read_config(tmp_path)[1].rotary_scaling == "none"
    family, model = read_config(tmp_path)
    check_written(merge_config({}, keys, "float32"), family, model)
    with pytest.raises(ConfigError, match="gpt_oss model cannot be exported: .* kind0.rotary_scaling=yarn"):
        check_written({name: one for name, one in keys.items() if "rope" not in name}, family, model)


def test_an_export_has_the_size_of_heads_that_transformers_would_not_take():
    """transformers' ministral3 has heads of 128 where config.json does not say."""
    model = dataclasses.replace(preset("ministral3-8b"), head_size=None, hidden=32 * 64)
    family, keys = family_of_model(model, "ministral3")
    check_written(merge_config({}, keys, "float32"), family, model)

"""Presets of released models whose blocks differ from Llama's in more than sizes: norms, windows, rotations, caps, sinks.

As `released.py`: values of config.json, but for the length, which is that of the pretraining.
"""

import math
from typing import Any

from megajax.config.released import released_model as _model
from megajax.config.released_hybrids import RELEASED_HYBRIDS

__all__ = ["RELEASED_OTHERS"]


def _gemma(layers: int, hidden: int, heads: int, kv_heads: int, feedforward: int, vocabulary: int, **more: Any) -> dict:
    """Heads of 256, tied embeddings times the root of the width, norms with an offset of 1."""
    more = {"head_size": 256, "norm_offset": True, "embedding_multiplier": hidden**0.5, "norm_epsilon": 1e-6, **more}
    more = {"tied_embeddings": True, **more, "activation": "geglu"}
    return _model(layers, hidden, heads, kv_heads, feedforward, vocabulary, **more)


GEMMA2 = {
    "norm_placement": "both",
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
    "layer_pattern": "local,global",
    "kind_fields": ("local.sliding_window=4096",),
}
OLMO = {
    "norm_placement": "post",
    "query_key_norm": True,
    "query_key_norm_over": "projection",
    "rotary_base": 500000.0,
    "norm_epsilon": 1e-6,
}
GPT_OSS = {
    "head_size": 64,
    "experts_per_token": 4,
    "router_softmax": "after",
    "expert_biases": True,
    "activation": "clamped_swiglu",
    "attention_sinks": True,
    "qkv_biases": True,
    "output_biases": True,
    "layer_pattern": "local,global",
    "kind_fields": ("local.sliding_window=128",),
    "sequence_length": 4096,
    "rotary_base": 150000.0,
    "rotary_scaling": "yarn",
    "rotary_factor": 32.0,
    "rotary_original_length": 4096,
    "rotary_truncate": False,
}
NANOCHAT = {
    "norm": "unweighted_rmsnorm",
    "norm_epsilon": 1e-6,
    "embedding_norm": True,
    "rotated_norm": True,
    "rotary_pairs": "halves_backwards",
    "activation": "squared_relu",
    "logit_softcap": 15.0,
    "sequence_length": 2048,
}
LLAMA4 = {
    "head_size": 128,
    "rotary_base": 500000.0,
    "rotary_pairs": "neighbours",
    "layer_pattern": "chunked*3,global",
    "kind_fields": ("chunked.chunked_attention=8192", "global.positions=none", "global.query_growth=0.1"),
    "query_growth_first": 1,
    "query_growth_length": 8192,
    "experts_per_token": 1,
    "shared_feedforward": 8192,
    "router_scores": "sigmoid",
    "router_normalize": False,
    "expert_weighted": "input",
    "balance_loss": 0.001,
}
QWEN2_MOE = {"qkv_biases": True, "shared_gate": True, "router_normalize": False, "rotary_base": 1e6}
QWEN2_MOE |= {"norm_epsilon": 1e-6, "balance_loss": 0.001}


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, feedforward: int, window: int, **more: Any) -> dict:
    """Five layers with a window and a base of 10,000, then one with neither (2503.19786 section 2)."""
    more = {"norm_placement": "both", "query_key_norm": True, "layer_pattern": "local*5,global", **more}
    words = ("local.rotary_base=10000", f"local.sliding_window={window}")
    more |= {"rotary_base": 1e6, "kind_fields": words, "sequence_length": 32768}
    return _gemma(layers, hidden, heads, kv_heads, feedforward, 262144, **more)


def _deepseek(layers: int, hidden: int, heads: int, experts: int, feedforward: int, factor: float, **more: Any) -> dict:
    """Latent attention; yarn's mscale, which is mscale_all_dim in all of them, is 1 unless `more` says otherwise."""
    growth = 0.1 * more.pop("mscale", 1.0) * math.log(factor) + 1
    latent = {"head_size": 192, "kv_latent": 512, "rotary_head_size": 64, "value_head_size": 128}
    yarn = {"rotary_scaling": "yarn", "rotary_factor": factor, "rotary_original_length": 4096}
    yarn |= {
        "rotary_attention_factor": 1.0,
        "rotary_pairs": "neighbours",
        "attention_scale": 192**-0.5 * growth * growth,
    }
    more = {"query_latent": 1536, "router_scores": "sigmoid", "balance_bias_rate": 0.001, "dense_layers": 1, **more}
    more |= {"experts": experts, "sequence_length": 4096, "norm_epsilon": 1e-6}
    return _model(layers, hidden, heads, heads, feedforward, **latent | yarn | more)


RELEASED_OTHERS: dict[str, dict[str, Any]] = {
    # Gemma, 2403.08295 table 1; Gemma 2, 2408.00118 table 1; Gemma 3's texts, 2503.19786.
    "gemma-2b": _gemma(18, 2048, 8, 1, 16384, 256000),
    "gemma-7b": _gemma(28, 3072, 16, 16, 24576, 256000),
    "gemma2-2b": _gemma(26, 2304, 8, 4, 9216, 256000, **GEMMA2),
    "gemma2-9b": _gemma(42, 3584, 16, 8, 14336, 256000, **GEMMA2),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, 512),
    # OLMo 2, 2501.00656; OLMo 3: a window of 4,096 in three layers of four.
    "olmo2-7b": _model(32, 4096, 32, 32, 11008, 100352, **OLMO | {"sequence_length": 4096}),
    "olmo3-7b": _model(
        *(32, 4096, 32, 32, 11008, 100278),
        **OLMO,
        layer_pattern="local*3,global",
        kind_fields=("local.sliding_window=4096",),
    ),
    # Phi-3 mini of 4,096 tokens, 2404.14219.
    "phi3-mini": _model(32, 3072, 32, 32, 8192, 32064, sliding_window=2047, sequence_length=4096),
    # SmolLM3: every fourth layer has no positions.
    "smollm3-3b": _model(
        *(36, 2048, 16, 4, 11008, 128256),
        tied_embeddings=True,
        rotary_base=5e6,
        norm_epsilon=1e-6,
        sequence_length=4096,
        layer_pattern="rotary*3,nope",
        kind_fields=("nope.positions=none",),
    ),
    "glm4-9b": _model(
        *(40, 4096, 32, 2, 13696, 151552),
        qkv_biases=True,
        norm_placement="both",
        rotary_pairs="neighbours",
        rotary_fraction=0.5,
    ),
    "granite3-2b": _model(
        *(40, 2048, 32, 8, 8192, 49155),
        tied_embeddings=True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_scale=0.015625,
        logit_multiplier=0.125,
        sequence_length=4096,
    ),
    # Command R7B: layers without a window have no positions.
    "command-r7b": _model(
        *(32, 4096, 32, 8, 14336, 256000),
        tied_embeddings=True,
        norm="layernorm",
        norm_placement="parallel",
        rotary_pairs="neighbours",
        rotary_base=50000.0,
        logit_multiplier=0.25,
        layer_pattern="local*3,global",
        kind_fields=("local.sliding_window=4096", "global.positions=none"),
    ),
    # StarCoder2, 2402.19173 table 6.
    "starcoder2-3b": _model(
        *(30, 3072, 24, 2, 12288, 49152),
        tied_embeddings=True,
        norm="layernorm",
        activation="gelu",
        biases=True,
        rotary_base=999999.4420358813,
        sliding_window=4096,
        sequence_length=4096,
    ),
    "nanochat-d20": _model(20, 1280, 10, 10, 5120, 65536, **NANOCHAT),
    "nanochat-d32": _model(32, 2048, 16, 16, 8192, 65536, **NANOCHAT),
    "ministral-8b": _model(36, 4096, 32, 8, 12288, 131072, rotary_base=1e8, sliding_window=32768),
    "ministral3-8b": _model(
        *(34, 4096, 32, 8, 14336, 131072),
        sequence_length=16384,
        rotary_base=1e6,
        rotary_scaling="yarn",
        rotary_factor=16.0,
        rotary_original_length=16384,
        rotary_attention_factor=1.0,
        query_growth=0.1,
    ),
    "mistral-nemo-12b": _model(40, 5120, 32, 8, 14336, 131072, head_size=128, rotary_base=1e6),
    "mistral-small-24b": _model(40, 5120, 32, 8, 32768, 131072, head_size=128, rotary_base=1e8),
    # Qwen2 with experts, 2407.10671 table 1, and Qwen1.5-MoE.
    "qwen1.5-moe-a2.7b": _model(
        24, 2048, 16, 16, 1408, 151936, **QWEN2_MOE, experts=60, experts_per_token=4, shared_feedforward=5632
    ),
    "qwen2-57b-a14b": _model(
        28, 3584, 28, 4, 2560, 151936, **QWEN2_MOE, experts=64, experts_per_token=8, shared_feedforward=20480
    ),
    # GLM-4.5 Air, 2508.06471 table 1.
    "glm4.5-air": _model(
        *(46, 4096, 96, 8, 1408, 151552),
        head_size=128,
        qkv_biases=True,
        rotary_fraction=0.5,
        rotary_base=1e6,
        experts=128,
        experts_per_token=8,
        router_scores="sigmoid",
        shared_feedforward=1408,
        dense_layers=1,
        dense_feedforward=10944,
        balance_bias_rate=0.001,
    ),
    # DeepSeek-V2-Lite, 2405.04434 appendix B; DeepSeek-V3, 2412.19437 section 4.2, without multi-token prediction; Kimi K2,
    # 2507.20534. All were pretrained with 4,096 tokens, before yarn.
    "deepseek-v2-lite": _deepseek(
        *(27, 2048, 16, 64, 1408, 40.0),
        mscale=0.707,
        vocabulary=102400,
        query_latent=0,
        experts_per_token=6,
        shared_feedforward=2816,
        dense_feedforward=10944,
        router_scores="softmax",
        router_normalize=False,
        balance_bias_rate=0.0,
        balance_loss=0.001,
    ),
    "deepseek-v3": _deepseek(
        *(61, 7168, 128, 256, 2048, 40.0),
        vocabulary=129280,
        experts_per_token=8,
        shared_feedforward=2048,
        dense_layers=3,
        dense_feedforward=18432,
        router_groups=8,
        router_group_choices=4,
        router_scale=2.5,
        balance_loss=0.0001,
    ),
    "kimi-k2": _deepseek(
        *(61, 7168, 64, 384, 2048, 32.0),
        vocabulary=163840,
        experts_per_token=8,
        shared_feedforward=2048,
        dense_feedforward=18432,
        router_scale=2.827,
        rotary_base=50000.0,
        rotary_beta_fast=1.0,
    ),
    # Llama 4's texts; Scout's frequencies are those of its context of 10 million tokens.
    "llama4-scout": _model(
        *(48, 5120, 40, 8, 8192, 202048),
        **LLAMA4,
        experts=16,
        rotated_norm=True,
        rotary_scaling="llama3",
        rotary_factor=16.0,
        rotary_original_length=8192,
        rotary_high_frequency=1.0,
    ),
    "llama4-maverick": _model(
        48, 5120, 40, 8, 8192, 202048, **LLAMA4, experts=128, moe_layer_freq="([0]+[1])*24", dense_feedforward=16384
    ),
    # gpt-oss, 2508.10925.
    "gpt-oss-20b": _model(24, 2880, 64, 8, 2880, 201088, **GPT_OSS, experts=32),
    "gpt-oss-120b": _model(36, 2880, 64, 8, 2880, 201088, **GPT_OSS, experts=128),
    **RELEASED_HYBRIDS,
}

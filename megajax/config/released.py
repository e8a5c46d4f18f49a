"""Presets of models with released weights: Llama, Mistral, Mixtral, Qwen, OLMoE and SmolLM2, with the values of their
config.json.

`sequence_length` is that of most of the pretraining; the released context is longer where it was extended later, and
`python -m megajax.interop.hugging_face import` takes it from the model's files, as all else. Parameter counts are checked
in tests/config/test_presets.py; norm epsilons, rotary bases and lengths were not compared with the files.

The coefficients of the balance losses are for training, and not in the files. Mixtral and Qwen3 have those of Megatron-LM's
recipes, 0.01 and 0.001, whose loss is summed over the layers too; OLMoE has its own, 0.01 of the mean over its 16 layers.
"""

from typing import Any

LLAMA2_VOCABULARY, LLAMA3_VOCABULARY, QWEN_VOCABULARY, SMOLLM2_VOCABULARY = 32000, 128256, 151936, 49152


def released_model(
    layers: int, hidden: int, heads: int, kv_heads: int | None, feedforward: int, vocabulary: int, **more: Any
) -> dict:
    """RMS norms, SwiGLU, rotary positions, no biases, 8,192 tokens, unless `more` says otherwise."""
    fields = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "feedforward": feedforward}
    fields |= {"vocabulary": vocabulary, "sequence_length": 8192, "norm": "rmsnorm", "activation": "swiglu"}
    return fields | {"positions": "rotary", "tied_embeddings": False, "biases": False} | more


def _llama(layers: int, hidden: int, heads: int, feedforward: int, vocabulary: int, length: int, **more: Any) -> dict:
    """As `released_model`, with keys and values of all heads unless `more` says otherwise."""
    kv_heads = more.pop("kv_heads", None)
    return released_model(
        layers, hidden, heads, kv_heads, feedforward, vocabulary, **{"sequence_length": length, **more}
    )


def _llama3(layers: int, hidden: int, heads: int, feedforward: int, factor: float | None = None, **more: Any) -> dict:
    """Llama 3, 2407.21783 table 3: 8 key and value heads; `factor`: of 3.1 and 3.2's scaling of 8,192 tokens."""
    scaled = {"rotary_scaling": "llama3", "rotary_factor": factor, "rotary_original_length": 8192} if factor else {}
    more = {"kv_heads": 8, "rotary_base": 500000.0, **scaled, **more}
    return _llama(layers, hidden, heads, feedforward, LLAMA3_VOCABULARY, 8192, **more)


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, feedforward: int, **more: Any) -> dict:
    """Qwen2.5 and Qwen3, pretrained at 4,096 tokens before their long-context stage."""
    more = {"kv_heads": kv_heads, "rotary_base": 1e6, "norm_epsilon": 1e-6, "vocabulary": QWEN_VOCABULARY, **more}
    return _llama(layers, hidden, heads, feedforward, length=4096, **more)


def _mixtral(layers: int, hidden: int, heads: int, feedforward: int) -> dict:
    """Mixtral: two of eight experts, whose weights are the softmax over their two scores; 8 key and value heads."""
    more = {"experts": 8, "experts_per_token": 2, "router_softmax": "after", "balance_loss": 0.01}
    more |= {"kv_heads": 8, "rotary_base": 1e6}
    return _llama(layers, hidden, heads, feedforward, LLAMA2_VOCABULARY, 32768, **more)


QWEN2 = {"qkv_biases": True}  # the other linear layers have none
QWEN2_LARGE = {**QWEN2, "vocabulary": 152064}
QWEN3 = {"query_key_norm": True, "head_size": 128}
QWEN3_MOE = {**QWEN3, "experts": 128, "experts_per_token": 8, "balance_loss": 0.001}
TIED = {"tied_embeddings": True}
OLMOE = {
    "experts": 64,
    "experts_per_token": 8,
    "router_normalize": False,
    "balance_loss": 0.01 / 16,
    "query_key_norm": True,
    "query_key_norm_over": "projection",
}

RELEASED: dict[str, dict[str, Any]] = {
    # Llama 2: 2307.09288.
    "llama2-7b": _llama(32, 4096, 32, 11008, LLAMA2_VOCABULARY, 4096),
    "llama2-13b": _llama(40, 5120, 40, 13824, LLAMA2_VOCABULARY, 4096),
    "llama2-70b": _llama(80, 8192, 64, 28672, LLAMA2_VOCABULARY, 4096, kv_heads=8),
    # Llama 3, 3.1 and 3.2: 2407.21783, and the model cards.
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3.1-8b": _llama3(32, 4096, 32, 14336, 8.0),
    "llama3.1-70b": _llama3(80, 8192, 64, 28672, 8.0),
    "llama3.1-405b": _llama3(126, 16384, 128, 53248, 8.0),
    "llama3.2-1b": _llama3(16, 2048, 32, 8192, 32.0, **TIED),
    "llama3.2-3b": _llama3(28, 3072, 24, 8192, 32.0, **TIED),
    # Mistral 7B v0.1: 2310.06825 table 1.
    "mistral-7b": _llama(32, 4096, 32, 14336, LLAMA2_VOCABULARY, 8192, kv_heads=8, sliding_window=4096),
    # Qwen2.5: 2412.15115. The norms' epsilon of the 14B, 32B and 72B base models is 1e-5.
    "qwen2.5-0.5b": _qwen(24, 896, 14, 2, 4864, **QWEN2, **TIED),
    "qwen2.5-1.5b": _qwen(28, 1536, 12, 2, 8960, **QWEN2, **TIED),
    "qwen2.5-3b": _qwen(36, 2048, 16, 2, 11008, **QWEN2, **TIED),
    "qwen2.5-7b": _qwen(28, 3584, 28, 4, 18944, **QWEN2_LARGE),
    "qwen2.5-14b": _qwen(48, 5120, 40, 8, 13824, **QWEN2_LARGE, norm_epsilon=1e-5),
    "qwen2.5-32b": _qwen(64, 5120, 40, 8, 27648, **QWEN2_LARGE, norm_epsilon=1e-5),
    "qwen2.5-72b": _qwen(80, 8192, 64, 8, 29568, **QWEN2_LARGE, norm_epsilon=1e-5),
    # Qwen3: 2505.09388 table 1. Heads have 128 elements whatever the width.
    "qwen3-0.6b": _qwen(28, 1024, 16, 8, 3072, **QWEN3, **TIED),
    "qwen3-1.7b": _qwen(28, 2048, 16, 8, 6144, **QWEN3, **TIED),
    "qwen3-4b": _qwen(36, 2560, 32, 8, 9728, **QWEN3, **TIED),
    "qwen3-8b": _qwen(36, 4096, 32, 8, 12288, **QWEN3),
    "qwen3-14b": _qwen(40, 5120, 40, 8, 17408, **QWEN3),
    "qwen3-32b": _qwen(64, 5120, 64, 8, 25600, **QWEN3),
    # Mixtral 8x7B: 2401.04088 table 1. 8x22B: its config.json.
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384),
    # Qwen3 with experts: 2505.09388 table 2.
    "qwen3-30b-a3b": _qwen(48, 2048, 32, 4, 768, **QWEN3_MOE),
    "qwen3-235b-a22b": _qwen(94, 4096, 64, 4, 1536, **QWEN3_MOE),
    # OLMoE: 2409.02060 appendix B.
    "olmoe-1b-7b": _llama(16, 2048, 16, 1024, 50304, 4096, **OLMOE),
    # SmolLM2: 2502.02737.
    "smollm2-135m": _llama(30, 576, 9, 1536, SMOLLM2_VOCABULARY, 2048, kv_heads=3, rotary_base=100000.0, **TIED),
    "smollm2-360m": _llama(32, 960, 15, 2560, SMOLLM2_VOCABULARY, 2048, kv_heads=5, rotary_base=100000.0, **TIED),
    "smollm2-1.7b": _llama(24, 2048, 32, 8192, SMOLLM2_VOCABULARY, 2048, rotary_base=130000.0, **TIED),
}

"""Presets of released models with recurrent mixers; values as in `released_others.py`."""

from typing import Any

from megajax.config.layer_pattern import layer_pattern_of
from megajax.config.released import released_model as _model

__all__ = ["RELEASED_HYBRIDS"]

QWEN3_NEXT = {
    "head_size": 256,
    "norm_offset": True,
    "query_key_norm": True,
    "attention_gate": True,
    "rotary_fraction": 0.25,
    "rotary_base": 1e7,
    "norm_epsilon": 1e-6,
    "experts": 512,
    "experts_per_token": 10,
    "shared_feedforward": 512,
    "shared_gate": True,
    "balance_loss": 0.001,
    "layer_pattern": "linear*3,full",
    "kind_fields": ("linear.mixer=gated_delta",),
    "recurrent_heads": 32,
    "recurrent_head_size": 128,
    "recurrent_groups": 16,
}
GRANITE4 = {
    "tied_embeddings": True,
    "positions": "none",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "layer_pattern": "linear*5,full,linear*9,full,linear*9,full,linear*9,full,linear*4",
    "kind_fields": ("linear.mixer=mamba2",),
    "recurrent_head_size": 64,
    "recurrent_chunk": 256,
}


def _nemotron(pattern: str, hidden: int, kv_heads: int, feedforward: int, heads: int, **more: Any) -> dict:
    """Mamba-2 (M, with `heads`), attention (*) and MLPs (- or E) as layers of their own."""
    names = {"M": "M", "*": "A", "-": "F", "E": "F"}
    fields = _model(len(pattern), hidden, 32, kv_heads, feedforward, 131072, head_size=128, positions="none")
    fields |= {"layer_pattern": layer_pattern_of([names[one] for one in pattern]), "activation": "squared_relu"}
    fields |= {"kind_fields": ("M.mixer=mamba2", "F.mixer=none"), "recurrent_heads": heads}
    fields |= {"recurrent_head_size": 64, "recurrent_groups": 8, "recurrent_chunk": 128}
    return fields | {"recurrent_least_step": 0.001} | more


RELEASED_HYBRIDS: dict[str, dict[str, Any]] = {
    # Mamba-2, 2405.21060; its vocabulary padded as in its files.
    "mamba2-2.7b": {
        **{"layers": 64, "hidden": 2560, "heads": 80, "head_size": 64, "feedforward": 0, "vocabulary": 50288},
        **{"sequence_length": 2048, "mixer": "mamba2", "recurrent_chunk": 256, "positions": "none", "norm": "rmsnorm"},
        **{"biases": False, "tied_embeddings": True},
    },
    # Qwen3-Next: three layers of four have the gated delta rule.
    "qwen3-next-80b-a3b": _model(48, 2048, 16, 2, 512, 151936, **QWEN3_NEXT),
    # Nemotron-H, 2504.03624 table 1, and Nemotron 3 Nano.
    "nemotron-h-8b": _nemotron("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", 4096, 8, 21504, 128),
    "nemotron3-nano-30b-a3b": _nemotron(
        "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
        2688,
        2,
        1856,
        64,
        experts=128,
        experts_per_token=6,
        shared_feedforward=3712,
        router_scores="sigmoid",
        router_scale=2.5,
        balance_bias_rate=0.001,
    ),
    # Granite 4.0's hybrids.
    "granite4-h-micro": _model(
        40, 2048, 32, 8, 8192, 100352, **GRANITE4, recurrent_heads=64, logit_multiplier=0.125, attention_scale=0.015625
    ),
    "granite4-h-tiny": _model(
        40,
        1536,
        12,
        4,
        512,
        100352,
        **GRANITE4,
        recurrent_heads=48,
        logit_multiplier=0.166666666666667,
        attention_scale=0.0078125,
        experts=64,
        experts_per_token=6,
        shared_feedforward=1024,
        router_softmax="after",
        balance_loss=0.001,
    ),
}

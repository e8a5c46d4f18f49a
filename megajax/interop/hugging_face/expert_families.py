"""The families mixtral, qwen2_moe, qwen3_moe and olmoe of transformers: keys of config.json to `ModelConfig`, and back.

The coefficient of transformers' auxiliary loss, router_aux_loss_coef, is neither read nor changed, because the loss is
another one (docs/weights.md): it is of the tokens of all layers and of the whole batch together.
"""

import math
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_kinds import DENSE, MOST_LAYERS, SPARSE, model_kinds, pattern_of
from megajax.interop.hugging_face.keys import Family, Keys
from megajax.interop.hugging_face.llama_families import read_llama, write_llama, write_window
from megajax.interop.hugging_face.windows import read_windows, write_windows

__all__ = ["NAMES_OF_EXPERTS", "SPARSE_FAMILIES", "read_kinds", "write_kinds"]

# The number of experts as released files have it, and as transformers 5 writes it for Qwen3.
NAMES_OF_EXPERTS = ("num_experts", "num_local_experts")


def _read_experts(keys: Keys, name: str) -> dict[str, Any]:
    """The numbers of experts; `name`: the key of their total."""
    experts = keys.get(name, int)
    if experts == 0:
        keys.refuse(name)  # transformers has a dense MLP then
    return {"experts": experts, "experts_per_token": keys.get("num_experts_per_tok", int)}


def _normalizes(model: ModelConfig) -> bool:
    """Whether the weights of a token's experts add up to 1: a softmax after the choice is one before it, normalized."""
    return model.router_normalize or model.router_softmax == "after"


def _read_mixtral(keys: Keys) -> dict[str, Any]:
    keys.idle("router_jitter_noise")
    fields = read_llama(keys) | _read_experts(keys, "num_local_experts")
    return fields | {"router_softmax": "after", "sliding_window": keys.get("sliding_window", int, None)}


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    return write_llama(model) | {
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "sliding_window": model.sliding_window,
    }


def _read_qwen3(keys: Keys) -> dict[str, Any]:
    keys.require("attention_bias", False)
    fields = read_llama(keys, inner="moe_intermediate_size") | _read_experts(keys, "num_experts")
    return fields | {
        **read_kinds(keys),
        "query_key_norm": True,
        "router_normalize": keys.get("norm_topk_prob", bool),
        "sliding_window": keys.get("sliding_window", int, None),
    }


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    keys = write_llama(model) | write_window(model)
    del keys["intermediate_size"]  # of dense layers
    return keys | {
        **write_kinds(model),
        "head_dim": model.head_dimension,
        "moe_intermediate_size": model.feedforward_size,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": _normalizes(model),
    }


def _read_qwen2(keys: Keys) -> dict[str, Any]:
    fields = read_llama(keys, inner="moe_intermediate_size", mixed=True) | _read_experts(keys, "num_experts")
    return fields | {
        **read_kinds(keys),
        **read_windows(keys),
        "qkv_biases": keys.get("qkv_bias", bool),
        "shared_feedforward": keys.get("shared_expert_intermediate_size", int),
        "shared_gate": True,
        "router_normalize": keys.get("norm_topk_prob", bool),
    }


def _write_qwen2(model: ModelConfig) -> dict[str, Any]:
    keys = _write_qwen3(model) | write_windows(model)
    del keys["head_dim"]
    return keys | {"qkv_bias": model.has_qkv_biases, "shared_expert_intermediate_size": model.shared_feedforward}


def read_kinds(keys: Keys) -> dict[str, Any]:
    """Which layers are dense (mlp_only_layers, and i where decoder_sparse_step does not divide i + 1), and their width."""
    step, layers = keys.get("decoder_sparse_step", int), keys.get("num_hidden_layers", int)
    dense = keys.get("mlp_only_layers", list)
    if step == 1 and not dense:
        return {}
    if step < 1 or not 1 <= layers <= MOST_LAYERS:
        keys.refuse("decoder_sparse_step" if step < 1 else "num_hidden_layers")
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense):
        keys.refuse("mlp_only_layers")
    kinds = tuple(SPARSE if (layer + 1) % step == 0 and layer not in dense else DENSE for layer in range(layers))
    if SPARSE not in kinds:
        keys.refuse("mlp_only_layers" if dense else "decoder_sparse_step")
    if DENSE not in kinds:
        return {}
    return {"moe_layer_freq": pattern_of(kinds), "dense_feedforward": keys.get("intermediate_size", int)}


def write_kinds(model: ModelConfig) -> dict[str, Any]:
    """The keys of dense layers: every layer is sparse but those that are listed."""
    if len(set(kinds := model_kinds(model))) == 1:
        return {"decoder_sparse_step": 1, "mlp_only_layers": []}
    step = math.gcd(*(layer + 1 for layer, kind in enumerate(kinds) if kind == SPARSE))
    dense = [layer for layer, kind in enumerate(kinds) if kind == DENSE and (layer + 1) % step == 0]
    width = model.of_kind(DENSE).feedforward_size
    return {"decoder_sparse_step": step, "mlp_only_layers": dense, "intermediate_size": width}


def _read_olmoe(keys: Keys) -> dict[str, Any]:
    keys.require("attention_bias", False)
    keys.require("clip_qkv")
    keys.require("sliding_window")
    fields = read_llama(keys, has_windows=False) | _read_experts(keys, "num_experts")
    if fields["head_size"] is not None:
        keys.refuse("head_dim")  # in transformers the norm of queries has the hidden size
    return fields | {
        "query_key_norm": True,
        "query_key_norm_over": "projection",
        "router_normalize": keys.get("norm_topk_prob", bool),
    }


def _write_olmoe(model: ModelConfig) -> dict[str, Any]:
    keys = write_llama(model)
    keys.pop("head_dim", None)
    return keys | {
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": _normalizes(model),
    }


SPARSE_FAMILIES = (
    Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, has_experts=True),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2, _write_qwen2, has_experts=True),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3, _write_qwen3, has_experts=True),
    Family("olmoe", "OlmoeForCausalLM", _read_olmoe, _write_olmoe, has_experts=True),
)

"""Families with shared experts: GLM-4.5, dots1, and DeepSeek-V2, V3 and Kimi K2, which have latent attention."""

import dataclasses
import math
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_kinds import DENSE
from megajax.interop.hugging_face.description import LAYER, NO_BIASES, Description, Fields
from megajax.interop.hugging_face.keys import Keys
from megajax.interop.hugging_face.llama_families import write_rotary
from megajax.interop.hugging_face.tensors import Piece, expert_pieces, shared_expert_pieces

__all__ = ["SHARED_EXPERT_FAMILIES"]


def _read_shared(keys: Keys, fields: Fields) -> Fields:
    """Shared experts, of the routed ones' width, and dense layers before those with experts."""
    width = {"shared_feedforward": keys.get("n_shared_experts", int) * fields["feedforward"]}
    return width | ({"dense_feedforward": keys.get("intermediate_size", int)} if fields["dense_layers"] else {})


def _write_shared(model: ModelConfig) -> dict[str, Any]:
    shared = model.shared_feedforward // model.feedforward_size
    further = {"num_nextn_predict_layers": model.mtp_num_layers} if model.mtp_num_layers else {}
    return {"n_shared_experts": shared, "intermediate_size": model.of_kind(DENSE).feedforward_size} | further


def _read_latent(keys: Keys, fields: Fields) -> Fields:
    """Sizes of heads, and the scale of scores, which yarn's mscale_all_dim changes."""
    size = keys.get("qk_nope_head_dim", int) + fields["rotary_head_size"]
    found = {"head_size": size, "kv_heads": None}
    rope = Keys(keys.get("rope_parameters", dict), f"{keys.path}: rope_parameters")
    if fields["heads"] != fields["kv_heads"]:
        keys.refuse("num_key_value_heads")
    keys.require("head_dim", fields["rotary_head_size"])  # transformers' rotation has its size
    if "rotary_scaling" in fields and (growth := rope.get("mscale_all_dim", float, 0.0)):
        factor = 0.1 * growth * math.log(fields["rotary_factor"]) + 1 if fields["rotary_factor"] > 1 else 1.0
        found["attention_scale"] = size**-0.5 * factor * factor
    return found | _read_shared(keys, fields)


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    rope, rotated = write_rotary(model), model.rotary_head_size
    if model.rotary_scaling != "none" and model.rotary_factor > 1:
        growth = 0.1 * math.log(model.rotary_factor)
        all_of = ((model.attention_scale or model.head_dimension**-0.5) * model.head_dimension**0.5) ** 0.5
        scale = lambda factor: float(f"{(factor - 1) / growth:.9g}")  # noqa: E731
        if scale(all_of):
            rope["mscale_all_dim"], given = scale(all_of), model.rotary_attention_factor
            below = growth * scale(all_of) + 1
            if given is not None and (growth * scale(given * below) + 1) / below == given:
                rope["mscale"] = scale(given * below)
                del rope["attention_factor"]
    sizes = {"qk_nope_head_dim": model.head_dimension - rotated, "head_dim": rotated}
    sizes |= {"q_lora_rank": model.query_latent or None, "v_head_dim": model.value_dimension, "rope_parameters": rope}
    return sizes | _write_shared(model)


def _read_v2(keys: Keys, fields: Fields) -> Fields:
    keys.require("scoring_func", "softmax")
    keys.require("topk_method", "greedy", "group_limited_greedy")
    grouped = keys.get("topk_method", str) != "greedy" and keys.get("n_group", int, 1) > 1
    groups = {"router_groups": keys.get("n_group", int), "router_group_choices": keys.get("topk_group", int)}
    return _read_latent(keys, fields) | (groups | {"router_group_best": 1} if grouped else {})


def _write_v2(model: ModelConfig) -> dict[str, Any]:
    method = "greedy" if model.router_groups == 1 else "group_limited_greedy"
    groups = {"n_group": model.router_groups, "topk_group": model.router_group_choices, "topk_method": method}
    return _write_latent(model) | groups


def _read_v3(keys: Keys, fields: Fields) -> Fields:
    keys.require("scoring_func", "sigmoid")
    keys.require("topk_method", "noaux_tc")
    pairs = "neighbours" if keys.get("rope_interleave", bool, True) else "halves"
    return _read_latent(keys, fields) | {"rotary_pairs": pairs}


def _write_v3(model: ModelConfig) -> dict[str, Any]:
    more = {"rope_interleave": model.rotary_pairs == "neighbours", "num_nextn_predict_layers": model.mtp_num_layers}
    return _write_latent(model) | more


SHARED_EXPERTS = {
    **expert_pieces(LAYER + "mlp."),
    "blocks/feedforward/router/bias": (Piece(LAYER + "mlp.gate.e_score_correction_bias", "x", "x"),),
    **shared_expert_pieces(LAYER + "mlp.shared_experts."),
}
ATTENTION = LAYER + "self_attn."
LATENTS = {
    "blocks/attention/query/kernel": (Piece(ATTENTION + "q_proj.weight", "ad h", "had"),),
    "blocks/attention/query_down/kernel": (Piece(ATTENTION + "q_a_proj.weight", "k h", "hk"),),
    "blocks/attention/query_norm/scale": (Piece(ATTENTION + "q_a_layernorm.weight", "k", "k"),),
    "blocks/attention/query_up/kernel": (Piece(ATTENTION + "q_b_proj.weight", "ad k", "kad"),),
    "blocks/attention/key_value_down/kernel": (Piece(ATTENTION + "kv_a_proj_with_mqa.weight", "m h", "hm"),),
    "blocks/attention/key_value_norm/scale": (Piece(ATTENTION + "kv_a_layernorm.weight", "b", "b"),),
    "blocks/attention/key_value_up/kernel": (Piece(ATTENTION + "kv_b_proj.weight", "aj b", "baj"),),
    "blocks/attention/output/kernel": (Piece(ATTENTION + "o_proj.weight", "h ai", "aih"),),
}
ROUTED = {
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "feedforward": "moe_intermediate_size",
    "dense_layers": "first_k_dense_replace",
    "router_scale": "routed_scaling_factor",
}
GROUPS = {"router_groups": "n_group", "router_group_choices": "topk_group", "router_normalize": "norm_topk_prob"}
LATENT_NAMES = ROUTED | {
    "kv_latent": "kv_lora_rank",
    "query_latent": "q_lora_rank",
    "rotary_head_size": "qk_rope_head_dim",
    "value_head_size": "v_head_dim",
}
DEEPSEEK_V3 = Description(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {"router_scores": "sigmoid"},
    LATENT_NAMES | GROUPS,
    NO_BIASES | {"sliding_window": None},
    leaves=SHARED_EXPERTS | LATENTS,
    read=_read_v3,
    write=_write_v3,
    has_experts=True,
)

SHARED_EXPERT_FAMILIES = (
    Description(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {"router_scores": "sigmoid"},
        {
            **ROUTED,
            **GROUPS,
            "qkv_biases": "attention_bias",
            "query_key_norm": "use_qk_norm",
        },
        {"sliding_window": None},
        leaves=SHARED_EXPERTS,
        read=_read_shared,
        write=lambda model: _write_shared(model) | {"num_nextn_predict_layers": model.mtp_num_layers},
        partial=True,
        has_experts=True,
    ),
    Description(
        "dots1",
        "Dots1ForCausalLM",
        {"router_scores": "sigmoid", "query_key_norm": True},
        ROUTED | GROUPS | {"qkv_biases": "attention_bias", "output_biases": "attention_bias"},
        leaves=SHARED_EXPERTS,
        layers="types",
        read=_read_shared,
        write=_write_shared,
        has_experts=True,
    ),
    Description(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {"rotary_pairs": "neighbours", "router_normalize": False},
        LATENT_NAMES,
        NO_BIASES | {"mlp_bias": False, "norm_topk_prob": False, "sliding_window": None},
        leaves=SHARED_EXPERTS | LATENTS | {"blocks/feedforward/router/bias": ()},
        read=_read_v2,
        write=_write_v2,
        has_experts=True,
    ),
    DEEPSEEK_V3,
    dataclasses.replace(DEEPSEEK_V3, name="kimi_k2"),
)

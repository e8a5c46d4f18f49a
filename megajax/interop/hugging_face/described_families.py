"""Families whose blocks are Llama's but for norms, windows, rotations, factors, caps, routers and names: a description of
each (`description.py`), of 2 to 30 lines.
"""

import dataclasses
import math
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_kinds import DENSE
from megajax.interop.hugging_face.description import LAYER, Description, Fields, described
from megajax.interop.hugging_face.keys import Keys
from megajax.interop.hugging_face.llama4_family import LLAMA4
from megajax.interop.hugging_face.llama_families import write_rotary
from megajax.interop.hugging_face.recurrent_families import GRANITE_HYBRID, QWEN3_NEXT
from megajax.interop.hugging_face.tensors import (
    KEY,
    QUERIES,
    VALUE,
    Piece,
    expert_pieces,
    shared_expert_pieces,
)

__all__ = ["DESCRIBED_FAMILIES", "DESCRIPTIONS"]


def _scaled(keys: Keys, fields: Fields) -> Fields:
    """Gemma's factor on the embedding."""
    keys.require("use_bidirectional_attention", False)
    return {"embedding_multiplier": fields["hidden"] ** 0.5}


def _read_gemma(keys: Keys, fields: Fields) -> Fields:
    size = fields.get("head_size") or fields["hidden"] // fields["heads"]
    scalar = keys.positive("query_pre_attn_scalar")
    return _scaled(keys, fields) | {"attention_scale": None if scalar == size else scalar**-0.5}


def _write_gemma(model: ModelConfig) -> dict[str, Any]:
    if model.attention_scale is None:
        return {"query_pre_attn_scalar": model.head_dimension}
    scalar = round(model.attention_scale**-2, 6)
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def _read_phi3(keys: Keys, fields: Fields) -> Fields:
    if "rotary_scaling" in fields:  # transformers' Phi3 has no other than longrope
        keys.refuse("rope_parameters")
    return {}


def _read_growth(keys: Keys, fields: Fields) -> Fields:
    if fields.get("rotary_scaling") != "yarn":  # then transformers' model has no original length
        keys.refuse("rope_parameters")
    rope = Keys(keys.get("rope_parameters", dict), f"{keys.path}: rope_parameters")
    return {"query_growth": rope.get("llama_4_scaling_beta", float)}


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


def _norms(
    attention: str | None, attention_output: str | None, feedforward: str | None, feedforward_output: str | None
):
    names = ("attention_norm", "attention_output_norm", "feedforward_norm", "feedforward_output_norm")
    theirs = (attention, attention_output, feedforward, feedforward_output)
    return {ours: f"{name}_layernorm" for ours, name in zip(names, theirs, strict=True) if name}


GEMMA = {"norm_offset": True}
SANDWICH = _norms("input", "post_attention", "pre_feedforward", "post_feedforward")
OLMO = {"norm_placement": "post", "query_key_norm": True, "query_key_norm_over": "projection"}
OLMO_NORMS = _norms(None, "post_attention", None, "post_feedforward")
OLMO_LEAVES = {
    "blocks/attention/query_norm/scale": (Piece(LAYER + "self_attn.q_norm.weight", "gnd", "gnd"),),
    "blocks/attention/key_norm/scale": (Piece(LAYER + "self_attn.k_norm.weight", "gd", "gd"),),
}
NO_BIASES = {"attention_bias": False}
GATE_AND_UP = {"blocks/feedforward/up/kernel": (Piece(LAYER + "mlp.gate_up_proj.weight", "zf h", "hzf"),)}
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
CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
QKV = ("gnd", "gd", "gd")
EXPERTS = LAYER + "mlp.experts."

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

DESCRIPTIONS = (
    Description(
        "gemma", "GemmaForCausalLM", GEMMA, legal=NO_BIASES | {"sliding_window": None}, read=_scaled, head_size=256
    ),
    Description(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA | {"norm_placement": "both"},
        CAPS,
        NO_BIASES,
        SANDWICH,
        activation="hidden_activation",
        layers="types",
        read=_read_gemma,
        write=_write_gemma,
        head_size=256,
    ),
    Description(
        "gemma3_text",
        "Gemma3ForCausalLM",
        GEMMA | {"norm_placement": "both", "query_key_norm": True},
        CAPS,
        NO_BIASES,
        SANDWICH,
        activation="hidden_activation",
        layers="types",
        by_type=True,
        read=_read_gemma,
        write=_write_gemma,
        head_size=256,
    ),
    Description("olmo2", "Olmo2ForCausalLM", OLMO, {}, NO_BIASES | {"sliding_window": None}, OLMO_NORMS, OLMO_LEAVES),
    Description(
        "olmo3", "Olmo3ForCausalLM", OLMO, {}, NO_BIASES, OLMO_NORMS, OLMO_LEAVES, layers="types", by_type=True
    ),
    Description(
        "phi3",
        "Phi3ForCausalLM",
        leaves=GATE_AND_UP
        | {
            "blocks/attention/qkv/kernel": (
                Piece(LAYER + "self_attn.qkv_proj.weight", "gnd h", "hgnd", QUERIES, None, QKV, 0),
                Piece(LAYER + "self_attn.qkv_proj.weight", "gd h", "hg1d", KEY, None, QKV, 1),
                Piece(LAYER + "self_attn.qkv_proj.weight", "gd h", "hg1d", VALUE, None, QKV, 2),
            )
        },
        read=_read_phi3,
        padding=32000,
        idle=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        partial=True,
    ),
    Description("ministral", "MinistralForCausalLM", layers="types"),
    Description(
        "smollm3",
        "SmolLM3ForCausalLM",
        legal=NO_BIASES | {"mlp_bias": False},
        layers="listed",
        padding=128004,
    ),
    Description(
        "glm4",
        "Glm4ForCausalLM",
        {"norm_placement": "both", "rotary_pairs": "neighbours"},
        {"qkv_biases": "attention_bias"},
        {"sliding_window": None},
        _norms("input", "post_self_attn", "post_attention", "post_mlp"),
        GATE_AND_UP,
        head_size=128,
        padding=151329,
        partial=True,
    ),
    Description(
        "granite",
        "GraniteForCausalLM",
        names={
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "attention_scale": "attention_multiplier",
        },
        legal=NO_BIASES | {"mlp_bias": False, "sliding_window": None},
        read=lambda keys, fields: {"logit_multiplier": float(f"{1 / keys.positive('logits_scaling'):.15g}")},
        write=lambda model: {
            "logits_scaling": float(f"{1 / model.logit_multiplier:.12g}"),
            "attention_multiplier": model.attention_scale or model.head_dimension**-0.5,
        },
    ),
    Description(
        "cohere2",
        "Cohere2ForCausalLM",
        {"norm": "layernorm", "norm_placement": "parallel", "rotary_pairs": "neighbours"},
        {"norm_epsilon": "layer_norm_eps", "logit_multiplier": "logit_scale"},
        NO_BIASES,
        layers="nope",
    ),
    Description(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"norm": "layernorm", "biases": True, "activation": "gelu"},
        {"norm_epsilon": "norm_epsilon"},
        {"use_bias": True},
        leaves={
            f"blocks/feedforward/{ours}/{leaf}": (Piece(f"{LAYER}mlp.{theirs}.{tensor}", *axes),)
            for ours, theirs, kernel in (("up", "c_fc", ("f h", "hf")), ("down", "c_proj", ("h f", "fh")))
            for leaf, tensor, axes in (("kernel", "weight", kernel), ("bias", "bias", (kernel[0][0], kernel[0][0])))
        },
        idle=("attention_dropout", "residual_dropout", "embedding_dropout"),
    ),
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
    Description(
        "ministral3",
        "Ministral3ForCausalLM",
        read=_read_growth,
        write=lambda model: {"rope_parameters": write_rotary(model) | {"llama_4_scaling_beta": model.query_growth}},
        padding=11,
    ),
    Description(
        "exaone4",
        "Exaone4ForCausalLM",
        {"norm_placement": "post", "query_key_norm": True},
        norms=OLMO_NORMS,
        layers="nope",
        read=lambda keys, fields: {} if keys.positive("sliding_window") else {},  # without one all layers rotate
    ),
    Description(
        "nanochat",
        "NanoChatForCausalLM",
        {
            "norm": "unweighted_rmsnorm",
            "embedding_norm": True,
            "rotated_norm": True,
            "rotary_pairs": "halves_backwards",
            "activation": "squared_relu",
        },
        {"logit_softcap": "final_logit_softcapping", "qkv_biases": "attention_bias", "output_biases": "attention_bias"},
        {"hidden_act": "relu2", "sliding_window": None},
        leaves={
            "blocks/feedforward/up/kernel": (Piece(LAYER + "mlp.fc1.weight", "f h", "hf"),),
            "blocks/feedforward/down/kernel": (Piece(LAYER + "mlp.fc2.weight", "h f", "fh"),),
        },
        write=lambda model: {"hidden_act": "relu2"},
        padding=1,
    ),
    Description(
        "seed_oss",
        "SeedOssForCausalLM",
        names={"qkv_biases": "attention_bias", "output_biases": "attention_out_bias"},
        legal={"mlp_bias": False, "sliding_window": None},
        idle=("attention_dropout", "residual_dropout"),
        head_size=128,
    ),
    Description(
        "gpt_oss",
        "GptOssForCausalLM",
        {"activation": "clamped_swiglu", "attention_sinks": True, "expert_biases": True, "router_softmax": "after"},
        {
            "experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
            "activation_limit": "swiglu_limit",
            "qkv_biases": "attention_bias",
            "output_biases": "attention_bias",
        },
        {"swiglu_alpha": 1.702},
        leaves={
            "blocks/attention/sinks": (Piece(LAYER + "self_attn.sinks", "gn", "gn"),),
            "blocks/feedforward/router/kernel": (Piece(LAYER + "mlp.router.weight", "x h", "hx"),),
            "blocks/feedforward/router/logit_bias": (Piece(LAYER + "mlp.router.bias", "x", "x"),),
            "blocks/feedforward/router/bias": (),
            "blocks/feedforward/router/losses": (),
            "blocks/feedforward/up": (Piece(EXPERTS + "gate_up_proj", "x h fz", "xhzf"),),
            "blocks/feedforward/up_bias": (Piece(EXPERTS + "gate_up_proj_bias", "x fz", "xzf"),),
            "blocks/feedforward/down": (Piece(EXPERTS + "down_proj", "x f h", "xfh"),),
            "blocks/feedforward/down_bias": (Piece(EXPERTS + "down_proj_bias", "x h", "xh"),),
        },
        layers="types",
        head_size=64,
        has_experts=True,
    ),
    QWEN3_NEXT,
    LLAMA4,
    GRANITE_HYBRID,
)

DESCRIBED_FAMILIES = tuple(map(described, DESCRIPTIONS))

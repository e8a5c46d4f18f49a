"""Families whose blocks are Llama's but for norms, windows, rotations, factors, caps, routers and names: a description of
each (`description.py`), of 2 to 30 lines.
"""

from typing import Any

from megajax.config import ModelConfig
from megajax.interop.hugging_face.description import LAYER, NO_BIASES, Description, Fields, described
from megajax.interop.hugging_face.keys import Keys
from megajax.interop.hugging_face.llama4_family import LLAMA4
from megajax.interop.hugging_face.llama_families import ORIGINAL, write_rotary
from megajax.interop.hugging_face.recurrent_families import GRANITE_HYBRID, QWEN3_NEXT
from megajax.interop.hugging_face.shared_expert_families import SHARED_EXPERT_FAMILIES
from megajax.interop.hugging_face.tensors import Piece, fused_qkv

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
    if fields.get("rotary_scaling", "longrope") != "longrope":  # transformers' Phi3 has no other
        keys.refuse("rope_parameters")
    return {}


def _write_phi3(model: ModelConfig) -> dict[str, Any]:
    """Where it is in rope_parameters alone, transformers has 4,096."""
    rope = write_rotary(model)
    return {ORIGINAL: rope[ORIGINAL]} if model.rotary_scaling == "longrope" else {}


def _read_growth(keys: Keys, fields: Fields) -> Fields:
    if fields.get("rotary_scaling") != "yarn":  # then transformers' model has no original length
        keys.refuse("rope_parameters")
    rope = Keys(keys.get("rope_parameters", dict), f"{keys.path}: rope_parameters")
    return {"query_growth": rope.get("llama_4_scaling_beta", float)}


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
GATE_AND_UP = {"blocks/feedforward/up/kernel": (Piece(LAYER + "mlp.gate_up_proj.weight", "zf h", "hzf"),)}
CAP = {"logit_softcap": "final_logit_softcapping"}
EXPERTS = LAYER + "mlp.experts."

DESCRIPTIONS = (
    Description(
        "gemma", "GemmaForCausalLM", GEMMA, legal=NO_BIASES | {"sliding_window": None}, read=_scaled, head_size=256
    ),
    Description(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA | {"norm_placement": "both"},
        CAP | {"attention_softcap": "attn_logit_softcapping"},
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
        CAP,
        NO_BIASES | {"attn_logit_softcapping": None},  # which transformers does not use
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
        leaves=GATE_AND_UP | {"blocks/attention/qkv/kernel": fused_qkv(LAYER + "self_attn.qkv_proj.weight")},
        read=_read_phi3,
        write=_write_phi3,
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
    *SHARED_EXPERT_FAMILIES,
    Description(
        "ministral3",
        "Ministral3ForCausalLM",
        read=_read_growth,
        write=lambda model: {"rope_parameters": write_rotary(model) | {"llama_4_scaling_beta": model.query_growth}},
        head_size=128,
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
        CAP | {"qkv_biases": "attention_bias", "output_biases": "attention_bias"},
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

"""The family llama4_text of transformers: chunks, layers without positions or without experts, a sigmoid router.

A released checkpoint has images too; transformers' Llama4ForCausalLM reads its text model, and save_pretrained writes this
family.
"""

from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_kinds import DENSE, SPARSE, model_kinds, pattern_of
from megajax.config.layer_pattern import VARYING, variant_numbers, variants
from megajax.interop.hugging_face.description import LAYER, Description, Fields
from megajax.interop.hugging_face.keys import Keys
from megajax.interop.hugging_face.tensors import GATE, UP, Piece, shared_expert_pieces
from megajax.interop.hugging_face.windows import FULL, of_kinds

__all__ = ["LLAMA4"]

CHUNKED = "chunked_attention"
MLP = LAYER + "feed_forward."


def _read_llama4(keys: Keys, fields: Fields) -> Fields:
    layers, chunk = fields["layers"], keys.get("attention_chunk_size", int, None)
    types, rotates = keys.get("layer_types", list), keys.get("no_rope_layers", list)[:layers]  # 1: the layer rotates
    if not set(map(str, types)) <= {CHUNKED, FULL} or len(types) != layers or (CHUNKED in types and chunk is None):
        keys.refuse("layer_types")
    if len(rotates) != layers:
        keys.refuse("no_rope_layers")
    growth = keys.get("attn_scale", float) if keys.values.get("attn_temperature_tuning") else 0.0
    kinds, each = [], {}
    for kind, rotated in zip(types, rotates, strict=True):
        kinds.append(("chunked" if kind == CHUNKED else "global") + "_nope" * (not rotated))
        each[kinds[-1]] = {name: fields[name] for name in VARYING if name in fields} | {
            "positions": "rotary" if rotated else "none",
            "chunked_attention": chunk if kind == CHUNKED else None,
            "query_growth": 0.0 if rotated else growth,
        }
    found = of_kinds(kinds, each) | _read_experts(keys, fields)
    if any(one["query_growth"] for one in each.values()):
        found |= {"query_growth_first": 1, "query_growth_length": keys.get("floor_scale", int)}
    return found | {"rotated_norm": keys.get("use_qk_norm", bool)}


def _read_experts(keys: Keys, fields: Fields) -> Fields:
    """Which layers have experts, and the inner width of the others; the shared expert has that of an expert."""
    listed = keys.get("moe_layers", list)
    kinds = tuple(SPARSE if layer in listed else DENSE for layer in range(fields["layers"]))
    if SPARSE not in kinds:
        keys.refuse("moe_layers")
    found = {"shared_feedforward": fields["feedforward"]}
    if DENSE in kinds:
        found |= {"moe_layer_freq": pattern_of(kinds), "dense_feedforward": keys.get("intermediate_size_mlp", int)}
    return found


def _write_llama4(model: ModelConfig) -> dict[str, Any]:
    each, kinds = [variants(model)[number] for number in variant_numbers(model)], model_kinds(model)
    kinds = kinds if len(kinds) == model.layers else kinds * model.layers
    growth = max(one.query_growth for one in each)
    keys = {
        "layer_types": [FULL if one.chunked_attention is None else CHUNKED for one in each],
        "no_rope_layers": [int(one.positions == "rotary") for one in each],
        "attention_chunk_size": next((one.chunked_attention for one in each if one.chunked_attention), None),
        "use_qk_norm": model.rotated_norm,
        "attn_temperature_tuning": growth > 0,
        "attn_scale": growth,
        "floor_scale": model.growth_length,
        "moe_layers": [layer for layer, kind in enumerate(kinds) if kind == SPARSE],
    }
    return keys | ({"intermediate_size_mlp": model.of_kind(DENSE).feedforward_size} if DENSE in kinds else {})


LLAMA4 = Description(
    "llama4_text",
    "Llama4ForCausalLM",
    {
        "rotary_pairs": "neighbours",
        "router_scores": "sigmoid",
        "router_normalize": False,
        "expert_weighted": "input",
    },
    {
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "qkv_biases": "attention_bias",
        "output_biases": "attention_bias",
    },
    {"sliding_window": None},
    leaves={
        "blocks/feedforward/up/kernel": (
            Piece(MLP + "gate_proj.weight", "f h", "h1f", GATE),
            Piece(MLP + "up_proj.weight", "f h", "h1f", UP),
        ),
        "blocks/feedforward/down/kernel": (Piece(MLP + "down_proj.weight", "h f", "fh"),),
        "blocks/feedforward/router/kernel": (Piece(MLP + "router.weight", "x h", "hx"),),
        "blocks/feedforward/router/bias": (),
        "blocks/feedforward/router/losses": (),
        "blocks/feedforward/up": (Piece(MLP + "experts.gate_up_proj", "x h zf", "xhzf"),),
        "blocks/feedforward/down": (Piece(MLP + "experts.down_proj", "x f h", "xfh"),),
        **shared_expert_pieces(MLP + "shared_expert."),
    },
    read=_read_llama4,
    write=_write_llama4,
    idle=("attention_dropout", "router_jitter_noise"),
    head_size=128,
    has_experts=True,
)

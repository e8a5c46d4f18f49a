"""Families with recurrent mixers: mamba2, keys and tensors, and the description of qwen3_next."""

import math
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_pattern import layer_pattern_of, variant_numbers, variants
from megajax.interop.hugging_face.description import LAYER as LLAMA_LAYER
from megajax.interop.hugging_face.description import Description, Fields
from megajax.interop.hugging_face.expert_families import read_kinds, write_kinds
from megajax.interop.hugging_face.keys import Family, Keys, read_fields, write_fields
from megajax.interop.hugging_face.tensors import GATE, UP, Piece, Table, expert_pieces, shared_expert_pieces

__all__ = ["MAMBA2", "MAMBA2_FAMILY", "QWEN3_NEXT"]

NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "head_size": "head_dim",
    "vocabulary": "vocab_size",
    "recurrent_groups": "n_groups",
    "recurrent_state": "state_size",
    "recurrent_convolution": "conv_kernel",
    "recurrent_chunk": "chunk_size",
    "tied_embeddings": "tie_word_embeddings",
    "init_deviation": "initializer_range",
    "norm_epsilon": "layer_norm_epsilon",
}
LENGTH = 2048  # of samples: no key has it, and the family's models were pretrained with this one


def _read_mamba2(keys: Keys) -> dict[str, Any]:
    for key, legal in {"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"}.items():
        keys.require(key, legal)
    keys.require("time_step_limit", [0.0, math.inf], (0.0, math.inf))
    fields = {"mixer": "mamba2", "feedforward": 0, "positions": "none", "norm": "rmsnorm", "biases": False}
    return fields | {"sequence_length": LENGTH} | read_fields(keys, NAMES)


def _write_mamba2(model: ModelConfig) -> dict[str, Any]:
    keys = write_fields(model, NAMES) | {"num_heads": model.state_heads, "head_dim": model.state_head_size}
    return keys | {"expand": model.state_heads * model.state_head_size // model.hidden}


MAMBA2_FAMILY = Family("mamba2", "Mamba2ForCausalLM", _read_mamba2, _write_mamba2, free=("sequence_length",))

LAYER = "backbone.layers.{}."
INPUT, CONVOLVED = ("GJ", "GJ", "GN", "GN", "GR"), ("GJ", "GN", "GN")  # gate, x, B, C, dt; x, B, C


def _input(axes: str, ours: str, part: tuple[int, int] | None, place: int) -> Piece:
    return Piece(LAYER + "mixer.in_proj.weight", f"{axes} h", ours, part, None, INPUT, place)


def convolutions(
    layer: str, whole: tuple[str, ...], order: tuple[str, ...], biases: bool
) -> dict[str, tuple[Piece, ...]]:
    """The leaves of a convolution whose tensor has the parts `order`, of axes `whole`."""
    found = {}
    for place, (name, axes) in enumerate(zip(order, whole, strict=True)):
        ours = f"blocks/mixer/convolution/{name}"
        found[ours] = (Piece(f"{layer}conv1d.weight", f"{axes} u K", f"{axes}uK", None, None, whole, place),)
        if biases:
            found[f"{ours}_bias"] = (Piece(f"{layer}conv1d.bias", axes, axes, None, None, whole, place),)
    return found


MAMBA2 = Table(
    {
        "shared/embedding/tokens": (Piece("backbone.embeddings.weight", "v h", "vh"),),
        "shared/head/norm/scale": (Piece("backbone.norm_f.weight", "h", "h"),),
        "shared/head/vocabulary": (Piece("lm_head.weight", "v h", "vh"),),
        "blocks/attention_norm/scale": (Piece(LAYER + "norm.weight", "h", "h"),),
        "blocks/mixer/gate_value/kernel": (_input("GJ", "hG1J", GATE, 0), _input("GJ", "hG1J", UP, 1)),
        "blocks/mixer/key_query/kernel": (_input("GN", "hG1N", GATE, 2), _input("GN", "hG1N", UP, 3)),
        "blocks/mixer/step/kernel": (_input("GR", "hGR", None, 4),),
        **convolutions(LAYER + "mixer.", CONVOLVED, ("value", "key", "query"), biases=True),
        "blocks/mixer/step_bias": (Piece(LAYER + "mixer.dt_bias", "GR", "GR"),),
        "blocks/mixer/log_rate": (Piece(LAYER + "mixer.A_log", "GR", "GR"),),
        "blocks/mixer/skip": (Piece(LAYER + "mixer.D", "GR", "GR"),),
        "blocks/mixer/norm": (Piece(LAYER + "mixer.norm.weight", "GJ", "GJ"),),
        "blocks/mixer/output/kernel": (Piece(LAYER + "mixer.out_proj.weight", "h HP", "HPh"),),
    },
    prefix="backbone.",
    ignored=(),
    renamed={"backbone.embedding.weight": "backbone.embeddings.weight"},
    tied={"lm_head.weight": "backbone.embeddings.weight"},
)

TYPES = {"linear_attention": "gated_delta", "full_attention": "attention"}


def _read_next(keys: Keys, fields: Fields) -> Fields:
    if not fields["experts"]:
        keys.refuse("num_experts")  # transformers has a dense MLP then
    types = keys.get("layer_types", list)
    if len(types) != fields["layers"] or not set(map(str, types)) <= TYPES.keys():
        keys.refuse("layer_types")
    if len(mixers := {TYPES[one] for one in types}) == 1:
        return read_kinds(keys) | {"mixer": mixers.pop()}
    pattern = layer_pattern_of(["linear" if TYPES[one] == "gated_delta" else "full" for one in types])
    return read_kinds(keys) | {"layer_pattern": pattern, "kind_fields": ("linear.mixer=gated_delta",)}


def _write_next(model: ModelConfig) -> dict[str, Any]:
    each, names = variants(model), {mixer: name for name, mixer in TYPES.items()}
    types = [names.get(each[number].mixer) for number in variant_numbers(model)]
    return write_kinds(model) | {"layer_types": types}


DELTA, MLP = LLAMA_LAYER + "linear_attn.", LLAMA_LAYER + "mlp."
ATTENTION = LLAMA_LAYER + "self_attn."
QWEN3_NEXT = Description(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    {"norm_offset": True, "query_key_norm": True, "attention_gate": True, "shared_gate": True},
    {
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "feedforward": "moe_intermediate_size",
        "shared_feedforward": "shared_expert_intermediate_size",
        "router_normalize": "norm_topk_prob",
        "recurrent_heads": "linear_num_value_heads",
        "recurrent_head_size": "linear_value_head_dim",
        "recurrent_groups": "linear_num_key_heads",
        "recurrent_state": "linear_key_head_dim",
        "recurrent_convolution": "linear_conv_kernel_dim",
    },
    {"attention_bias": False, "sliding_window": None},
    leaves={
        "blocks/attention/query_gate/kernel": (Piece(ATTENTION + "q_proj.weight", "gnzd h", "hgnzd"),),
        "blocks/attention/key_value/kernel": (
            Piece(ATTENTION + "k_proj.weight", "gd h", "hg1d", GATE),
            Piece(ATTENTION + "v_proj.weight", "gd h", "hg1d", UP),
        ),
        "blocks/mixer/input/kernel": (Piece(DELTA + "in_proj_qkvz.weight", "GW h", "hGW"),),
        "blocks/mixer/step/kernel": (Piece(DELTA + "in_proj_ba.weight", "GB h", "hGB"),),
        **convolutions(DELTA, ("GN", "GN", "GJ"), ("query", "key", "value"), biases=False),
        "blocks/mixer/step_bias": (Piece(DELTA + "dt_bias", "GR", "GR"),),
        "blocks/mixer/log_rate": (Piece(DELTA + "A_log", "GR", "GR"),),
        "blocks/mixer/norm": (Piece(DELTA + "norm.weight", "P", "P"),),
        "blocks/mixer/output/kernel": (Piece(DELTA + "out_proj.weight", "h HP", "HPh"),),
        **expert_pieces(MLP),
        **shared_expert_pieces(MLP + "shared_expert.", MLP + "shared_expert_gate"),
    },
    read=_read_next,
    write=_write_next,
    head_size=256,
    partial=True,
    has_experts=True,
    free=("recurrent_chunk",),
)

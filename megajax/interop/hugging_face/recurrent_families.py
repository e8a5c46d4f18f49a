"""Families with recurrent mixers: mamba2, keys and tensors, and the descriptions of qwen3_next and granitemoehybrid."""

import math
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_pattern import layer_pattern_of, variant_numbers, variants
from megajax.interop.hugging_face.description import LAYER as LLAMA_LAYER
from megajax.interop.hugging_face.description import Description, Fields
from megajax.interop.hugging_face.expert_families import read_kinds, write_kinds
from megajax.interop.hugging_face.keys import Family, Keys, read_fields, write_fields
from megajax.interop.hugging_face.tensors import GATE, UP, Piece, Table, expert_pieces, shared_expert_pieces

__all__ = ["GRANITE_HYBRID", "LAYER", "MAMBA2", "MAMBA2_FAMILY", "QWEN3_NEXT", "mamba2_pieces"]

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
ANY_STEP = ([0.0, math.inf], (0.0, math.inf))
LENGTH = 2048  # of samples: no key has it, and the family's models were pretrained with this one


def _read_mamba2(keys: Keys) -> dict[str, Any]:
    for key, legal in {"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"}.items():
        keys.require(key, legal)
    keys.require("time_step_limit", *ANY_STEP)
    fields = {"mixer": "mamba2", "feedforward": 0, "positions": "none", "norm": "rmsnorm", "biases": False}
    return fields | {"sequence_length": LENGTH} | read_fields(keys, NAMES)


def _write_mamba2(model: ModelConfig) -> dict[str, Any]:
    keys = write_fields(model, NAMES) | {"num_heads": model.state_heads, "head_dim": model.state_head_size}
    return keys | {"expand": model.state_heads * model.state_head_size // model.hidden}


MAMBA2_FAMILY = Family(
    "mamba2", "Mamba2ForCausalLM", _read_mamba2, _write_mamba2, free=("sequence_length",), mixers_alone=True
)

LAYER = "backbone.layers.{}."
INPUT, CONVOLVED = ("GJ", "GJ", "GN", "GN", "GR"), ("GJ", "GN", "GN")  # gate, x, B, C, dt; x, B, C


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


def mamba2_pieces(mixer: str) -> dict[str, tuple[Piece, ...]]:
    """The leaves of the mixer, whose tensors begin with `mixer`."""

    def of_input(axes: str, ours: str, part: tuple[int, int] | None, place: int) -> Piece:
        return Piece(mixer + "in_proj.weight", f"{axes} h", ours, part, None, INPUT, place)

    return {
        "blocks/mixer/gate_value/kernel": (of_input("GJ", "hG1J", GATE, 0), of_input("GJ", "hG1J", UP, 1)),
        "blocks/mixer/key_query/kernel": (of_input("GN", "hG1N", GATE, 2), of_input("GN", "hG1N", UP, 3)),
        "blocks/mixer/step/kernel": (of_input("GR", "hGR", None, 4),),
        **convolutions(mixer, CONVOLVED, ("value", "key", "query"), biases=True),
        "blocks/mixer/step_bias": (Piece(mixer + "dt_bias", "GR", "GR"),),
        "blocks/mixer/log_rate": (Piece(mixer + "A_log", "GR", "GR"),),
        "blocks/mixer/skip": (Piece(mixer + "D", "GR", "GR"),),
        "blocks/mixer/norm": (Piece(mixer + "norm.weight", "GJ", "GJ"),),
        "blocks/mixer/output/kernel": (Piece(mixer + "out_proj.weight", "h HP", "HPh"),),
    }


MAMBA2 = Table(
    {
        "shared/embedding/tokens": (Piece("backbone.embeddings.weight", "v h", "vh"),),
        "shared/head/norm/scale": (Piece("backbone.norm_f.weight", "h", "h"),),
        "shared/head/vocabulary": (Piece("lm_head.weight", "v h", "vh"),),
        "blocks/attention_norm/scale": (Piece(LAYER + "norm.weight", "h", "h"),),
        **mamba2_pieces(LAYER + "mixer."),
    },
    prefix="backbone.",
    ignored=(),
    renamed={"backbone.embedding.weight": "backbone.embeddings.weight"},
    tied={"lm_head.weight": "backbone.embeddings.weight"},
)

LINEAR, FULL = "linear_attention", "full_attention"


def _read_mixers(keys: Keys, fields: Fields, linear: str) -> Fields:
    """The mixers of the layers by layer_types; `linear`: that of linear_attention."""
    types = keys.get("layer_types", list)
    if len(types) != fields["layers"] or not set(map(str, types)) <= {LINEAR, FULL}:
        keys.refuse("layer_types")
    if LINEAR in types:
        keys.require("hidden_act", "silu", "swish")  # the mixer has it too, in which ours is silu
    if len(set(types)) == 1:
        return {"mixer": linear if types[0] == LINEAR else "attention"}
    pattern = layer_pattern_of(["linear" if one == LINEAR else "full" for one in types])
    return {"layer_pattern": pattern, "kind_fields": (f"linear.mixer={linear}",)}


def _write_mixers(model: ModelConfig, linear: str) -> dict[str, list[str | None]]:
    each, names = variants(model), {linear: LINEAR, "attention": FULL}
    return {"layer_types": [names.get(each[number].mixer) for number in variant_numbers(model)]}


def _read_next(keys: Keys, fields: Fields) -> Fields:
    if not fields["experts"]:
        keys.refuse("num_experts")  # transformers has a dense MLP then
    return read_kinds(keys) | _read_mixers(keys, fields, "gated_delta")


def _write_next(model: ModelConfig) -> dict[str, Any]:
    return write_kinds(model) | _write_mixers(model, "gated_delta")


def _read_granite(keys: Keys, fields: Fields) -> Fields:
    """Without experts the MLP is the shared expert."""
    keys.require("time_step_limit", *ANY_STEP)
    if keys.get("mamba_expand", int) * fields["hidden"] != fields["recurrent_heads"] * fields["recurrent_head_size"]:
        keys.refuse("mamba_expand")
    width = "shared_feedforward" if fields["experts"] else "feedforward"
    found = _read_mixers(keys, fields, "mamba2") | {width: keys.get("shared_intermediate_size", int)}
    if keys.get("position_embedding_type", str, "") != "rope":
        found |= {"positions": "none", "rotary_scaling": "none", "rotary_factor": None}
    return found | {"logit_multiplier": float(f"{1 / keys.positive('logits_scaling'):.15g}")}


def _write_granite(model: ModelConfig) -> dict[str, Any]:
    """Without layers of Mamba-2 their sizes are any that transformers takes."""
    heads, size = (model.state_heads, model.state_head_size) if "mamba2" in model.mixers else (1, model.hidden)
    return _write_mixers(model, "mamba2") | {
        "shared_intermediate_size": model.shared_feedforward if model.experts else model.feedforward_size,
        "position_embedding_type": "rope" if model.positions == "rotary" else "nope",
        "logits_scaling": float(f"{1 / model.logit_multiplier:.12g}"),
        "attention_multiplier": model.attention_scale or model.head_dimension**-0.5,
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_expand": heads * size // model.hidden,
    }


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

SHARED, SPARSE = LLAMA_LAYER + "shared_mlp.", LLAMA_LAYER + "block_sparse_moe."
GRANITE_HYBRID = Description(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {"router_softmax": "after"},
    {
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "attention_scale": "attention_multiplier",
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "recurrent_heads": "mamba_n_heads",
        "recurrent_head_size": "mamba_d_head",
        "recurrent_groups": "mamba_n_groups",
        "recurrent_state": "mamba_d_state",
        "recurrent_convolution": "mamba_d_conv",
        "recurrent_chunk": "mamba_chunk_size",
    },
    {"attention_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False, "sliding_window": None},
    leaves={
        **mamba2_pieces(LLAMA_LAYER + "mamba."),
        "blocks/feedforward/up/kernel": (Piece(SHARED + "input_linear.weight", "zf h", "hzf"),),
        "blocks/feedforward/down/kernel": (Piece(SHARED + "output_linear.weight", "h f", "fh"),),
        "blocks/feedforward/shared/up/kernel": (Piece(SHARED + "input_linear.weight", "zy h", "hzy"),),
        "blocks/feedforward/shared/down/kernel": (Piece(SHARED + "output_linear.weight", "h y", "yh"),),
        "blocks/feedforward/router/kernel": (Piece(SPARSE + "router.layer.weight", "x h", "hx"),),
        "blocks/feedforward/router/bias": (),
        "blocks/feedforward/router/losses": (),
        "blocks/feedforward/up": (Piece(SPARSE + "input_linear.weight", "x zf h", "xhzf"),),
        "blocks/feedforward/down": (Piece(SPARSE + "output_linear.weight", "x h f", "xfh"),),
    },
    read=_read_granite,
    write=_write_granite,
    has_experts=None,
    free=("recurrent_chunk",),
)

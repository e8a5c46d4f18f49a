"""The family nemotron_h of transformers: a layer is Mamba-2, attention, or an MLP, dense or with experts."""

from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_pattern import layer_pattern_of, variant_numbers, variants
from megajax.interop.hugging_face.keys import Family, Keys, read_fields, write_fields
from megajax.interop.hugging_face.recurrent_families import LAYER, mamba2_pieces
from megajax.interop.hugging_face.tensors import KEY, QUERIES, VALUE, Piece, Table

__all__ = ["NEMOTRON_H", "NEMOTRON_H_FAMILY"]

MIXERS = {"linear_attention": "mamba2", "full_attention": "attention", "mlp": "none", "moe": "none"}
KINDS = {"mamba2": "M", "attention": "A", "none": "F"}  # short: a pattern has all layers
NAMES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "vocabulary": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "init_deviation": "initializer_range",
    "norm_epsilon": "layer_norm_epsilon",
    "recurrent_heads": "mamba_num_heads",
    "recurrent_head_size": "mamba_head_dim",
    "recurrent_groups": "n_groups",
    "recurrent_state": "ssm_state_size",
    "recurrent_convolution": "conv_kernel",
    "recurrent_chunk": "chunk_size",
    "recurrent_least_step": "time_step_min",
}
EXPERTS = {
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "feedforward": "moe_intermediate_size",
    "shared_feedforward": "moe_shared_expert_intermediate_size",
    "router_groups": "n_group",
    "router_group_choices": "topk_group",
    "router_normalize": "norm_topk_prob",
    "router_scale": "routed_scaling_factor",
}
LEGAL = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias", "tie_word_embeddings"), False)
LEGAL |= {"use_conv_bias": True, "moe_latent_size": None, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
FIXED = {"norm": "rmsnorm", "positions": "none", "biases": False, "tied_embeddings": False}
FIXED |= {"activation": "squared_relu"}


def _read(keys: Keys) -> dict[str, Any]:
    for key in ("attention_dropout", "hidden_dropout"):
        keys.idle(key)
    for key, value in LEGAL.items():
        keys.require(key, value)
    types = keys.get("layers_block_type", list)
    if not types or not set(map(str, types)) <= MIXERS.keys() or {"mlp", "moe"} <= set(types):
        keys.refuse("layers_block_type")
    fields = FIXED | {"layers": len(types)} | read_fields(keys, NAMES)
    if "moe" in types:
        fields |= {"router_scores": "sigmoid"} | read_fields(keys, EXPERTS)
    else:
        fields["feedforward"] = keys.get("intermediate_size", int) if "mlp" in types else 0
    mixers = [MIXERS[one] for one in types]
    if len(set(mixers)) == 1:
        return fields | {"mixer": mixers[0]}
    own = tuple(f"{KINDS[mixer]}.mixer={mixer}" for mixer in dict.fromkeys(mixers) if mixer != "attention")
    return fields | {"layer_pattern": layer_pattern_of([KINDS[one] for one in mixers]), "kind_fields": own}


def _write(model: ModelConfig) -> dict[str, Any]:
    each = [variants(model)[number].mixer for number in variant_numbers(model)]
    names = {"mamba2": "linear_attention", "attention": "full_attention", "none": "moe" if model.experts else "mlp"}
    keys = LEGAL | write_fields(model, NAMES | (EXPERTS if model.experts else {"feedforward": "intermediate_size"}))
    keys |= {"mamba_num_heads": model.state_heads, "mamba_head_dim": model.state_head_size}
    keys |= {"head_dim": model.head_dimension, "layers_block_type": [names.get(one) for one in each]}
    return keys


NEMOTRON_H_FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _read,
    _write,
    has_experts=None,
    free=("recurrent_chunk",),
    mixers_alone=True,
)

MIXER = LAYER + "mixer."
NORM = (Piece(LAYER + "norm.weight", "h", "h"),)
NEMOTRON_H = Table(
    {
        "shared/embedding/tokens": (Piece("backbone.embeddings.weight", "v h", "vh"),),
        "shared/head/norm/scale": (Piece("backbone.norm_f.weight", "h", "h"),),
        "shared/head/vocabulary": (Piece("lm_head.weight", "v h", "vh"),),
        "blocks/attention_norm/scale": NORM,
        "blocks/feedforward_norm/scale": NORM,
        **mamba2_pieces(MIXER),
        "blocks/attention/qkv/kernel": (
            Piece(MIXER + "q_proj.weight", "gnd h", "hgnd", QUERIES),
            Piece(MIXER + "k_proj.weight", "gd h", "hg1d", KEY),
            Piece(MIXER + "v_proj.weight", "gd h", "hg1d", VALUE),
        ),
        "blocks/attention/output/kernel": (Piece(MIXER + "o_proj.weight", "h ad", "adh"),),
        "blocks/feedforward/up/kernel": (Piece(MIXER + "up_proj.weight", "f h", "hf"),),
        "blocks/feedforward/down/kernel": (Piece(MIXER + "down_proj.weight", "h f", "fh"),),
        "blocks/feedforward/router/kernel": (Piece(MIXER + "gate.weight", "x h", "hx"),),
        "blocks/feedforward/router/bias": (Piece(MIXER + "gate.e_score_correction_bias", "x", "x"),),
        "blocks/feedforward/router/losses": (),
        "blocks/feedforward/up": (Piece(MIXER + "experts.{}.up_proj.weight", "f h", "hf"),),
        "blocks/feedforward/down": (Piece(MIXER + "experts.{}.down_proj.weight", "h f", "fh"),),
        "blocks/feedforward/shared/up/kernel": (Piece(MIXER + "shared_experts.up_proj.weight", "y h", "hy"),),
        "blocks/feedforward/shared/down/kernel": (Piece(MIXER + "shared_experts.down_proj.weight", "h y", "yh"),),
    },
    prefix="backbone.",
    ignored=(),
)

"""The arguments that Megatron-LM stores in a checkpoint, as a `ModelConfig`.

Arguments that change what the model computes, and that the block does not have, are refused by name. Those that are missing
(older versions have fewer) have Megatron-LM's defaults.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError, ModelConfig
from megajax.interop.hugging_face.keys import Keys

__all__ = ["added_biases", "is_zero_centred", "model_of", "padded_rows", "ranks"]

# Arguments with their values that change nothing; other values are refused. None is always legal.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_experts": (0,),
    "num_moe_experts": (0,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (),
    "linear_attention_freq": (),
    "mtp_num_layers": (0,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (),
    "hybrid_layer_pattern": (),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "enable_mhc_connections": (False,),
    "retro_add_retriever": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "activation_func_clamp_value": (),
    "glu_linear_offset": (0, 0.0),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (),
    "rotary_interleaved": (False,),
    "no_rope_freq": (),
    "window_attn_skip_freq": (),
    "use_mup": (False,),
}
KINDS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary"}
LLAMA3_LENGTH = 8192  # of megatron-core's --use-rope-scaling
YARN = {
    "rotary_factor": "yarn_rotary_scaling_factor",
    "rotary_original_length": "yarn_original_max_position_embeddings",
    "rotary_beta_fast": "yarn_beta_fast",
    "rotary_beta_slow": "yarn_beta_slow",
}


def model_of(args: Mapping[str, Any], path: pathlib.Path, vocabulary: int) -> ModelConfig:
    """The model; its sequence length is `max_position_embeddings`, the longest that it has.

    Args:
      args: the checkpoint's arguments.
      path: of the checkpoint, for messages and as the model's name.
      vocabulary: without padding, which the arguments do not have.

    Raises:
      ConfigError: a size is missing, or a setting is not supported by megajax's block.
    """
    keys = Keys(args, f"{path}: args")
    for name, legal in UNSUPPORTED.items():
        keys.require(name, *legal)
    hidden, heads = keys.get("hidden_size", int), keys.get("num_attention_heads", int)
    groups = keys.get("num_query_groups", int, heads) if keys.get("group_query_attention", bool, False) else heads
    norm = keys.get("normalization", str, "LayerNorm")
    keys.require("normalization", "LayerNorm", "RMSNorm")
    with_norms = keys.get("qk_layernorm", bool, False)
    if with_norms and norm != "RMSNorm":
        keys.refuse("qk_layernorm")  # a layer norm of each head
    linear = _linear_biases(keys)
    biases = linear or norm == "LayerNorm"  # whose biases the block has only with the linear layers'
    dropout = keys.get("hidden_dropout", float, 0.0)
    fields = {
        "layers": keys.get("num_layers", int),
        "hidden": hidden,
        "heads": heads,
        "head_size": keys.get("kv_channels", int, None),
        "kv_heads": groups,
        "vocabulary": vocabulary,
        "sequence_length": keys.get("max_position_embeddings", int, keys.get("seq_length", int, None)),
        "dropout": dropout if keys.get("attention_dropout", float, dropout) == dropout else 0.0,
        "norm": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}[norm],
        "norm_epsilon": keys.get("layernorm_epsilon", float, keys.get("norm_epsilon", float, 1e-5)),
        "query_key_norm": with_norms,
        "tied_embeddings": not keys.get("untie_embeddings_and_output_weights", bool, False),
        "biases": biases,
        "qkv_biases": biases or keys.get("add_qkv_bias", bool, False),
        "init_deviation": keys.get("init_method_std", float, 0.02),
        "sliding_window": _window(keys),
        **_feedforward(keys, hidden, linear),
        **_positions(keys),
    }
    if fields["sequence_length"] is None:
        keys.get("max_position_embeddings", int)
    model = ModelConfig(name=path.absolute().parent.name, **fields)
    try:
        model.validate()
    except ConfigError as error:
        raise ConfigError(f"{path}: its args are not a legal model: {error}") from None
    return model


def padded_rows(args: Mapping[str, Any], vocabulary: int) -> int:
    """Rows of the token table with Megatron-LM's padding (`--make-vocab-size-divisible-by`)."""
    multiple = max(1, Keys(args, "args").get("make_vocab_size_divisible_by", int, 128) * ranks(args)[0])
    return -(-vocabulary // multiple) * multiple


def ranks(args: Mapping[str, Any]) -> tuple[int, int]:
    """Ranks of tensor and of pipeline parallelism of the run that wrote the checkpoint."""
    keys = Keys(args, "args")
    tensor = keys.get("tensor_model_parallel_size", int, keys.get("model_parallel_size", int, 1))
    return max(1, tensor), max(1, keys.get("pipeline_model_parallel_size", int, 1))


def is_zero_centred(args: Mapping[str, Any]) -> bool:
    """Whether the norms' weights are stored without the 1."""
    return bool(args.get("apply_layernorm_1p") or args.get("layernorm_zero_centered_gamma"))


def added_biases(args: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (of `megatron/tensors.py`) and shapes of the biases that the block has and the checkpoint has not.

    A LayerNorm of Megatron-LM has a bias also with --disable-bias-linear; the block's has one only if the linear layers
    have. Theirs are zero, and compute the same.
    """
    keys = Keys(args, "args")
    if not model.biases or _linear_biases(keys):
        return {}
    rows = (model.heads + 2 * model.key_value_heads) * model.head_dimension
    up = ("bias_w", "bias_v") if model.is_gated else ("bias",)
    shapes = {"self_attention.linear_proj.bias": (model.hidden,), "mlp.linear_fc2.bias": (model.hidden,)}
    shapes |= {f"mlp.linear_fc1.{name}": (model.feedforward_size,) for name in up}
    if not keys.get("add_qkv_bias", bool, False):
        shapes["self_attention.linear_qkv.bias"] = (rows,)
    return {f"decoder.layers.{layer}.{name}": one for layer in range(model.layers) for name, one in shapes.items()}


def _linear_biases(keys: Keys) -> bool:
    return keys.get("add_bias_linear", bool, not keys.get("disable_bias_linear", bool, False))


def _feedforward(keys: Keys, hidden: int, linear_biases: bool) -> dict[str, Any]:
    """The MLP's width and nonlinearity.

    Megatron-LM's GELU is that by erf, but the fused one is the tanh approximation: --bias-gelu-fusion, the default, which
    needs biases.
    """
    fused = keys.get("bias_gelu_fusion", bool, True)
    if keys.get("swiglu", bool, False):
        activation = "swiglu"
    elif keys.get("gated_linear_unit", bool, False):
        if not fused:
            keys.refuse("gated_linear_unit")  # by erf
        activation = "geglu"
    elif keys.get("openai_gelu", bool, False) or (fused and linear_biases and not keys.get("onnx_safe", bool, False)):
        activation = "gelu"
    else:
        activation = "gelu_exact"
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if activation == "swiglu" else 4 * hidden
    return {"activation": activation, "feedforward": keys.get("ffn_hidden_size", int, usual)}


def _positions(keys: Keys) -> dict[str, Any]:
    kind = keys.get("position_embedding_type", str, "learned_absolute")
    keys.require("position_embedding_type", *KINDS)
    if keys.get("use_rotary_position_embeddings", bool, False) and kind == "learned_absolute":
        kind = "rope"
    if kind == "learned_absolute":
        return {"positions": "learned"}
    fields: dict[str, Any] = {"positions": "rotary", "rotary_base": keys.get("rotary_base", float, 10000.0)}
    stretch = keys.get("rotary_seq_len_interpolation_factor", float, None)
    if kind == "yarn":
        return fields | _yarn(keys)
    fields["rotary_fraction"] = keys.get("rotary_percent", float, 1.0)
    scaled = keys.get("use_rope_scaling", bool, False)
    if scaled and stretch not in (None, 1.0):
        keys.refuse("rotary_seq_len_interpolation_factor")
    if scaled:
        factor = keys.get("rope_scaling_factor", float, 8.0)
        return fields | {
            "rotary_scaling": "llama3",
            "rotary_factor": factor,
            "rotary_original_length": LLAMA3_LENGTH,
        }
    if stretch not in (None, 1.0):
        return fields | {"rotary_scaling": "linear", "rotary_factor": stretch}
    return fields


def _yarn(keys: Keys) -> dict[str, Any]:
    """YaRN as megatron-core computes it; its factor is mscale's share of mscale_all_dim's."""
    keys.require("yarn_correction_range_round_to_int", True)
    keys.require("rotary_seq_len_interpolation_factor", 1, 1.0)
    fields = {ours: keys.get(name, float, None) for ours, name in YARN.items()}
    for ours, name in YARN.items():
        if fields[ours] is None:
            keys.get(name, float)
    fields["rotary_original_length"] = int(fields["rotary_original_length"])

    def share(name: str) -> float:
        return 0.1 * keys.get(name, float) * math.log(fields["rotary_factor"]) + 1

    names = ("yarn_mscale", "yarn_mscale_all_dim")
    if all(keys.get(name, float, None) is not None for name in names):
        fields["rotary_attention_factor"] = share(names[0]) / share(names[1])
    return {"rotary_scaling": "yarn", **fields}


def _window(keys: Keys) -> int | None:
    """Megatron-LM's window is the tokens before the one that attends, and those after it."""
    window = keys.values.get("window_size")
    if window is None:
        return None
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and isinstance(window[0], int)):
        keys.refuse("window_size")
    if window[0] < 0:
        return None
    if window[1] != 0:
        keys.refuse("window_size")
    return window[0] + 1

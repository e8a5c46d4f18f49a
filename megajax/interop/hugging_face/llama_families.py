"""The families llama, mistral, qwen2 and qwen3 of transformers: keys of config.json to fields of `ModelConfig`, and back."""

import math
from collections.abc import Mapping
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_pattern import variants
from megajax.interop.hugging_face.keys import GATED, SIZES, Family, Keys, note, read_fields, write_fields
from megajax.interop.hugging_face.windows import read_windows, write_windows

__all__ = [
    "LLAMA_FAMILIES",
    "NAMES",
    "SCALINGS",
    "read_llama",
    "read_rotary",
    "read_window",
    "write_llama",
    "write_rotary",
    "write_window",
]

NAMES = {
    **SIZES,
    "kv_heads": "num_key_value_heads",
    "tied_embeddings": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
ORIGINAL = "original_max_position_embeddings"
# Keys of each kind of rope_scaling: ours -> theirs.
SCALINGS = {
    "linear": {"rotary_factor": "factor"},
    "llama3": {
        "rotary_factor": "factor",
        "rotary_original_length": ORIGINAL,
        "rotary_low_frequency": "low_freq_factor",
        "rotary_high_frequency": "high_freq_factor",
    },
    "yarn": {
        "rotary_factor": "factor",
        "rotary_original_length": ORIGINAL,
        "rotary_beta_fast": "beta_fast",
        "rotary_beta_slow": "beta_slow",
        "rotary_attention_factor": "attention_factor",
    },
    "longrope": {
        "rotary_factor": "factor",
        "rotary_original_length": ORIGINAL,
        "rotary_attention_factor": "attention_factor",
    },
}


def read_llama(
    keys: Keys, inner: str = "intermediate_size", has_windows: bool = True, mixed: bool = False
) -> dict[str, Any]:
    """The fields that these families and those with experts have in common.

    Args:
      keys: of config.json.
      inner: the key of the MLP's inner width.
      has_windows: whether the family's models read sliding_window.
      mixed: whether the caller reads layer_types.
    """
    keys.idle("attention_dropout")
    others = set(map(str, keys.get("layer_types", list, None) or [])) - {"full_attention"}
    if (
        not mixed
        and others
        and (others != {"sliding_attention"} or not has_windows or keys.values.get("sliding_window") is None)
    ):
        keys.refuse("layer_types")  # transformers' cache has them, and its models not, or it fails
    activation = keys.get("hidden_act", str)
    if activation not in GATED:
        keys.refuse("hidden_act")
    fields, head_size = read_fields(keys, NAMES | {"feedforward": inner}), keys.get("head_dim", int, None)
    if head_size and head_size * fields["heads"] == fields["hidden"]:
        head_size = None
    fields |= {"norm": "rmsnorm", "activation": GATED[activation], "positions": "rotary", "biases": False}
    rope = Keys(keys.get("rope_parameters", dict), f"{keys.path}: rope_parameters")
    if "rope_type" not in rope.values:  # but a dictionary for each type of layers
        keys.refuse("rope_parameters")
    return fields | {"head_size": head_size} | read_rotary(keys, rope)


def write_llama(model: ModelConfig) -> dict[str, Any]:
    """The keys of these fields."""
    keys = write_fields(model, NAMES) | {"hidden_act": "gelu_pytorch_tanh" if model.activation == "geglu" else "silu"}
    if model.head_size not in (None, model.hidden / model.heads):
        keys["head_dim"] = model.head_size
    return keys | {"rope_parameters": write_rotary(model)}


def read_rotary(keys: Keys, rope: Keys, partial: bool = False) -> dict[str, Any]:
    """What the models compute with (transformers' modeling_rope_utils.py): other keys have no effect there.

    Args:
      keys: of config.json.
      rope: those of rope_parameters, or of one type of layers there.
      partial: whether the default kind reads partial_rotary_factor; it does not in most families.
    """
    kind = rope.get("rope_type", str)
    fields: dict[str, Any] = {"rotary_base": rope.get("rope_theta", float)}
    if partial:
        fields["rotary_fraction"] = rope.get("partial_rotary_factor", float, 1.0)
    if kind == "default":
        return fields
    if kind not in SCALINGS:
        rope.refuse("rope_type")
    if not partial:
        rope.require("partial_rotary_factor", 1.0)
    for field, key in SCALINGS[kind].items():
        value = rope.get(key, int if field == "rotary_original_length" else float, None)
        if value or (value == 0 and not key.startswith("beta_")):  # 0 is the default of these two
            fields[field] = value
    if kind == "yarn":
        fields |= _yarn(keys, rope, fields)
    if kind == "longrope":
        fields |= _longrope(keys, rope, fields)
    return fields | {"rotary_scaling": kind}


def _yarn(keys: Keys, rope: Keys, given: Mapping[str, Any]) -> dict[str, float]:
    """Factors that transformers computes from other keys."""
    factor = given.get("rotary_factor")
    if factor is None:
        factor = keys.get("max_position_embeddings", int) / max(1, rope.get(ORIGINAL, int))
    scales = [rope.get(name, float, 0.0) for name in ("mscale", "mscale_all_dim")]
    rope.require("truncate", True, False)
    found = {"rotary_factor": factor, "rotary_truncate": bool(rope.values.get("truncate", True))}  # null: off
    if "rotary_attention_factor" not in given and all(scales):
        above, below = (0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0 for scale in scales)
        found["rotary_attention_factor"] = above / below
    return found


def _longrope(keys: Keys, rope: Keys, given: Mapping[str, Any]) -> dict[str, Any]:
    """The pairs' factors. transformers takes those of long texts where the longest text of a call is longer than before."""
    longest, before = keys.get("max_position_embeddings", int), rope.get(ORIGINAL, int)
    short, long = (rope.get(name, list) for name in ("short_factor", "long_factor"))
    if len(short) != len(long) or not all(type(one) in (int, float) for one in short + long):
        rope.refuse("long_factor")
    if longest > before:
        note(
            f"{keys.path}: longrope has long_factor for texts of more than {before:,} tokens, and short_factor for others; "
            f"here a sequence_length above {before:,} means long_factor for all: --sequence-length {before} is for the other"
        )
    factor = max(1.0, given.get("rotary_factor", longest / max(1, before)))
    return {"rotary_factor": factor, "rotary_factors": tuple(repr(float(one)) for one in short + long)}


def write_rotary(model: ModelConfig, partial: bool = False) -> dict[str, Any]:
    """rope_parameters; `partial`: as of `read_rotary`."""
    rope = {"rope_type": "default" if model.rotary_scaling == "none" else model.rotary_scaling}
    written = {key: getattr(model, field) for field, key in SCALINGS.get(model.rotary_scaling, {}).items()}
    rope |= {"rope_theta": model.rotary_base} | {key: value for key, value in written.items() if value is not None}
    if model.rotary_scaling in ("llama3", "yarn", "longrope"):
        rope.setdefault(ORIGINAL, model.sequence_length)
    if factors := [*map(float, model.rotary_factors)]:
        half = len(factors) // 2
        rope |= {"short_factor": factors[:half], "long_factor": factors[half:]}
    if not model.rotary_truncate:
        rope["truncate"] = False
    return rope | {"partial_rotary_factor": model.rotary_fraction} if partial else rope


def _read_plain_llama(keys: Keys) -> dict[str, Any]:
    with_biases = keys.get("attention_bias", bool)
    if keys.get("mlp_bias", bool) != with_biases:  # the block has both or none
        keys.refuse("attention_bias" if with_biases else "mlp_bias")
    return read_llama(keys, has_windows=False) | {"biases": with_biases}


def _read_mistral(keys: Keys) -> dict[str, Any]:
    return read_llama(keys) | {"sliding_window": read_window(keys)}


def _read_qwen2(keys: Keys) -> dict[str, Any]:
    return read_llama(keys, mixed=True) | {"qkv_biases": True, **read_windows(keys)}


def _read_qwen3(keys: Keys) -> dict[str, Any]:
    keys.require("attention_bias", False)
    return read_llama(keys, mixed=True) | {"query_key_norm": True, **read_windows(keys)}


def read_window(keys: Keys) -> int | None:
    """The window of all layers; transformers' Mistral has none in some layers only."""
    window = keys.get("sliding_window", int, None)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = set(map(str, keys.get("layer_types", list, None) or [usual]))
    if len(kinds) > 1:
        keys.refuse("layer_types")
    return None if kinds == {"full_attention"} else window


def write_window(model: ModelConfig) -> dict[str, Any]:
    """Qwen's keys of windows."""
    each = variants(model)
    if len(each) > 1:
        return write_windows(model)
    model = each[0]
    if model.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}


LLAMA_FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        _read_plain_llama,
        lambda model: write_llama(model) | {"attention_bias": model.biases, "mlp_bias": model.biases},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        _read_mistral,
        lambda model: write_llama(model) | {"sliding_window": model.sliding_window},
    ),
    Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, lambda model: write_llama(model) | write_window(model)),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _read_qwen3,
        lambda model: (
            write_llama(model) | write_window(model) | {"head_dim": model.head_dimension, "attention_bias": False}
        ),  # their defaults are others
    ),
)

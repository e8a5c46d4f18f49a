"""The families llama, mistral, qwen2 and qwen3 of transformers: keys of config.json to fields of `ModelConfig`, and back."""

from typing import Any

from megajax.config import ModelConfig
from megajax.interop.hugging_face.keys import REQUIRED, Family, Keys

__all__ = ["LLAMA_FAMILIES", "SCALINGS", "read_llama", "write_llama", "write_window"]

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
# Keys of each kind of rope_scaling: ours -> theirs.
SCALINGS = {
    "linear": {"rotary_factor": "factor"},
    "llama3": {
        "rotary_factor": "factor",
        "rotary_original_length": "original_max_position_embeddings",
        "rotary_low_frequency": "low_freq_factor",
        "rotary_high_frequency": "high_freq_factor",
    },
    "yarn": {
        "rotary_factor": "factor",
        "rotary_original_length": "original_max_position_embeddings",
        "rotary_beta_fast": "beta_fast",
        "rotary_beta_slow": "beta_slow",
        "rotary_attention_factor": "attention_factor",
    },
}


def read_llama(
    keys: Keys,
    kv_heads: Any = REQUIRED,
    head_size: int | None = None,
    norm_epsilon: float = 1e-6,
    rotary_base: float = 10000.0,
    inner: str = "intermediate_size",
) -> dict[str, Any]:
    """The fields that these families and those with experts have in common.

    Args:
      keys: of the config.json.
      kv_heads, head_size, norm_epsilon, rotary_base: the family's defaults; kv_heads None: as many as heads.
      inner: the key of the MLP's inner width.
    """
    keys.require("attention_dropout", 0.0)
    activation = keys.get("hidden_act", str, "silu")
    if activation not in GATED:
        keys.refuse("hidden_act")
    heads = keys.get("num_attention_heads", int)
    return {
        "layers": keys.get("num_hidden_layers", int),
        "hidden": keys.get("hidden_size", int),
        "heads": heads,
        "head_size": keys.get("head_dim", int, head_size),
        "kv_heads": keys.get("num_key_value_heads", int, kv_heads or heads),
        "feedforward": keys.get(inner, int),
        "vocabulary": keys.get("vocab_size", int),
        "sequence_length": keys.get("max_position_embeddings", int),
        "norm": "rmsnorm",
        "activation": GATED[activation],
        "positions": "rotary",
        "tied_embeddings": keys.get("tie_word_embeddings", bool, False),
        "biases": False,
        "init_deviation": keys.get("initializer_range", float, 0.02),
        "norm_epsilon": keys.get("rms_norm_eps", float, norm_epsilon),
        **_read_rotary(keys, rotary_base),
    }


def write_llama(model: ModelConfig) -> dict[str, Any]:
    """The keys of these fields."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "intermediate_size": model.feedforward_size,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.sequence_length,
        "hidden_act": "gelu_pytorch_tanh" if model.activation == "geglu" else "silu",
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_deviation,
        "rms_norm_eps": model.norm_epsilon,
        **({"head_dim": model.head_size} if model.head_size not in (None, model.hidden / model.heads) else {}),
        **_write_rotary(model),
    }


def _read_rotary(keys: Keys, usual_base: float) -> dict[str, Any]:
    """transformers 5 has rope_parameters; 4 has rope_theta and rope_scaling. Files of either are common."""
    name = "rope_parameters" if keys.values.get("rope_parameters") else "rope_scaling"
    scaling = Keys(keys.get(name, dict, {}), f"{keys.path}: {name}")
    kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    keys.require("partial_rotary_factor", 1.0)
    scaling.require("partial_rotary_factor", 1.0)
    scaling.require("truncate", True)
    base = scaling.get("rope_theta", float, keys.get("rope_theta", float, usual_base))
    fields: dict[str, Any] = {"rotary_base": base}
    if kind == "default":
        return fields
    if kind not in SCALINGS:
        scaling.refuse("rope_type" if "rope_type" in scaling.values else "type")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", *SCALINGS[kind].values()}
    for key in scaling.values:
        if key not in known:
            scaling.require(key)
    for field, key in SCALINGS[kind].items():
        whole = field == "rotary_original_length"
        value = scaling.get(key, int if whole else float, REQUIRED if field == "rotary_factor" else None)
        if value is not None:
            fields[field] = value
    if kind != "linear":
        fields.setdefault("rotary_original_length", keys.get("max_position_embeddings", int))
    return fields | {"rotary_scaling": kind}


def _write_rotary(model: ModelConfig) -> dict[str, Any]:
    """The keys of transformers 4, which 5 reads too."""
    scaling = None
    if model.rotary_scaling != "none":
        written = {key: getattr(model, field) for field, key in SCALINGS[model.rotary_scaling].items()}
        written = {key: value for key, value in written.items() if value is not None}
        scaling = {"rope_type": model.rotary_scaling} | written
        if model.rotary_scaling != "linear":
            scaling.setdefault("original_max_position_embeddings", model.sequence_length)
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling}


def _read_plain_llama(keys: Keys) -> dict[str, Any]:
    fields, with_biases = read_llama(keys, kv_heads=None), keys.get("attention_bias", bool, False)
    keys.require("mlp_bias", with_biases)  # the block has both or none
    if keys.get("mlp_bias", bool, False) != with_biases:
        keys.refuse("attention_bias")
    return fields | {"biases": with_biases}


def _read_mistral(keys: Keys) -> dict[str, Any]:
    return read_llama(keys) | {"sliding_window": keys.get("sliding_window", int, None)}


def _read_qwen2(keys: Keys) -> dict[str, Any]:
    return read_llama(keys) | {"qkv_biases": True, "sliding_window": _qwen_window(keys)}


def _read_qwen3(keys: Keys) -> dict[str, Any]:
    keys.require("attention_bias", False)
    return read_llama(keys, head_size=128) | {"query_key_norm": True, "sliding_window": _qwen_window(keys)}


def _qwen_window(keys: Keys) -> int | None:
    """The window of all layers; the block cannot have one in some layers only."""
    window = keys.get("sliding_window", int, None)
    if not keys.get("use_sliding_window", bool, False) or window is None:
        return None
    layers = keys.get("num_hidden_layers", int)
    kinds = keys.get("layer_types", list, None)
    if kinds is not None:
        if len(set(map(str, kinds))) != 1:
            keys.refuse("layer_types")
        return window if kinds[0] == "sliding_attention" else None
    first = keys.get("max_window_layers", int, 28)
    if 0 < first < layers:
        keys.refuse("max_window_layers")
    return window if first == 0 else None


def write_window(model: ModelConfig) -> dict[str, Any]:
    """Qwen's keys of a window of all layers, or of none."""
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
            write_llama(model) | write_window(model) | {"head_dim": model.head_dimension}
        ),  # its default is 128
    ),
)

"""The families that `transformers` calls gpt2, llama, mistral, qwen2, qwen3, bert and megatron-bert: keys of config.json to
fields of `ModelConfig` or `BertConfig`, and back.

A family reads the keys that transformers reads, with transformers' defaults; like transformers it ignores others. A value
that the block cannot compute is an error that names its key.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megajax.config import BertConfig, ConfigError, ModelConfig
from megajax.schedules.errors import shown

__all__ = ["FAMILIES", "SCALINGS", "Family", "Keys"]

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
MISSING = object()
REQUIRED = object()
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


class Keys:
    """The keys of a config.json, with checks whose errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: pathlib.Path | str):
        self.values, self.path = values, path

    def get(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """The value of a key; the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.path} has no {key}: the model's size is unknown; give a complete file")
            return default
        legal = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not legal:
            raise ConfigError(f"{self.path}: {key} = {shown(value)} must be a {kind.__name__}; correct the file")
        return kind(value)

    def require(self, key: str, *legal: Any) -> None:
        """Raises ConfigError if a key is there and has another value than these."""
        if self.values.get(key, MISSING) not in (MISSING, None, *legal):
            self.refuse(key)

    def refuse(self, key: str) -> None:
        """Raises the error of a value that the block does not have."""
        value = self.values.get(key)
        raise ConfigError(f"{self.path}: {key} = {shown(value)} is not supported by megajax's block; use another model")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models as transformers names it.

    Attributes:
      name: model_type.
      architecture: the class with a language-model head; `write` may give another one.
      read: the fields of a model's configuration from its keys.
      write: its keys from the configuration.
      config: the type of the configuration.
    """

    name: str
    architecture: str
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    config: type[ModelConfig] = ModelConfig


# GPT-2.


def _read_gpt2(keys: Keys) -> dict[str, Any]:
    keys.require("scale_attn_weights", True)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    keys.require("add_cross_attention", False)
    rates = {name: keys.get(name, float, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    for name, rate in rates.items():
        if rate != rates["resid_pdrop"]:
            keys.refuse(name)
    activation = keys.get("activation_function", str, "gelu_new")
    if activation not in PLAIN:
        keys.refuse("activation_function")
    return {
        "layers": keys.get("n_layer", int),
        "hidden": keys.get("n_embd", int),
        "heads": keys.get("n_head", int),
        "feedforward": keys.get("n_inner", int, None),
        "vocabulary": keys.get("vocab_size", int),
        "sequence_length": keys.get("n_positions", int),
        "dropout": rates["resid_pdrop"],
        "activation": PLAIN[activation],
        "tied_embeddings": keys.get("tie_word_embeddings", bool, True),
        "init_deviation": keys.get("initializer_range", float, 0.02),
        "norm_epsilon": keys.get("layer_norm_epsilon", float, 1e-5),
    }


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    return rates | {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.feedforward_size,
        "vocab_size": model.vocabulary,
        "n_positions": model.sequence_length,
        "activation_function": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_deviation,
        "layer_norm_epsilon": model.norm_epsilon,
    }


# Llama, Mistral and Qwen.


def _read_llama(keys: Keys, kv_heads: Any = REQUIRED, head_size: int | None = None) -> dict[str, Any]:
    """What the four families have in common; the defaults of the keys num_key_value_heads and head_dim differ."""
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
        "feedforward": keys.get("intermediate_size", int),
        "vocabulary": keys.get("vocab_size", int),
        "sequence_length": keys.get("max_position_embeddings", int),
        "norm": "rmsnorm",
        "activation": GATED[activation],
        "positions": "rotary",
        "tied_embeddings": keys.get("tie_word_embeddings", bool, False),
        "biases": False,
        "init_deviation": keys.get("initializer_range", float, 0.02),
        "norm_epsilon": keys.get("rms_norm_eps", float, 1e-6),
        **_read_rotary(keys),
    }


def _write_llama(model: ModelConfig) -> dict[str, Any]:
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


def _read_rotary(keys: Keys) -> dict[str, Any]:
    """transformers 5 has rope_parameters; 4 has rope_theta and rope_scaling. Files of either are common."""
    name = "rope_parameters" if keys.values.get("rope_parameters") else "rope_scaling"
    scaling = Keys(keys.get(name, dict, {}), f"{keys.path}: {name}")
    kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    keys.require("partial_rotary_factor", 1.0)
    scaling.require("partial_rotary_factor", 1.0)
    scaling.require("truncate", True)
    fields: dict[str, Any] = {"rotary_base": scaling.get("rope_theta", float, keys.get("rope_theta", float, 10000.0))}
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
    fields, with_biases = _read_llama(keys, kv_heads=None), keys.get("attention_bias", bool, False)
    keys.require("mlp_bias", with_biases)  # the block has both or none
    if keys.get("mlp_bias", bool, False) != with_biases:
        keys.refuse("attention_bias")
    return fields | {"biases": with_biases}


def _read_mistral(keys: Keys) -> dict[str, Any]:
    return _read_llama(keys) | {"sliding_window": keys.get("sliding_window", int, None)}


def _read_qwen2(keys: Keys) -> dict[str, Any]:
    return _read_llama(keys) | {"qkv_biases": True, "sliding_window": _qwen_window(keys)}


def _read_qwen3(keys: Keys) -> dict[str, Any]:
    keys.require("attention_bias", False)
    return _read_llama(keys, head_size=128) | {"query_key_norm": True, "sliding_window": _qwen_window(keys)}


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


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    window: dict[str, Any] = {"use_sliding_window": False}
    if model.sliding_window is not None:
        window = {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}
    return _write_llama(model) | window


# BERT: the original one, and Megatron-LM's, whose norms are before attention and MLP. The heads are told by the class.
BERT_HEADS = {
    "ForPreTraining": "masked_lm_and_order",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classification",
    "Model": "none",
}


def _read_bert(keys: Keys, prefix: str, post_norm: bool) -> dict[str, Any]:
    keys.require("position_embedding_type", "absolute")
    keys.require("is_decoder", False)
    keys.require("tie_word_embeddings", True)  # the names of an untied head differ between versions of transformers
    keys.require("add_cross_attention", False)
    rates = {name: keys.get(name, float, 0.1) for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")}
    if len(set(rates.values())) > 1:
        keys.refuse("attention_probs_dropout_prob")
    activation = keys.get("hidden_act", str, "gelu")
    if activation not in PLAIN:
        keys.refuse("hidden_act")
    classes = {prefix + name: heads for name, heads in BERT_HEADS.items()}
    architecture = (keys.get("architectures", list, None) or [prefix + "Model"])[0]
    if architecture not in classes:
        keys.refuse("architectures")
    return {
        "layers": keys.get("num_hidden_layers", int),
        "hidden": keys.get("hidden_size", int),
        "heads": keys.get("num_attention_heads", int),
        "feedforward": keys.get("intermediate_size", int),
        "vocabulary": keys.get("vocab_size", int),
        "sequence_length": keys.get("max_position_embeddings", int),
        "dropout": rates["hidden_dropout_prob"],
        "activation": PLAIN[activation],
        "init_deviation": keys.get("initializer_range", float, 0.02),
        "norm_epsilon": keys.get("layer_norm_eps", float, 1e-12),
        "token_types": keys.get("type_vocab_size", int, 2),
        "post_norm": post_norm,
        "output_heads": classes[architecture],
        "classes": len(keys.get("id2label", dict, None) or ("LABEL_0", "LABEL_1")),  # transformers' default is two
    }


def _write_bert(model: BertConfig, prefix: str) -> dict[str, Any]:
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model.dropout)
    labels = {"id2label": {str(number): f"LABEL_{number}" for number in range(model.classes)}}
    keys = rates | {
        "architectures": [prefix + name for name, heads in BERT_HEADS.items() if heads == model.output_heads],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.feedforward_size,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.sequence_length,
        "type_vocab_size": model.token_types,
        "hidden_act": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "tie_word_embeddings": True,
        "initializer_range": model.init_deviation,
        "layer_norm_eps": model.norm_epsilon,
    }
    return keys | labels if model.has_classifier else keys


def _bert(name: str, prefix: str, post_norm: bool) -> Family:
    read, write = partial(_read_bert, prefix=prefix, post_norm=post_norm), partial(_write_bert, prefix=prefix)
    return Family(name, prefix + "ForPreTraining", read, write, BertConfig)


FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", _read_gpt2, _write_gpt2),
        Family(
            "llama",
            "LlamaForCausalLM",
            _read_plain_llama,
            lambda model: _write_llama(model) | {"attention_bias": model.biases, "mlp_bias": model.biases},
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            _read_mistral,
            lambda model: _write_llama(model) | {"sliding_window": model.sliding_window},
        ),
        Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            _read_qwen3,
            lambda model: _write_qwen(model) | {"head_dim": model.head_dimension},  # its default is 128
        ),
        _bert("bert", "Bert", post_norm=True),
        _bert("megatron-bert", "MegatronBert", post_norm=False),
    )
}

"""A family of models: the checked keys of a config.json, and functions between them and a config."""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megajax.config import ConfigError, ModelConfig
from megajax.schedules.errors import shown

__all__ = [
    "GATED",
    "PLAIN",
    "REQUIRED",
    "SIZES",
    "Family",
    "Keys",
    "kind_of",
    "note",
    "read_fields",
    "read_json",
    "write_fields",
]

# Activations of transformers with a gate or without one; those by tanh are one function, computed in several orders.
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
PLAIN = dict.fromkeys(TANH, "gelu") | dict.fromkeys(("gelu", "gelu_python"), "gelu_exact")
GATED = dict.fromkeys(TANH, "geglu") | dict.fromkeys(("silu", "swish"), "swiglu")
MISSING = object()
REQUIRED = object()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ConfigError: there is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a directory of a Hugging Face model") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error).splitlines()[0]}; download it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is a JSON {type(found).__name__}, not an object; download it again")
    return found


class Keys:
    """The keys of a config.json, with checks whose errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: pathlib.Path | str):
        self.values, self.path = values, path

    def get(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """The value of a key; the default where it is missing or null, but False for a bool that is null, as in torch."""
        value = self.values.get(key)
        if value is None and kind is bool and key in self.values:
            return False
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.path} has no {key}: the model's size is unknown; give a complete file")
            return default
        legal = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not legal:
            raise ConfigError(f"{self.path}: {key} = {shown(value)} must be a {kind.__name__}; correct the file")
        return kind(value)

    def positive(self, key: str) -> float:
        """A number above 0."""
        if self.get(key, float) <= 0:
            self.refuse(key)
        return self.get(key, float)

    def require(self, key: str, *legal: Any) -> None:
        """Raises ConfigError if a key is there and has another value than these."""
        if self.values.get(key, MISSING) not in (MISSING, None, *legal):
            self.refuse(key)

    def refuse(self, key: str) -> None:
        """Raises the error of a value that the block does not have."""
        value = self.values.get(key)
        raise ConfigError(f"{self.path}: {key} = {shown(value)} is not supported by megajax's block; use another model")

    def rate(self, *names: str) -> float:
        """The dropout, if the keys `names` have one rate; else 0, with a note: this changes training only."""
        rates = [self.get(name, float, 0.0) for name in names]
        if len(set(rates)) == 1:
            return rates[0]
        told = ", ".join(f"{name} = {rate}" for name, rate in zip(names, rates, strict=True))
        note(f"{self.path}: {told}, but megajax has one rate of dropout for all: it trains without dropout")
        return 0.0

    def idle(self, key: str) -> None:
        """Notes a key that has an effect in training only, where megajax does not have it."""
        if self.values.get(key):
            note(f"{self.path}: {key} = {shown(self.values[key])} has no effect here: megajax trains without it")


# Keys of a model's sizes in most families.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feedforward": "intermediate_size",
    "vocabulary": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "init_deviation": "initializer_range",
}
# Types of fields that are not int, and properties with the values of fields that may be None.
KINDS: dict[str, type] = dict.fromkeys(("tied_embeddings", "qkv_biases", "output_biases"), bool)
KINDS |= dict.fromkeys(("init_deviation", "norm_epsilon", "attention_scale", "attention_softcap"), float)
KINDS |= dict.fromkeys(("logit_softcap", "logit_multiplier", "embedding_multiplier", "residual_multiplier"), float)
KINDS |= {"activation_limit": float, "router_scale": float, "router_normalize": bool, "query_key_norm": bool}
KINDS["recurrent_least_step"] = float
COMPUTED = {"feedforward": "feedforward_size", "kv_heads": "key_value_heads", "qkv_biases": "has_qkv_biases"}
COMPUTED |= {"output_biases": "has_output_biases"}


def kind_of(field: str) -> type:
    """The type of a field's key."""
    return KINDS.get(field, int)


def read_fields(keys: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a configuration that are keys of config.json; `names`: of the keys, by field."""
    return {field: keys.get(key, kind_of(field)) for field, key in names.items()}


def write_fields(model: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The keys of these fields."""
    return {key: getattr(model, COMPUTED.get(field, field)) for field, key in names.items()}


@functools.cache  # once for each file
def note(text: str) -> None:
    """Says what of a config.json another program would do otherwise."""
    print(f"note: {text}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models as transformers names it.

    Attributes:
      name: model_type.
      architecture: the class with a language-model head; `write` may give another one.
      read: the fields of a model's configuration from its keys.
      write: its keys from the configuration.
      config: the type of the configuration.
      has_experts: whether its blocks have experts; None: some of its models have.
      has_latents: whether they have latent attention.
      free: fields that no key has.
      mixers_alone: whether it has layers without an MLP.
    """

    name: str
    architecture: str
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    config: type[ModelConfig] = ModelConfig
    has_experts: bool | None = False
    has_latents: bool = False
    free: tuple[str, ...] = ()
    mixers_alone: bool = False

"""A family of models: the checked keys of a config.json, and functions between them and a config."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from megajax.config import ConfigError, ModelConfig
from megajax.schedules.errors import shown

__all__ = ["PLAIN", "REQUIRED", "Family", "Keys"]

PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}  # activations without a gate
MISSING = object()
REQUIRED = object()


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
      has_experts: whether its blocks have experts.
    """

    name: str
    architecture: str
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    config: type[ModelConfig] = ModelConfig
    has_experts: bool = False

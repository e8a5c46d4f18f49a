"""layer_types of config.json: which layers have a sliding window, as the kinds of a model's layers, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from megajax.config import ConfigError, ModelConfig
from megajax.config.layer_pattern import VARYING, layer_pattern_of, variant_numbers, variants, words_of
from megajax.interop.hugging_face.keys import Keys

__all__ = ["FULL", "SLIDING", "layer_types", "of_kinds", "read_windows", "type_of", "write_windows"]

SLIDING, FULL = "sliding_attention", "full_attention"
Fields = dict[str, Any]


def layer_types(keys: Keys) -> list[str]:
    """The type of each layer, checked."""
    types, layers = keys.get("layer_types", list, None), keys.get("num_hidden_layers", int)
    if types is None:
        types = [FULL if keys.values.get("sliding_window") is None else SLIDING] * layers
    if not set(map(str, types)) <= {SLIDING, FULL} or len(types) != layers:
        keys.refuse("layer_types")
    if SLIDING in types and keys.get("sliding_window", int, None) is None:
        keys.refuse("layer_types")
    return types


def of_kinds(kinds: Sequence[str], each: Mapping[str, Fields]) -> Fields:
    """The fields of a model whose layers are of these kinds.

    Args:
      kinds: of the layers.
      each: the fields of `VARYING` of each kind. The model has those of the last kind that rotates; the others differ.

    Raises:
      ConfigError: a kind has longrope, whose factors are the model's.
    """
    if any("rotary_factors" in one for one in each.values()):
        raise ConfigError(
            "rope_type = 'longrope' is not supported in models whose layers are of several kinds; use another"
        )
    usual = {name: ModelConfig.__dataclass_fields__[name].default for name in VARYING}
    used = {kind: usual | each[kind] for kind in dict.fromkeys(kinds)}
    base = next((used[kind] for kind in reversed(kinds) if used[kind]["positions"] == "rotary"), used[kinds[-1]])
    own = {kind: {name: value for name, value in one.items() if value != base[name]} for kind, one in used.items()}
    if not any(own.values()):
        return base
    return base | {"layer_pattern": layer_pattern_of(kinds), "kind_fields": words_of(own)}


def read_windows(keys: Keys) -> Fields:
    """The windows of a model whose layers differ in nothing else, after its other fields."""
    window = {SLIDING: keys.get("sliding_window", int, None), FULL: None}
    types = layer_types(keys)
    if len(set(types)) == 1:
        return {"sliding_window": window[types[0]]}
    words = words_of({"local": {"sliding_window": window[SLIDING]}})
    return {
        "layer_pattern": layer_pattern_of(["local" if one == SLIDING else "global" for one in types]),
        "kind_fields": words,
    }


def type_of(model: ModelConfig) -> str:
    """The type of the layers of a model that are alike."""
    return FULL if model.sliding_window is None else SLIDING


def write_windows(model: ModelConfig) -> dict[str, Any]:
    """The keys of Qwen's windows."""
    each = variants(model)
    types = [type_of(each[number]) for number in variant_numbers(model)]
    windows = [one.sliding_window for one in each if one.sliding_window is not None]
    keys = {"layer_types": types, "use_sliding_window": bool(windows)}
    return keys | ({"sliding_window": windows[0]} if windows else {})

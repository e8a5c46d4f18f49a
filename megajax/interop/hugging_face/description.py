"""A family described by data: what all its models have, the keys of the rest, and the tensors that Llama has not."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_pattern import variant_numbers, variants
from megajax.interop.hugging_face.keys import GATED, PLAIN, Family, Keys, kind_of, read_fields, write_fields
from megajax.interop.hugging_face.llama_families import NAMES, read_rotary, write_rotary
from megajax.interop.hugging_face.tensors import Piece, Table
from megajax.interop.hugging_face.windows import FULL, SLIDING, layer_types, of_kinds, type_of

__all__ = ["LAYER", "NO_BIASES", "Description", "Fields", "described"]

LAYER = "model.layers.{}."
NO_BIASES = {"attention_bias": False}
OWN_NORMS = ("blocks/attention_norm/", "blocks/feedforward_norm/")
Fields = dict[str, Any]


class _Found(dict):
    """Fields that were found in a config.json. To read one whose key is null is an error, which names the key."""

    def __init__(self, keys: Keys, names: Mapping[str, str]):
        self.keys_of_file, self.names = keys, names

    def __missing__(self, field: str) -> Any:
        return self.keys_of_file.get(self.names[field], kind_of(field))


@dataclasses.dataclass(frozen=True)
class Description:
    """A family.

    Attributes:
      name: model_type.
      architecture: the class with a language-model head.
      fixed: fields that all its models have.
      names: keys of fields, other than Llama's or in addition; a key that is null is a field that is None.
      legal: keys that must have a value.
      norms: our norms -> their tensors, in a layer; biases too.
      leaves: other tensors in which it differs from Llama: leaves -> pieces.
      activation: the key of the activation.
      layers: how layers differ: "" they do not; "types" by layer_types, and by rope_parameters of each type; "nope"
        likewise, and layers of full attention have no rotation; "listed" by no_rope_layers.
      read, write: more fields of the keys, and keys of the model.
      by_type: whether rope_parameters has those of each type of layers.
      head_size, padding: transformers' defaults of a head's size, and of a padding token, if it has any of its own.
      idle: rates of dropout that it has in training.
      partial: whether the rotation reads partial_rotary_factor.
      has_experts, free: see `Family`.
    """

    name: str
    architecture: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    legal: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, tuple[Piece, ...]] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"
    layers: str = ""
    read: Callable[[Keys, Fields], Fields] = lambda keys, fields: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    idle: tuple[str, ...] = ("attention_dropout",)
    partial: bool = False
    by_type: bool = False
    head_size: int = 0
    padding: int = 0
    has_experts: bool | None = False
    free: tuple[str, ...] = ()

    def table(self, llama: Table) -> Table:
        """The family's tensors, in place of Llama's."""
        norms = {}
        for ours, theirs in self.norms.items():
            norms[f"blocks/{ours}/scale"] = (Piece(f"{LAYER}{theirs}.weight", "h", "h"),)
            norms[f"blocks/{ours}/bias"] = (Piece(f"{LAYER}{theirs}.bias", "h", "h"),)
        kept = {
            name: pieces for name, pieces in llama.leaves.items() if not self.norms or not name.startswith(OWN_NORMS)
        }
        return dataclasses.replace(
            llama, leaves={**kept, **norms, **self.leaves}, more_layers="dense_layers" in self.names
        )

    @property
    def own_names(self) -> dict[str, str]:
        """The key of each field that is one."""
        return {**NAMES, **self.names}

    def read_all(self, keys: Keys) -> Fields:
        """The fields."""
        for key in self.idle:
            keys.idle(key)
        for key, value in self.legal.items():
            keys.require(key, value)
        names = {field: name for field, name in self.own_names.items() if name}
        required = {field: name for field, name in names.items() if field in NAMES}
        found = {field: name for field, name in names.items() if keys.get(name, kind_of(field), None) is not None}
        fields = _Found(keys, names)
        fields |= {"norm": "rmsnorm", "positions": "rotary", "biases": False, **self.fixed}
        fields |= read_fields(keys, found | required) | self._activation(keys)
        head_size = keys.get("head_dim", int, None)
        if head_size and head_size * fields["heads"] != fields["hidden"]:
            fields["head_size"] = head_size
        fields |= self._layers(keys, fields)
        return fields | self.read(keys, fields)

    def _activation(self, keys: Keys) -> Fields:
        if "activation" in self.fixed and self.fixed["activation"] not in PLAIN.values():
            return {}
        legal, name = (PLAIN if "activation" in self.fixed else GATED), keys.get(self.activation, str)
        if name not in legal:
            keys.refuse(self.activation)
        return {"activation": legal[name]}

    def _layers(self, keys: Keys, fields: Fields) -> Fields:
        """Rotation and window, of all layers or of each kind."""
        rope = Keys(keys.get("rope_parameters", dict), f"{keys.path}: rope_parameters")
        window = keys.get("sliding_window", int, None)
        if not self.layers:
            return read_rotary(keys, rope, self.partial) | ({"sliding_window": window} if self.windows else {})
        types = layer_types(keys)
        if SLIDING in types and keys.values.get("use_sliding_window") is False:
            keys.refuse("layer_types")
        rotates = [self.layers != "nope" or one == SLIDING for one in types]
        if self.layers == "listed":
            rotates = [bool(one) for one in keys.get("no_rope_layers", list)]
            if len(rotates) != len(types):
                keys.refuse("no_rope_layers")
        kinds, each = [], {}
        for kind, rotated in zip(types, rotates, strict=True):
            own = Keys(rope.get(kind, dict), rope.path) if kind in rope.values else rope
            kinds.append(("local" if kind == SLIDING else "global") + "_nope" * (not rotated))
            each[kinds[-1]] = read_rotary(keys, own, self.partial) | {
                "positions": "rotary" if rotated else "none",
                "sliding_window": window if kind == SLIDING else None,
            }
        return of_kinds(kinds, each)

    @property
    def windows(self) -> bool:
        """Whether all layers have the window of sliding_window."""
        return "sliding_window" not in self.legal

    def write_all(self, model: ModelConfig) -> dict[str, Any]:
        """The keys."""
        keys = {key: value for key, value in self.legal.items() if value is not None}
        keys |= write_fields(model, {field: key for field, key in self.own_names.items() if key})
        names = {"gelu_exact": "gelu"} if "activation" in self.fixed else {"swiglu": "silu"}
        keys |= {self.activation: names.get(model.activation, "gelu_pytorch_tanh")}
        if self.head_size or model.head_dimension * model.heads != model.hidden:
            keys["head_dim"] = model.head_dimension
        if model.vocabulary <= self.padding:
            keys["pad_token_id"] = None
        if "activation" in self.fixed and self.fixed["activation"] not in PLAIN.values():
            del keys[self.activation]
        each, numbers = variants(model), variant_numbers(model)
        rotary = next((one for one in each if one.positions == "rotary"), model)
        of = lambda kind: next((one for one in each if type_of(one) == kind), rotary)  # noqa: E731
        keys["rope_parameters"] = write_rotary(rotary, self.partial)
        if self.by_type:
            keys["rope_parameters"] = {kind: write_rotary(of(kind), self.partial) for kind in (SLIDING, FULL)}
        if self.windows:
            keys["sliding_window"] = of(SLIDING).sliding_window
        if self.layers:
            keys["layer_types"] = [type_of(each[number]) for number in numbers]
        if self.layers == "listed":
            keys["no_rope_layers"] = [int(each[number].positions == "rotary") for number in numbers]
            keys["use_sliding_window"] = SLIDING in keys["layer_types"]
        elif self.layers and keys["sliding_window"] is None:
            keys["sliding_window"] = model.sequence_length  # of no layer
        return keys | self.write(model)


def described(one: Description) -> Family:
    """The family of a description."""
    kinds = {"has_experts": one.has_experts, "has_latents": "kv_latent" in one.names}
    return Family(one.name, one.architecture, one.read_all, one.write_all, free=one.free, **kinds)

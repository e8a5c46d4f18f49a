"""Families whose blocks are Llama's but for norms, windows, rotations, multipliers, caps and names: a description of each.

A description has what all models of the family have, the keys of the rest, and the tensors that Llama has not, or elsewhere.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megajax.config import ModelConfig
from megajax.config.layer_pattern import variant_numbers, variants
from megajax.interop.hugging_face.keys import GATED, PLAIN, Family, Keys, read_fields, write_fields
from megajax.interop.hugging_face.llama_families import NAMES, read_rotary, write_rotary
from megajax.interop.hugging_face.tensors import KEY, QUERIES, VALUE, Piece, Table
from megajax.interop.hugging_face.windows import FULL, SLIDING, layer_types, of_kinds, type_of

__all__ = ["DESCRIBED_FAMILIES", "DESCRIPTIONS", "Description", "described"]

LAYER = "model.layers.{}."
Fields = dict[str, Any]


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
      has_experts: see `Family`.
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
    has_experts: bool = False

    def table(self, llama: Table) -> Table:
        """The family's tensors, in place of Llama's."""
        norms = {}
        for ours, theirs in self.norms.items():
            norms[f"blocks/{ours}/scale"] = (Piece(f"{LAYER}{theirs}.weight", "h", "h"),)
            norms[f"blocks/{ours}/bias"] = (Piece(f"{LAYER}{theirs}.bias", "h", "h"),)
        kept = {
            name: pieces for name, pieces in llama.leaves.items() if not self.norms or not name.startswith(OWN_NORMS)
        }
        return dataclasses.replace(llama, leaves={**kept, **norms, **self.leaves})

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
        found = {field: name for field, name in self.own_names.items() if name and keys.values.get(name) is not None}
        required = {field: name for field, name in self.own_names.items() if field in NAMES and name}
        fields = {"norm": "rmsnorm", "positions": "rotary", "biases": False, **self.fixed}
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


OWN_NORMS = ("blocks/attention_norm/", "blocks/feedforward_norm/")


def _scaled(keys: Keys, fields: Fields) -> Fields:
    """Gemma's factor on the embedding."""
    keys.require("use_bidirectional_attention", False)
    return {"embedding_multiplier": fields["hidden"] ** 0.5}


def _read_gemma(keys: Keys, fields: Fields) -> Fields:
    size = fields.get("head_size") or fields["hidden"] // fields["heads"]
    scalar = keys.positive("query_pre_attn_scalar")
    return _scaled(keys, fields) | {"attention_scale": None if scalar == size else scalar**-0.5}


def _write_gemma(model: ModelConfig) -> dict[str, Any]:
    if model.attention_scale is None:
        return {"query_pre_attn_scalar": model.head_dimension}
    scalar = round(model.attention_scale**-2, 6)
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def _read_phi3(keys: Keys, fields: Fields) -> Fields:
    if "rotary_scaling" in fields:  # transformers' Phi3 has no other than longrope
        keys.refuse("rope_parameters")
    return {}


def _norms(
    attention: str | None, attention_output: str | None, feedforward: str | None, feedforward_output: str | None
):
    names = ("attention_norm", "attention_output_norm", "feedforward_norm", "feedforward_output_norm")
    theirs = (attention, attention_output, feedforward, feedforward_output)
    return {ours: f"{name}_layernorm" for ours, name in zip(names, theirs, strict=True) if name}


GEMMA = {"norm_offset": True}
SANDWICH = _norms("input", "post_attention", "pre_feedforward", "post_feedforward")
OLMO = {"norm_placement": "post", "query_key_norm": True, "query_key_norm_over": "projection"}
OLMO_NORMS = _norms(None, "post_attention", None, "post_feedforward")
OLMO_LEAVES = {
    "blocks/attention/query_norm/scale": (Piece(LAYER + "self_attn.q_norm.weight", "gnd", "gnd"),),
    "blocks/attention/key_norm/scale": (Piece(LAYER + "self_attn.k_norm.weight", "gd", "gd"),),
}
NO_BIASES = {"attention_bias": False}
GATE_AND_UP = {"blocks/feedforward/up/kernel": (Piece(LAYER + "mlp.gate_up_proj.weight", "zf h", "hzf"),)}
CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
QKV = ("gnd", "gd", "gd")
EXPERTS = LAYER + "mlp.experts."

DESCRIPTIONS = (
    Description(
        "gemma", "GemmaForCausalLM", GEMMA, legal=NO_BIASES | {"sliding_window": None}, read=_scaled, head_size=256
    ),
    Description(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA | {"norm_placement": "both"},
        CAPS,
        NO_BIASES,
        SANDWICH,
        activation="hidden_activation",
        layers="types",
        read=_read_gemma,
        write=_write_gemma,
        head_size=256,
    ),
    Description(
        "gemma3_text",
        "Gemma3ForCausalLM",
        GEMMA | {"norm_placement": "both", "query_key_norm": True},
        CAPS,
        NO_BIASES,
        SANDWICH,
        activation="hidden_activation",
        layers="types",
        by_type=True,
        read=_read_gemma,
        write=_write_gemma,
        head_size=256,
    ),
    Description("olmo2", "Olmo2ForCausalLM", OLMO, {}, NO_BIASES | {"sliding_window": None}, OLMO_NORMS, OLMO_LEAVES),
    Description(
        "olmo3", "Olmo3ForCausalLM", OLMO, {}, NO_BIASES, OLMO_NORMS, OLMO_LEAVES, layers="types", by_type=True
    ),
    Description(
        "phi3",
        "Phi3ForCausalLM",
        leaves=GATE_AND_UP
        | {
            "blocks/attention/qkv/kernel": (
                Piece(LAYER + "self_attn.qkv_proj.weight", "gnd h", "hgnd", QUERIES, None, QKV, 0),
                Piece(LAYER + "self_attn.qkv_proj.weight", "gd h", "hg1d", KEY, None, QKV, 1),
                Piece(LAYER + "self_attn.qkv_proj.weight", "gd h", "hg1d", VALUE, None, QKV, 2),
            )
        },
        read=_read_phi3,
        padding=32000,
        idle=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        partial=True,
    ),
    Description("ministral", "MinistralForCausalLM", layers="types"),
    Description(
        "smollm3",
        "SmolLM3ForCausalLM",
        legal=NO_BIASES | {"mlp_bias": False},
        layers="listed",
        padding=128004,
    ),
    Description(
        "glm4",
        "Glm4ForCausalLM",
        {"norm_placement": "both", "rotary_pairs": "neighbours"},
        {"qkv_biases": "attention_bias"},
        {"sliding_window": None},
        _norms("input", "post_self_attn", "post_attention", "post_mlp"),
        GATE_AND_UP,
        head_size=128,
        padding=151329,
        partial=True,
    ),
    Description(
        "granite",
        "GraniteForCausalLM",
        names={
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "attention_scale": "attention_multiplier",
        },
        legal=NO_BIASES | {"mlp_bias": False, "sliding_window": None},
        read=lambda keys, fields: {"logit_multiplier": float(f"{1 / keys.positive('logits_scaling'):.15g}")},
        write=lambda model: {"logits_scaling": float(f"{1 / model.logit_multiplier:.12g}")},
    ),
    Description(
        "cohere2",
        "Cohere2ForCausalLM",
        {"norm": "layernorm", "norm_placement": "parallel", "rotary_pairs": "neighbours"},
        {"norm_epsilon": "layer_norm_eps", "logit_multiplier": "logit_scale"},
        NO_BIASES,
        layers="nope",
    ),
    Description(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"norm": "layernorm", "biases": True, "activation": "gelu"},
        {"norm_epsilon": "norm_epsilon"},
        {"use_bias": True},
        leaves={
            f"blocks/feedforward/{ours}/{leaf}": (Piece(f"{LAYER}mlp.{theirs}.{tensor}", *axes),)
            for ours, theirs, kernel in (("up", "c_fc", ("f h", "hf")), ("down", "c_proj", ("h f", "fh")))
            for leaf, tensor, axes in (("kernel", "weight", kernel), ("bias", "bias", (kernel[0][0], kernel[0][0])))
        },
        idle=("attention_dropout", "residual_dropout", "embedding_dropout"),
    ),
    Description(
        "exaone4",
        "Exaone4ForCausalLM",
        {"norm_placement": "post", "query_key_norm": True},
        norms=OLMO_NORMS,
        layers="nope",
        read=lambda keys, fields: {} if keys.positive("sliding_window") else {},  # without one all layers rotate
    ),
    Description(
        "seed_oss",
        "SeedOssForCausalLM",
        names={"qkv_biases": "attention_bias", "output_biases": "attention_out_bias"},
        legal={"mlp_bias": False, "sliding_window": None},
        idle=("attention_dropout", "residual_dropout"),
        head_size=128,
    ),
    Description(
        "gpt_oss",
        "GptOssForCausalLM",
        {"activation": "clamped_swiglu", "attention_sinks": True, "expert_biases": True, "router_softmax": "after"},
        {
            "experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
            "activation_limit": "swiglu_limit",
            "qkv_biases": "attention_bias",
            "output_biases": "attention_bias",
        },
        {"swiglu_alpha": 1.702},
        leaves={
            "blocks/attention/sinks": (Piece(LAYER + "self_attn.sinks", "gn", "gn"),),
            "blocks/feedforward/router/kernel": (Piece(LAYER + "mlp.router.weight", "x h", "hx"),),
            "blocks/feedforward/router/logit_bias": (Piece(LAYER + "mlp.router.bias", "x", "x"),),
            "blocks/feedforward/router/bias": (),
            "blocks/feedforward/router/losses": (),
            "blocks/feedforward/up": (Piece(EXPERTS + "gate_up_proj", "x h fz", "xhzf"),),
            "blocks/feedforward/up_bias": (Piece(EXPERTS + "gate_up_proj_bias", "x fz", "xzf"),),
            "blocks/feedforward/down": (Piece(EXPERTS + "down_proj", "x f h", "xfh"),),
            "blocks/feedforward/down_bias": (Piece(EXPERTS + "down_proj_bias", "x h", "xh"),),
        },
        layers="types",
        head_size=64,
        has_experts=True,
    ),
)


def described(one: Description) -> Family:
    """The family of a description."""
    return Family(one.name, one.architecture, one.read_all, one.write_all, has_experts=one.has_experts)


DESCRIBED_FAMILIES = tuple(map(described, DESCRIPTIONS))

"""LoRA (2106.09685): which projections of a block get adapters, by the names of PEFT, transformers and Megatron-LM.

An adapter adds alpha / rank * (x A) B to a projection of x, with A [inputs, rank] and B [rank, outputs]. Queries, keys and
values are one matmul here, and so are the MLP's gate and up projection; "q_proj" has an adapter of its own on its part of
the outputs, "linear_qkv" one for all three, as `c_attn` of GPT-2.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from megajax.config.errors import ConfigError

__all__ = [
    "ROW",
    "TARGETS",
    "Target",
    "adapter_sizes",
    "base_model",
    "check_lora",
    "is_base",
    "lora_parameters",
    "lora_scale",
    "lora_targets",
    "part_range",
    "parts_of",
]


class Target(NamedTuple):
    """A projection that may have an adapter.

    Attributes:
      matmul: of a block: "qkv", "output", "up" or "down".
      part: start and stop on the last but one axis of its outputs; None: all of them.
    """

    matmul: str
    part: tuple[int, int | None] | None = None


TARGETS = {
    "q_proj": Target("qkv", (0, -2)),
    "k_proj": Target("qkv", (-2, -1)),
    "v_proj": Target("qkv", (-1, None)),
    "linear_qkv": Target("qkv"),
    "o_proj": Target("output"),
    "gate_proj": Target("up", (0, 1)),
    "up_proj": Target("up", (1, 2)),  # of an MLP without a gate, "linear_fc1"
    "linear_fc1": Target("up"),
    "down_proj": Target("down"),
}
OTHER_NAMES = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "c_attn": ("linear_qkv",),
    "query_key_value": ("linear_qkv",),
    "linear_proj": ("o_proj",),
    "c_fc": ("linear_fc1",),
    "linear_fc2": ("down_proj",),
    "c_proj": ("o_proj", "down_proj"),
}
ALL = "all-linear"
ROW = ("output", "down")  # matmuls into the residual, whose inputs are split over tensor


def lora_targets(model: Any) -> tuple[str, ...]:
    """The names in TARGETS of a model's projections with adapters (`ModelConfig`); none without `lora`.

    Default: those of PEFT for the family: queries, keys and values of a GPT, queries and values of others.
    """
    if not model.lora:
        return ()
    is_gpt = model.causal and model.positions == "learned"
    attention = ("linear_qkv",) if is_gpt else ("q_proj", "k_proj", "v_proj")
    mlp = ("gate_proj", "up_proj") if model.is_gated else ("linear_fc1",)
    usual = attention if is_gpt else ("q_proj", "v_proj")
    found: set[str] = set()
    for name in model.lora_targets or usual:
        if name == ALL:
            found.update((*attention, "o_proj", *mlp, "down_proj"))
        elif name == "up_proj" and not model.is_gated:
            found.add("linear_fc1")
        else:
            found.update(OTHER_NAMES.get(name, (name,)))
    if model.experts:  # whose matrices have none
        found = {name for name in found if TARGETS[name].matmul in ("qkv", "output")}
    return tuple(name for name in TARGETS if name in found)


def lora_scale(model: Any) -> float:
    """The factor of an adapter's product, alpha / rank."""
    return (model.lora if model.lora_alpha is None else model.lora_alpha) / model.lora


def parts_of(model: Any, name: str) -> int:
    """Elements of the axis of a matmul's outputs that a target is a part of."""
    return model.heads // model.key_value_heads + 2 if TARGETS[name].matmul == "qkv" else 2


def part_range(name: str, size: int) -> tuple[int, int]:
    """Start and stop of a target on that axis, of `size` elements."""
    start, stop = TARGETS[name].part
    return start % size, size if stop is None else stop if stop > 0 else size + stop


def base_model(model: Any) -> Any:
    """The configuration without adapters."""
    return dataclasses.replace(model, lora=0, lora_alpha=None, lora_targets=(), lora_dropout=0.0)


def is_base(model: Any, name: str) -> bool:
    """Whether a parameter, such as "blocks/attention/qkv/kernel", is one of the weights that adapters are added to.

    They are not trained. Heads that fine-tuning adds are, and what the experts' router reports is no weight.
    """
    if not model.lora or "/lora/" in name:
        return False
    return not name.endswith(("/router/bias", "/router/losses")) and not name.startswith(
        ("shared/head/classifier", "shared/head/spans")
    )


def adapter_sizes(model: Any, target: str) -> tuple[int, int]:
    """(inputs, outputs) of a projection."""
    heads, groups, size = model.heads, model.key_value_heads, model.head_dimension
    width = model.feedforward_size
    return {
        "q_proj": (model.hidden, heads * size),
        "k_proj": (model.hidden, groups * size),
        "v_proj": (model.hidden, groups * size),
        "linear_qkv": (model.hidden, (heads + 2 * groups) * size),
        "o_proj": (heads * size, model.hidden),
        "gate_proj": (model.hidden, width),
        "up_proj": (model.hidden, width),
        "linear_fc1": (model.hidden, (2 if model.is_gated else 1) * width),
        "down_proj": (width, model.hidden),
    }[target]


def lora_parameters(model: Any) -> int:
    """Parameters of all adapters."""
    kinds = model.layer_kinds or (None,) * model.layers
    of_kind = lambda kind: model.of_kind(kind)  # noqa: E731
    return sum(
        kinds.count(kind) * model.lora * sum(adapter_sizes(of_kind(kind), name))
        for kind in set(kinds)
        for name in lora_targets(of_kind(kind))
    )


def check_lora(model: Any) -> None:
    """Checks the fields of a `ModelConfig` that begin with "lora".

    Raises:
      ConfigError: for the first that is illegal.
    """
    if not model.lora:
        for name, usual in (("lora_alpha", None), ("lora_targets", ()), ("lora_dropout", 0)):
            if getattr(model, name) != usual:
                value = ",".join(value) if isinstance(value := getattr(model, name), tuple) else value
                raise ConfigError(f"{name} = {value}, but there are no adapters: pass --lora RANK, or omit it.")
        return
    if model.lora_alpha is not None and not 0 < model.lora_alpha < math.inf:
        raise ConfigError(f"lora_alpha = {model.lora_alpha} must be above 0: pass --lora-alpha {model.lora}.")
    legal = [*TARGETS, *OTHER_NAMES, ALL]
    for name in model.lora_targets:
        if name not in legal:
            raise ConfigError(f"lora_targets = {name} is no projection: pass --lora-targets with {', '.join(legal)}.")
        if name == "gate_proj" and not model.is_gated:
            raise ConfigError(f"lora_targets = {name}, but activation = {model.activation} has no gate: omit it.")
    targets = set(lora_targets(model))
    for whole, parts in (("linear_qkv", ("q_proj", "k_proj", "v_proj")), ("linear_fc1", ("gate_proj", "up_proj"))):
        both = [part for part in parts if part in targets]
        if whole in targets and both:
            raise ConfigError(f"lora_targets has {whole} and {both[0]}, a part of it: omit one of them.")
    if model.experts and not model.layer_kinds:
        legal = [name for name, target in TARGETS.items() if target.matmul in ("qkv", "output")]
        names = {one for name in model.lora_targets for one in OTHER_NAMES.get(name, (name,))} - {ALL}
        wrong = [name for name in TARGETS if name in names and name not in legal]
        if wrong:
            raise ConfigError(
                f"lora_targets = {wrong[0]}, but matrices of experts have no adapters: pass --lora-targets with "
                f"{', '.join(legal)}."
            )
    if model.lora and model.balance_bias_rate:
        raise ConfigError(
            f"balance_bias_rate = {model.balance_bias_rate} moves biases that adapters do not have: pass "
            "--balance-bias-rate 0 with --lora."
        )

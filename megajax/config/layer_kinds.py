"""Which layers of a model with experts have experts, and which have a dense MLP: the fields, their rules, and patterns.

A layer has experts if it is not one of the first `dense_layers` (DeepSeek's `first_k_dense_replace`), and `moe_layer_freq`
selects it, Megatron-LM's option of this name: a number N selects layers 0, N, 2N and so on, and a pattern has 0 for a dense
and 1 for a sparse layer, as in "[0]*3+[1]*58" or "([0]+[1])*24".
"""

import functools
import itertools
import re
from typing import Any

from megajax.config.errors import ConfigError, option
from megajax.schedules.errors import shown

__all__ = [
    "DENSE",
    "MOST_LAYERS",
    "SPARSE",
    "check_kinds_parallel",
    "check_layer_kinds",
    "joined",
    "layer_kinds",
    "model_kinds",
    "parts_of",
    "pattern_of",
    "period_of",
    "read_pattern",
]

DENSE, SPARSE = "dense", "sparse"
MOST_LAYERS = 10000  # of a model whose layers are listed one by one
RINGS_OFF = {"context": "1", "tensor_overlap": "none"}
TOKEN = re.compile(r"\s*([0-9]+|[][()*+,])")
DEPTH, DIGITS = 16, 10  # fewer digits than these, and no more parentheses in one another


def layer_kinds(model: Any) -> tuple[str, ...] | None:
    """The kind of each layer of a model's configuration; None if all are of one kind."""
    return getattr(model, "layer_kinds", None)


def joined(mixers: tuple[str, ...] | None, mlps: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The kind of each layer from its mixer and its kind of MLP; None: all are alike."""
    if mixers is None or mlps is None:
        return mixers or mlps
    return tuple(f"{mixer}_{mlp}" for mixer, mlp in zip(mixers, mlps, strict=True))


def parts_of(kind: str, mixers: tuple[str, ...]) -> tuple[str, str]:
    """The mixer and the kind of MLP in a kind of layers, "" for what all layers have alike."""
    mixer = next((one for one in mixers if kind.startswith(one)), "")
    return mixer, kind.removeprefix(mixer).removeprefix("_")


def read_pattern(text: str, layers: int) -> tuple[str, ...]:
    """The kind of each layer by `moe_layer_freq`.

    Raises:
        ConfigError: it is neither a number nor a pattern of as many zeros and ones as there are layers.
    """
    if text and not text.strip("0"):
        raise ConfigError(
            "moe_layer_freq = 0 must be at least 1: the first of every N layers has experts; pass "
            "--moe-layer-freq 1 for all layers, or --experts 0 for none."
        )
    if text.isascii() and text.isdecimal() and len(text) < DIGITS:
        return tuple(DENSE if layer % int(text) else SPARSE for layer in range(layers))
    try:
        kinds = _Pattern(text, layers).read()
    except ValueError as error:
        raise ConfigError(
            f"moe_layer_freq = {shown(text)} {error}: pass --moe-layer-freq N, or a pattern such as "
            f"'{pattern_of((DENSE, *[SPARSE] * (layers - 1)))}'."
        ) from None
    return tuple(SPARSE if one else DENSE for one in kinds)


def pattern_of(kinds: tuple[str, ...]) -> str:
    """A short `moe_layer_freq` for these kinds; "1" if all layers have experts."""
    if DENSE not in kinds:
        return "1"
    period = period_of(kinds)
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds[:period])]
    one = "+".join(f"[{int(kind == SPARSE)}]" + (f"*{count}" if count > 1 else "") for kind, count in runs)
    return one if period == len(kinds) else f"({one})*{len(kinds) // period}"


def period_of(kinds: tuple[str, ...]) -> int:
    """The length of the shortest part of `kinds`, not empty, of which these are repetitions."""
    return next(n for n in range(1, len(kinds) + 1) if kinds[:n] * (len(kinds) // n) == kinds)


def check_layer_kinds(model: Any) -> None:
    """Checks the fields of layers of two kinds of a `ModelConfig` whose fields are legal each by itself.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    if not model.experts:
        for name, usual in (("dense_layers", 0), ("moe_layer_freq", "1"), ("dense_feedforward", None)):
            if (value := getattr(model, name)) != usual:
                raise ConfigError(
                    f"{name} = {value} does nothing without experts, where all layers are dense: pass --experts 2 or more, "
                    f"or omit {option(name)}."
                )
        return
    if has_pattern(model) and model.layers > MOST_LAYERS:
        raise ConfigError(
            f"layers = {model.layers} is above {MOST_LAYERS}, the most with dense_layers or moe_layer_freq: pass fewer, or "
            "omit these."
        )
    if has_pattern(model) and "none" in model.mixers:
        raise ConfigError(
            "dense_layers and moe_layer_freq choose among layers with MLPs, which with mixer = none are its kind: omit them."
        )
    kinds = model_kinds(model)
    if SPARSE not in kinds:
        selected = [
            layer for layer, kind in enumerate(read_pattern(model.moe_layer_freq, model.layers)) if kind == SPARSE
        ]
        fewer = f"--dense-layers {selected[-1]}{' or fewer' * (selected[-1] > 0)}" if selected else "--moe-layer-freq 1"
        raise ConfigError(
            f"dense_layers = {model.dense_layers} and moe_layer_freq = {model.moe_layer_freq} leave none of layers = "
            f"{model.layers} with experts: pass --experts 0, or {fewer}."
        )
    if DENSE not in kinds and model.dense_feedforward is not None:
        raise ConfigError(
            f"dense_feedforward = {model.dense_feedforward} does nothing where all layers have experts: pass --dense-layers "
            "or --moe-layer-freq, or omit --dense-feedforward."
        )


def check_kinds_parallel(model: Any, parallel: Any) -> None:
    """Checks that a layout can run layers of two kinds.

    Raises:
        ConfigError: it cannot.
    """
    if not (kinds := layer_kinds(model)):
        return
    kind = DENSE if DENSE in kinds else kinds[0]
    given = f"{kinds.count(kind)} of layers = {model.layers} are {kind}"
    if parallel.recompute_blocks > 1:
        raise ConfigError(
            f"recompute_blocks = {parallel.recompute_blocks} recomputes groups of equal layers, but {given}: pass "
            "--recompute-blocks 1."
        )
    stages = parallel.stage_layers(model.layers, kinds=kinds)
    if parallel.rings and model.layers >= stages.stages and not stages.same_stages:
        name = parallel.rings[0]
        raise ConfigError(
            f"{name} = {getattr(parallel, name)} communicates round a ring that all pipeline ranks reach together, but "
            f"{given}, in another order on some stages than on others: pass {option(name)} {RINGS_OFF[name]}, or --pipe 1 "
            "--chunks 1."
        )


def has_pattern(model: Any) -> bool:
    """Whether any of the fields that make layers dense is set."""
    return bool(model.dense_layers) or model.moe_layer_freq != "1"


def model_kinds(model: Any) -> tuple[str, ...]:
    """The kind of each layer of a model with experts; one "sparse" for a model without dense layers."""
    return _all_kinds(model.layers, model.dense_layers, model.moe_layer_freq) if has_pattern(model) else (SPARSE,)


@functools.lru_cache(maxsize=256)
def _all_kinds(layers: int, dense_layers: int, moe_layer_freq: str) -> tuple[str, ...]:
    kinds = read_pattern(moe_layer_freq, layers)
    return tuple(DENSE if layer < dense_layers else kind for layer, kind in enumerate(kinds))


class _Pattern:
    """Reads a pattern: lists of 0 and 1, joined by "+", repeated by "*" and a number, in parentheses.

    Nothing is evaluated as Python, and no list becomes longer than the layers.
    """

    def __init__(self, text: str, layers: int):
        self.layers, self.tokens, place = layers, [], 0
        while text[place:].strip():
            found = TOKEN.match(text, place)
            if not found:
                raise ValueError(f"has {text[place:].strip()[0]!r}, which no pattern has")
            self.tokens.append(found[1])
            place = found.end()

    def read(self) -> list[int]:
        kinds = self._sum(0)
        if self.tokens:
            raise ValueError(f"cannot be read from {shown(self.tokens[0])} on")
        if len(kinds) != self.layers:
            raise ValueError(f"has {len(kinds)} layers, and layers = {self.layers}")
        return kinds

    def _next(self, *legal: str) -> str:
        token = self.tokens.pop(0) if self.tokens else ""
        if token not in legal:
            raise ValueError(
                f"has {shown(token)} where {' or '.join(map(repr, legal))} must be" if token else "ends early"
            )
        return token

    def _sum(self, depth: int) -> list[int]:
        kinds = self._repeated(depth)
        while self.tokens[:1] == ["+"]:
            self.tokens.pop(0)
            kinds = kinds + self._repeated(depth)
        return kinds

    def _repeated(self, depth: int) -> list[int]:
        if self._next("[", "(") == "[":
            kinds = [int(self._next("0", "1"))]
            while self._next(",", "]") == ",":
                kinds.append(int(self._next("0", "1")))
        elif depth == DEPTH:
            raise ValueError(f"has more than {DEPTH} parentheses in one another")
        else:
            kinds = self._sum(depth + 1)
            self._next(")")
        while self.tokens[:1] == ["*"]:
            self.tokens.pop(0)
            count = self.tokens.pop(0) if self.tokens else ""
            if not count.isdecimal() or len(count) >= DIGITS or not int(count):
                raise ValueError("has no number after '*'")
            if len(kinds) * int(count) > self.layers:
                raise ValueError(f"has {len(kinds) * int(count)} layers or more, and layers = {self.layers}")
            kinds = kinds * int(count)
        return kinds

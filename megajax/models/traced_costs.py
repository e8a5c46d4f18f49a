"""The costs of any model, found by tracing its block, for models without formulas.

Nothing is executed and no array is created. FLOPs are those of the block's `dot_general`s, the values stored for the
backward pass are the residuals of its `jax.vjp` in each recompute mode, and parameters are counted in `jax.eval_shape` of
init. The tensor split of a weight is read from its logical axes, that of a residual from the `constrain` calls on values of
its shape, both with the default sharding rules. A residual whose shape occurs in no `constrain` call counts as replicated
over tensor.

Matmuls outside the blocks are not counted, except the head's with an axis called "vocabulary".
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import ConfigError
from megajax.config.layer_kinds import layer_kinds
from megajax.models.costs import Elementwise, KeptValue, Matmul, ModelCosts, Parameters
from megajax.models.remat import MODES
from megajax.ops.linear import plain_operations
from megajax.runtime.compat import Literal, vjp_residuals
from megajax.sharding.rules import default_rules

__all__ = ["traced_costs"]

Tree = Any
RULES = default_rules()
SAME_AXES = ("convert_element_type", "copy", "sharding_constraint", "optimization_barrier")  # of one operand


def traced_costs(model) -> ModelCosts:
    """FLOPs of the block's matmuls, values that its backward keeps, and parameters of a `PipelineModel`.

    Of a model whose layers are of several kinds those of each kind are traced in a model of that kind alone.

    Raises:
      ConfigError: its blocks are of several kinds, and its configuration has no `of_kind` that gives such a model.
    """
    if layer_kinds(model.config):
        return _of_kinds(model)
    modes = {mode: _Trace(model, mode) for mode in MODES}
    none = modes["none"]
    streams = jax.tree.leaves(none.x)
    tokens = max(math.prod(leaf.shape[1:-1]) for leaf in streams)  # of the longest stream; sizes are for each of them
    widths = [-(-math.prod(leaf.shape[1:]) // tokens) for leaf in streams]
    hidden = sum(widths)
    repeated = {mode: trace.backward_dots - none.backward_dots for mode, trace in modes.items()}
    matmuls, with_weights = [], []
    for number, (equation, weights) in enumerate(_dots(none.forward.jaxpr, none.weight_splits)):
        again = tuple(mode for mode in MODES if repeated[mode][_signature(equation)] > 0)
        for mode in again:
            repeated[mode][_signature(equation)] -= 1
        matmuls.append(_matmul(f"matmul {number}", equation, weights, tokens, again))
        if any(axes is not None for axes in weights):
            with_weights.append(matmuls[-1])
    kept = [
        KeptValue("input", width, split=none.split_of(leaf.shape)) for leaf, width in zip(streams, widths, strict=True)
    ]
    for mode, trace in modes.items():
        kept += trace.kept(mode, tokens)
    vocabulary, width, uncast, shared = _shared(none, model.lookup_mask()["shared"])
    return ModelCosts(
        layers=model.config.layers,
        hidden=hidden,
        sequence_length=tokens,
        vocabulary=vocabulary,
        matmuls=tuple(matmuls),
        attention=None,
        block=_parameters(none.shapes["blocks"], none.axes["blocks"], model.config.layers),
        shared=shared,
        vocabulary_width=width,
        looked_up_width=uncast,
        kept=tuple(kept),
        kept_for_weights=tuple(_kept_for_weights(with_weights)),
        elementwise=Elementwise(residual_passes=3),  # of x + f(x): read x, read f(x), write
    )


def _of_kinds(model) -> ModelCosts:
    """`traced_costs` of a model with several kinds of layers: the costs of each kind, in those of the largest."""
    config, kinds = model.config, layer_kinds(model.config)
    found = {}
    for kind in sorted(set(kinds)):
        own = config.of_kind(kind) if hasattr(config, "of_kind") else config
        if layer_kinds(own):
            raise ConfigError(
                f"{type(config).__name__} has layers of several kinds: for its costs, of_kind({kind!r}) must return the "
                "configuration of a model all of whose layers are of this kind, whose layer_kinds is None."
            )
        found[kind] = traced_costs(type(model)(own, model.context))
    counted = tuple((kinds.count(kind), costs) for kind, costs in found.items())
    return dataclasses.replace(max(found.values(), key=lambda costs: costs.block.total), kinds=counted)


class _Trace:
    """The block in one recompute mode, in bf16, traced for microbatches of one and of two samples.

    Attributes:
      shapes, axes: of the parameters.
      x: shapes and types of the block's input for one sample.
      forward: jaxpr of the block for one sample.
      weight_splits: for each input of `forward`, its axes that are split over tensor.
      residuals: what the VJP saves, for one and for two samples.
      backward_dots: signatures of the backward's dots, counted.
    """

    def __init__(self, model, mode: str):
        self.splits: dict[tuple[int, ...], str | None] = {}
        recording = {"constrain": self._record, "operations": plain_operations(self._record)}
        context = dataclasses.replace(model.context, dtype=jnp.bfloat16, recompute=mode, **recording)
        model = type(model)(model.config, context)
        self.shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
        self.axes = model.logical_axes()
        cast = lambda leaf, shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
        weights = jax.tree.map(lambda leaf: cast(leaf, leaf.shape[1:]), self.shapes["blocks"])
        shared = jax.tree.map(lambda leaf: cast(leaf, leaf.shape), self.shapes["shared"])
        self.residuals = []
        for samples in (2, 1):
            batch = {
                name: jax.ShapeDtypeStruct((samples, *leaf.shape), leaf.dtype)
                for name, leaf in model.batch_shapes().items()
            }
            self.x = jax.eval_shape(model.embed, shared, batch)

            def vjp(weights, x, batch):
                block = lambda weights, x: model.block(weights, x, batch, np.int32(0))  # noqa: E731
                return jax.vjp(block, weights, x)[1]

            shapes = jax.eval_shape(vjp, weights, self.x, batch)
            self.residuals.insert(
                0, [leaf for leaf in jax.tree.leaves(vjp_residuals(shapes)) if hasattr(leaf, "shape")]
            )
        self.forward = jax.make_jaxpr(model.block)(weights, self.x, batch, np.int32(0))
        flat = jax.tree.leaves(self.axes["blocks"], is_leaf=lambda node: isinstance(node, tuple))
        self.weight_splits = [_tensor_axes(axes[1:]) for axes in flat]
        backward = jax.make_jaxpr(lambda weights, x, batch, dy: vjp(weights, x, batch)(dy))(
            weights, self.x, batch, self.x
        )
        self.backward_dots = Counter(_signature(equation) for equation, _ in _dots(backward.jaxpr, []))

    def _record(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """The context's `constrain`: notes how values of x's shape are split; a replicated one is gathered, not kept."""
        if _tensor_axes(axes):
            split, key = "sequence" if "sequence" in axes else "tensor", tuple(x.shape[1:])
            self.splits[key] = split if self.splits.get(key) != "sequence" else "sequence"
        return x

    def split_of(self, shape: tuple[int, ...]) -> str | None:
        """How values [samples, ...] of this shape are split."""
        return self.splits.get(tuple(shape[1:]))

    def kept(self, mode: str, tokens: int) -> list[KeptValue]:
        """The residuals that grow with the samples."""
        values = []
        for number, (one, two) in enumerate(zip(*self.residuals, strict=True)):
            elements = -(-(two.size - one.size) // tokens)
            if elements <= 0:
                continue
            itemsize = None if one.dtype.itemsize == 2 else one.dtype.itemsize
            split = self.split_of(one.shape)
            values.append(KeptValue(f"{mode} {number}", elements, split=split, modes=(mode,), itemsize=itemsize))
        return values


def _tensor_axes(axes) -> tuple[int, ...]:
    """The axes of an array that the default rules split over tensor."""
    known = (index for index, name in enumerate(axes) if name in RULES.table)
    return tuple(index for index in known if "tensor" in RULES.mesh_axes(axes[index]))


def _parameters(shapes: Tree, axes: Tree, layers: int = 1) -> Parameters:
    """Parameters of one layer (or of the shared part), split over tensor or not."""
    split = whole = 0
    names = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    for leaf, own in zip(jax.tree.leaves(shapes), names, strict=True):
        if "vocabulary" in own:
            continue
        if _tensor_axes(own):
            split += leaf.size // layers
        else:
            whole += leaf.size // layers
    return Parameters(split, whole)


def _shared(trace: _Trace, looked_up: Any) -> tuple[int, int, int, Parameters]:
    """Rows of the token tables, parameters for each of them, those that are only looked up, the other shared parameters."""
    rows, width, uncast = 0, 0, 0
    names = jax.tree.leaves(trace.axes["shared"], is_leaf=lambda node: isinstance(node, tuple))
    leaves = jax.tree.leaves(trace.shapes["shared"]), names, jax.tree.leaves(looked_up)
    for leaf, own, flag in zip(*leaves, strict=True):
        if "vocabulary" in own:
            rows = leaf.shape[own.index("vocabulary")]
            width += leaf.size // rows
            uncast += flag * leaf.size // rows
    return rows, width, uncast, _parameters(trace.shapes["shared"], trace.axes["shared"])


def _dots(jaxpr, splits: list) -> list[tuple[Any, tuple]]:
    """Every `dot_general` in a jaxpr and those inside it, with the split axes of its two operands, where they are weights.

    A loop's body counts once per iteration, if the trip count is known.
    """
    known = {var: split for var, split in zip(jaxpr.invars, splits, strict=False) if split is not None}
    found = []
    for equation in jaxpr.eqns:
        inputs = [None if isinstance(var, Literal) else known.get(var) for var in equation.invars]
        if equation.primitive.name == "dot_general":
            found.append((equation, tuple(inputs)))
        elif equation.primitive.name in SAME_AXES and inputs[0] is not None:
            known[equation.outvars[0]] = inputs[0]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                inner = getattr(inner, "jaxpr", inner)
                aligned = inputs if len(inner.invars) == len(inputs) else []
                found += _dots(inner, aligned) * equation.params.get("length", 1)
    return found


def _is_jaxpr(node) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return hasattr(node, "eqns")


def _signature(equation) -> tuple:
    """Shapes and contracted axes: what a repeated dot has in common with the first."""
    return (*(tuple(var.aval.shape) for var in equation.invars), str(equation.params["dimension_numbers"]))


def _matmul(name: str, equation, weights: tuple, tokens: int, recomputed: tuple[str, ...]) -> Matmul:
    """A dot as the matmul of `tokens` rows with the same FLOPs, split as its weight; `weights`: as `_dots` returns them."""
    contracted = equation.params["dimension_numbers"][0]
    inputs = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted[0])
    outputs = -(-math.prod(equation.outvars[0].aval.shape) // tokens)
    split = None
    for axes, own in zip(weights, contracted, strict=True):
        if axes:
            split = "row" if set(axes) & set(own) else "column"
    return Matmul(name, inputs, outputs, split, recomputed)


def _kept_for_weights(matmuls: list[Matmul]) -> Iterator[KeptValue]:
    """The values that zero bubble's I stores for W: the outputs' gradients and, with full recompute, the inputs."""
    for matmul in matmuls:
        output, given = ("tensor" if matmul.split == side else None for side in ("column", "row"))
        yield KeptValue(f"gradient of {matmul.name}", matmul.outputs, split=output)
        yield KeptValue(f"input of {matmul.name}", matmul.inputs, split=given, modes=("full",))

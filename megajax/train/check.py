"""`megajax.check`: whether a model and batches of one's own fit each other, by their shapes alone (`jax.eval_shape`).

jax's messages name an operation deep inside of a model. These name the function, the array, and what was expected and found.
The Trainer checks its first batch before it compiles the step.
"""

import dataclasses
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.estimate.branch_permutes import is_library
from megajax.models.context import model_shapes
from megajax.models.ids import checked_ids
from megajax.models.interface import PipelineModel
from megajax.train.precision import cast, compute_dtype

__all__ = ["check", "check_batch", "model_to_check"]

Batch = Mapping[str, Any]
Tree = Any
KINDS = {"i": "integers", "u": "integers", "f": "floats", "V": "floats", "b": "bools"}  # of dtype.kind; V: bfloat16


def check(model: PipelineModel | RunConfig, data: Any) -> None:
    """Checks that a model's functions take the first of these batches; compiles and computes nothing.

    Args:
      model: a model, or a run, whose model and precision are then checked.
      data: has `batch(consumed_samples)`, as for `Trainer`; or is a batch, a dictionary of arrays.

    Raises:
      ConfigError: one line that names the function or array, what was expected and what was found.
    """
    if isinstance(model, RunConfig):
        model = model_to_check(model)
    name, batch = ("the batch", data) if isinstance(data, Mapping) else ("batch(0)", data.batch(0))
    check_batch(model, batch, name)
    checked_ids({key: np.asarray(array) for key, array in batch.items()}, model.id_bounds())


def model_to_check(run: RunConfig, model: type[PipelineModel] | None = None, rules: Any = None) -> PipelineModel:
    """The run's model without a mesh, in the run's precision."""
    shapes = model_shapes(run, model, rules)
    dtype = compute_dtype(run.train.precision)
    return type(shapes)(run.model, dataclasses.replace(shapes.context, dtype=dtype))


def check_batch(model: PipelineModel, batch: Batch, name: str, replicas: int = 1) -> None:
    """As `check`, without the values of ids. `name`: of the batch; `replicas`: that split its samples."""
    _check_arrays(model, batch, name)
    params = _call("init", name, lambda: jax.eval_shape(model.init, jax.random.key(0)))
    _check_axes(model, params)
    dtype = model.context.dtype
    params = jax.tree.map(lambda leaf, fp32: leaf if fp32 else _cast(leaf, dtype), params, model.fp32_mask())
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, _stored(array.dtype)), dict(batch))
    whole = _call("prepare_batch", name, lambda: jax.eval_shape(model.prepare_batch, shapes), shapes)
    one = {
        key: jax.ShapeDtypeStruct((array.shape[1] // replicas, *array.shape[2:]), array.dtype)
        for key, array in whole.items()
    }
    own = _call("prepare_microbatch", name, lambda: jax.eval_shape(model.prepare_microbatch, one), one)
    x = _call("embed", name, lambda: jax.eval_shape(model.embed, params["shared"], one), one)
    _check_activations(model, x, name)
    for kind, weights in _blocks(model, params).items():
        y = _call("block", name, lambda w=weights: jax.eval_shape(model.block, w, x, own, jnp.int32(0)), own)
        if _type(y) != _type(x):
            of = f" (of kind {kind})" if kind else ""
            raise ConfigError(
                f"block of {_name(model)}{of} returns {_shown(y)}; expected {_shown(x)}, as embed: all blocks take and "
                "return the same"
            )
    loss = _call("head_loss", name, lambda: jax.eval_shape(model.only_loss, params["shared"], x, one), one)
    if _type(loss) != ((), "float32"):
        raise ConfigError(
            f"head_loss of {_name(model)} returns {_shown(loss)}; expected float32 [], the loss summed over the microbatch"
        )
    weight = _call("loss_weight", name, lambda: jax.eval_shape(model.loss_weight, shapes), shapes)
    if getattr(weight, "shape", None) != ():
        raise ConfigError(f"loss_weight of {_name(model)} returns {_shown(weight)}; expected a scalar")


def _check_activations(model: PipelineModel, x: Any, name: str) -> None:
    """Checks that what `embed` returns has the arrays and axes of `activation_axes`, and that they have gradients."""
    axes = model.activation_axes
    several = isinstance(axes, Mapping)
    if several and (not isinstance(x, dict) or x.keys() != axes.keys()):
        found = f"a dictionary of {', '.join(map(repr, x))}" if isinstance(x, dict) else _shown(x)
        raise ConfigError(
            f"embed of {_name(model)} returns {found} for {name}; expected a dictionary of "
            f"{', '.join(map(repr, axes))}, those of activation_axes"
        )
    for key, own in axes.items() if several else (("", axes),):
        leaf, of = (x[key], f" as {key!r}") if several else (x, "")
        if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.ndim != len(own):
            raise ConfigError(
                f"embed of {_name(model)} returns {_shown(leaf)}{of} for {name}; expected one array of {len(own)} axes, "
                f"those of activation_axes = {axes}"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"embed of {_name(model)} returns {_shown(leaf)}{of} for {name}, and gradients pass through all that blocks "
                "pass on: leave integers in the microbatch, which every block gets"
            )


def _check_arrays(model: PipelineModel, batch: Batch, name: str) -> None:
    """Checks the arrays that `batch_shapes` describes and the batch has; which ones are read, its functions say."""
    for key, sample in model.batch_shapes().items():
        if key not in batch:
            continue
        found = batch[key]
        if found.shape[2:] != sample.shape or _kind(found.dtype) != _kind(sample.dtype):
            size = ", ".join(["microbatches", "samples", *map(str, sample.shape)])
            raise ConfigError(
                f"{name}[{key!r}] is {_shown(found)}; expected {_kind(sample.dtype)} [{size}], by batch_shapes() of "
                f"{_name(model)}"
            )


def _check_axes(model: PipelineModel, params: Tree) -> None:
    """Checks that `logical_axes` and the masks are like the parameters."""
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731
    for method in ("logical_axes", "decay_mask", "fp32_mask", "lookup_mask"):
        tree = getattr(model, method)()
        found = {
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree.leaves_with_path(tree, is_axes)
        }
        wanted = {
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)
        }
        if found != wanted:
            missing, extra = sorted(wanted - found), sorted(found - wanted)
            problem = f"has no {missing[0]}" if missing else f"has {extra[0]}, which is no parameter"
            raise ConfigError(f"{method}() of {_name(model)} {problem}: return a tree like the parameters of init()")
    axes = jax.tree.leaves(model.logical_axes(), is_leaf=is_axes)
    for (path, leaf), names in zip(jax.tree.leaves_with_path(params), axes, strict=True):
        if len(names) != leaf.ndim:
            key = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ConfigError(
                f"logical_axes() of {_name(model)} names {len(names)} axes of {key}, {names}; expected one for each axis of "
                f"{_shown(leaf)}"
            )


def _blocks(model: PipelineModel, params: Tree) -> dict[str, Tree]:
    """The weights of one block of each kind."""
    one = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)  # noqa: E731
    kinds = layer_kinds(model.config)
    return {kind: one(params["blocks"][kind]) for kind in sorted(set(kinds))} if kinds else {"": one(params["blocks"])}


def _call(function: str, name: str, call: Callable[[], Any], batch: Batch | None = None) -> Any:
    """`call()`; an error in it as one line."""
    try:
        return call()
    except ConfigError:
        raise
    except KeyError as error:
        if batch is None or not error.args or error.args[0] in batch:
            raise ConfigError(_failed(function, name, error)) from error
        raise ConfigError(
            f"{function} reads {error.args[0]!r} of the microbatch{_place(error)}, and {name} has {', '.join(sorted(batch))}"
        ) from error
    except Exception as error:  # whatever a user's function raises
        raise ConfigError(_failed(function, name, error)) from error


def _failed(function: str, name: str, error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{function} does not take {name}{_place(error)}: {type(error).__name__}: {message[:400]}"


def _place(error: Exception) -> str:
    """The innermost frame that is in no library, as " (FILE, line N)"."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _cast(leaf: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda leaf: cast(leaf, dtype), leaf)


def _stored(dtype: Any) -> Any:
    """The type that an array has on devices: of 32 bits or fewer."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _kind(dtype: Any) -> str:
    return KINDS.get(np.dtype(dtype).kind, str(dtype))


def _type(value: Any) -> Any:
    """Comparable: of an array its shape and type, of a dictionary those of its arrays."""
    if isinstance(value, dict):
        return {key: _type(leaf) for key, leaf in value.items()}
    return (value.shape, str(value.dtype)) if isinstance(value, jax.ShapeDtypeStruct) else None


def _shown(value: Any) -> str:
    """float32 [4, 8]; of other things their type."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(leaf)}" for key, leaf in value.items()) + "}"
    if not hasattr(value, "shape"):
        return f"a {type(value).__name__}"
    return f"{value.dtype} [{', '.join(map(str, value.shape))}]"


def _name(model: PipelineModel) -> str:
    return type(model).__name__

"""Number formats: the dtype that a step computes in, and the loss scale that keeps fp16 gradients from underflow.

Parameters that are trained, gradient accumulators and optimizer state are always fp32; the precision is the dtype of matmuls
and activations. bf16 has fp32's exponent range and needs no loss scale; fp16 does: its smallest positive number is 6e-8.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.config import ConfigError, TrainConfig
from megajax.estimate.gpus import DTYPES
from megajax.pipeline.parameters import ParameterSpecs
from megajax.pipeline.trained import merge, split


def compute_dtype(precision: str) -> jnp.dtype:
    """The dtype of matmuls and activations for "bf16", "fp32" or "fp16".

    Raises:
      ConfigError: any other name.
    """
    if precision not in DTYPES:
        raise ConfigError(f"precision {precision!r} is unknown; pass --precision with one of {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[precision])


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """The tree with its floating-point leaves in `dtype`; integers, booleans and keys stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def to_compute(params: Any, fp32: Any, precision: str) -> Any:
    """Parameters in the type to compute with; those that the mask `fp32` names stay as they are."""
    dtype = compute_dtype(precision)
    return jax.tree.map(lambda p, keep: p if keep else cast(p, dtype), params, fp32)


def uncast(model: Any, specs: ParameterSpecs, drains: bool) -> Any:
    """Mask of the parameters that a step does not cast: those that the model computes with in fp32, and token tables.

    A table of which `embed` reads and casts rows needs no copy in 16 bits, unless replicas gather it, which sends 16 bits,
    or the schedule never drains and keeps the weights of a batch in flight.
    """

    def kept(fp32: bool, looked_up: bool, stored: PartitionSpec, computed: PartitionSpec) -> bool:
        return fp32 or looked_up and drains and stored == computed

    return jax.tree.map(kept, model.fp32_mask(), model.lookup_mask(), specs.stored, specs.computed)


def shared_apart(params: Any) -> Any:
    """The cast parameters, of which XLA's GPU compiler does not cast token tables after they were gathered in fp32."""
    return {**params, "shared": jax.tree.map(jax.lax.optimization_barrier, params["shared"])}


def cast_frozen(params: Any, trained: Any, fp32: Any, precision: str) -> Any:
    """The parameters as they are stored: frozen ones in the type to compute with, the others in fp32.

    Args:
      trained: mask of the parameters that are trained (`pipeline/trained.py`); None: all.
      fp32, precision: as of `to_compute`.
    """
    own, frozen = split(params, trained)
    return merge(own, to_compute(frozen, split(fp32, trained)[1], precision)) if trained else params


def all_finite(tree: Any) -> jax.Array:
    """Boolean scalar: whether no element of any leaf is infinite or NaN."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)], dtype=bool).all()


@dataclasses.dataclass(frozen=True)
class ScaleRules:
    """When a dynamic loss scale changes. The defaults are Megatron-LM's, which starts at 2**32 with a window of 1000."""

    initial: float
    window: int  # good steps in a row until the scale grows
    minimum: float = 1.0
    growth: float = 2.0  # factor after `window` good steps in a row
    backoff: float = 0.5  # factor after an overflow, once the hysteresis is exhausted
    hysteresis: int = 2  # overflows until the scale shrinks; reset only when the scale grows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale as a pytree that is part of the training state and of checkpoints.

    The loss is multiplied by `scale` before the backward pass; the gradients are divided by it after it, in fp32. `update`
    only changes the scale: the caller skips a step whose gradients are not finite.
    """

    scale: jax.Array  # fp32 scalar
    good_steps: jax.Array  # int32 scalar: consecutive finite steps since the scale last grew or a step overflowed
    overflows_left: jax.Array  # int32 scalar: the rest of the hysteresis
    rules: ScaleRules | None = dataclasses.field(metadata={"static": True}, default=None)  # None: constant scale

    def update(self, finite: jax.Array) -> "LossScale":
        """The scale for the next step.

        A finite step counts towards the window; when the window is full the scale grows and the hysteresis is reset. An
        overflow empties the window and decrements the hysteresis; once that is 0, this and every further overflow shrink
        the scale, down to the minimum.

        Args:
          finite: boolean scalar, whether this step's gradients were all finite.
        """
        if self.rules is None:
            return self
        rules = self.rules
        counted = jnp.where(finite, self.good_steps + 1, 0)
        grow = counted >= rules.window
        left = jnp.where(finite, self.overflows_left, jnp.maximum(self.overflows_left - 1, 0))
        shrunk = jnp.maximum(self.scale * rules.backoff, rules.minimum)
        after_overflow = jnp.where(left == 0, shrunk, self.scale)
        after_good = jnp.where(grow, self.scale * rules.growth, self.scale)
        return dataclasses.replace(
            self,
            scale=jnp.where(finite, after_good, after_overflow),
            good_steps=jnp.where(grow, 0, counted),
            overflows_left=jnp.where(grow, rules.hysteresis, left),
        )


def make_loss_scale(train: TrainConfig) -> LossScale:
    """The initial loss scale of a run: dynamic for fp16, constant 1 for bf16 and fp32."""
    if train.precision != "fp16":
        return LossScale(scale=jnp.float32(1), good_steps=jnp.int32(0), overflows_left=jnp.int32(0))
    return dynamic_loss_scale(ScaleRules(initial=train.initial_loss_scale, window=train.loss_scale_window))


def dynamic_loss_scale(rules: ScaleRules) -> LossScale:
    """An initial loss scale with full hysteresis."""
    return LossScale(
        scale=jnp.float32(rules.initial),
        good_steps=jnp.int32(0),
        overflows_left=jnp.int32(rules.hysteresis),
        rules=rules,
    )

"""The norms of a block and of the head, in fp32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import ModelConfig
from megajax.models.nnx_model import parameter
from megajax.ops.norm import norm

__all__ = ["Norm", "ProjectionNorm", "ReplicatedNorm", "unweighted_norm"]


def initial_scale(config: ModelConfig, *shape: int) -> jax.Array:
    """The initial weights of a norm: 1, or 0 where 1 is added to them."""
    return jnp.zeros(shape) if config.norm_offset else jnp.ones(shape)


def scale_of(config: ModelConfig, weights: nnx.Param) -> jax.Array:
    """What a norm multiplies with."""
    return 1 + weights[...].astype(jnp.float32) if config.norm_offset else weights[...]


def unweighted_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm of x [..., n] over its last axis, without weights, in fp32; the result has x's type."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


class Norm(nnx.Module):
    """Layer norm (1607.06450) or RMS norm (1910.07467), with or without weights, over the last axis, in fp32."""

    def __init__(self, config: ModelConfig):
        self.config = config
        if config.norm == "unweighted_rmsnorm":
            return
        self.scale = parameter(initial_scale(config, config.hidden), "hidden", decay=False)
        if config.norm == "layernorm" and config.biases:
            self.bias = parameter(jnp.zeros(config.hidden), "hidden", decay=False)

    def __call__(self, x: jax.Array, one_pass: Callable[..., jax.Array] | None = None) -> jax.Array:
        """Norms x [..., h]; the result has x's type. `one_pass`: RMS norms are computed by it (`Operations.norm`)."""
        if not hasattr(self, "scale"):
            return unweighted_norm(x, self.config.norm_epsilon)
        bias = self.bias[...] if hasattr(self, "bias") else None
        if one_pass is not None and bias is None and self.config.norm != "layernorm":
            return one_pass(x, scale_of(self.config, self.scale), self.config.norm_epsilon)
        return norm(
            x, scale_of(self.config, self.scale), bias, self.config.norm == "layernorm", self.config.norm_epsilon
        )


class ReplicatedNorm(nnx.Module):
    """RMS norm over the last axis, in fp32, whose scale all devices have: of each head (Qwen3), or of a latent."""

    def __init__(self, config: ModelConfig, size: int, epsilon: float):
        """`size`: of the last axis."""
        self.config, self.epsilon = config, epsilon
        self.scale = parameter(initial_scale(config, size), None, decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms x [..., size]; the result has x's type."""
        return norm(x, scale_of(self.config, self.scale), None, False, self.epsilon)


class ProjectionNorm(nnx.Module):
    """RMS norm over the elements of all heads of a token, in fp32; a scale for each of them (OLMoE).

    The groups of heads are split over tensor: the mean of the squares is an all-reduce of one number for each token.
    """

    def __init__(self, config: ModelConfig, *heads: int, split: bool = True):
        """`heads`: the axes of a token's heads, groups first; `split`: whether groups are split over tensor."""
        self.config, self.axes = config, len(heads) + 1
        scale = initial_scale(config, *heads, config.head_dimension)
        self.scale = parameter(scale, "groups" if split else None, *[None] * len(heads), decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms x [..., *heads, d]; the result has x's type.

        x may have a group for each rank of tensor, with a part of a group's queries or a copy of its key.
        """
        wide, here = x.astype(jnp.float32), x.shape[-self.axes :]
        mean = jnp.square(wide).mean(tuple(range(-self.axes, 0)), keepdims=True)
        wide = wide * lax.rsqrt(mean + self.config.norm_epsilon)
        scale = scale_of(self.config, self.scale).astype(jnp.float32)
        scale = scale.reshape(here) if self.axes > 2 else jnp.repeat(scale, here[0] // len(scale), axis=0)
        return (wide * scale).astype(x.dtype)

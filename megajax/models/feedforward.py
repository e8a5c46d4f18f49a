"""A block's dense MLP, and the matmul with a weight and a bias that all parts of a block use.

Shapes: b samples, s tokens, h = hidden, f = feedforward.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.models.interface import ModelContext
from megajax.models.lora import adapters
from megajax.models.nnx_model import named_key, parameter
from megajax.ops.activation import exact_gelu, gelu
from megajax.ops.linear import add_bias

__all__ = ["ACTIVATIONS", "FeedForward", "Linear", "activate"]

ACTIVATIONS = {  # of the MLP, or of its gate
    "gelu": gelu,
    "gelu_exact": exact_gelu,
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=True),
    "geglu_exact": exact_gelu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "clamped_swiglu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


class Linear(nnx.Module):
    """A matmul from the last axes of x to new ones, in x's type, with or without a bias."""

    def __init__(self, key, inputs: dict[str, int], outputs: dict[str, int], deviation: float, biases: bool, lora=None):
        """Takes the axes as name -> size, in order; a name that starts with "_" is no logical axis.

        `lora`: makes the matmul's adapters, see `megajax.models.lora.adapters`; None: it has none.
        """
        shape, names = (*inputs.values(), *outputs.values()), [*inputs, *outputs]
        axes = [None if name.startswith("_") else name for name in names]
        self.kernel = parameter(jax.random.normal(named_key(key, "kernel"), shape) * deviation, *axes)
        if biases:
            self.bias = parameter(jnp.zeros(tuple(outputs.values())), *axes[len(inputs) :], decay=False)
        if lora is not None:
            self.lora = lora(named_key(key, "lora"), inputs, outputs)

    def __call__(self, x: jax.Array, product: Callable[..., jax.Array], *how, drop=None) -> jax.Array:
        """`product(x, kernel, *how)` plus the bias: from [..., *inputs] to [..., *outputs]; `drop`: of the adapters."""
        y = product(x, self.kernel[...].astype(x.dtype), *how)
        if hasattr(self, "lora"):
            y = y + self.lora(x, how[0], drop)
        return add_bias(y, self.bias[...].astype(x.dtype)) if hasattr(self, "bias") else y


def activate(config: ModelConfig, up: jax.Array) -> jax.Array:
    """The activation function of up [..., f], or of [..., 2, f]: the gate, then the gated value; fp32 [..., f]."""
    activation, wide = ACTIVATIONS[config.activation], up.astype(jnp.float32)
    if config.activation == "clamped_swiglu":
        limit = config.activation_limit
        return activation(jnp.minimum(wide[..., 0, :], limit)) * (wide[..., 1, :].clip(-limit, limit) + 1)
    return activation(wide[..., 0, :]) * wide[..., 1, :] if config.is_gated else activation(wide)


class FeedForward(nnx.Module):
    """Two matmuls around GELU, or SwiGLU or GEGLU (2002.05202), the inner width split over tensor."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext, width: int | None = None):
        """Draws the weights; `width`: the inner one, by default the config's. Only those of this width have adapters."""
        self.config, self.constrain, self.operations = config, context.constrain, context.operations
        hidden, inner = {"hidden": config.hidden}, {"feedforward": width or config.feedforward_size}
        gated = {"_gate_and_up": 2, **inner} if config.is_gated else inner
        small = config.init_deviation / (2 * config.layers) ** 0.5
        lora = lambda name: adapters(config, context, name) if width is None else None  # noqa: E731
        self.up = Linear(named_key(key, "up"), hidden, gated, config.init_deviation, config.biases, lora("up"))
        self.down = Linear(named_key(key, "down"), inner, hidden, small, config.biases, lora("down"))

    def __call__(self, y: jax.Array, drop=None) -> jax.Array:
        """From [b, split s, h] to the same, through [b, whole s, split f]; `drop`: of adapters."""
        gates = (None,) if self.config.is_gated else ()
        lead = ("batch", "whole_sequence")
        up = checkpoint_name(self.up(y, self.operations.column, (*lead, *gates, "feedforward"), drop=drop), "up")
        if self.config.is_gated and self.operations.gated and not hasattr(self.down, "lora"):
            return self.down(up, self.operations.gated, ACTIVATIONS[self.config.activation])
        active = activate(self.config, up)
        # Its gradient must be split by feedforward too: otherwise XLA may split it by sequence and add an all-to-all.
        active = checkpoint_name(self.constrain(active.astype(y.dtype), *lead, "feedforward"), "activation")
        return self.down(active, self.operations.row, 1, drop=drop)

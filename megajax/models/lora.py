"""The adapters of a matmul (LoRA, 2106.09685): alpha / rank * (x A) B, as PEFT initializes and computes them.

A [*inputs, rank] is uniform in +-1/sqrt(inputs), B [rank, *outputs] zero. Tensor parallelism splits B of a column-parallel
matmul as its outputs, and A of a row-parallel one as its inputs; the other of the two is replicated. What is communicated
has `rank` elements for each token: x A is gathered along the sequence before B, or reduce-scattered after A.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config import ModelConfig
from megajax.config.lora import ROW, TARGETS, lora_scale, lora_targets, part_range
from megajax.models.interface import ModelContext
from megajax.models.nnx_model import named_key, parameter
from megajax.ops.linear import RESIDUAL

__all__ = ["Adapters", "adapters"]

Drop = Callable[..., jax.Array]


def adapters(config: ModelConfig, context: ModelContext, matmul: str) -> Callable[..., "Adapters"] | None:
    """Makes the adapters of a matmul from a key and its axes; None: it has none. `matmul`: as `config.lora.Target`."""
    names = [name for name in lora_targets(config) if TARGETS[name].matmul == matmul]
    return partial(Adapters, config, context, matmul, names) if names else None


class Adapter(nnx.Module):
    """A and B of one projection."""

    def __init__(self, key: jax.Array, rank: int, inputs: Mapping[str, int], outputs: Mapping[str, int]):
        """Takes the axes as `feedforward.Linear`."""
        axes = lambda names: [None if name.startswith("_") else name for name in names]  # noqa: E731
        bound = 1 / math.sqrt(math.prod(inputs.values()))
        a = jax.random.uniform(named_key(key, "a"), (*inputs.values(), rank), minval=-bound, maxval=bound)
        self.a = parameter(a, *axes(inputs), None, decay=True)
        self.b = parameter(jnp.zeros((rank, *outputs.values())), None, *axes(outputs), decay=True)


class Adapters(nnx.Module):
    """Those of one matmul; several of them are computed as one of the sum of their ranks."""

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        matmul: str,
        names: list[str],
        key: jax.Array,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
    ):
        """Draws A for each of `names`."""
        self.names, self.matmul, self.scale = tuple(names), matmul, lora_scale(config)
        self.constrain, self.width, self.axes = context.constrain, tuple(outputs.values()), len(inputs)
        for name in names:
            own = dict(outputs)
            if TARGETS[name].part:
                low, high = part_range(name, self.width[-2])
                own[list(outputs)[-2]] = high - low
            setattr(self, name, Adapter(named_key(key, name), config.lora, inputs, own))

    def __call__(self, x: jax.Array, axes: tuple, drop: Drop | None = None) -> jax.Array:
        """What is added to the product of x [b, s, *inputs], [b, s, *outputs].

        Args:
          axes: logical axes of the product of a column-parallel matmul.
          drop: dropout of x, as `models.dropout.Dropout`.
        """
        is_row = self.matmul in ROW
        if drop is not None:
            inner = {"output": ("heads", None), "down": ("feedforward",)}
            whole = ("batch", "whole_sequence", *inner[self.matmul]) if is_row else RESIDUAL
            x = drop(x, f"lora_{self.matmul}", *whole)
        a = jnp.concatenate([getattr(self, name).a[...] for name in self.names], -1)
        z = jnp.tensordot(x, a.astype(x.dtype), self.axes) * jnp.asarray(self.scale, x.dtype)
        z = self.constrain(z, "batch", "sequence", None)
        z = z if is_row else self.constrain(z, "batch", "whole_sequence", None)
        b = jnp.concatenate([self._whole(name) for name in self.names], 0)
        return self.constrain(jnp.tensordot(z, b.astype(x.dtype), 1), *(RESIDUAL if is_row else axes))

    def _whole(self, name: str) -> jax.Array:
        """B with zeros for the outputs that are not its projection's."""
        b = getattr(self, name).b[...]
        if TARGETS[name].part is None:
            return b
        low, high = part_range(name, self.width[-2])
        return jnp.pad(b, [*[(0, 0)] * (b.ndim - 2), (low, self.width[-2] - high), (0, 0)])

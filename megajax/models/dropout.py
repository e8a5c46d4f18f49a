"""Dropout that does not depend on the mesh."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.models.interface import Microbatch, ModelContext
from megajax.models.nnx_model import named_key

__all__ = ["Dropout"]


class Dropout:
    """Dropout whose masks depend on the sample, the layer and the site alone: the same on any mesh, in any microbatch.

    Attributes:
      rate: probability of dropping an element; 0 outside training.
      constrain: the context's.
      keys: one key for each sample, [b], already folded with the layer; None where the rate is 0.
    """

    def __init__(self, rate: float, context: ModelContext, microbatch: Microbatch, layer: jax.Array | int):
        """Reads the microbatch's "sample", the samples' index in the run [b], only if the rate is not 0."""
        self.rate, self.constrain, self.keys = rate if context.training else 0.0, context.constrain, None
        if self.rate > 0:
            key = jax.random.key(context.dropout_seed)
            fold = lambda index: jax.random.fold_in(jax.random.fold_in(key, index), layer)  # noqa: E731
            self.keys = jax.vmap(fold)(microbatch["sample"])

    def __call__(self, x: jax.Array, site: str, *axes: str | None) -> jax.Array:
        """Drops elements of x [b, ...], which has these logical axes, and scales up the rest; `site` names the mask."""
        if self.keys is None:
            return x

        def draw(key):  # threefry counts elements of the whole array: the bits do not depend on the sharding
            return jax.random.bernoulli(named_key(key, site), 1 - self.rate, x.shape[1:])

        mask = checkpoint_name(self.constrain(jax.vmap(draw)(self.keys), *axes), f"{site}_mask")
        return jnp.where(mask, x / (1 - self.rate), 0).astype(x.dtype)

"""Dropout that does not depend on the mesh."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.models.interface import Microbatch, ModelContext
from megajax.models.nnx_model import named_key
from megajax.ops.score_dropout import ScoreDropout

__all__ = ["Dropout"]


class Dropout:
    """Dropout whose masks depend on the sample, the token's place in it, the layer and the site, not on mesh or microbatch.

    Attributes:
      rate: probability of dropping an element; 0 outside training.
      constrain: the context's.
      keys: one key for each sample, [b], already folded with the layer; None where the rate is 0.
      places: of the tokens in the sample, [b, s]; None: 0 to s - 1.
    """

    def __init__(self, rate: float, context: ModelContext, microbatch: Microbatch, layer: jax.Array | int):
        """Reads the microbatch's "sample", the samples' index in the run [b], and "places", only if the rate is not 0."""
        self.rate, self.constrain, self.keys = rate if context.training else 0.0, context.constrain, None
        if self.rate > 0:
            key = jax.random.key(context.dropout_seed)
            fold = lambda index: jax.random.fold_in(jax.random.fold_in(key, index), layer)  # noqa: E731
            self.keys, self.places = jax.vmap(fold)(microbatch["sample"]), microbatch.get("places")

    def __call__(self, x: jax.Array, site: str, *axes: str | None, tokens: bool = True) -> jax.Array:
        """Drops elements of x [b, s, ...], or without `tokens` [b, ...], of these logical axes; `site` names the mask."""
        if self.keys is None:
            return x

        def draw(key):  # threefry counts elements of the whole array: the bits do not depend on the sharding
            return jax.random.bernoulli(key, 1 - self.rate, x.shape[1 + tokens :])

        each = jax.vmap(jax.vmap(draw)) if tokens else jax.vmap(draw)
        mask = each(self._keys(site, x.shape[1], axes[1]) if tokens else self._keys(site))
        mask = checkpoint_name(self.constrain(mask, *axes), f"{site}_mask")
        return jnp.where(mask, x / (1 - self.rate), 0).astype(x.dtype)

    def of_scores(self, heads: int, length: int) -> ScoreDropout | None:
        """Dropout of the attention probabilities of queries of s = `length` tokens; None: there is none."""
        if self.keys is None:
            return None
        return ScoreDropout.of_tokens(self._keys("probabilities", length), heads, self.rate, self.constrain)

    def _keys(self, site: str, length: int | None = None, axis: str | None = None) -> jax.Array:
        """Keys of a site's samples, [b], or of tokens, [b, s] with this logical axis of s: XLA would gather others."""
        keys = jax.vmap(lambda key: named_key(key, site))(self.keys)
        if length is None:
            return keys
        places = jnp.broadcast_to(jnp.arange(length), (len(keys), length)) if self.places is None else self.places
        keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, self.constrain(places, "batch", None))
        return jax.random.wrap_key_data(self.constrain(jax.random.key_data(keys), "batch", axis, None))

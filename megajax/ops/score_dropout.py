"""Dropout of attention probabilities, drawn by any device for any part of the scores.

A mask of a sample's scores is as large as they are, and ranks that share a sample (`megajax.ops.ring_attention`,
`megajax.ops.exchanged_attention`) multiply parts of its queries and keys, in an order of their own. So each query of a head
has a random key, and whether one of its probabilities is dropped depends on that and on the place of the key it attends to
alone: one block of threefry with the place as counter, the same number on every mesh.

Shapes: b samples, a heads, s queries, t keys of attention.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from megajax.ops.linear import Constrain, identity

__all__ = ["ScoreDropout"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreDropout:
    """Which attention probabilities are dropped.

    Attributes:
      keys: uint32 [b, a, s, n], the data of the random key of each query of a head.
      places: int32 [b, t], of the attention's keys in the sample; None: 0 to t - 1.
      rate: probability of dropping one.
      is_reversed: whether attention's keys are in the other order (see `megajax.ops.attention.fused_attention`).
    """

    keys: jax.Array
    places: jax.Array | None = None
    rate: float = dataclasses.field(default=0.0, metadata={"static": True})
    is_reversed: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of_tokens(cls, keys: jax.Array, heads: int, rate: float, constrain: Constrain = identity) -> "ScoreDropout":
        """That of queries of tokens with these random keys [b, s], from which each head makes its own.

        `constrain`: (x, *logical axes) -> x, a sharding constraint.
        """
        each = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))  # [s], [a] -> [a, s]
        own = jax.random.key_data(jax.vmap(each, (0, None))(keys, jnp.arange(heads)))
        return cls(constrain(own, "batch", "heads", None, None), rate=rate)

    def at(self, keys: jax.Array, places: jax.Array, length: int) -> "ScoreDropout":
        """The same of the queries with these random keys, and attention's keys at these places [t] or [b, t] of `length`."""
        places = jnp.broadcast_to(length - 1 - places if self.is_reversed else places, (len(keys), places.shape[-1]))
        return dataclasses.replace(self, keys=keys, places=places)

    def kept(self, shape: tuple[int, ...]) -> jax.Array:
        """Which probabilities of `shape` [b, ..., s, t], with the a heads on the axes in between, are not dropped."""
        length = shape[-1]
        here = self.at(self.keys, jnp.arange(length), length) if self.places is None else self
        draw = jax.vmap(jax.random.fold_in, (None, 0))  # of one query
        draw = jax.vmap(jax.vmap(jax.vmap(draw, (0, None)), (0, None)))  # of its sample's queries, heads, and samples
        numbers = jax.random.key_data(draw(jax.random.wrap_key_data(here.keys), here.places))[..., 0]
        return (numbers >= np.uint32(int(self.rate * 2**32))).reshape(shape)

    def __call__(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        """Probabilities or their gradients without what is not kept, and the rest scaled up."""
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)

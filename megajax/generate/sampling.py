"""The choice of the next token from its logits, on the devices: temperature, top-k, top-p, and keys that no mesh changes."""

import jax
import jax.numpy as jnp

from megajax.config.sample import SampleConfig

__all__ = ["draw", "keep_likely"]


def draw(
    logits: jax.Array, number: jax.Array, position: jax.Array, sampling: SampleConfig, seed: int | jax.Array
) -> jax.Array:
    """Draws a token for each sample.

    The key of a draw depends on the seed, the sample's number and the token's position in it, so the text of a sample is
    the same on every mesh and in any batch. Logits are divided by the temperature, then cut to the most likely ones, in the
    order of transformers' `generate`.

    Args:
      logits: fp32 [b, vocabulary], without padding.
      number: uint32 [b], of the samples in the run.
      position: int32 [b], of the tokens to draw.
      sampling: temperature (0: the most likely token), top_k and top_p.
      seed: of the run.

    Returns:
      int32 [b].
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = keep_likely(logits / sampling.temperature, sampling.top_k, sampling.top_p)

    def one(logits, number, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)
        return jax.random.categorical(key, logits)

    return jax.vmap(one)(kept, number, position).astype(jnp.int32)


def keep_likely(logits: jax.Array, top_k: int | None, top_p: float) -> jax.Array:
    """The logits [b, v], with those of unlikely tokens at -inf.

    Args:
      logits: already divided by the temperature.
      top_k: the number of tokens to keep; None: all.
      top_p: then keeps the fewest of the most likely tokens whose probabilities add up to this or more, at least one
        (nucleus sampling, 1904.09751 section 3.1). Tokens of equal logits are kept or dropped together.
    """
    vocabulary = logits.shape[-1]
    count = vocabulary if top_k is None else min(top_k, vocabulary)
    if count == vocabulary and top_p == 1:
        return logits
    descending = jax.lax.top_k(logits, count)[0]
    before = jnp.cumsum(jax.nn.softmax(descending), axis=-1) - jax.nn.softmax(descending)  # of the more likely ones
    inside = jnp.where((before < top_p).at[:, 0].set(True), descending, jnp.inf)
    return jnp.where(logits < inside.min(-1, keepdims=True), -jnp.inf, logits)

"""Text generation with a trained model: one token at a time, recomputing the whole context for each (no KV cache)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import ConfigError
from megajax.config.sample import SampleConfig

NextTokenLogits = Callable[[Any, jax.Array, int], jax.Array]


def choose(logits: jax.Array, key: jax.Array, temperature: float, top_k: int | None) -> jax.Array:
    """Samples a token from each row of logits.

    Args:
      logits: [n, vocabulary].
      key: random key; unused at temperature 0.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: only the k most likely tokens can be drawn; None allows all.

    Returns:
      int32 [n].
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)


def check_sampling(new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raises ConfigError for arguments that `generate` does not accept."""
    SampleConfig(new_tokens=new_tokens, temperature=temperature, top_k=top_k).validate()


def generate(
    next_token_logits: NextTokenLogits,
    params: Any,
    prompts: np.ndarray,
    new_tokens: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Continues every prompt by `new_tokens` tokens.

    The model's input is always a window of `context` tokens, so it is compiled once. A shorter text is padded at its end,
    which a causal model does not attend to; of a longer text, the window is the end.

    Args:
      next_token_logits: (params, tokens int32 [n, context], position) -> logits [n, vocabulary] of the token that
        follows the one at `position`.
      prompts: int32 [n, prompt length], at least one token.
      context: the model's sequence length.
      temperature: 0 is greedy; smaller values favour likely tokens.
      top_k: sample among the k most likely tokens only; None: among all.
      seed: the same seed gives the same text.

    Returns:
      int32 [n, prompt length + new_tokens].

    Raises:
      ConfigError: an empty prompt, or see `check_sampling`.
    """
    check_sampling(new_tokens, temperature, top_k)
    prompts = np.asarray(prompts, np.int32)
    if prompts.ndim != 2 or prompts.shape[1] == 0:
        raise ConfigError("the prompt is empty; give at least one token, for example the end-of-document token")
    samples, length = prompts.shape
    text = np.zeros((samples, length + new_tokens), np.int32)
    text[:, :length] = prompts
    draw = jax.jit(choose, static_argnames=("temperature", "top_k"))
    key = jax.random.key(seed)
    for end in range(length, length + new_tokens):
        start = max(0, end - context)
        window = np.zeros((samples, context), np.int32)
        window[:, : end - start] = text[:, start:end]
        logits = next_token_logits(params, window, end - start - 1)
        text[:, end] = draw(logits, jax.random.fold_in(key, end), temperature=temperature, top_k=top_k)
    return text

"""What a run's learning rate, weight decay and batch size are after so many samples. Everything scales in samples.

Megatron-LM's rules, at Megatron's values, with one difference: a rate is taken at the *end* of its update, n = the
samples of all updates so far and of this one. So the first update already moves (Megatron's has learning rate 0), and
the last one has exactly the minimum. Samples of skipped steps do not count.
"""

import jax
import jax.numpy as jnp

from megajax.config import RunConfig, TrainConfig
from megajax.data.loader import batch_size


def learning_rate(train: TrainConfig, samples: jax.Array) -> jax.Array:
    """The learning rate of the update that ends at `samples`.

    With w = warm-up, d = end of the decay, r = (n - w) / (d - w), span = maximum - minimum:

      n <= w               maximum n / w
      constant             maximum
      linear               minimum + span (1 - r)
      cosine               minimum + span (1 + cos(pi r)) / 2
      inverse_square_root  max(minimum, maximum sqrt(w / n))
      wsd                  minimum + span c((n - (d - cool-down)) / cool-down), c falling from 1 at 0 to 0 at 1:
                           linear 1 - x, cosine (1 + cos(pi x)) / 2, exponential 2 * 0.5**x - 1, square_root 1 - sqrt(x)

    and the minimum after d, except for constant.

    Args:
      samples: integer scalar, 1 or more.
    """
    n = jnp.asarray(samples).astype(jnp.float32)
    total = train.steps * train.global_batch_size
    warmup = train.warmup_steps * train.global_batch_size if train.warmup_samples is None else train.warmup_samples
    end = total if train.decay_samples is None else train.decay_samples
    high, low = train.learning_rate, train.minimum_learning_rate
    done = jnp.clip((n - warmup) / max(end - warmup, 1), 0, 1)
    if train.learning_rate_decay == "constant":
        return high * jnp.minimum(n / max(warmup, 1), 1)
    if train.learning_rate_decay == "inverse_square_root":
        after = jnp.maximum(low, high * jnp.sqrt(max(warmup, 1) / jnp.maximum(n, 1)))
    elif train.learning_rate_decay == "wsd":
        length = max(1, end // 10 if train.cooldown_samples is None else train.cooldown_samples)
        after = low + (high - low) * _fall(train.cooldown, jnp.clip((n - (end - length)) / length, 0, 1))
    else:
        after = low + (high - low) * _fall(train.learning_rate_decay, done)
    return jnp.where(n <= warmup, high * n / max(warmup, 1), jnp.where(n > end, low, after))


def _fall(shape: str, x: jax.Array) -> jax.Array:
    """From 1 at x = 0 to 0 at x = 1."""
    if shape == "linear":
        return 1 - x
    if shape == "cosine":
        return (1 + jnp.cos(jnp.pi * x)) / 2
    if shape == "exponential":
        return 2 * 0.5**x - 1
    assert shape == "square_root", shape
    return 1 - jnp.sqrt(x)


def weight_decay(train: TrainConfig, samples: jax.Array) -> jax.Array:
    """The weight decay of the update that ends at `samples`: from start_weight_decay to weight_decay over the run."""
    if train.start_weight_decay is None:
        return jnp.float32(train.weight_decay)
    done = jnp.clip(jnp.asarray(samples).astype(jnp.float32) / (train.steps * train.global_batch_size), 0, 1)
    return train.weight_decay + (train.start_weight_decay - train.weight_decay) * _fall(train.weight_decay_ramp, done)


def steps_left(run: RunConfig, consumed: int) -> int:
    """Steps from `consumed` samples to the end of the run; the last one may go past it."""
    steps, ramp_end = 0, run.train.batch_ramp[2] if run.train.batch_ramp else 0
    while consumed < min(ramp_end, run.total_samples):
        consumed += batch_size(run.train, consumed)
        steps += 1
    return steps + max(0, -(-(run.total_samples - consumed) // run.train.global_batch_size))

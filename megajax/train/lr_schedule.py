"""The learning rate and weight decay of a run, as functions of the samples trained on.

Megatron-LM's formulas and values, with one difference: a rate is evaluated at the *end* of its update, n = the samples of
all updates so far and of this one. So the first update already changes the weights (Megatron's has learning rate 0), and
the last one has exactly the minimum. Samples of skipped steps do not count.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from megajax.config import ConfigError, TrainConfig
from megajax.config.batch_ramp import equal_batches


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
    warmup, end, cooldown = lengths(train)
    high, low = train.learning_rate, train.minimum_learning_rate
    done = jnp.clip((n - warmup) / max(end - warmup, 1), 0, 1)
    if train.learning_rate_decay == "constant":
        return high * jnp.minimum(n / max(warmup, 1), 1)
    if train.learning_rate_decay == "inverse_square_root":
        after = jnp.maximum(low, high * jnp.sqrt(max(warmup, 1) / jnp.maximum(n, 1)))
    elif train.learning_rate_decay == "wsd":
        length = max(1, cooldown)
        after = low + (high - low) * _fall(train.cooldown, jnp.clip((n - (end - length)) / length, 0, 1))
    else:
        after = low + (high - low) * _fall(train.learning_rate_decay, done)
    return jnp.where(n <= warmup, high * n / max(warmup, 1), jnp.where(n > end, low, after))


def lengths(train: TrainConfig) -> tuple[int, int, int]:
    """Samples of the warm-up, until the end of the decay, and of the cool-down."""
    warmup = train.warmup_steps * train.global_batch_size if train.warmup_samples is None else train.warmup_samples
    end = train.steps * train.global_batch_size if train.decay_samples is None else train.decay_samples
    return warmup, end, end // 10 if train.cooldown_samples is None else train.cooldown_samples


def describe_change(stored: Mapping[str, Any], train: TrainConfig, step: int, trained: int, batch: int) -> str:
    """What a resumed run's other schedule does to the learning rate, and how to keep that of before; "": nothing.

    Args:
      stored: the section "train" of the configuration with which the run was saved.
      train: of the run that resumes.
      step: the last one before it.
      trained: samples of all updates so far.
      batch: samples of the next step.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig) if field.name in stored]
    before = TrainConfig(**{name: tuple(v) if isinstance(v := stored[name], list) else v for name in names})
    last, kept = (float(learning_rate(before, samples)) for samples in (trained, trained + batch))
    following = float(learning_rate(train, trained + batch))
    if trained == 0 or abs(following - kept) <= 1e-4 * max(following, kept):
        return ""
    was, now = _schedule_options(before), _schedule_options(train)
    options = " ".join(f"{name} {value}" for name, value in was.items() if now.get(name) != value)
    return (
        f"learning rate {last:.3g} at step {step}, {following:.3g} at step {step + 1}; the schedule before would give "
        f"{kept:.3g}: to keep it pass {options}"
    )


def _schedule_options(train: TrainConfig) -> dict[str, Any]:
    """The options that give this learning rate for any number of steps and any batch."""
    warmup, end, cooldown = lengths(train)
    found = {
        "--learning-rate": train.learning_rate,
        "--learning-rate-decay": train.learning_rate_decay,
        "--warmup-samples": warmup,
    }
    if train.learning_rate_decay != "constant":
        found |= {"--minimum-learning-rate": train.minimum_learning_rate, "--decay-samples": end}
    if train.learning_rate_decay == "wsd":
        found |= {"--cooldown": train.cooldown, "--cooldown-samples": cooldown}
    return found


def _fall(shape: str, x: jax.Array) -> jax.Array:
    """Falls from 1 at x = 0 to 0 at x = 1."""
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


def samples_after(train: TrainConfig, count: jax.Array) -> jax.Array:
    """int32 scalar: the samples trained on after the update that follows `count` others, if no step is skipped."""
    starts, consumed, sizes = (jnp.array(column, jnp.int32) for column in zip(*equal_batches(train), strict=True))
    count = jnp.asarray(count).astype(jnp.int32)
    number = jnp.searchsorted(starts, count, side="right") - 1
    return consumed[number] + (count + 1 - starts[number]) * sizes[number]


def updates_before(train: TrainConfig, samples: jax.Array) -> jax.Array:
    """int32 scalar: the updates before the one that ends at `samples`: the inverse of `samples_after`."""
    starts, consumed, sizes = (jnp.array(column, jnp.int32) for column in zip(*equal_batches(train), strict=True))
    samples = jnp.asarray(samples).astype(jnp.int32)
    number = jnp.maximum(jnp.searchsorted(consumed, samples, side="left") - 1, 0)
    return starts[number] + -(-(samples - consumed[number]) // sizes[number]) - 1


Schedule = Callable[[jax.Array], Any]  # the learning rate, of an int32 scalar


@dataclasses.dataclass(frozen=True)
class SamplesSchedule:
    """A schedule for `Trainer(schedule=...)` whose argument is the samples of all updates, the one at hand included.

    Attributes:
      function: the learning rate, of an int32 scalar; jax traces it.
    """

    function: Schedule


def rate_of(train: TrainConfig, schedule: Schedule | SamplesSchedule) -> Schedule:
    """The learning rate of a user's schedule as a function of the samples trained on, as `learning_rate`.

    Args:
      train: of the run, whose own learning rate is not used.
      schedule: traced; of the number of updates before this one, as optax's schedules, unless it is a `SamplesSchedule`.

    Raises:
      ConfigError: the schedule returns no number.
    """
    of_samples = isinstance(schedule, SamplesSchedule)
    function = schedule.function if of_samples else schedule
    result = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
    if getattr(result, "shape", None) != () or not jnp.issubdtype(result.dtype, jnp.number):
        raise ConfigError(f"schedule: the function returned {result}, not a scalar, the learning rate.")

    def rate_at(samples: jax.Array) -> jax.Array:
        samples = jnp.asarray(samples).astype(jnp.int32)
        return jnp.asarray(function(samples if of_samples else updates_before(train, samples)), jnp.float32)

    return rate_at

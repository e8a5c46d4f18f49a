"""Losses of completions from their log-probabilities: DPO, IPO and KTO of pairs, GRPO of tokens. Formulas are TRL's 1.16."""

import jax
import jax.numpy as jnp

__all__ = ["direct_losses", "group_advantages", "kto_losses", "policy_losses"]


def direct_losses(loss_type: str, beta: float, logps: jax.Array, reference: jax.Array, lengths: jax.Array) -> jax.Array:
    """The losses of pairs by DPO or IPO.

    With r = logps - reference of the chosen completion, minus that of the rejected one:

        sigmoid (2305.18290 equation 7)     -log sigmoid(beta r)
        ipo     (2310.12036 equation 17)    (r - 1 / (2 beta))^2, each of the two divided by its completion's tokens

    Args:
      loss_type: "sigmoid" or "ipo".
      logps: fp32 [2 n], summed over a completion's tokens; those of pair i are 2 i (chosen) and 2 i + 1 (rejected).
      reference: of the reference model, likewise.
      lengths: tokens of each completion, likewise.

    Returns:
      fp32 [n].
    """
    ratios = logps - reference
    if loss_type == "ipo":
        ratios = ratios / jnp.maximum(lengths, 1)
    chosen, rejected = ratios.reshape(-1, 2).T
    if loss_type == "ipo":
        return jnp.square(chosen - rejected - 1 / (2 * beta))
    return -jax.nn.log_sigmoid(beta * (chosen - rejected))


def kto_losses(
    beta: float, logps: jax.Array, reference: jax.Array, kl: jax.Array, weights: tuple[float, float] = (1.0, 1.0)
) -> jax.Array:
    """The losses of completions by KTO (2402.01306 equation 7): 1 - sigmoid(+-beta (logps - reference - kl)).

    Args:
      logps, reference: fp32 [2 n], as for `direct_losses`; those of chosen completions have the sign +.
      kl: the estimate of KL(policy, reference) from mismatched completions, at least 0; it has no gradient.
      weights: of the chosen and of the rejected completions.

    Returns:
      fp32 [2 n].
    """
    ratios = (logps - reference - jax.lax.stop_gradient(kl)).reshape(-1, 2)
    return ((1 - jax.nn.sigmoid(beta * ratios * jnp.array([1.0, -1.0]))) * jnp.array(weights)).reshape(-1)


def group_advantages(rewards: jax.Array, generations: int, scale: str = "group") -> jax.Array:
    """Rewards [n] less the mean of each group of `generations` neighbours, over the deviation (2402.03300).

    Args:
      scale: the deviation: of the "group", of the "batch", or "none". It is the unbiased one, plus 1e-4.
    """
    groups = rewards.reshape(-1, generations)
    centred = groups - groups.mean(1, keepdims=True)
    if scale == "none":
        return centred.reshape(-1)
    deviation = groups.std(1, ddof=1, keepdims=True) if scale == "group" else rewards.std(ddof=1)
    return (centred / (deviation + 1e-4)).reshape(-1)


def policy_losses(
    logps: jax.Array,
    old: jax.Array,
    reference: jax.Array,
    advantages: jax.Array,
    *,
    beta: float,
    epsilon: float,
    epsilon_high: float,
    correct_kl: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped objective of each token, and the penalty of its deviation from the reference (2402.03300 equation 3).

    With the ratio p = exp(logps - old) and d = reference - logps:

        -min(p A, clip(p, 1 - epsilon, 1 + epsilon_high) A) + beta p (exp(d) - d - 1)

    The p before the penalty makes its gradient that of KL(policy, reference), which it is not without (2512.02556).

    Args:
      logps, old, reference: fp32 [b, s], of the policy, of the policy that has drawn the tokens, and of the reference.
      advantages: fp32 [b].
      correct_kl: False: the penalty without p.

    Returns:
      fp32 [b, s]; and by name, likewise, "kl" and whether the ratio was clipped: "low" and "high".
    """
    advantages = advantages[:, None]
    ratio = jnp.exp(logps - old)
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon_high)
    losses = -jnp.minimum(ratio * advantages, clipped * advantages)
    away = reference - logps
    kl = (jnp.exp(away) - away - 1) * (ratio if correct_kl else 1)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    measured = {"kl": kl, "low": low.astype(jnp.float32), "high": high.astype(jnp.float32)}
    return losses + beta * kl if beta else losses, jax.lax.stop_gradient(measured)

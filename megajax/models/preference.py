"""GPT with the losses of preferences and of rewards as its head's; the rest of the model, and its parameters, are GPT's."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.preference import PreferenceConfig
from megajax.config.reward import RewardConfig
from megajax.models.gpt import GPT
from megajax.models.interface import Microbatch, Tree
from megajax.ops.preference import direct_losses, kto_losses, policy_losses

__all__ = ["PolicyModel", "PreferenceModel", "completion_scores", "policy_model", "preference_model"]


def completion_scores(model: GPT, shared: Tree, y: jax.Array, microbatch: Microbatch) -> jax.Array:
    """fp32 [b]: the sum of the log-probabilities of each completion, the labels of weight 1."""
    found, _ = model.log_probabilities(shared, y, microbatch["labels"])
    return (found * microbatch["weights"]).sum(1)


class PreferenceModel(GPT):
    """Losses of pairs. Batches have those arrays of GPT's, of samples 2 i (chosen) and 2 i + 1 (rejected) of pair i:

    "tokens" and "labels" int32 [b, s]; "weights" fp32 [b, s], 1 for labels of the completion; "reference" fp32 [b], the
    completion's log-probability by the reference model; and for KTO "kl" fp32 [b], the estimate for the whole batch.
    """

    vocabulary_over_pipe = True  # `log_probabilities` sums over the ranks
    has_outputs = True
    settings: ClassVar[PreferenceConfig] = PreferenceConfig()

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one sample."""
        more = {name: jax.ShapeDtypeStruct((), np.float32) for name in ("reference", *self._kl)}
        return super().batch_shapes() | more

    @property
    def _kl(self) -> tuple[str, ...]:
        return ("kl",) if self.settings.loss_type == "kto" else ()

    def head_loss(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, Tree]:
        """The sum of the losses of pairs, for KTO of completions; and "logps" of completions [b]."""
        settings, reference = self.settings, microbatch["reference"]
        logps = completion_scores(self, shared, y, microbatch)
        if settings.loss_type == "kto":
            weights = settings.desirable_weight, settings.undesirable_weight
            losses = kto_losses(settings.beta, logps, reference, microbatch["kl"], weights)
        else:
            lengths = microbatch["weights"].sum(1)
            losses = direct_losses(settings.loss_type, settings.beta, logps, reference, lengths)
        return losses.sum(), {"logps": logps}

    def loss_weight(self, batch: Microbatch) -> jax.Array:
        """The number of pairs, for KTO of completions."""
        return jnp.float32(batch["reference"].size // (1 if self._kl else 2))

    def metrics(self, outputs: Tree, batch: Microbatch) -> Mapping[str, jax.Array]:
        """Means over the batch, by TRL's names."""
        logps = outputs["logps"].reshape(-1, 2)
        rewards = self.settings.beta * (logps - batch["reference"].reshape(-1, 2))
        chosen, rejected = rewards.T
        return {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/accuracies": (chosen > rejected).mean(dtype=jnp.float32),
            "rewards/margins": (chosen - rejected).mean(),
            "logps/chosen": logps[:, 0].mean(),
            "logps/rejected": logps[:, 1].mean(),
        } | {name: batch[name].reshape(-1)[0] for name in self._kl}


def preference_model(settings: PreferenceConfig) -> type[PreferenceModel]:
    """The model with these settings."""
    fields: dict[str, Any] = {"settings": settings, "__module__": __name__, "__doc__": PreferenceModel.__doc__}
    return type("PreferenceModel", (PreferenceModel,), fields)


class PolicyModel(GPT):
    """The objective of completions with advantages. Batches have those arrays of GPT's:

    "tokens" and "labels" int32 [b, s]; "weights" fp32 [b, s], 1 for labels of the completion; "advantages" fp32 [b]; with
    several iterations "old" and with beta "reference" fp32 [b, s], the labels' log-probabilities by the policy that has
    drawn them, and by the reference model.
    """

    vocabulary_over_pipe = True
    has_outputs = True
    settings: ClassVar[RewardConfig] = RewardConfig()

    @property
    def scored(self) -> tuple[str, ...]:
        """The arrays of log-probabilities that a batch has."""
        settings = self.settings
        return ("old",) * (settings.num_iterations > 1) + ("reference",) * (settings.beta > 0)

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one sample."""
        tokens = jax.ShapeDtypeStruct((self.config.sequence_length,), np.float32)
        more = {"advantages": jax.ShapeDtypeStruct((), np.float32)} | dict.fromkeys(self.scored, tokens)
        return super().batch_shapes() | more

    def head_loss(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, Tree]:
        """The sum that `loss_weight` divides; and sums over each completion's tokens of what `metrics` averages, [b]."""
        settings, mask = self.settings, microbatch["weights"]
        logps, entropies = self.log_probabilities(shared, y, microbatch["labels"], settings.temperature)
        old = microbatch["old"] if "old" in self.scored else jax.lax.stop_gradient(logps)
        reference = microbatch["reference"] if "reference" in self.scored else jax.lax.stop_gradient(logps)
        losses, measured = policy_losses(
            *(logps, old, reference, microbatch["advantages"]),
            beta=settings.beta,
            correct_kl=settings.use_bias_correction_kl,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon if settings.epsilon_high is None else settings.epsilon_high,
        )
        sums = (losses * mask).sum(1)
        if settings.loss_type == "grpo":
            sums = sums / jnp.maximum(mask.sum(1), 1)
        measured |= {"entropy": entropies}
        return sums.sum(), {name: (values * mask).sum(1) for name, values in measured.items()}

    def loss_weight(self, batch: Microbatch) -> jax.Array:
        """Completions, tokens that count, or the most there could be: see `RewardConfig.loss_type`."""
        completions, settings = jnp.float32(batch["advantages"].size), self.settings
        if settings.loss_type == "dapo":
            return jnp.maximum(batch["weights"].sum(), 1)
        return completions * (settings.max_completion_length if settings.loss_type == "dr_grpo" else 1)

    def metrics(self, outputs: Tree, batch: Microbatch) -> Mapping[str, jax.Array]:
        """Means over the completions' tokens, by TRL's names."""
        mean = {name: sums.sum() / jnp.maximum(batch["weights"].sum(), 1) for name, sums in outputs.items()}
        found = {"kl": mean["kl"]} if self.settings.beta else {}
        return found | {
            "entropy": mean["entropy"],
            "clip_ratio/low_mean": mean["low"],
            "clip_ratio/high_mean": mean["high"],
            "clip_ratio/region_mean": mean["low"] + mean["high"],
        }


def policy_model(settings: RewardConfig) -> type[PolicyModel]:
    """The model with these settings."""
    fields: dict[str, Any] = {"settings": settings, "__module__": __name__, "__doc__": PolicyModel.__doc__}
    return type("PolicyModel", (PolicyModel,), fields)

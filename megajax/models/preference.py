"""GPT with the losses of preferences and of rewards as its head's; the rest of the model, and its parameters, are GPT's."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.preference import PreferenceConfig
from megajax.models.gpt import GPT
from megajax.models.interface import Microbatch, Tree
from megajax.ops.preference import direct_losses, kto_losses

__all__ = ["PreferenceModel", "completion_scores", "preference_model"]


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

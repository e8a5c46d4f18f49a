"""The decoder-only transformer: GPT's or llama's embedding and head around the blocks of `megajax.models.transformer`.

    params = {"blocks": {...}, "shared": {"embedding": {"tokens", "positions"}, "head": {"norm", "vocabulary"}}}

llama has no "positions", a model with tied embeddings no "vocabulary"; modules for further tokens are "mtp1" and so on.
The vocabulary is padded to lcm(128, shares) rows, so that the devices that share it have as many rows each: padded rows are
zero and their logits masked, so they get no gradient and change no loss.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.config import ModelConfig, padded_vocabulary
from megajax.config.mixers import RECURRENT
from megajax.models import moe, mtp
from megajax.models.costs import ModelCosts
from megajax.models.dropout import Dropout
from megajax.models.ids import Ids
from megajax.models.interface import FusableAttention, Microbatch, ModelContext, Tree, register_model
from megajax.models.mixers.attention import cache_arrays
from megajax.models.mixers.latent import latent_cache
from megajax.models.mixers.recurrent import state_arrays
from megajax.models.nnx_model import named_key, parameter
from megajax.models.norms import Norm
from megajax.models.transformer import TransformerModel
from megajax.models.transformer_costs import transformer_costs
from megajax.ops.attention import softcapped
from megajax.ops.cached_attention import CachedArray
from megajax.ops.distillation import TEACHER_ARRAYS, distillation
from megajax.ops.linear import GATHERED, RESIDUAL
from megajax.ops.vocabulary import IGNORED_LABEL, cross_entropy, logsumexp, mask_padding, token_scores

__all__ = ["GPT", "Embedding", "Head", "Shared", "token_table"]

TABLE = ("vocabulary", "hidden")
LOGITS = ("batch", "whole_sequence", "vocabulary")


class Embedding(nnx.Module):
    """Token embedding plus learned positions (unless the blocks rotate), normed if the model says so."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        self.config, self.context, self.constrain = config, context, context.constrain
        table = token_table(named_key(key, "tokens"), config, context)
        self.tokens = parameter(table, *TABLE, looked_up=not config.tied_embeddings)
        if config.positions == "learned":
            shape = (config.sequence_length, config.hidden)
            table = jax.random.normal(named_key(key, "positions"), shape) * config.init_deviation
            self.positions = parameter(table, "positions", "hidden")
        if config.embedding_norm or config.post_norm:
            self.norm = Norm(config)

    def __call__(self, microbatch: Microbatch) -> jax.Array:
        """Tokens [b, s] -> [b, split s, h], where "positions" [b, s] are those of tokens that are not at 0 to s - 1."""
        dropout = Dropout(self.config.dropout, self.context, microbatch, self.config.layers)  # one past the last block
        return self.constrain(dropout(self.vectors(microbatch), "embedding", *RESIDUAL), *RESIDUAL)

    def vectors(self, microbatch: Microbatch) -> jax.Array:
        """The same before dropout."""
        x = self.summed(microbatch)
        return self.constrain(self.norm(x), *RESIDUAL) if hasattr(self, "norm") else x

    def summed(self, microbatch: Microbatch) -> jax.Array:
        """The same before the norm."""
        tokens, positions, dtype = microbatch["tokens"], microbatch.get("positions"), self.context.dtype
        x = self.constrain(self.context.vocabulary.lookup(self.tokens[...], tokens, dtype=dtype), *RESIDUAL)
        if self.config.embedding_multiplier != 1:
            x = x * jnp.asarray(self.config.embedding_multiplier, dtype)
        if self.config.positions == "learned":
            if positions is None:
                added = self.positions[: tokens.shape[1]].astype(dtype)
            else:  # fp32, so that the gradient's rows are summed in fp32
                added = jnp.take(self.positions[...].astype(jnp.float32), positions, axis=0).astype(dtype)
            x = self.constrain(x + added, *RESIDUAL)
        return x


class Head(nnx.Module):
    """Final norm, then logits against the token table, the embedding's or the head's own."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        self.config, self.constrain, self.ranks = config, context.constrain, context.vocabulary.ranks
        self.norm = Norm(config)
        if not config.tied_embeddings:
            self.vocabulary = parameter(token_table(named_key(key, "vocabulary"), config, context), *TABLE)

    def __call__(self, y: jax.Array, embedding: Embedding) -> jax.Array:
        """From y [b, split s, h] to logits [b, s, local rows] of y's type, padding not masked."""
        return self.logits(self.normed(y), embedding)

    def normed(self, y: jax.Array) -> jax.Array:
        """The last block's output, normed, on all ranks that have rows of the tables."""
        return self.norm(self.ranks.broadcast(y))

    def logits(self, y: jax.Array, embedding: Embedding) -> jax.Array:
        """As a call, of y that is normed."""
        table = self.vocabulary if hasattr(self, "vocabulary") else embedding.tokens
        y = self.constrain(self.constrain(y, *RESIDUAL), *GATHERED)  # both: see Block._split
        multiplier, cap = self.config.logit_multiplier, self.config.logit_softcap
        y = y if multiplier == 1 else y * jnp.asarray(multiplier, y.dtype)
        logits = self.constrain(jnp.einsum("bsh,vh->bsv", y, table[...].astype(y.dtype)), *LOGITS)
        return logits if cap is None else softcapped(logits, cap)


class Shared(nnx.Module):
    """The embedding, which the first stage uses, and the head, which the last one does; a tied table is used by both."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        self.config, self.context = config, context
        self.embedding = Embedding(config, named_key(key, "embedding"), context)
        self.head = Head(config, named_key(key, "head"), context)
        for number in range(1, config.mtp_num_layers + 1):
            setattr(self, mtp.module_name(number), mtp.MTPModule(config, key, context, number))

    def embed(self, microbatch: Microbatch) -> jax.Array:
        """The microbatch's "tokens" [b, s] -> x [b, split s, h]."""
        return self.embedding(microbatch)

    def head_loss(self, y: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Sum over tokens of "weights" * loss of "labels", fp32: cross entropy, with the context's smoothing and z-loss.

        With the context's teacher, (1 - w) times that and w times the divergence from "teacher_ids" and "teacher_logits". In
        training its gradients have those of multi-token prediction, if the batch has been prepared (`megajax.models.mtp`).
        """
        context, hidden = self.context, self.head.normed(y)
        logits, teacher = self.head.logits(hidden, self.embedding), context.teacher
        losses = self.losses(logits, microbatch["labels"])
        if teacher:
            given = (microbatch[name] for name in TEACHER_ARRAYS)
            apart = distillation(logits, *given, self.config.vocabulary, teacher, context.vocabulary)
            apart = jnp.where(microbatch["labels"] == IGNORED_LABEL, 0, apart)
            losses = (1 - teacher.weight) * losses + teacher.weight * apart
        loss = (losses * microbatch["weights"].astype(jnp.float32)).sum()
        further = context.training and "mtp1_labels" in microbatch
        return loss + mtp.mtp_loss(self, hidden, microbatch) if further else loss

    def losses(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Of each label: fp32 [b, s]."""
        options = {"z_loss": self.context.z_loss, "label_smoothing": self.context.label_smoothing}
        return self.context.vocabulary.regularised(logits, labels, self.config.vocabulary, **options)

    def token_scores(self, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, jax.Array]:
        """Losses of "labels", fp32 [b, s], and whether they are the most likely tokens; logits stay sharded."""
        vocabulary, ranks = self.config.vocabulary, self.context.vocabulary.ranks
        return token_scores(self.head(y, self.embedding), microbatch["labels"], vocabulary, ranks)

    def log_probabilities(
        self, y: jax.Array, tokens: jax.Array, temperature: float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """log softmax(logits / temperature) of tokens [b, s], and the entropy of each distribution, without a gradient.

        Both are fp32 [b, s]; logits stay sharded.
        """
        count, ranks = self.config.vocabulary, self.context.vocabulary.ranks
        logits = self.head(y, self.embedding) / temperature
        found = -cross_entropy(logits, tokens, count, ranks)
        masked = jax.lax.stop_gradient(mask_padding(logits, count, ranks))
        normaliser = logsumexp(masked, count, ranks)
        share = jnp.exp(masked - normaliser[..., None])
        mean = ranks.sum(jnp.where(share > 0, share * masked, 0).sum(-1))
        return found, jax.lax.stop_gradient(normaliser - mean)

    def logits(self, y: jax.Array) -> jax.Array:
        """fp32 [b, s, padded vocabulary], padding at MASKED_LOGIT."""
        ranks, constrain = self.context.vocabulary.ranks, self.context.constrain
        masked = mask_padding(self.head(y, self.embedding), self.config.vocabulary, ranks)
        return ranks.gather(constrain(masked, *LOGITS))


def token_table(key: jax.Array, config: ModelConfig, context: ModelContext) -> jax.Array:
    """[padded rows, h]; padding is zero. threefry's bits for an element do not depend on the number of rows."""
    rows = padded_vocabulary(config.vocabulary, context.vocabulary.shares)
    table = jax.random.normal(key, (rows, config.hidden)) * config.init_deviation
    return jnp.where(jnp.arange(rows)[:, None] < config.vocabulary, table, 0)


@register_model(ModelConfig)
class GPT(TransformerModel):
    """Next-token prediction with the blocks of `megajax.models.transformer`.

    Initial values: normal with config.init_deviation; the two projections into the residual scaled by 1/sqrt(2 layers);
    biases 0, norm scales 1. Batches: "tokens", "labels" and "weights" [b, s]; "sample" [b], the sample's index in the run,
    which seeds its dropout; and optionally "positions" and "document" [b, s] (`mixers.attention.Attention`).
    """

    shared_module = Shared
    vocabulary_over_pipe = True
    has_loss_options = True
    scaled_arrays = moe.SCALED

    @property
    def measured_kind(self) -> str | None:
        """The kind of layers that has experts; None: all have, or several kinds."""
        kinds = sorted(set(self.config.layer_kinds or ()))
        sparse = [kind for kind in kinds if self.config.of_kind(kind).experts]
        return sparse[0] if len(sparse) == 1 else None

    def prepare_batch(self, batch: Microbatch) -> Microbatch:
        """Also the shares in the balance losses, and what is further on; a batch without "weights" has no losses."""
        balance = moe.balance_arrays(batch) if self.config.experts and "weights" in batch else {}
        return {**batch, **balance, **(mtp.ahead(batch, self.config.mtp_num_layers) if "weights" in batch else {})}

    def take_measurements(self, gradients: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """With experts, "expert_load" and "router_losses" of each layer that has them; losses of multi-token prediction."""
        gradients, found = moe.take_measurements(gradients) if self.config.experts else (gradients, {})
        if self.config.mtp_num_layers:
            gradients, found["outside"] = mtp.take_measurements(gradients, self.config)
        return gradients, found

    def apply_measurements(self, updates: Tree, measurements: Mapping[str, jax.Array]) -> Tree:
        """Moves the biases that balance experts."""
        rate, further = self.config.balance_bias_rate, measurements.get("outside", {})
        if rate and "expert_load" in measurements:
            updates = moe.move_biases(updates, measurements["expert_load"], rate)
        return mtp.move_biases(updates, further, rate) if rate and "expert_load" in further else updates

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one sample."""
        of = lambda dtype: jax.ShapeDtypeStruct((self.config.sequence_length,), dtype)  # noqa: E731
        batch = {"tokens": of(np.int32), "labels": of(np.int32), "weights": of(np.float32)}
        return batch | {"sample": jax.ShapeDtypeStruct((), np.uint32)}

    def id_bounds(self) -> dict[str, Ids]:
        """Tokens, labels, and positions if they are learned."""
        config = self.config
        learned = {"positions": Ids(config.sequence_length)} if config.positions == "learned" else {}
        tokens = {"tokens": Ids(config.vocabulary), "labels": Ids(config.vocabulary, "weights")}
        return tokens | {"teacher_ids": Ids(config.vocabulary)} | learned

    def cache_arrays(self, samples: int, slots: int) -> Mapping[str, CachedArray]:
        """Keys and values of attention, or its latents, and states of recurrent mixers; of several kinds all of these."""
        config, dtype, found = self.config, self.context.dtype, {}
        if "attention" in config.mixers:
            own = latent_cache(config, dtype, samples, slots) if config.kv_latent else None
            found |= own or cache_arrays(config, dtype, samples, slots, self.context.tensor)
        if set(config.mixers) & {*RECURRENT}:
            found |= state_arrays(config, dtype, samples)
        return found

    def kind_cache_arrays(self, kind: str, samples: int, slots: int) -> Mapping[str, CachedArray]:
        """Those of the kind's mixer."""
        return type(self)(self.config.of_kind(kind), self.context).cache_arrays(samples, slots)

    def costs(self) -> ModelCosts:
        """By formula."""
        return transformer_costs(self.config)

    def log_probabilities(
        self, shared: Tree, y: jax.Array, tokens: jax.Array, temperature: float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """Of tokens [b, s] after the last block's output y, and entropies (`Shared.log_probabilities`)."""
        return self.merged_shared(shared).log_probabilities(y, tokens, temperature)

    @classmethod
    def fusable_attention(cls, config: ModelConfig) -> FusableAttention | None:
        """The heads' sizes and dropout, and the sliding windows; None: no layer has attention."""
        if "attention" not in config.mixers:
            return None
        windows = config.attention_windows
        window = windows[0] if len(windows) == 1 else None
        more = {"differ": len(windows) > 1 or any(config.attention_chunks), "unfused": config.unfused_attention}
        return FusableAttention(
            config.head_dimension, config.dropout, window, value_size=config.value_dimension, **more
        )

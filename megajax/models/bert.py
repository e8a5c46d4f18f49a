"""BERT: masked words and the order of two segments, predicted by blocks that attend in both directions (1810.04805).

With `output_heads` = classification it classifies the sample instead, with spans it points at an answer's first and last
token, and with multiple_choice it chooses one of several samples (the same paper, sections 4.1, 4.2 and 4.4).

    params = {"blocks": {...}, "shared": {"embedding": {"tokens", "positions", "types", "norm"},
              "head": {"norm", "transform", "transform_norm", "bias", "vocabulary", "pooler", "order", "classifier",
                       "spans"}}}

The blocks are those of `megajax.models.transformer` without a causal mask. With norms before attention and MLP (Megatron's
order, 1909.08053 figure 7b) the head has a norm; with norms after the residual additions (the original order) the
embedding has one. ModernBERT (2412.13663) has both, and no types. The table of tokens is padded as GPT's is, and the bias
of the logits with it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from megajax.config import BertConfig
from megajax.config.batch_ramp import PADDING
from megajax.models.costs import Matmul, ModelCosts, Parameters
from megajax.models.dropout import Dropout
from megajax.models.feedforward import ACTIVATIONS, Linear
from megajax.models.gpt import LOGITS, TABLE, Embedding, token_table
from megajax.models.ids import Ids
from megajax.models.interface import FusableAttention, Microbatch, ModelContext, Tree, register_model
from megajax.models.nnx_model import named_key, parameter
from megajax.models.norms import Norm
from megajax.models.transformer import TransformerModel
from megajax.models.transformer_costs import transformer_costs
from megajax.ops.linear import GATHERED, RESIDUAL, add_bias
from megajax.ops.vocabulary import cross_entropy, mask_padding

__all__ = ["BERT"]


class BertEmbedding(Embedding):
    """The sum of a token's, its position's and its type's vector, normed if the model or its `post_norm` says so."""

    def __init__(self, config: BertConfig, key: jax.Array, context: ModelContext):
        super().__init__(config, key, context)
        if config.token_types:
            types = jax.random.normal(named_key(key, "types"), (config.token_types, config.hidden))
            self.types = parameter(types * config.init_deviation, None, "hidden")

    def summed(self, microbatch: Microbatch) -> jax.Array:
        """Tokens and types [b, s] -> [b, split s, h], before norm and dropout."""
        x = super().summed(microbatch)
        if not self.config.token_types:
            return x
        table = self.types[...].astype(jnp.float32)  # so that the gradient's rows are summed in fp32
        return self.constrain(x + jnp.take(table, microbatch["types"], axis=0).astype(x.dtype), *RESIDUAL)


class BertHead(nnx.Module):
    """The last norm, the masked-word head (a layer, a norm, then logits against the token table), pooler and order head."""

    def __init__(self, config: BertConfig, key: jax.Array, context: ModelContext):
        self.config, self.constrain, self.ranks = config, context.constrain, context.vocabulary.ranks
        hidden = {"hidden": config.hidden}

        def linear(name: str, axis: str, size: int) -> Linear:
            return Linear(named_key(key, name), hidden, {axis: size}, config.init_deviation, config.biases)

        if not config.post_norm:
            self.norm = Norm(config)
        if config.has_masked_lm:
            self.transform, self.transform_norm = linear("transform", "_hidden", config.hidden), Norm(config)
            table = token_table(named_key(key, "vocabulary"), config, context)
            if not config.tied_embeddings:
                self.vocabulary = parameter(table, *TABLE)
            if config.has_masked_lm_bias:
                self.bias = parameter(jnp.zeros(len(table)), TABLE[0], decay=False)
        if config.has_pooler:
            self.pooler = linear("pooler", "_hidden", config.hidden)
        if config.has_order:
            self.order = linear("order", "_orders", 2)
        if config.has_classifier:
            self.classifier = linear("classifier", "_classes", config.scores)
        if config.has_spans:
            self.spans = linear("spans", "_ends", 2)

    def states(self, y: jax.Array) -> jax.Array:
        """The last block's output [b, split s, h], normed."""
        y = self.ranks.broadcast(y)
        return self.constrain(self.norm(y), *RESIDUAL) if hasattr(self, "norm") else self.constrain(y, *RESIDUAL)

    def logits(self, states: jax.Array, embedding: BertEmbedding) -> jax.Array:
        """Scores of each token's word [b, s, local rows], padding not masked."""
        table = self.vocabulary if hasattr(self, "vocabulary") else embedding.tokens
        wide = self.transform(states, jnp.tensordot, 1).astype(jnp.float32)
        z = self.transform_norm(ACTIVATIONS[self.config.activation](wide).astype(states.dtype))
        z = self.constrain(self.constrain(z, *RESIDUAL), *GATHERED)  # both: see Block._split
        logits = self.constrain(jnp.einsum("bsh,vh->bsv", z, table[...].astype(z.dtype)), *LOGITS)
        return add_bias(logits, self.bias[...].astype(z.dtype)) if hasattr(self, "bias") else logits

    def pooled(self, states: jax.Array, is_first: jax.Array) -> jax.Array:
        """tanh of a layer on the first token's state, [b, h]; `is_first` bool [b or 1, s] has one True in a sample.

        The state is picked by a masked sum: the sequence may be split over tensor, where a slice would gather it.
        """
        first = jnp.where(is_first[..., None], states.astype(jnp.float32), 0).sum(1).astype(states.dtype)
        return jnp.tanh(self.pooler(first, jnp.tensordot, 1))

    def order_logits(self, states: jax.Array, is_first: jax.Array) -> jax.Array:
        """Scores of segments in order and swapped, fp32 [b, 2]."""
        return self.order(self.pooled(states, is_first), jnp.tensordot, 1).astype(jnp.float32)

    def class_logits(self, states: jax.Array, is_first: jax.Array, dropout: Dropout) -> jax.Array:
        """Scores of the classes, fp32 [b, classes]; with choices, of the samples [b, 1]."""
        pooled = dropout(self.pooled(states, is_first), "pooled", "batch", "hidden", tokens=False)
        return self.classifier(pooled, jnp.tensordot, 1).astype(jnp.float32)

    def span_logits(self, states: jax.Array) -> jax.Array:
        """Scores of each local token as the first and the last one of the answer, fp32 [b, s, 2]."""
        ends = self.constrain(self.spans(states, jnp.tensordot, 1), *RESIDUAL[:2], None)
        return self.constrain(ends, *GATHERED[:2], None).astype(jnp.float32)


class BertShared(nnx.Module):
    """The embedding, which the first stage uses, and the heads, which the last one does."""

    def __init__(self, config: BertConfig, key: jax.Array, context: ModelContext):
        self.config, self.context = config, context
        self.embedding = BertEmbedding(config, named_key(key, "embedding"), context)
        self.head = BertHead(config, named_key(key, "head"), context)

    def embed(self, microbatch: Microbatch) -> jax.Array:
        """The microbatch's "tokens" and "types" [b, s] -> x [b, split s, h]."""
        return self.embedding(microbatch)

    def head_loss(self, y: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Sum of "weights" * cross entropy with "labels", and of "order_weights" * cross entropy with "swapped"; fp32.

        For a classifier or choices: of "weights" * cross entropy with "class"; for spans: of "weights" * the mean of the
        tokens' cross entropies with "start" and "end".
        """
        self.config.require_loss()
        self.config.require_whole_questions(len(y))
        if self.config.has_spans:
            return self.span_losses(self.span_logits(y), microbatch).sum()
        if self.config.has_classifier:
            return self.class_losses(self.class_logits(y, microbatch), microbatch).sum()
        states, ranks = self.head.states(y), self.context.vocabulary.ranks
        logits = self.head.logits(states, self.embedding)
        losses = cross_entropy(logits, microbatch["labels"], self.config.vocabulary, ranks)
        total = (losses * microbatch["weights"].astype(jnp.float32)).sum()
        if not self.config.has_order:
            return total
        orders = jax.nn.log_softmax(self.head.order_logits(states, first_places(microbatch)))
        losses = -jnp.where(microbatch["swapped"] == 1, orders[:, 1], orders[:, 0])
        return total + (losses * microbatch["order_weights"].astype(jnp.float32) * has_first_place(microbatch)).sum()

    def class_losses(self, logits: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Cross entropy with "class", times "weights": fp32 [n]; 0 on context ranks without the first token."""
        classes, weights, counts = self.per_choice(microbatch)
        classes = jnp.maximum(classes, 0)  # IGNORED_LABEL has weight 0, and must not give NaN
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), classes[:, None], axis=1)[:, 0]
        return jnp.where(counts, losses * weights.astype(jnp.float32), 0.0)

    def class_logits(self, y: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Scores of the classes, fp32 [b, classes]; or of the choices, [b / choices, choices]."""
        dropout = Dropout(self.config.dropout, self.context, microbatch, self.config.layers + 1)  # past the embedding's
        logits = self.head.class_logits(self.head.states(y), first_places(microbatch), dropout)
        return logits.reshape(-1, self.config.choices) if self.config.has_choices else logits

    def per_choice(self, microbatch: Microbatch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arrays "class" and "weights" [n], and whether this context rank has the first token, of samples or questions.

        A question has those of its first sample.
        """
        rows = (microbatch["class"], microbatch["weights"], has_first_place(microbatch))
        return tuple(array[:: self.config.choices] for array in rows) if self.config.has_choices else rows

    def span_logits(self, y: jax.Array) -> jax.Array:
        """Scores of all tokens of the samples as the first and the last one, fp32 [b, s, 2], on all context ranks."""
        return self.context.gather_sequence(self.head.span_logits(self.head.states(y)))

    def span_losses(self, logits: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Mean of the cross entropies with "start" and "end", times "weights": fp32 [b]; 0 on the other context ranks."""
        places = jnp.stack([microbatch["start"], microbatch["end"]], axis=1)[:, None]  # [b, 1, 2]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), places, axis=1).mean((1, 2))
        return jnp.where(has_first_place(microbatch), losses * microbatch["weights"].astype(jnp.float32), 0.0)

    def logits(self, y: jax.Array) -> jax.Array:
        """fp32 [b, s, padded vocabulary], padding at MASKED_LOGIT."""
        ranks, constrain = self.context.vocabulary.ranks, self.context.constrain
        logits = self.head.logits(self.head.states(y), self.embedding)
        return ranks.gather(constrain(mask_padding(logits, self.config.vocabulary, ranks), *LOGITS))


def first_places(microbatch: Microbatch) -> jax.Array:
    """Where the first token of a sample is: bool [1, s], or [b, s] with context ranks, only one of which has it."""
    if "places" in microbatch:
        return microbatch["places"] == 0
    return lax.broadcasted_iota(jnp.int32, (1, microbatch["tokens"].shape[1]), 1) == 0


def has_first_place(microbatch: Microbatch) -> jax.Array:
    """Whether a sample's first token is here: bool [b] with context ranks, else [1], always True."""
    return first_places(microbatch).any(-1) if "places" in microbatch else jnp.ones(1, bool)


@register_model(BertConfig)
class BERT(TransformerModel):
    """Masked words and sentence order with the blocks of `megajax.models.transformer`.

    Initial values: as GPT's. Batches: "tokens", "types", "labels" int32 and "weights" fp32 [b, s]; "padding" int32 [b], the
    number of tokens at the end that nothing attends to; "swapped" int32 [b], 1 if the segments are swapped; and "sample" as
    GPT's. The loss is the mean over the masked words ("weights") of the global batch plus the mean over its samples, on
    any layout; the samples numbered `PADDING`, and those of padding alone, are none.

    A classifier's batches: "tokens", "types", "padding" and "sample" likewise; "class" int32 [b], and "weights" fp32 [b], 0
    for samples that do not count. Its loss is the mean over the samples that count. A model of spans has "start" and "end"
    int32 [b], the places of the answer's first and last token, instead of "class". Of choices, as many samples as there are
    choices follow one another and are a question: "class" is the right one's number, and the first sample has the weight of
    the question, the others 0.
    """

    shared_module = BertShared
    vocabulary_over_pipe = True

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one sample."""
        of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
        length = self.config.sequence_length
        batch = {name: of(np.int32, length) for name in ("tokens", "types")}
        if self.config.has_task:
            targets = ("start", "end") if self.config.has_spans else ("class",)
            batch |= {name: of(np.int32) for name in ("padding", *targets)}
            return batch | {"weights": of(np.float32), "sample": of(np.uint32)}
        batch["labels"] = of(np.int32, length)
        batch["weights"] = of(np.float32, length)
        return batch | {"padding": of(np.int32), "swapped": of(np.int32), "sample": of(np.uint32)}

    def id_bounds(self) -> dict[str, Ids]:
        """Tokens, types, positions if they are learned, the length of the padding, and the targets of the model's heads."""
        config = self.config
        places = Ids(config.sequence_length)
        read = {"positions": places} if config.positions == "learned" else {}
        read |= {"types": Ids(config.token_types)} if config.token_types else {}
        classes = config.choices if config.has_choices else config.classes
        return read | {
            "tokens": Ids(config.vocabulary),
            "padding": Ids(config.sequence_length + 1),
            "labels": Ids(config.vocabulary, "weights"),
            "swapped": Ids(2),
            "class": Ids(classes, "weights"),
            "start": places,
            "end": places,
        }

    def prepare_batch(self, batch: Microbatch) -> Microbatch:
        """Adds "order_weights", (masked words of the batch) / (its samples), to every sample that is no padding."""
        if not self.config.has_order or "weights" not in batch:  # without weights there is no loss
            return batch
        *samples, length = batch["tokens"].shape
        real = jnp.broadcast_to(batch.get("padding", 0) < jnp.int32(length), samples)
        if "sample" in batch:
            real &= batch["sample"] != jnp.uint32(PADDING)
        share = batch["weights"].astype(jnp.float32).sum() / jnp.maximum(real.sum(), 1)
        return {**batch, "order_weights": jnp.where(real, share, 0.0)}

    def states(self, shared: Tree, y: jax.Array) -> jax.Array:
        """The encoder's output, fp32 [b, s, h], of the last block's: what transformers calls last_hidden_state."""
        return self.merged_shared(shared).head.states(y).astype(jnp.float32)

    def order_logits(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Scores of segments in order and swapped, fp32 [b, 2]; with context ranks, of the first token's rank only."""
        head = self.merged_shared(shared).head
        return head.order_logits(head.states(y), first_places(microbatch))

    def class_scores(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, jax.Array]:
        """Losses, fp32 [n], and predicted classes or choices, int32 [n], of n samples or questions.

        0 on context ranks without the first token.
        """
        modules = self.merged_shared(shared)
        logits = modules.class_logits(y, microbatch)
        best = logits.argmax(-1).astype(jnp.int32)
        return modules.class_losses(logits, microbatch), jnp.where(modules.per_choice(microbatch)[2], best, 0)

    def span_scores(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, jax.Array]:
        """Losses, fp32 [b], and scores of the first and the last token, fp32 [b, s, 2]; 0 on the other context ranks."""
        modules = self.merged_shared(shared)
        logits, counts = modules.span_logits(y), has_first_place(microbatch)
        return modules.span_losses(logits, microbatch), jnp.where(counts[:, None, None], logits, 0)

    def costs(self) -> ModelCosts:
        """By formula; pooler, classifier and spans, of one token of a sample or with two columns, have no FLOPs."""
        config, costs = self.config, transformer_costs(self.config)
        split = costs.vocabulary_width + int(config.has_masked_lm_bias)
        rest = config.parameters - config.vocabulary * split - costs.layers * costs.block.total
        head = (Matmul("masked_lm_transform", config.hidden, config.hidden),) if config.has_masked_lm else ()
        return dataclasses.replace(costs, vocabulary_width=split, shared=Parameters(whole=rest), head=head)

    @classmethod
    def fusable_attention(cls, config: BertConfig) -> FusableAttention:
        """The heads' size and dropout, for attention in both directions; with windows no kernel has it."""
        return FusableAttention(config.head_dimension, config.dropout, causal=False, unfused=config.unfused_attention)

"""The decoder-only transformer as pure functions of plain dictionaries of arrays.

    params = {"blocks": {...}, "shared": {"embedding": {"tokens", "positions"}, "head": {"norm", "vocabulary"}}}

Leaves of "blocks" have a leading axis of layers; "shared" is what every pipeline rank holds. llama has no "positions",
a model with tied embeddings no "vocabulary". NNX modules define the parameters and their axes; they are split once,
here, and merged again inside each pure function. The vocabulary is padded to lcm(128, tensor) rows, that a tensor group
can split it: padded rows are zero, their logits masked, and so they get no gradient and change no loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import ModelConfig, padded_vocabulary
from megajax.models import remat
from megajax.models.transformer import (
    RESIDUAL,
    WHOLE,
    Block,
    Dropout,
    Norm,
    Operations,
    Places,
    identity,
    named_key,
    parameter,
)

__all__ = [
    "Embedding",
    "Head",
    "ModelFunctions",
    "cross_entropy",
    "decay_mask",
    "functions",
    "init",
    "logical_axes",
    "reference_loss",
]

Tree = Any  # nested dictionaries
Microbatch = dict[str, jax.Array]
TABLE = ("vocabulary", "hidden")
LOGITS = ("batch", "whole_sequence", "vocabulary")
MASKED_LOGIT = -1e30  # of a padded row: its exponential is 0 in fp32, and the number is finite


def _same(x: jax.Array) -> jax.Array:
    return x


class RowsOverRanks(NamedTuple):
    """How ranks that each have some rows of the token tables work together; see megajax.ops.vocabulary.

    Attributes:
      spread: y [b, s, h], which one rank has and the others have zeros for -> y on all of them.
      first_row: how many rows are here -> the number of the first of them.
      total: fp32 [b, s] -> its sum over the ranks.
      most: fp32 [b, s] -> its maximum over the ranks.
      whole: logits [b, s, rows here] -> [b, s, rows].
    """

    spread: Callable[[jax.Array], jax.Array] = _same
    first_row: Callable[[int], jax.Array | int] = lambda rows: 0
    total: Callable[[jax.Array], jax.Array] = _same
    most: Callable[[jax.Array], jax.Array] = _same
    whole: Callable[[jax.Array], jax.Array] = _same


ALL_ROWS = RowsOverRanks()


def take(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The `lookup` of a model that is on no mesh: rows of table [v, h] for tokens [b, s] -> [b, s, h]."""
    return jnp.take(table, tokens, axis=0)


class Embedding(nnx.Module):
    """Token embedding plus learned positions (unless the blocks rotate)."""

    def __init__(self, config: ModelConfig, key: jax.Array, rows: int, constrain=identity, lookup=take):
        """Draws `rows` >= config.vocabulary rows, zero from there on: what a token starts as depends on no padding."""
        self.config, self.constrain, self.lookup = config, constrain, lookup
        self.tokens = parameter(_token_table(named_key(key, "tokens"), config, rows), *TABLE)
        if config.positions == "learned":
            shape = (config.sequence_length, config.hidden)
            table = jax.random.normal(named_key(key, "positions"), shape) * config.init_deviation
            self.positions = parameter(table, "positions", "hidden")

    def __call__(self, tokens: jax.Array, dtype: jnp.dtype, dropout: Dropout, positions=None) -> jax.Array:
        """Tokens [b, s] -> [b, split s, h] of `dtype`; `positions` [b, s] of the tokens where they are not 0 to s - 1."""
        x = self.constrain(self.lookup(self.tokens[...], tokens).astype(dtype), *RESIDUAL)
        if self.config.positions == "learned":
            if positions is None:
                added = self.positions[: tokens.shape[1]].astype(dtype)
            else:  # fp32, in which the gradient's rows are added up
                added = jnp.take(self.positions[...].astype(jnp.float32), positions, axis=0).astype(dtype)
            x = self.constrain(x + added, *RESIDUAL)
        return self.constrain(dropout(x, "embedding", *RESIDUAL), *RESIDUAL)


class Head(nnx.Module):
    """Final norm, then logits against the token table, the embedding's or the head's own."""

    def __init__(self, config: ModelConfig, key: jax.Array, rows: int, constrain=identity, ranks=ALL_ROWS):
        self.constrain, self.ranks = constrain, ranks
        self.norm = Norm(config)
        if not config.tied_embeddings:
            self.vocabulary = parameter(_token_table(named_key(key, "vocabulary"), config, rows), *TABLE)

    def __call__(self, y: jax.Array, embedding: Embedding) -> jax.Array:
        """From y [b, split s, h] to logits [b, s, rows] of y's type, rows split over tensor, padding not masked."""
        table = self.vocabulary if hasattr(self, "vocabulary") else embedding.tokens
        y = self.norm(self.ranks.spread(y))
        y = self.constrain(self.constrain(y, *RESIDUAL), *WHOLE)  # split, then whole: see Block._gathered
        return self.constrain(jnp.einsum("bsh,vh->bsv", y, table[...].astype(y.dtype)), *LOGITS)


class Shared(nnx.Module):
    """What every pipeline rank holds: the first uses the embedding, the last the head, and both a tied table."""

    def __init__(self, config: ModelConfig, key: jax.Array, rows: int, constrain=identity, lookup=take, ranks=ALL_ROWS):
        self.embedding = Embedding(config, named_key(key, "embedding"), rows, constrain, lookup)
        self.head = Head(config, named_key(key, "head"), rows, constrain, ranks)


def _token_table(key: jax.Array, config: ModelConfig, rows: int) -> jax.Array:
    """[rows, h], rows from the vocabulary's end on zero. threefry's bits for an element do not depend on `rows`."""
    table = jax.random.normal(key, (rows, config.hidden)) * config.init_deviation
    return jnp.where(jnp.arange(rows)[:, None] < config.vocabulary, table, 0)


def _rows(logits: jax.Array, ranks: RowsOverRanks) -> jax.Array:
    """The numbers of the table's rows that the logits' last axis is of."""
    return ranks.first_row(logits.shape[-1]) + lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def _masked(logits: jax.Array, vocabulary: int, ranks: RowsOverRanks) -> jax.Array:
    """Logits in fp32, those of padded rows far below all others."""
    return jnp.where(_rows(logits, ranks) < vocabulary, logits.astype(jnp.float32), MASKED_LOGIT)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(logits: jax.Array, labels: jax.Array, vocabulary: int, ranks: RowsOverRanks = ALL_ROWS) -> jax.Array:
    """-log softmax(logits)[label], in fp32, with sums over the vocabulary only: it may be split over tensor and ranks.

    The label's logit is picked by a masked sum, as a gather from a sharded axis can abort XLA's partitioner. The
    derivative (softmax - one-hot) is written out to keep the logits in their own type and no fp32 copy of them.

    Args:
      logits: [b, s, rows here] of any float type.
      labels: [b, s] integers below `vocabulary`.
      vocabulary: rows that count; those from there on are padding.
      ranks: that have the other rows. The gradient may come to one of them, zeros to the others.

    Returns:
      fp32 [b, s], on all ranks.
    """
    return _cross_entropy_forward(logits, labels, vocabulary, ranks)[0]


def _cross_entropy_forward(logits, labels, vocabulary, ranks):
    masked = _masked(logits, vocabulary, ranks)
    most = ranks.most(masked.max(-1))
    normaliser = most + jnp.log(ranks.total(jnp.exp(masked - most[..., None]).sum(-1)))
    picked = ranks.total(jnp.where(_rows(logits, ranks) == labels[..., None], masked, 0).sum(-1))
    return normaliser - picked, (logits, labels, normaliser)


def _cross_entropy_backward(vocabulary, ranks, residuals, gradient):
    logits, labels, normaliser = residuals
    softmax = jnp.exp(_masked(logits, vocabulary, ranks) - normaliser[..., None])
    is_label = _rows(logits, ranks) == labels[..., None]
    return ((softmax - is_label) * ranks.total(gradient)[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@dataclass(frozen=True)
class ModelFunctions:
    """The model as pure functions; `shared` and `weights` are parts of params, in fp32 or cast to `dtype` already.

    Attributes:
      embed: (shared, microbatch) -> x [b, s, h] of dtype.
      block: (weights of one block, x, microbatch, layer's index) -> x. Checkpointed by the recompute mode. Reads the
        microbatch's "sample" and the layer only if the model has dropout, and "positions", like embed,
        and "document" if it has them (see `Places`).
      logits: (shared, x) -> fp32 [b, s, padded vocabulary], padding at MASKED_LOGIT.
      head_loss: (shared, x, microbatch) -> fp32 scalar: sum over tokens of weights * cross entropy.
    """

    embed: Callable[[Tree, Microbatch], jax.Array]
    block: Callable[[Tree, jax.Array, Microbatch, jax.Array], jax.Array]
    logits: Callable[[Tree, jax.Array], jax.Array]
    head_loss: Callable[[Tree, jax.Array, Microbatch], jax.Array]


def functions(
    config: ModelConfig,
    *,
    constrain: Callable[..., jax.Array] = identity,
    lookup: Callable[[jax.Array, jax.Array], jax.Array] = take,
    ranks: RowsOverRanks = ALL_ROWS,
    operations: Operations | None = None,
    dtype: jnp.dtype = jnp.float32,
    recompute: str = "selective",
    dropout_seed: int = 0,
) -> ModelFunctions:
    """The pure functions of a model.

    Args:
      config: the model.
      constrain: (x, *logical axes) -> x, lays an activation out, see megajax.sharding.rules.
      lookup: (table [v, h], tokens [b, s]) -> [b, s, h], see megajax.ops.vocabulary.
      ranks: that share the token tables' rows with this one; `lookup` then knows it.
      operations: the block's matmuls and attention; plain ones if not given.
      dtype: of activations and matmuls; softmax, norms, activation function and loss are fp32 inside.
      recompute: none, selective or full, see megajax.models.remat.
      dropout_seed: of the run; masks come from it, the sample's index, the layer and the place.

    Raises:
      ConfigError: for an unknown recompute mode.
    """
    key = jax.random.key(0)  # of no consequence: only the structure of the modules is used
    block_module = nnx.split(nnx.eval_shape(lambda: Block(config, key, constrain, operations)))[0]
    shared_module = nnx.split(nnx.eval_shape(lambda: Shared(config, key, 1, constrain, lookup, ranks)))[0]

    def dropout(microbatch, layer):
        return Dropout(config.dropout, constrain, dropout_seed, microbatch.get("sample"), layer)

    def places(microbatch):
        return Places(microbatch.get("positions"), microbatch.get("document"))

    def embed(shared, microbatch):
        embedding = nnx.merge(shared_module, shared).embedding
        masks = dropout(microbatch, config.layers)  # one past the last block
        return embedding(microbatch["tokens"], dtype, masks, microbatch.get("positions"))

    # Forward and backward are in different loops, where XLA cannot merge what is computed twice: no barriers needed.
    @partial(jax.checkpoint, policy=remat.policy(recompute), prevent_cse=False)
    def block(weights, x, microbatch, layer):
        return nnx.merge(block_module, weights)(x, dropout(microbatch, layer), places(microbatch))

    def raw_logits(shared, y):
        model = nnx.merge(shared_module, shared)
        return model.head(y, model.embedding)

    def logits(shared, y):
        return ranks.whole(constrain(_masked(raw_logits(shared, y), config.vocabulary, ranks), *LOGITS))

    def head_loss(shared, y, microbatch):
        losses = cross_entropy(raw_logits(shared, y), microbatch["labels"], config.vocabulary, ranks)
        return (losses * microbatch["weights"].astype(jnp.float32)).sum()

    return ModelFunctions(embed, block, logits, head_loss)


def init(config: ModelConfig, key: jax.Array, shares: int = 1) -> Tree:
    """Fresh parameters: fp32, canonical form (block leaves [layers, ...]). To be jitted with out_shardings if large.

    Normal with config.init_deviation; the two projections into the residual scaled by 1/sqrt(2 layers); biases 0, norm
    scales 1. A value depends on the key, the parameter's name and the layer, not on `shares`.

    Args:
      config: the model.
      key: of the run.
      shares: devices that the vocabulary's rows must split over.
    """
    rows = padded_vocabulary(config.vocabulary, shares)

    def block(layer):
        return _values(Block(config, jax.random.fold_in(named_key(key, "blocks"), layer)))

    return {
        "blocks": jax.vmap(block)(jnp.arange(config.layers)),
        "shared": _values(Shared(config, named_key(key, "shared"), rows)),
    }


def _values(module: nnx.Module) -> Tree:
    """The parameters of a module as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _metadata(config: ModelConfig) -> dict[str, Tree]:
    """Trees like params of the NNX parameters themselves, without the axis of layers."""
    key = jax.random.key(0)

    def parameters(make):
        return nnx.state(nnx.eval_shape(make), nnx.Param)

    return {
        "blocks": parameters(lambda: Block(config, key)),
        "shared": parameters(lambda: Shared(config, key, padded_vocabulary(config.vocabulary, 1))),
    }


def _map_parameters(of: Callable[[nnx.Param], Any], tree) -> Tree:
    """A nested dictionary of `of` each parameter in an NNX state."""
    return {name: of(node) if isinstance(node, nnx.Param) else _map_parameters(of, node) for name, node in tree.items()}


def logical_axes(config: ModelConfig) -> Tree:
    """A tree like params whose leaves are tuples of logical axis names; those of blocks start with "layers"."""
    trees = _metadata(config)
    return {
        "blocks": _map_parameters(lambda p: ("layers", *p.logical_axes), trees["blocks"]),
        "shared": _map_parameters(lambda p: p.logical_axes, trees["shared"]),
    }


def decay_mask(config: ModelConfig) -> Tree:
    """A tree like params of bools: whether weight decay applies, to all but biases and norms."""
    return {name: _map_parameters(lambda p: p.decay, tree) for name, tree in _metadata(config).items()}


def reference_loss(model: ModelFunctions, params: Tree, batch: Microbatch) -> jax.Array:
    """Mean loss of a batch with no pipeline: what every schedule must reproduce.

    Args:
      model: the pure functions.
      params: canonical.
      batch: arrays [microbatches, samples, ...].

    Returns:
      fp32 scalar: sum of weights * cross entropy over sum of weights, over the whole batch.
    """
    layers = len(jax.tree.leaves(params["blocks"])[0])

    def one(total, microbatch):
        def through(x, weights_and_layer):
            weights, layer = weights_and_layer
            return model.block(weights, x, microbatch, layer), None

        x = model.embed(params["shared"], microbatch)
        y, _ = lax.scan(through, x, (params["blocks"], jnp.arange(layers)))
        return total + model.head_loss(params["shared"], y, microbatch), None

    return lax.scan(one, jnp.float32(0), batch)[0] / batch["weights"].sum()

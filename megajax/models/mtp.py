"""Multi-token prediction: modules after the last block, each for one token further (2412.19437 section 2.2).

Module k of D takes the hidden states h of the one before, of the first those that the head reads, and the tokens t:

    x_i  = P [norm(embedding(t_{i+k})); norm(h_i)]         both of width h; P is [2h, h]
    h'_i = norm(block(x)_i)                                a block as the model's last one
    loss of label i + k, that is of token t_{i+k+1}, by the model's own head and token tables

as in Megatron-Core and in DeepSeek-V3's weights (enorm, hnorm, eh_proj, shared_head.norm). The model trains with

    mean loss + mtp_loss_scaling_factor / D * sum over k of the mean loss of module k

where the last mean is over the tokens whose label i + k is in the sample, in the document of token i, and counts. As in
Megatron-Core the value of the loss is the first term alone: the others are in its gradients.

All pipeline ranks have the modules, beside embedding and head, and the last stage computes them with its head, forward
and backward at once: nothing of them is stashed, and schedules have no operations for them. What comes after token i is
moved to i before the batch is split (`ahead`), so context ranks need no exchange. If all ranks share the ends
(`--vocab-parallel pipe`), all compute the modules, on the same values, and each has the part of the gradients that
follows from its rows of the token tables; the sum over pipe is then the whole.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import ModelConfig
from megajax.config.mtp import mtp_block
from megajax.models import moe
from megajax.models.dropout import Dropout
from megajax.models.interface import Microbatch, ModelContext
from megajax.models.nnx_model import named_key, parameter
from megajax.models.norms import Norm
from megajax.models.transformer import Block
from megajax.ops.linear import RESIDUAL

__all__ = ["MTPModule", "ahead", "module_name", "move_biases", "mtp_loss", "take_measurements"]

Tree = Any
ARRAYS = ("tokens", "labels", "weights")


def module_name(number: int) -> str:
    """The attribute of the shared module that has module `number`, from 1 on."""
    return f"mtp{number}"


class MTPModule(nnx.Module):
    """One module. `loss` is 0: its gradient is the module's mean loss, which steps report (`take_measurements`)."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext, number: int):
        """Draws the weights from the key of the shared module."""
        self.config, self.context, self.number = config, context, number
        key, hidden = named_key(key, module_name(number)), config.hidden
        self.embedding_norm, self.hidden_norm, self.norm = Norm(config), Norm(config), Norm(config)
        kernel = jax.random.normal(named_key(key, "projection"), (2, hidden, hidden)) * config.init_deviation
        self.projection = parameter(kernel, None, None, "hidden")
        self.block = Block(mtp_block(config), named_key(key, "block"), context)
        self.loss = parameter(jnp.zeros(1), None, decay=False, fp32=True)

    def __call__(self, hidden: jax.Array, embedded: jax.Array, microbatch: Microbatch) -> jax.Array:
        """From h [b, split s, h], and the embeddings of the tokens `number` further on, to h' of the same shape."""
        split = lambda x: self.context.constrain(x, *RESIDUAL)  # noqa: E731
        kernel, layer = self.projection[...].astype(hidden.dtype), jnp.int32(self.config.layers + self.number)
        embedded = Dropout(self.config.dropout, self.context, microbatch, layer)(embedded, "embedding", *RESIDUAL)
        both = split(jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1))
        x = split(jnp.tensordot(both, kernel.reshape(-1, kernel.shape[-1]), 1))
        return split(self.norm(self.block(x, microbatch, layer)))


def ahead(batch: Microbatch, modules: int) -> dict[str, jax.Array]:
    """What each module reads of a batch [microbatches, samples, s], by names such as "mtp1_labels".

    Element i has what is k further on, or 0 where that is past the end of the sample or in another document. Weights
    are scaled to the sum of the batch's: divided by it, the weighted sum of losses is their own mean.
    """
    length, document, found = batch["tokens"].shape[-1], batch.get("document"), {}
    for number in range(1, modules + 1):
        inside = jnp.arange(length) < length - number
        if document is not None and document.shape == batch["tokens"].shape:
            inside &= document == jnp.roll(document, -number, -1)
        moved = {name: jnp.where(inside, jnp.roll(batch[name], -number, -1), 0) for name in ARRAYS}
        total = moved["weights"].sum()
        moved["weights"] *= jnp.where(total > 0, batch["weights"].sum() / jnp.where(total > 0, total, 1), 0)
        found |= {f"{module_name(number)}_{name}": array for name, array in moved.items()}
    return found


def mtp_loss(shared: Any, hidden: jax.Array, microbatch: Microbatch) -> jax.Array:
    """An fp32 scalar of value 0 with the gradients of the modules' losses, weighted; and of reporting these.

    Args:
      shared: the model's shared module (`megajax.models.gpt.Shared`).
      hidden: h [b, split s, h], normed for the head, on all ranks that have rows of the token tables.
      microbatch: with the arrays of `ahead`.
    """
    config, vocabulary = shared.config, shared.context.vocabulary
    # Of ranks that compute the same the first one adds the balance losses, and has the embedding's gradient.
    first, total = vocabulary.ranks.first_row(1) == 0, jnp.float32(0)
    once = {name: jnp.where(first, microbatch[name], 0) for name in moe.SCALED if name in microbatch}
    only_gradient = lambda x: x - lax.stop_gradient(x)  # noqa: E731
    for number in range(1, config.mtp_num_layers + 1):
        own = {name: microbatch[f"{module_name(number)}_{name}"] for name in ARRAYS}
        module, moved = getattr(shared, module_name(number)), {"tokens": own["tokens"]}
        if config.positions == "learned":
            places = microbatch.get("positions", jnp.arange(hidden.shape[1])[None])
            moved["positions"] = jnp.minimum(places + number, config.sequence_length - 1)
        embedded = vocabulary.broadcast(jnp.where(first, shared.embedding.vectors(moved), 0))
        hidden = module(hidden, embedded, {**microbatch, **once})
        losses = shared.losses(shared.head.logits(hidden, shared.embedding), own["labels"])
        loss = (losses * own["weights"].astype(jnp.float32)).sum()
        total += config.mtp_loss_scaling_factor / config.mtp_num_layers * only_gradient(loss)
        total += only_gradient(module.loss[0]) * lax.stop_gradient(loss)
    return total


def take_measurements(gradients: Tree, config: ModelConfig) -> tuple[Tree, dict[str, Any]]:
    """As `PipelineModel.take_measurements`: "losses", by name, and "expert_load" of the modules' experts."""
    shared, found = dict(gradients["shared"]), {"losses": {}}
    names = [name for name in map(module_name, range(1, config.mtp_num_layers + 1)) if "loss" in shared.get(name, {})]
    for name in names:
        found["losses"][f"{name}_loss"] = shared[name]["loss"][0]
        shared[name] = {**shared[name], "loss": jnp.zeros_like(shared[name]["loss"])}
    gradients = {**gradients, "shared": shared}
    if not (mtp_block(config).experts and names):
        return gradients, found
    blocks, measured = moe.take_measurements(_blocks(gradients, names))
    return _with_blocks(gradients, blocks), found | {name: measured[name] for name in measured if name == "expert_load"}


def move_biases(updates: Tree, measured: dict[str, Any], rate: float) -> Tree:
    """`moe.move_biases` of the modules' experts, from their "expert_load"."""
    blocks = _blocks(updates, [name.removesuffix("_loss") for name in measured["losses"]])
    return _with_blocks(updates, moe.move_biases(blocks, measured["expert_load"], rate))


def _blocks(tree: Tree, names: list[str]) -> Tree:
    """The modules' blocks, as if they were kinds of layers."""
    return {"blocks": {name: tree["shared"][name]["block"] for name in names}}


def _with_blocks(tree: Tree, blocks: Tree) -> Tree:
    own = {name: {**tree["shared"][name], "block": block} for name, block in blocks["blocks"].items()}
    return {**tree, "shared": {**tree["shared"], **own}}

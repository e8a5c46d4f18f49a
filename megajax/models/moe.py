"""The mixture-of-experts MLP of a block: each token passes the k experts with the highest scores.

Shapes: b samples, s tokens, h = hidden, E experts of inner width f, k experts for a token, R = b s k rows.

    y [b, s, h] -> router, fp32 -> k experts and their weights for each token
                -> dispatch [R, h], sorted by expert -> up, activation, weight -> down [R, h] -> combine [b, s, h]

The experts' inner width is split over tensor, as a dense MLP's. Every replica has all experts, or with expert parallelism
E / N of them: then its rows are those of a group of N replicas (`ops/expert_dispatch.py`), R = N b s min(k, E / N) of them,
of which the last ones belong to other replicas' experts and are zero. The router runs on a replica's own whole samples, so
that a token's choice does not depend on the layout.

**Balance.** With p the softmax over all E scores, c_i the choices of expert i in a sample of S tokens,
f_i = E c_i / (k S), and P_i the mean of p_i over the sample, `balance_loss` adds its coefficient times the sum over
layers of the mean over samples of

    sum_i f_i P_i        1 if experts are chosen equally often (DeepSeek-V2, 2405.04434 section 2.2.3; f has no gradient)

and `router_z_loss` that of the mean over tokens of logsumexp(scores)^2 (2202.08906 equation 5). Both are means over the
global batch, so loss and gradient do not depend on microbatches, replicas or context ranks. `balance_bias_rate` instead adds
a bias to p for the choice alone, which after each step grows by the rate where an expert had fewer tokens than the mean of
the global batch, and shrinks where it had more (2408.15664 algorithm 1).

**Padding**, the tokens whose "padding_mask" is not 0 and the samples numbered `PADDING`, is not counted: S, c_i, P_i, the
loads and the means are of real tokens. Tokens of loss weight 0, such as a prompt's, are real.

**Capacity.** With `expert_capacity` c an expert takes, in training, at most ceil(c k S / E) of a sample's S real tokens, the
first that choose it (GShard, 2006.16668 section 2.2, whose groups are samples here, so that the layout does not matter). The
other choices are dropped: nothing is added for them, and a token's other weights stay as they are. A token without any
experts left passes the block by its residual. There are then as many rows as the experts can take, which bounds the
memory of expert parallelism.

These losses leave the step in its gradients. `add_loss` gives them their gradient in the block's backward; `report`
returns measured values as the gradients of small parameters (`Router.bias` and `Router.losses`), which the executor sums
over microbatches and replicas like all others, and which the optimizer does not see (`take_measurements`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.config.batch_ramp import PADDING
from megajax.config.experts import expert_tokens
from megajax.models.feedforward import ACTIVATIONS, FeedForward, activate
from megajax.models.interface import Microbatch, ModelContext
from megajax.models.nnx_model import named_key, parameter
from megajax.ops.expert_choice import Choice
from megajax.ops.expert_dispatch import Gather, all_to_all
from megajax.ops.expert_rounds import Rounds, add_rounds
from megajax.ops.group_order import dispatch
from megajax.ops.grouped_gated import gated_row
from megajax.ops.grouped_matmul import route
from megajax.ops.linear import GATHERED, RESIDUAL, reduce_scattered

__all__ = ["SCALED", "Experts", "Router", "balance_arrays", "move_biases", "take_measurements"]

Tree = Any
SCALED = ("counted_samples", "sample_shares", "token_shares")  # of `balance_arrays`
LOSSES = ("balance_loss", "router_z_loss")
ONE = ""  # the kind of layers that are all of one
MEASURED = {"bias", "losses"}  # parameters of a router whose gradients are measured values


def balance_arrays(batch: Microbatch) -> dict[str, jax.Array]:
    """Three arrays for a batch [microbatches, samples], for samples with any real token; 0 for others, which are padding.

    "counted_samples" is 1, "sample_shares" their share in the mean over samples, and "token_shares" that of each of their
    real tokens in the mean over tokens. The training step multiplies them by the factor of the loss in the gradients.
    """
    real = _real_tokens(batch)
    tokens = jnp.ones_like(batch["tokens"]).sum(-1) if real is None else real.sum(-1, dtype=jnp.int32)
    if "sample" in batch:
        tokens = jnp.where(batch["sample"] == jnp.uint32(PADDING), 0, tokens)
    counted, total = (tokens > 0).astype(jnp.float32), tokens.sum().astype(jnp.float32)
    return {
        "counted_samples": counted,
        "sample_shares": counted / jnp.maximum(counted.sum(), 1),
        "token_shares": counted / jnp.maximum(total, 1),
    }


def _real_tokens(batch: Microbatch) -> jax.Array | None:
    """Which tokens are no padding, bool [..., s]; None: all."""
    return batch["padding_mask"] == 0 if "padding_mask" in batch else None


class Router(nnx.Module):
    """Chooses k experts for each token, in fp32. Ties go to the expert with the lower number."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        """Draws the weights.

        `losses` is never read: its gradient carries the layer's two losses and, with capacity, the dropped choices.
        """
        self.config, self.context = config, context
        kernel = jax.random.normal(named_key(key, "kernel"), (config.hidden, config.experts)) * config.init_deviation
        self.kernel = parameter(kernel, "hidden", None, fp32=True)
        self.bias = parameter(jnp.zeros(config.experts), None, decay=False, fp32=True)
        if config.expert_biases:
            self.logit_bias = parameter(jnp.zeros(config.experts), None, decay=False, fp32=True)
        measured = len(LOSSES) + bool(config.expert_capacity)
        self.losses = parameter(jnp.zeros(measured), None, decay=False, fp32=True)

    def __call__(self, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, jax.Array]:
        """Weights fp32 [b, s, k] and experts int32 [b, s, k] of the tokens y [b, s, h]; a dropped choice has expert E."""
        config = self.config
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.matmul(y.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        if config.expert_biases:
            logits = logits + self.logit_bias[...].astype(jnp.float32)
        logits = checkpoint_name(self.context.constrain(logits, "batch", "whole_sequence", None), "router")
        is_sigmoid = config.router_scores == "sigmoid"
        scores = jax.nn.sigmoid(logits) if is_sigmoid else jax.nn.softmax(logits)
        biases = self.bias[...].astype(jnp.float32)
        ranking = scores + biases
        if config.router_groups > 1:
            ranking = self._of_best_groups(ranking)
        elif not config.balance_bias_rate:  # there are biases if the run had a rate before, and they stay in use
            ranking = jnp.where((biases != 0).any(), ranking, logits)
        experts = lax.top_k(lax.stop_gradient(ranking), config.experts_per_token)[1]
        chosen = experts[..., None] == jnp.arange(config.experts)  # [b, s, k, E]
        pick = lambda values: jnp.where(chosen, values[:, :, None], 0).sum(-1)  # noqa: E731
        if config.router_softmax == "after":
            weights = jax.nn.softmax(pick(logits))
        else:
            weights = pick(scores)
            weights = weights / weights.sum(-1, keepdims=True) if config.router_normalize else weights
        weights = weights if config.router_scale == 1 else weights * config.router_scale
        if not self.context.training:
            return weights, experts
        if config.expert_capacity:
            # [b, s, E]: whether the token chose it, and how many earlier tokens of the sample did.
            taken, most, real = chosen.any(2), expert_tokens(config, y.shape[1]), _real_tokens(microbatch)
            if real is not None:
                taken &= real[..., None]
                table = jnp.asarray([expert_tokens(config, tokens) for tokens in range(y.shape[1] + 1)], jnp.int32)
                most = jnp.where(real, table[real.sum(1)][:, None], 0)[..., None]  # padding takes no expert's place
            earlier = jnp.cumsum(taken, 1, dtype=jnp.int32) - taken
            experts = jnp.where(pick(earlier) < most, experts, config.experts)
        if "sample_shares" in microbatch:
            scores = scores / scores.sum(-1, keepdims=True) if is_sigmoid else scores
            weights = self._balanced(weights, logits, scores, chosen, experts == config.experts, microbatch)
        return weights, experts

    def _of_best_groups(self, ranking: jax.Array) -> jax.Array:
        """The ranking [b, s, E]; -inf for experts outside the groups whose best experts rank highest (2412.19437)."""
        groups = ranking.reshape(*ranking.shape[:-1], self.config.router_groups, -1)
        ranks = lax.top_k(groups, self.config.router_group_best)[0].sum(-1)
        best = lax.top_k(ranks, self.config.router_group_choices)[1]
        inside = (best[..., None] == jnp.arange(self.config.router_groups)).any(-2)
        return jnp.where(inside[..., None], groups, -jnp.inf).reshape(ranking.shape)

    def _balanced(self, weights, logits, scores, chosen, dropped, microbatch: Microbatch) -> jax.Array:
        """`weights`, with the gradients of the balance losses and the values to report.

        Args:
          weights, logits, scores: of the tokens.
          chosen: bool [b, s, k, E], their choices.
          dropped: bool [b, s, k], the choices that are dropped.
          microbatch: has the arrays of `balance_arrays`.
        """
        squares = jax.nn.logsumexp(logits, axis=-1) ** 2  # [b, s]
        real = _real_tokens(microbatch)
        if real is not None:
            chosen, scores = chosen & real[..., None, None], jnp.where(real[..., None], scores, 0)
            dropped, squares = dropped & real[..., None], jnp.where(real, squares, 0)
        counts = chosen.sum((1, 2), dtype=jnp.float32)  # [b, E] of local tokens
        config, total = self.config, lax.stop_gradient(self.context.sum_over_sequence(counts))
        choices = jnp.maximum(total.sum(-1, keepdims=True), 1)  # [b, 1], k S
        tokens = choices[:, 0] / config.experts_per_token
        balance = ((total * config.experts / choices) * (scores.sum(1) / tokens[:, None])).sum(-1)  # [b]
        shares = [microbatch["sample_shares"], microbatch["token_shares"]]
        losses = (jnp.stack(shares, axis=1) * jnp.stack([balance, squares.sum(1)], axis=1)).sum(0)
        loads = (microbatch["counted_samples"][:, None] * counts).sum(0)
        weights = add_loss(weights, config.balance_loss * losses[0] + config.router_z_loss * losses[1])
        if config.expert_capacity:
            lost = dropped.sum((1, 2), dtype=jnp.float32)
            losses = jnp.append(losses, (microbatch["counted_samples"] * lost).sum())
        return report(weights, (self.bias[...], self.losses[...]), lax.stop_gradient((loads, losses)))


class Experts(nnx.Module):
    """The router, E MLPs, and the MLP that all tokens pass, if the config has one."""

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        """Draws the weights of one layer from its key."""
        self.config, self.constrain, self.group = config, context.constrain, context.experts
        self.matmuls, self.training = context.grouped_matmuls, context.training
        self.router = Router(config, named_key(key, "router"), context)
        hidden, width, gates = config.hidden, config.feedforward_size, (2,) if config.is_gated else ()
        draw = lambda name, *shape: jax.random.normal(named_key(key, name), shape)  # noqa: E731
        up = draw("up", config.experts, hidden, *gates, width) * config.init_deviation
        down = draw("down", config.experts, width, hidden) * config.init_deviation / (2 * config.layers) ** 0.5
        self.up = parameter(up, "experts", "hidden", *(None for _ in gates), "expert_feedforward")
        self.down = parameter(down, "experts", "expert_feedforward", "hidden")
        if config.expert_biases:
            zeros = jnp.zeros((config.experts, *gates, width))
            self.up_bias = parameter(zeros, "experts", *(None for _ in gates), "expert_feedforward", decay=False)
            self.down_bias = parameter(jnp.zeros((config.experts, hidden)), "experts", "hidden", decay=False)
        if config.shared_gate:
            gate = jax.random.normal(named_key(key, "shared_gate"), (hidden, 1)) * config.init_deviation
            self.shared_gate = parameter(gate, "hidden", None)
        if config.shared_feedforward:
            self.shared = FeedForward(config, named_key(key, "shared"), context, config.shared_feedforward)

    def __call__(self, y: jax.Array, microbatch: Microbatch) -> jax.Array:
        """From [b, split s, h] to the same, through [R, split f].

        In training the microbatch may have the arrays of `balance_arrays`; without them nothing is balanced or reported.
        """
        group = self.group
        weights, experts = self.router(y if group.over_tensor else self.constrain(y, *GATHERED), microbatch)
        biases = (self.up_bias[...], self.down_bias[...]) if self.config.expert_biases else ()
        kernels = self.up[...].astype(y.dtype), self.down[...].astype(y.dtype)
        if group.size > 1 and group.dispatch == "bucketed":
            rounds = Rounds.of(group, Choice.of(self.config), experts[..., 0].size)
            weights, experts = map(group.gather_choices, (weights, rounds.numbered(experts)))
            first = rounds.exchange(experts, 0), biases, kernels, rounds.room, rounds.rows
            out = self._with_shared(self._mixture(y, weights, *first), y)
            return add_rounds(out, y, weights, biases, kernels, experts, self._mixture, rounds)
        weights, experts = map(group.gather_choices, (weights, experts))
        return self._with_shared(self._mixture(y, weights, experts, biases, kernels), y)

    def _with_shared(self, out: jax.Array, y: jax.Array) -> jax.Array:
        """`out`, with what all tokens y pass, if there is such an MLP."""
        if not self.config.shared_feedforward:
            return out
        shared = self.shared(y)
        if self.config.shared_gate:
            shared = shared * jax.nn.sigmoid(y @ self.shared_gate[...].astype(y.dtype))
        return out + shared

    def _mixture(self, y, weights, experts, biases, kernels, room: int | None = None, rows: int | None = None):
        """What the experts compute of the tokens y [b, split s, h], weighted and summed, as y.

        Args:
          weights, experts: [N b, s, k], the group's; a dropped choice has expert E.
          biases: of the two matmuls, or none.
          kernels: theirs.
          room: places for tokens of another member (`all_to_all`), where there is a bound; `rows`: of the choices here.
        """
        group, samples, length, choices = self.group, *experts.shape
        weights, experts = map(group.of_members, (weights, experts))
        local, count = group.local_experts(experts, self.config.experts)
        # A token chooses an expert once, so no more of its choices than this member has experts can be here; nor more of a
        # sample's than these experts take.
        most = count * (expert_tokens(self.config, length) if self.training else length)
        sends = group.dispatch != "gather" and group.size > 1
        exchange = all_to_all(group, experts, Choice.of(self.config), most, room) if sends else Gather(group)
        constrain = (
            (lambda x, *axes: x) if group.over_tensor else self.constrain
        )  # then nothing is split or summed over it
        tokens = constrain(exchange.send(y), *GATHERED)
        weights, local = exchange.choices(weights), exchange.choices(local)
        rows = samples * min(length * min(count, choices), most) if rows is None else rows
        routing = group.each(lambda local: route(local.reshape(-1), count, rows))(local)
        up = self.matmuls.column(tokens.reshape(*local.shape[:-1], -1), kernels[0], routing)
        axes = "batch", *[None] * (up.ndim - 2), "expert_feedforward"
        up = checkpoint_name(constrain(up, *axes), "up")
        if biases:
            added = group.each(partial(_bias_of_rows, rows=up.shape[local.ndim - 2]))(
                group.split(biases[0]), routing.sizes
            )
            up = up.astype(jnp.float32) + constrain(added, *axes)
        # Weighted here and not after the second matmul, whose results the weights' gradients would then need.
        of_rows = lambda weights, routing: dispatch(weights.reshape(-1), routing.order, routing.places)  # noqa: E731
        shares, count_here = group.each(of_rows)(weights, routing), local.shape[-2]
        if self.matmuls.one_pass:
            gate = ACTIVATIONS[self.config.activation]
            out = gated_row(up, shares, kernels[1], routing, gate, self.matmuls, count_here)
        else:
            of_input = self.config.expert_weighted == "input"  # the product of a weighted row is the weighted product
            each = shares.reshape(*shares.shape, *[1] * (up.ndim - shares.ndim))
            wide = up.astype(jnp.float32) * each if of_input else up
            active = activate(self.config, wide) * (1 if of_input else shares[..., None])
            active = checkpoint_name(constrain(active.astype(y.dtype), "batch", "expert_feedforward"), "activation")
            out = self.matmuls.row(active, kernels[1], routing, count_here)
        out = reduce_scattered(out.reshape(tokens.shape), constrain)
        if biases:
            shares = (jax.nn.one_hot(local, count) * weights[..., None]).sum(-2)  # 0 for experts that are elsewhere
            added = (shares @ group.split(biases[1]).astype(jnp.float32)).reshape(tokens.shape)
            out = out + constrain(added.astype(out.dtype), *RESIDUAL)
        return exchange.collect(out)


def _bias_of_rows(biases: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """The bias of each row's expert, fp32 [rows, ...], of biases [G, ...]; a row of none gets any."""
    expert = (jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)).sum(1)
    return jnp.take(biases.astype(jnp.float32), expert, axis=0, mode="clip")


@jax.custom_vjp
def add_loss(x: jax.Array, loss: jax.Array) -> jax.Array:
    """x; the backward pass adds the gradient of `loss`, an fp32 scalar, to that of whatever is computed from x."""
    return x


@jax.custom_vjp
def report(x: jax.Array, leaves: Tree, values: Tree) -> jax.Array:
    """x; in the backward pass the gradients of `leaves` are `values`, arrays like them."""
    return x


add_loss.defvjp(lambda x, loss: (x, loss), lambda loss, dx: (dx, jnp.ones_like(loss)))
report.defvjp(
    lambda x, leaves, values: (x, jax.tree.map(lambda leaf, value: value.astype(leaf.dtype), leaves, values)),
    lambda values, dx: (dx, values, None),
)


def take_measurements(gradients: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """Separates what `report` returned from the gradients of the parameters.

    Args:
      gradients: like the parameters, blocks [..., n], or {kind: those}.

    Returns:
      (the gradients, with zeros for the router's `bias` and `losses`; "expert_load" [..., E], the choices of each expert in
      the global batch, and "router_losses" [..., 2], balance loss and z-loss without coefficients, of each layer; with
      capacity also "dropped_choices" [...], how many of them were dropped). No values if one of the two is frozen. If
      several kinds of layers have experts, a value is {kind: array}.
    """
    routers = _routers(gradients["blocks"])
    zeros = {kind: {name: jnp.zeros_like(own[name]) for name in own.keys() & MEASURED} for kind, own in routers.items()}
    if not all(MEASURED <= own.keys() for own in routers.values()):
        return _with_routers(gradients, zeros), {}
    losses = {kind: own["losses"] for kind, own in routers.items()}
    measured = {
        "expert_load": {kind: own["bias"] for kind, own in routers.items()},
        "router_losses": {kind: values[..., : len(LOSSES)] for kind, values in losses.items()},
    }
    if next(iter(losses.values())).shape[-1] > len(LOSSES):
        measured["dropped_choices"] = {kind: values[..., len(LOSSES)] for kind, values in losses.items()}
    alone = lambda of: of if len(of) > 1 else next(iter(of.values()))  # noqa: E731
    return _with_routers(gradients, zeros), {name: alone(of) for name, of in measured.items()}


def move_biases(updates: Tree, loads: Tree, rate: float) -> Tree:
    """The addends to the parameters, with those of the balancing biases: rate * sign(mean load - load)."""
    kinds = list(_routers(updates["blocks"]))
    loads = loads if len(kinds) > 1 else {kinds[0]: loads}
    moved = {kind: {"bias": rate * jnp.sign(load.mean(-1, keepdims=True) - load)} for kind, load in loads.items()}
    return _with_routers(updates, moved)


def _with_routers(tree: Tree, changed: dict[str, dict[str, jax.Array]]) -> Tree:
    """`tree` with these parameters of the routers of each kind of layers."""

    def replaced(block: Tree, new: dict[str, jax.Array]) -> Tree:
        inner = block["feedforward"]
        return {**block, "feedforward": {**inner, "router": {**inner["router"], **new}}}

    blocks = tree["blocks"]
    if ONE in changed:
        return {**tree, "blocks": replaced(blocks, changed[ONE])}
    return {**tree, "blocks": {**blocks, **{kind: replaced(blocks[kind], new) for kind, new in changed.items()}}}


def _routers(blocks: Tree) -> dict[str, Tree]:
    """The router of each kind of layers that has experts; of layers of one kind that of ONE."""
    kinds = {ONE: blocks} if "feedforward" in blocks else blocks
    return {kind: own["feedforward"]["router"] for kind, own in kinds.items() if "router" in own.get("feedforward", {})}

"""A decoder with experts in plain jax: every expert computed for every token, and masked; the balance losses in the loss.

It shares no code with megajax: its gradients are jax's of one function, without pipelines, custom VJPs and sorting.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from tests import small

PLAIN = dataclasses.replace(
    small.MODEL,
    norm="rmsnorm",
    activation="swiglu",
    biases=False,
    feedforward=24,
    experts=4,
    experts_per_token=2,
    router_softmax="after",
    balance_loss=0.02,
    router_z_loss=0.01,
)
# One expert gets no token, two have equal scores; another for all tokens.
UNEVEN = dataclasses.replace(
    PLAIN,
    experts=6,
    experts_per_token=3,
    router_softmax="before",
    router_normalize=False,
    router_z_loss=0.0,
    balance_bias_rate=0.01,
    shared_feedforward=16,
)
INPUTS = dataclasses.replace(UNEVEN, expert_weighted="input")
# A token's experts are of two of four groups of two.
GROUPED = dataclasses.replace(UNEVEN, experts=8, router_groups=4, router_group_choices=2, router_group_best=2)
# An expert takes 6 of a sample's 16 tokens; the others are dropped.
DROPPING = dataclasses.replace(UNEVEN, expert_capacity=0.75)
# The first three layers are dense, with a wider MLP; and every second one, from the second on.
FIRST_DENSE = dataclasses.replace(UNEVEN, dense_layers=3, dense_feedforward=40)
ALTERNATING = dataclasses.replace(PLAIN, moe_layer_freq="([0]+[1])*4", dense_feedforward=40)
MODELS = {"plain": PLAIN, "uneven": UNEVEN, "dropping": DROPPING}


@functools.cache
def params_of(config):
    """Random parameters; of UNEVEN's experts, 1 and 2 have the same score 0, and 5 is never chosen."""
    params = small.busy_params(config)
    if config.balance_bias_rate:
        router = of_experts(params["blocks"])["feedforward"]["router"]
        router["kernel"], router["bias"] = np.array(router["kernel"]), np.array(router["bias"])
        router["kernel"][..., 1:3] = 0
        router["bias"][:, 1:3], router["bias"][:, 5] = 0.05, -10
    return params


def of_experts(blocks):
    """The blocks that have experts; the others are dense."""
    return blocks.get("sparse", blocks)


def layers(config, blocks):
    """The weights of each layer in the model's order, and whether it has experts."""
    counts, found = {"dense": 0, "sparse": 0}, []
    for kind in config.layer_kinds or ("",) * config.layers:
        stack, place = (blocks[kind], counts[kind]) if kind else (blocks, len(found))
        found.append((jax.tree.map(lambda leaf: leaf[place], stack), kind != "dense"))  # noqa: B023
        if kind:
            counts[kind] += 1
    return found


def norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def attention(x, p):
    """Causal, x [b, s, h]."""
    qkv = jnp.einsum("bsh,hgqd->bsgqd", x, p["qkv"]["kernel"])
    query, key, value = qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]
    scores = jnp.einsum("bsgd,btgd->bgst", query, key) / math.sqrt(query.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bgst,btgd,gdh->bsh", jax.nn.softmax(scores), value, p["output"]["kernel"])


def mlp(x, up, down):
    gate = x @ up[:, 0]
    return (gate * jax.nn.sigmoid(gate) * (x @ up[:, 1])) @ down


def mixture(config, weights, x, p):
    """What the experts compute of x, with these weights [b, s, E]."""
    if config.expert_weighted == "input":
        return jax.vmap(mlp)(weights.transpose(2, 0, 1)[..., None] * x, p["up"], p["down"]).sum(0)
    return jnp.einsum("bse,ebsh->bsh", weights, jax.vmap(mlp, (None, 0, 0))(x, p["up"], p["down"]))


def among_first(ranking, count):
    """Of which fewer than `count` are better; of equal ones, those before it are better."""
    index = jnp.arange(ranking.shape[-1])
    better = (ranking[..., None, :] > ranking[..., None]) | (
        (ranking[..., None, :] == ranking[..., None]) & (index < index[:, None])
    )
    return better.sum(-1) < count


def experts(config, x, p, real):
    """(result [b, s, h], choices [b, E] of each sample, balance loss [b], squares [b, s] of the z-loss, dropped [b]).

    All but the result of real tokens alone, bool [b, s].
    """
    logits = x @ p["router"]["kernel"]
    scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    ranking = scores + p["router"]["bias"]  # also of a model whose biases do not move
    if config.router_groups > 1:
        best = jnp.sort(ranking.reshape(*ranking.shape[:-1], config.router_groups, -1), -1)[
            ..., -config.router_group_best :
        ]
        chosen = among_first(best.sum(-1), config.router_group_choices)
        ranking = jnp.where(jnp.repeat(chosen, config.experts // config.router_groups, -1), ranking, -jnp.inf)
    chosen = among_first(ranking, config.experts_per_token)
    weights = jnp.where(chosen, jnp.exp(logits) if config.router_softmax == "after" else scores, 0)
    if config.router_softmax == "after" or config.router_normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    dropped = jnp.zeros_like(chosen)
    if config.expert_capacity:
        share = config.expert_capacity * config.experts_per_token / config.experts
        most = np.array([math.ceil(share * count) for count in real.sum(1)])[:, None, None]
        taken = chosen & real[..., None]
        earlier = jnp.stack([taken[:, :token].sum(1) for token in range(x.shape[1])], 1)
        dropped = chosen & ((earlier >= most) | ~real[..., None])
        weights = jnp.where(dropped, 0, weights)
    out = mixture(config, weights, x, p)
    if config.shared_feedforward:
        out = out + mlp(x, p["shared"]["up"]["kernel"], p["shared"]["down"]["kernel"])
    counts = (chosen & real[..., None]).sum(1)
    tokens = np.maximum(real.sum(1), 1)[:, None]
    fraction = counts * config.experts / (config.experts_per_token * tokens)
    balance = (fraction * (scores * real[..., None]).sum(1) / tokens).sum(-1)
    return out, counts, balance, jnp.log(jnp.exp(logits).sum(-1)) ** 2 * real, (dropped & real[..., None]).sum((1, 2))


def loss(config, params, batch):
    """(mean loss with the balance losses, (without them, choices [layers, E], balance and z-loss [layers, 2])).

    The layers are those with experts.
    With capacity the last one has a third column, the dropped choices.
    """
    rows = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}
    real = np.asarray(rows.get("padding_mask", np.zeros(rows["tokens"].shape))) == 0
    samples = real.any(1).sum()
    embedding = params["shared"]["embedding"]
    x = embedding["tokens"][rows["tokens"]] + embedding["positions"]

    def block(x, p):
        x = x + attention(norm(x, p["attention_norm"]["scale"]), p["attention"])
        y = norm(x, p["feedforward_norm"]["scale"])
        out, counts, balance, squares, lost = experts(config, y, p["feedforward"], real)
        losses = jnp.stack([balance.sum() / samples, squares.sum() / real.sum()])
        return x + out, (counts.sum(0).astype(jnp.float32), losses, lost.sum().astype(jnp.float32))

    measured = []
    for p, sparse in layers(config, params["blocks"]):
        if sparse:
            x, values = block(x, p)
            measured.append(values)
        else:
            x = x + attention(norm(x, p["attention_norm"]["scale"]), p["attention"])
            up, down = (p["feedforward"][name]["kernel"] for name in ("up", "down"))
            x = x + mlp(norm(x, p["feedforward_norm"]["scale"]), up, down)
    loads, losses, dropped = map(jnp.stack, zip(*measured, strict=True))
    logits = norm(x, params["shared"]["head"]["norm"]["scale"]) @ embedding["tokens"][: config.vocabulary].T
    likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), rows["labels"][..., None], -1)[..., 0]
    mean = -(likelihoods * rows["weights"]).sum() / rows["weights"].sum()
    added = config.balance_loss * losses[:, 0].sum() + config.router_z_loss * losses[:, 1].sum()
    if config.expert_capacity:
        return mean + added, (mean, loads, jnp.concatenate([losses, dropped[:, None]], 1))
    return mean + added, (mean, loads, losses)


def expected_loss(config) -> np.ndarray:
    """`expected`'s mean loss alone, which is compiled faster."""
    batch = small.make_batch(small.make_run(microbatches=1, model=config))
    return np.asarray(jax.jit(lambda params: loss(config, params, batch)[1][0])(params_of(config)))


@functools.cache
def expected(config, seed: int = 0):
    """(mean loss, gradients) of the whole batch; those of the router's `bias` and `losses` are the measured values."""
    return expected_of(config, params_of(config), seed)


def expected_of(config, params, seed: int = 0):
    """As `expected`, with these parameters."""
    batch = small.make_batch(small.make_run(microbatches=1, model=config), seed)
    of = jax.jit(jax.value_and_grad(lambda params: loss(config, params, batch), has_aux=True))
    (_, (mean, loads, losses)), gradients = jax.tree.map(np.asarray, of(params))
    router = of_experts(gradients["blocks"])["feedforward"]["router"]
    router["bias"], router["losses"] = loads, losses
    return mean, gradients

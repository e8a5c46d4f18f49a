"""The training step of a GPT for one GPU as one would write it by hand in JAX: what megajax's own step is compared with.

Nothing of megajax computes here. Layers are unrolled and no matmul is recomputed: a layer saves what its backward reads. A
scan over the microbatches accumulates gradients in fp32; AdamW updates fp32 weights, of which a bf16 copy computes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.config import ConfigError, RunConfig

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PlainState:
    """fp32 parameters, AdamW's state, and no average of the weights."""

    params: Tree
    optimizer_state: Tree
    ema: Tree = ()


class PlainStep:
    """The step, with the methods of `megajax.train.step.Training` that compiling it needs.

    Attributes:
      state_sharding: like the state, NamedSharding of every array: on one device.
    """

    def __init__(self, run: RunConfig, mesh: Mesh):
        """Raises ConfigError for more than one device, and for another model than GPT without dropout."""
        model, gpt = run.model, ("layernorm", "gelu", "learned", 0)
        if run.parallel.devices != 1 or (model.norm, model.activation, model.positions, model.dropout) != gpt:
            raise ConfigError("the plain step is for a GPT without dropout on one device: pass --dropout 0, no mesh.")
        self.run, self.optimizer = run, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95))
        here = NamedSharding(mesh, PartitionSpec())
        self.state_sharding = jax.tree.map(lambda _: here, jax.eval_shape(self._init))
        self._step = jax.jit(self.train_step, in_shardings=(self.state_sharding, here), donate_argnums=0)

    def step_shapes(self) -> tuple[PlainState, Tree]:
        """The arguments of `train_step` as jax.ShapeDtypeStruct."""
        shape = (self.run.microbatches, self.run.parallel.microbatch_size, self.run.model.sequence_length)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        return jax.eval_shape(self._init), {"tokens": tokens, "labels": tokens}

    def compile_train_step(self, state: PlainState, batch: Tree) -> jax.stages.Compiled:
        """The compiled step of these shapes."""
        return self._step.lower(state, batch).compile()

    def train_step(self, state: PlainState, batch: Tree) -> tuple[PlainState, jax.Array]:
        """One update; `batch` has "tokens" and "labels", [microbatches, samples, sequence]. Also returns the loss."""
        half = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), state.params)

        def accumulate(totals, microbatch):
            loss, gradients = jax.value_and_grad(self.loss)(half, microbatch["tokens"], microbatch["labels"])
            return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), totals, (loss, gradients)), None

        zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), (jnp.float32(0), state.params))
        totals = lax.scan(accumulate, zeros, batch)[0]
        loss, gradients = jax.tree.map(lambda total: total / self.run.microbatches, totals)
        updates, optimizer_state = self.optimizer.update(gradients, state.optimizer_state, state.params)
        return PlainState(optax.apply_updates(state.params, updates), optimizer_state), loss

    def loss(self, params: Tree, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean cross-entropy of [samples, sequence] tokens."""
        vocabulary, heads = self.run.model.vocabulary, self.run.model.heads
        x = params["tokens"][tokens] + params["positions"]
        for weights in params["layers"]:
            x = _layer(weights, x, heads)
        logits = jnp.einsum("bsh,vh->bsv", _norm(params["norm"], x), params["tokens"]).astype(jnp.float32)
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocabulary, logits, -jnp.inf)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def _init(self) -> PlainState:
        """Random weights: products of constant ones draw less power, and a GPU then runs at a higher clock."""
        model, keys = self.run.model, iter(jax.random.split(jax.random.key(0), 4 * self.run.model.layers + 2))
        h, f, rows = model.hidden, model.feedforward_size, -(-model.vocabulary // 128) * 128
        norm = {"scale": jnp.ones(h), "bias": jnp.zeros(h)}

        def random(*shape):
            return 0.02 * jax.random.normal(next(keys), shape)

        def linear(*shape):
            return {"kernel": random(*shape), "bias": jnp.zeros(shape[1:])}

        def layer():
            attention = {"norm_1": norm, "qkv": linear(h, 3 * h), "output": linear(h, h)}
            return attention | {"norm_2": norm, "up": linear(h, f), "down": linear(f, h)}

        params = {"tokens": random(rows, h), "positions": random(model.sequence_length, h)}
        params |= {"layers": [layer() for _ in range(model.layers)], "norm": norm}
        return PlainState(params, self.optimizer.init(params))

    def init_state(self) -> PlainState:
        """A new state."""
        return jax.jit(self._init)()


def _layer(weights: Tree, x: jax.Array, heads: int) -> jax.Array:
    """A block of GPT, x of [samples, sequence, hidden], with cuDNN's attention."""
    samples, sequence, hidden = x.shape
    qkv = _linear(weights["qkv"], _norm(weights["norm_1"], x)).reshape(samples, sequence, 3, heads, hidden // heads)
    query, key, value = (qkv[:, :, index] for index in range(3))
    context = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    x = x + _linear(weights["output"], context.reshape(x.shape))
    inner = jax.nn.gelu(_linear(weights["up"], _norm(weights["norm_2"], x)), approximate=True)
    return x + _linear(weights["down"], inner)


def _linear(weights: Tree, x: jax.Array) -> jax.Array:
    return x @ weights["kernel"] + weights["bias"]


def _norm(weights: Tree, x: jax.Array) -> jax.Array:
    """Layer norm, in fp32."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
    return (y * weights["scale"] + weights["bias"]).astype(x.dtype)

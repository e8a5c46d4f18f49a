"""Random blocks of one's own: on any schedule they equal the unpipelined model, or are refused before a step; none hangs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.models.interface import ModelContext, mean_loss
from megajax.models.nnx_model import NNXModel, named_key, parameter
from megajax.runtime.mesh import make_mesh
from megajax.schedules.registry import find, names
from megajax.train.step import make_training
from tests import small

pytestmark = pytest.mark.slow

LENGTH, WIDTH, INNER, SAMPLES, LAYERS = 8, 6, 12, 8, 4
RESIDUAL = ("batch", "sequence", "hidden")
SCHEDULES = {  # with the chunks of a rank; PipeDream-2BW has stale weights
    name: 1 if find(name).chunks == "one" else 2 for name in names() if name != "pipedream_2bw"
}
TABLE = np.linspace(0.5, 1.5, LAYERS).astype(np.float32)


def in_halves(x, axis):
    first, second = jnp.split(x, 2, axis)
    return jnp.concatenate([jnp.tanh(second), first], axis)


def causal(x):
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), jnp.einsum("bsh,bth->bst", x, x) / WIDTH, -1e9)
    return jnp.einsum("bst,bth->bsh", jax.nn.softmax(scores), x)


def scanned(x):
    return jnp.moveaxis(
        lax.scan(lambda c, row: (0.5 * c + row,) * 2, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))[1], 0, 1
    )


def convolved(x):
    return lax.conv_general_dilated(
        x, 0.1 * jnp.ones((3, WIDTH, WIDTH)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def dropped(x, layer):
    return jnp.where(jax.random.bernoulli(jax.random.fold_in(jax.random.key(4), layer), 0.8, (LENGTH, WIDTH)), x, 0)


# (x [b, s, h], layer, a parameter [h], a parameter [h, h]) -> an array like x.
OPERATIONS = {
    "add": lambda x, n, v, m: x + v,
    "multiply": lambda x, n, v, m: x * v,
    "matmul": lambda x, n, v, m: x @ m,
    "einsum": lambda x, n, v, m: jnp.einsum("bsh,kh->bsk", x, m),
    "tanh": lambda x, n, v, m: jnp.tanh(x),
    "gelu": lambda x, n, v, m: jax.nn.gelu(x),
    "silu": lambda x, n, v, m: jax.nn.silu(x * v),
    "relu": lambda x, n, v, m: jax.nn.relu(x) + 0.1 * x,
    "softplus": lambda x, n, v, m: jax.nn.softplus(x),
    "sigmoid": lambda x, n, v, m: jax.nn.sigmoid(x @ m) * x,
    "sin": lambda x, n, v, m: jnp.sin(x),
    "cos": lambda x, n, v, m: jnp.cos(x),
    "exp": lambda x, n, v, m: jnp.exp(-jnp.abs(x)),
    "log1p": lambda x, n, v, m: jnp.log1p(x * x),
    "sqrt": lambda x, n, v, m: jnp.sqrt(1 + x * x),
    "square": lambda x, n, v, m: jnp.square(jnp.tanh(x)),
    "power": lambda x, n, v, m: jnp.tanh(x) ** 3,
    "clip": lambda x, n, v, m: jnp.clip(x, -1, 1),
    "maximum": lambda x, n, v, m: jnp.maximum(x, v),
    "minimum": lambda x, n, v, m: jnp.minimum(x, v),
    "where": lambda x, n, v, m: jnp.where(x > 0, x, 0.3 * x),
    "sign": lambda x, n, v, m: x * jnp.sign(v),
    "softmax": lambda x, n, v, m: jax.nn.softmax(x),
    "log_softmax": lambda x, n, v, m: jax.nn.log_softmax(x),
    "logsumexp": lambda x, n, v, m: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "softmax over tokens": lambda x, n, v, m: jax.nn.softmax(x, 1),
    "norm": lambda x, n, v, m: x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 0.1) * v,
    "layer norm": lambda x, n, v, m: jax.nn.standardize(x, epsilon=0.1),
    "norm over tokens": lambda x, n, v, m: jax.nn.standardize(x, 1, epsilon=0.1),
    "mean of tokens": lambda x, n, v, m: x + x.mean(1, keepdims=True),
    "max of tokens": lambda x, n, v, m: x - x.max(1, keepdims=True),
    "sum": lambda x, n, v, m: x + 0.1 * x.sum(-1, keepdims=True),
    "variance": lambda x, n, v, m: x / (1 + x.var(-1, keepdims=True)),
    "cumulative sum": lambda x, n, v, m: jnp.cumsum(x, 1) / LENGTH,
    "cumulative max": lambda x, n, v, m: lax.cummax(x, axis=1),
    "cumulative width": lambda x, n, v, m: jnp.cumsum(x, -1) / WIDTH,
    "scan": lambda x, n, v, m: scanned(x),
    "attention": lambda x, n, v, m: causal(x),
    "roll tokens": lambda x, n, v, m: jnp.roll(x, 1, axis=1),
    "roll width": lambda x, n, v, m: jnp.roll(x, 2, axis=-1),
    "shift": lambda x, n, v, m: jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1),
    "pad": lambda x, n, v, m: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "flip tokens": lambda x, n, v, m: jnp.flip(x, 1),
    "flip width": lambda x, n, v, m: jnp.flip(x, -1),
    "halves of tokens": lambda x, n, v, m: in_halves(x, 1),
    "halves of width": lambda x, n, v, m: in_halves(x, -1),
    "repeat": lambda x, n, v, m: jnp.repeat(x[:, ::2], 2, axis=1),
    "tile": lambda x, n, v, m: jnp.tile(x[..., :3], (1, 1, 2)),
    "first token": lambda x, n, v, m: x + x[:, :1],
    "last token": lambda x, n, v, m: x + x[:, -1:],
    "take": lambda x, n, v, m: jnp.take(x, np.array([3, 1, 2, 0, 7, 6, 5, 4]), axis=1),
    "set": lambda x, n, v, m: x.at[:, 2].set(v),
    "add at": lambda x, n, v, m: x.at[..., 1:3].add(1.0),
    "transpose": lambda x, n, v, m: jnp.swapaxes(jnp.tanh(jnp.swapaxes(x, 1, 2)), 1, 2),
    "reshape": lambda x, n, v, m: jnp.tanh(x.reshape(len(x), LENGTH // 2, 2 * WIDTH)).reshape(x.shape),
    "heads": lambda x, n, v, m: jax.nn.softmax(x.reshape(*x.shape[:2], 2, 3), 2).reshape(x.shape),
    "sort": lambda x, n, v, m: jnp.sort(x, -1),
    "top_k": lambda x, n, v, m: x + lax.top_k(x, 2)[0].sum(-1, keepdims=True),
    "one hot": lambda x, n, v, m: x + jax.nn.one_hot(x.argmax(-1), WIDTH),
    "convolution": lambda x, n, v, m: convolved(x),
    "cond": lambda x, n, v, m: lax.cond(n % 2 == 0, lambda x: x @ m, jnp.sin, x),
    "switch": lambda x, n, v, m: lax.switch(n % 3, [jnp.sin, jnp.tanh, lambda x: x * v], x),
    "remainder": lambda x, n, v, m: x * (1 + 0.1 * (n % 3)),
    "table": lambda x, n, v, m: x * jnp.asarray(TABLE)[n],
    "key": lambda x, n, v, m: x * (1 + 0.1 * jax.random.normal(jax.random.fold_in(jax.random.key(3), n), (WIDTH,))),
    "dropout": lambda x, n, v, m: dropped(x, n),
    "fori": lambda x, n, v, m: lax.fori_loop(0, 3, lambda i, y: 0.5 * y + 0.1 * jnp.sin(y), x),
    "checkpoint": lambda x, n, v, m: jax.checkpoint(lambda x: jnp.tanh(x @ m))(x),
    "stop gradient": lambda x, n, v, m: x + lax.stop_gradient(jnp.sin(x)),
    "bfloat16": lambda x, n, v, m: x + x.astype(jnp.bfloat16).astype(x.dtype),
}  # fmt: skip


@struct.dataclass
class RandomConfig:
    name: str = "random"
    layers: int = LAYERS
    operations: tuple = ()


class RandomBlock(nnx.Module):
    def __init__(self, config, key, context):
        self.config, self.constrain = config, context.constrain
        draw = lambda name, *shape: jax.random.normal(named_key(key, name), shape) / math.sqrt(shape[0])  # noqa: E731
        self.vectors = parameter(1 + draw("vectors", len(config.operations), WIDTH), None, "hidden")
        self.matrices = parameter(draw("matrices", len(config.operations), WIDTH, WIDTH), None, "hidden", None)
        self.up = parameter(draw("up", WIDTH, INNER), "hidden", "feedforward")
        self.down = parameter(draw("down", INNER, WIDTH), "feedforward", "hidden")

    def __call__(self, x, microbatch, layer):
        x = y = self.constrain(x, *RESIDUAL)
        for place, name in enumerate(self.config.operations):
            y = OPERATIONS[name](y, layer, self.vectors[...][place], self.matrices[...][place])
        y = self.constrain(x + jnp.tanh(y), *RESIDUAL)
        inner = self.constrain(jnp.tanh(y @ self.up[...]), "batch", "whole_sequence", "feedforward")
        return self.constrain(y + inner @ self.down[...], *RESIDUAL)


class RandomEnds(nnx.Module):
    def __init__(self, config, key, context):
        self.constrain = context.constrain
        self.scale = parameter(jnp.ones(WIDTH), "hidden")

    def embed(self, microbatch):
        return self.constrain(microbatch["x"] * self.scale[...], *RESIDUAL)

    def head_loss(self, y, microbatch):
        return jnp.square(self.constrain(y, *RESIDUAL) - microbatch["y"]).sum()


class RandomModel(NNXModel):
    block_module, shared_module, activation_axes = RandomBlock, RandomEnds, RESIDUAL

    def batch_shapes(self):
        return {name: jax.ShapeDtypeStruct((LENGTH, WIDTH), np.float32) for name in ("x", "y")}


def compare(operations, schedule, recompute):
    """Whether the model runs on pipe 2 x tensor 2 and equals the unpipelined one; None: it is refused."""
    chunks = SCHEDULES[schedule]
    parallel = ParallelConfig(
        pipe=2, tensor=2, schedule=schedule, chunks=chunks, recompute=recompute, microbatch_size=2
    )
    train = TrainConfig(global_batch_size=SAMPLES, steps=2, warmup_steps=1, precision="fp32")
    run = RunConfig(RandomConfig(operations=tuple(operations)), parallel, train)
    run.validate()
    training = make_training(run, make_mesh(parallel), RandomModel)
    x, y = np.random.default_rng(3).normal(size=(2, 4, 2, LENGTH, WIDTH)).astype(np.float32)
    model = RandomModel(run.model, ModelContext(recompute="none"))
    params = jax.device_get(jax.jit(model.init)(jax.random.key(1)))
    try:
        loss, gradients = training.loss_and_gradients(small.place(training, params), {"x": x, "y": y})
    except ConfigError as error:
        assert "is along an axis that is sharded over tensor" in str(error)
        return None
    want, slopes = jax.jit(jax.value_and_grad(functools.partial(mean_loss, model)))(params, {"x": x, "y": y})
    np.testing.assert_allclose(loss, want, rtol=1e-4)
    small.assert_gradients_close(small.canonical(gradients, training), jax.device_get(slopes), rtol=1e-3)
    return True


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(["none", "selective", "full"]),
)
def test_random_blocks(operations, schedule, recompute):
    compare(operations, schedule, recompute)


@pytest.mark.parametrize("part", range(6))
def test_every_operation(part):
    """A sixth of the operations in each case, two to a block, on alternating schedules and recompute modes."""
    own = sorted(OPERATIONS)[part::6]
    for index in range(0, len(own), 2):
        schedule = sorted(SCHEDULES)[(part + index // 2) % len(SCHEDULES)]
        compare(own[index : index + 2], schedule, ("selective", "none", "full")[index // 2 % 3])

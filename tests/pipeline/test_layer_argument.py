"""Blocks that use `layer`: tables, branches, keys and arithmetic of it, on every schedule and recompute mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from jax import lax

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.models.interface import ModelContext, mean_loss
from megajax.models.nnx_model import NNXModel, named_key, parameter
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests import small

WIDTH, LAYERS, SAMPLES = 6, 4, 8


@struct.dataclass
class LayeredConfig:
    name: str = "layered"
    layers: int = LAYERS
    use: str = "all"


def scale(use: str, layer):
    """A factor that depends on the layer, by one operation or by all."""
    table = jnp.asarray(np.linspace(0.5, 1.5, LAYERS), jnp.float32)
    factors = {
        "remainder": lambda: 1 + 0.1 * (layer % 3).astype(jnp.float32),
        "table": lambda: table[layer],
        "cond": lambda: lax.cond(layer % 2 == 0, lambda: jnp.float32(1.2), lambda: jnp.float32(0.8)),
        "switch": lambda: lax.switch(layer, [lambda n=n: jnp.float32(1 + n / 8) for n in range(LAYERS)]),
        "key": lambda: 1 + 0.1 * jax.random.uniform(jax.random.fold_in(jax.random.key(0), layer)),
        "where": lambda: jnp.where(layer >= 2, 1.1, 0.9) * jnp.exp2(-layer.astype(jnp.float32) / 9),
        "one_hot": lambda: (jax.nn.one_hot(layer, LAYERS) * table).sum(),
    }
    return functools.reduce(lambda a, b: a * b, (f() for f in factors.values())) if use == "all" else factors[use]()


class LayeredBlock(nnx.Module):
    def __init__(self, config, key, context):
        self.config, self.constrain = config, context.constrain
        self.up = parameter(jax.random.normal(named_key(key, "up"), (WIDTH, 8)) / 3, "hidden", "feedforward")
        self.down = parameter(jax.random.normal(named_key(key, "down"), (8, WIDTH)) / 3, "feedforward", "hidden")

    def __call__(self, x, microbatch, layer):
        factor = scale(self.config.use, layer)
        inner = self.constrain(jnp.tanh(factor * (x @ self.up[...])), "batch", "feedforward")
        return self.constrain(x + factor * (inner @ self.down[...]), "batch", "hidden")


class LayeredEnds(nnx.Module):
    def __init__(self, config, key, context):
        self.table = parameter(jnp.eye(WIDTH), "hidden", None)

    def embed(self, microbatch):
        return microbatch["x"] @ self.table[...]

    def head_loss(self, y, microbatch):
        return jnp.square(y - microbatch["y"]).sum()


class Layered(NNXModel):
    block_module, shared_module, activation_axes = LayeredBlock, LayeredEnds, ("batch", "hidden")

    def batch_shapes(self):
        return {name: jax.ShapeDtypeStruct((WIDTH,), np.float32) for name in ("x", "y")}


def batch_of(microbatches: int):
    x, y = np.random.default_rng(2).normal(size=(2, microbatches, SAMPLES // microbatches, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


@functools.cache
def expected(use: str):
    model = Layered(LayeredConfig(use=use), ModelContext(recompute="none"))
    params = jax.device_get(jax.jit(model.init)(jax.random.key(1)))
    return params, *jax.device_get(
        jax.jit(jax.value_and_grad(functools.partial(mean_loss, model)))(params, batch_of(1))
    )


CASES = [
    (schedule, chunks, recompute, use)
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2))
    for recompute in ("none", "selective", "full")
    for use in ("all", "remainder", "table", "cond", "switch", "key", "where", "one_hot")
    if use == "all" or (schedule == "zb_h1" and recompute == "selective")
]
QUICK = ("zb_h1", 1, "selective", "all")


@pytest.mark.slow
@pytest.mark.parametrize("case", [c if c == QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES], ids=str)
def test_gradients_are_those_without_a_pipeline(case):
    schedule, chunks, recompute, use = case
    parallel = ParallelConfig(pipe=2, schedule=schedule, chunks=chunks, recompute=recompute, microbatch_size=2)
    train = TrainConfig(global_batch_size=SAMPLES, steps=2, warmup_steps=1, precision="fp32")
    run = RunConfig(LayeredConfig(use=use), parallel, train)
    run.validate()
    training = make_training(run, make_mesh(parallel), Layered)
    params, want, slopes = expected(use)
    loss, gradients = training.loss_and_gradients(small.place(training, params), batch_of(4))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), slopes, rtol=1e-5)

"""NNXModel: parameters, metadata and recompute modes of a user's modules, including plain NNX layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.config import ConfigError
from megajax.models.interface import ModelContext
from megajax.models.nnx_model import NNXModel, named_key, parameter


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = "plain"
    layers: int = 3
    width: int = 4


class Block(nnx.Module):
    def __init__(self, config, key, context):
        self.linear = nnx.Linear(config.width, config.width, rngs=nnx.Rngs(named_key(key, "linear")))

    def __call__(self, x, microbatch, layer):
        return x + layer * jnp.sin(self.linear(x))


class Ends(nnx.Module):
    def __init__(self, config, key, context):
        self.scale = parameter(jnp.ones((config.width, 1)), "hidden", None, decay=False)

    def embed(self, microbatch):
        return microbatch["x"]

    def head_loss(self, y, microbatch):
        return (y @ self.scale[...]).sum()


class Plain(NNXModel):
    block_module, shared_module, activation_axes = Block, Ends, ("batch", "hidden")

    def batch_shapes(self):
        return {"x": jax.ShapeDtypeStruct((self.config.width,), np.float32)}


def test_a_plain_parameter_is_replicated_and_decays_if_it_is_a_matrix():
    model = Plain(Config())
    params = model.init(jax.random.key(0))
    assert params["blocks"]["linear"]["kernel"].shape == (3, 4, 4)
    axes, decay = model.logical_axes(), model.decay_mask()
    assert axes["blocks"] == {"linear": {"kernel": ("layers", None, None), "bias": ("layers", None)}}
    assert axes["shared"] == {"scale": ("hidden", None)}
    assert decay == {"blocks": {"linear": {"kernel": True, "bias": False}}, "shared": {"scale": False}}


def test_layers_differ_and_do_not_depend_on_their_number():
    few, many = (Plain(Config(layers=layers)).init(jax.random.key(0))["blocks"] for layers in (2, 3))
    kernel = np.asarray(many["linear"]["kernel"])
    np.testing.assert_array_equal(few["linear"]["kernel"], kernel[:2])
    assert np.abs(kernel[0] - kernel[1]).max() > 0.01


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_block_gets_its_layer_and_recompute_changes_no_gradient(mode):
    model = Plain(Config(), ModelContext(recompute=mode))
    weights = jax.tree.map(lambda a: a[1], model.init(jax.random.key(0))["blocks"])
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    y, vjp = jax.vjp(lambda w, x: model.block(w, x, {}, 2), weights, x)
    inner = x @ weights["linear"]["kernel"] + weights["linear"]["bias"]
    np.testing.assert_allclose(y, x + 2 * np.sin(inner), rtol=1e-5)
    dw, dx = vjp(jnp.ones_like(y))
    np.testing.assert_allclose(dw["linear"]["bias"], 2 * np.cos(inner).sum(0), rtol=1e-5)
    np.testing.assert_allclose(dx, 1 + 2 * np.cos(inner) @ weights["linear"]["kernel"].T, rtol=1e-5, atol=1e-6)


def test_the_loss_weight_is_the_number_of_samples_or_the_sum_of_weights():
    model = Plain(Config())
    assert model.loss_weight({"x": np.zeros((2, 3, 4), np.float32)}) == 6
    assert model.loss_weight({"x": np.zeros((3, 4), np.float32)}) == 3
    assert model.loss_weight({"x": np.zeros((3, 4)), "weights": np.float32([1, 0, 0.5])}) == 1.5


def test_other_state_than_parameters_is_refused():
    class Counting(Block):
        def __init__(self, config, key, context):
            super().__init__(config, key, context)
            self.calls = nnx.BatchStat(jnp.zeros(()))

    class Wrong(Plain):
        block_module = Counting

    with pytest.raises(ConfigError, match="calls: a model's modules may hold nnx.Param only"):
        Wrong(Config()).logical_axes()

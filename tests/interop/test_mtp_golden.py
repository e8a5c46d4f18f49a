"""Multi-token prediction: the losses of a file's first module are those that torch computed (make_mtp_golden.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import layout
from megajax.interop.hugging_face.config import family_of_model, read_config
from megajax.interop.hugging_face.weights import Weights
from megajax.interop.safetensors import open_tensors
from tests import small
from tests.interop.make_golden import LENGTH
from tests.interop.make_mtp_golden import FACTOR, MTP, batch


def test_losses_are_torchs():
    """From the last block's output on: the gradient of `loss` is the module's mean, and the value is the main loss."""
    found, config = read_config(MTP)
    assert config.mtp_num_layers == 0  # left out, unless one asks for them
    own = {"sequence_length": LENGTH, "mtp_num_layers": 1, "mtp_loss_scaling_factor": FACTOR}
    config = dataclasses.replace(config, **own)
    assert family_of_model(config, "deepseek_v3")[1]["num_nextn_predict_layers"] == 1
    model = small.build_model(config)
    shapes = layout.named(jax.eval_shape(model.init, jax.random.key(0)))
    weights = Weights(MTP, open_tensors(MTP), found.name, config, list(shapes))
    read = lambda name, leaf: weights.region(name, tuple(slice(0, size) for size in leaf.shape), leaf.shape)  # noqa: E731
    shared = {name: read(name, leaf) for name, leaf in shapes.items() if name.startswith("shared/")}
    output = jnp.asarray(np.load(MTP / "output.npy"))

    @jax.jit
    @jax.value_and_grad
    def loss(reported, rows):
        params, rows = layout.nest(shared | {"shared/mtp1/loss": reported})["shared"], model.prepare_batch(rows)
        return model.head_loss(params, output, rows) / model.loss_weight(rows)

    value, means = loss(jnp.zeros(1), batch())
    np.testing.assert_allclose([value, *means], np.load(MTP / "losses.npy")[:2], rtol=1e-6)

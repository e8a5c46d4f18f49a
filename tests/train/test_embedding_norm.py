"""A norm of the embedding, with and without weights, on meshes against one device; values: interop/test_described.py."""

import dataclasses

import numpy as np
import pytest

from tests import small

NORMS = ["layernorm", "rmsnorm", "unweighted_rmsnorm"]
LAYOUTS = [
    ((1, 2, 2), {"schedule": "zb_v", "chunks": 2}),
    ((2, 2, 1), {"schedule": "1f1b", "zero": 3}),
    ((1, 2, 2), {"schedule": "interleaved_1f1b", "chunks": 2, "vocab_parallel": "tensor", "recompute": "full"}),
]


def loss_and_gradients(norm, mesh, **options):
    model = dataclasses.replace(small.MODEL, norm=norm, embedding_norm=True, biases=norm == "layernorm")
    training = small.training_of(small.make_run(mesh, model=model, **options))
    params = small.place(training, small.busy_params(model))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    return np.asarray(loss), small.canonical(gradients, training)


@pytest.mark.parametrize("norm", [NORMS[1], *(pytest.param(one, marks=pytest.mark.slow) for one in NORMS[::2])])
@pytest.mark.parametrize(
    ("mesh", "options"), [LAYOUTS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in LAYOUTS[1:])], ids=str
)
def test_loss_and_gradients_on_any_mesh(norm, mesh, options):
    want_loss, want = loss_and_gradients(norm, (1, 1, 1))
    loss, gradients = loss_and_gradients(norm, mesh, **options)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(gradients, want, rtol=1e-5)
    own = gradients["shared"]["embedding"].get("norm", {})
    assert sorted(own) == {"layernorm": ["bias", "scale"], "rmsnorm": ["scale"]}.get(norm, [])
    assert all(np.abs(leaf).max() > 0 for leaf in own.values())

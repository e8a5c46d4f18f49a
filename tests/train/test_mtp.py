"""Multi-token prediction: losses and gradients on every kind of layout are those of one device; evaluation is without it.

tests/interop/test_mtp.py compares it with torch.
"""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.config import ConfigError
from tests import small
from tests.train.test_latent import LATENT

pytestmark = pytest.mark.slow
FURTHER = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
MODELS = {
    "dense": dataclasses.replace(small.LLAMA, **FURTHER),
    "learned positions, tied": dataclasses.replace(small.MODEL, dropout=0.1, **FURTHER),
    "experts": dataclasses.replace(
        LATENT,
        attention_scale=None,
        experts=4,
        feedforward=24,
        dense_layers=1,
        dense_feedforward=40,
        shared_feedforward=16,
        router_scores="sigmoid",
        balance_bias_rate=0.01,
        balance_loss=0.01,
        router_z_loss=0.02,
        **FURTHER,
    ),
}
PIPE = {"vocab_parallel": "pipe"}
CASES = [
    ("dense", (1, 2, 1), {"schedule": "1f1b"}),
    ("dense", (1, 2, 2), {"schedule": "interleaved_1f1b", "chunks": 2}),
    ("dense", (2, 2, 1), {"schedule": "dualpipe_v", "chunks": 2}),
    ("dense", (1, 2, 2), {"schedule": "1f1b", "pipeline_layout": "5,3"}),
    ("dense", (1, 1, 2), {"schedule": "gpipe", "context": 2}),
    ("dense", (1, 2, 1), {"schedule": "interleaved_1f1b", "context": 2, **PIPE}),
    ("dense", (1, 2, 1), {"schedule": "1f1b", "context": 2, "context_exchange": "all_to_all"}),
    ("dense", (1, 2, 2), {"schedule": "eager_1f1b", "tensor_overlap": "ring", **PIPE}),
    ("learned positions, tied", (2, 2, 2), {"schedule": "gpipe", "zero": 1}),
    ("learned positions, tied", (1, 2, 2), {"schedule": "zb_v", "chunks": 2, **PIPE}),
    ("learned positions, tied", (1, 2, 2), {"schedule": "zb_h1", "sequence_parallel": False, "recompute": "full"}),
    ("learned positions, tied", (1, 1, 2), {"schedule": "gpipe", "context": 2}),
    ("learned positions, tied", (1, 2, 1), {"schedule": "1f1b", "context": 2, "context_exchange": "all_to_all"}),
    ("experts", (1, 2, 2), {"schedule": "zb_v", "chunks": 2}),
    ("experts", (1, 2, 2), {"schedule": "1f1b", **PIPE}),
    ("experts", (2, 2, 1), {"schedule": "1f1b", "zero": 3}),
    ("experts", (2, 2, 1), {"schedule": "zb_v", "chunks": 2, "expert": 2, "expert_dispatch": "all_to_all", "zero": 1}),
    (
        "experts",
        (2, 2, 1),
        {"schedule": "dualpipe_v", "chunks": 2, "expert": 2, "expert_dispatch": "bucketed", "zero": 3, **PIPE},
    ),
]


@pytest.mark.parametrize(("model", "mesh", "options"), CASES, ids=str)
def test_losses_and_gradients(model, mesh, options):
    model = MODELS[model]
    training = small.training_of(small.make_run(mesh, model=model, **options))
    loss, gradients = training.loss_and_gradients(
        small.place(training, small.busy_params(model)), small.make_batch(training.run)
    )
    want_loss, want = small.expected(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


def test_steps_report_the_losses_and_evaluation_has_the_models_alone():
    """The modules' balancing biases move; what is no parameter stays 0; validation is that of a model without modules."""
    model = MODELS["experts"]
    training = small.training_of(small.make_run((1, 2, 1), model=model, schedule="1f1b"))
    state, batch = training.init_state(), small.make_batch(training.run)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = training.train_step(state, batch)
    assert sorted(metrics["model"]) == ["mtp1_loss", "mtp2_loss"]
    np.testing.assert_allclose([metrics["loss"], *metrics["model"].values()], np.log(61), atol=0.3)
    for name in ("mtp1", "mtp2"):
        was, now = (tree["shared"][name] for tree in (before, state.params))
        router, old = (one["block"]["feedforward"]["router"] for one in (now, was))
        moved = np.abs(np.asarray(router["bias"]) - old["bias"])
        assert moved.any()
        np.testing.assert_allclose(moved[moved > 0], 0.01, rtol=1e-5)
        assert not np.asarray(now["loss"]).any() and not np.asarray(router["losses"]).any()
        assert np.abs(np.asarray(now["projection"]) - was["projection"]).min() > 0
    alone = dataclasses.replace(model, mtp_num_layers=0)
    other = small.training_of(small.make_run((1, 1, 2), model=alone))
    shared = {name: tree for name, tree in before["shared"].items() if not name.startswith("mtp")}
    params = small.place(other, {**small.canonical(before, training), "shared": shared})
    found = training.evaluate(jax.device_put(before, training.params_sharding), batch)
    np.testing.assert_allclose(found, other.evaluate(params, batch), rtol=1e-6)
    np.testing.assert_allclose(found, metrics["loss"], rtol=1e-5)


def test_pipedream_2bw_reports_them_too():
    model = MODELS["dense"]
    training = small.training_of(small.make_run((1, 2, 1), model=model, schedule="pipedream_2bw"))
    state, batch = training.init_state(), small.make_batch(training.run)
    for _ in range(2):
        state, metrics = training.train_step(state, batch)
    np.testing.assert_allclose([metrics["loss"], *metrics["model"].values()], np.log(61), atol=0.3)


def test_a_ring_needs_all_ranks():
    run = small.make_run((1, 2, 1), model=MODELS["dense"], context=2, vocab_parallel="tensor")
    with pytest.raises(ConfigError, match="context communicates round a ring .* pass --vocab-parallel pipe"):
        small.training_of(run)

"""Documents packed in a sample, with positions and attention reset, against each document in a sample of its own."""

import functools

import jax
import numpy as np
import pytest

from megajax.data.loader import Boundaries
from megajax.models.interface import mean_loss
from tests import small

MODELS = pytest.mark.parametrize("model", [small.MODEL, small.LLAMA], ids=["gpt", "llama"])
END = 0


def packed(run) -> dict[str, np.ndarray]:
    """The test's batch, documents ending wherever END is drawn, a second in every sample."""
    batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in small.make_batch(run).items()}
    batch["tokens"][:, 5] = END
    more = Boundaries(END, reset_positions=True, reset_attention=True).arrays(batch["tokens"])
    batch |= {name: more[name] for name in ("positions", "document")}
    return {name: array.reshape(run.microbatches, -1, *array.shape[1:]) for name, array in batch.items()}


def alone(batch) -> dict[str, np.ndarray]:
    """Every document a sample, filled up with tokens that nothing sees and no label asks for."""
    tokens, document = batch["tokens"][0], batch["document"][0]
    samples = [(row, number) for row in range(len(tokens)) for number in range(document[row].max() + 1)]
    filled = {name: np.ones((len(samples), tokens.shape[1]), batch[name].dtype) for name in ("tokens", "labels")}
    filled["weights"] = np.zeros(filled["tokens"].shape, np.float32)
    for place, (row, number) in enumerate(samples):
        own = document[row] == number
        for name, array in filled.items():
            array[place, : own.sum()] = batch[name][0, row, own]
    return {name: array[None] for name, array in filled.items()}


@functools.cache
def wanted(model):
    functions = small.build_model(model, recompute="none")
    batch = alone(packed(small.make_run(microbatches=1, model=model)))
    loss = lambda params: mean_loss(functions, params, batch)  # noqa: E731
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(small.busy_params(model)))


@pytest.mark.parametrize(
    ("model", "mesh", "schedule", "chunks", "recompute"),
    [
        (small.MODEL, (2, 2, 2), "interleaved_1f1b", 2, "selective"),
        pytest.param(small.LLAMA, (1, 2, 2), "zb_h1", 1, "none", marks=pytest.mark.slow),
    ],
    ids=["gpt", "llama"],
)
def test_packed_documents_are_documents_alone(model, mesh, schedule, chunks, recompute):
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, model=model, recompute=recompute)
    training = small.training_of(run)
    loss, gradients = training.loss_and_gradients(small.place(training, small.busy_params(model)), packed(run))
    want_loss, want = wanted(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training.schedule.placement), want, rtol=1e-5)


@MODELS
def test_without_them_documents_see_one_another(model):
    """So the test above tests something."""
    functions = small.build_model(model, recompute="none")
    batch = packed(small.make_run(microbatches=1, model=model))
    plain = {name: array for name, array in batch.items() if name not in ("positions", "document")}
    loss = float(mean_loss(functions, small.busy_params(model), plain))
    assert abs(loss - float(wanted(model)[0])) > 1e-4

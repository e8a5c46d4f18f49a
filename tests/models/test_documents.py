"""Documents packed in a sample, with positions and attention reset, compared with one document per sample."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from megajax.data.loader import Boundaries
from megajax.models.interface import mean_loss
from tests import small

MODELS = pytest.mark.parametrize("model", [small.MODEL, small.LLAMA], ids=["gpt", "llama"])
TINY = dataclasses.replace(small.LLAMA, layers=2)
WINDOW = dataclasses.replace(small.LLAMA, layers=4, sliding_window=5)
CHUNKS = dataclasses.replace(
    small.LLAMA,
    layers=4,
    rotated_norm=True,
    layer_pattern="chunked,global",
    query_growth_first=1,
    query_growth_length=3,
)
CHUNKS = dataclasses.replace(
    CHUNKS, kind_fields=("chunked.chunked_attention=3", "global.positions=none", "global.query_growth=0.5")
)
END = 0


def packed(run) -> dict[str, np.ndarray]:
    """A batch whose documents end where END is drawn; every sample has a second document."""
    batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in small.make_batch(run).items()}
    batch["tokens"][:, 5] = END
    more = Boundaries(END, reset_positions=True, reset_attention=True).arrays(batch["tokens"])
    batch |= {name: more[name] for name in ("positions", "document")}
    return {name: array.reshape(run.microbatches, -1, *array.shape[1:]) for name, array in batch.items()}


def alone(batch) -> dict[str, np.ndarray]:
    """One sample per document, padded with tokens that no token attends to and that have weight 0."""
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


RUNS = {
    "gpt": (small.MODEL, (2, 2, 2), {"schedule": "interleaved_1f1b", "chunks": 2}),
    "llama": (small.LLAMA, (1, 2, 2), {"schedule": "zb_h1", "recompute": "none"}),
    "tokamax": (small.LLAMA, (1, 2, 2), {"schedule": "zb_h1", "recompute": "none", "attention": "tokamax"}),
    "tokamax, window": (WINDOW, (1, 2, 2), {"recompute": "full", "attention": "tokamax"}),
    "chunks": (CHUNKS, (1, 2, 2), {"schedule": "zb_h1", "recompute": "none"}),
    "tokamax, chunks": (CHUNKS, (1, 2, 2), {"attention": "tokamax"}),
    "context, chunks": (CHUNKS, (2, 1, 1), {"schedule": "gpipe", "context": 4, "attention": "xla"}),
    "exchange, chunks": (CHUNKS, (1, 2, 1), {"context": 2, "context_exchange": "all_to_all", "attention": "xla"}),
    "context": (small.MODEL, (1, 2, 2), {"chunks": 2, "context": 2, "attention": "xla"}),
    "context, window": (WINDOW, (2, 1, 1), {"schedule": "gpipe", "context": 4, "attention": "xla"}),
    "context, tiny": (TINY, (1, 1, 1), {"schedule": "gpipe", "context": 2, "attention": "xla"}),
    "context, tokamax": (TINY, (1, 2, 1), {"context": 2, "attention": "tokamax"}),
    "context, tokamax, window": (WINDOW, (1, 1, 2), {"schedule": "gpipe", "context": 4, "attention": "tokamax"}),
}


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [pytest.param(*run, id=name, marks=pytest.mark.slow) for name, run in RUNS.items()],
)
def test_packed_documents_equal_separate_documents(model, mesh, options):
    """Of a document that is alone in its sample, no token sees another document; the unpipelined model, XLA's attention."""
    run = small.make_run(mesh, model=model, **options)
    training = small.training_of(run)
    loss, gradients = training.loss_and_gradients(small.place(training, small.busy_params(model)), packed(run))
    want_loss, want = wanted(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


@pytest.mark.slow
@MODELS
def test_without_document_masks_documents_attend_to_each_other(model):
    """This shows that the test above depends on the masks."""
    functions = small.build_model(model, recompute="none")
    batch = packed(small.make_run(microbatches=1, model=model))
    plain = {name: array for name, array in batch.items() if name not in ("positions", "document")}
    loss = float(mean_loss(functions, small.busy_params(model), plain))
    assert abs(loss - float(wanted(model)[0])) > 1e-4

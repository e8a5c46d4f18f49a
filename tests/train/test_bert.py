"""BERT's loss and gradients do not depend on mesh, schedule, context, ZeRO, vocabulary placement or attention kernel."""

import dataclasses

import numpy as np
import pytest

from tests import small
from tests.train.test_equivalence import check, slow

POST = dataclasses.replace(small.BERT, post_norm=True, activation="gelu_exact", tied_embeddings=False)
# mesh (data, pipe, tensor), schedule, chunks, microbatches; other options of the layout
FIRST = ((2, 2, 2), "interleaved_1f1b", 2, 4, {"zero": 1})
LONG = [
    ((1, 2, 2), "interleaved_1f1b", 1, 4, {"context": 2, "recompute": "none"}),
    ((1, 1, 1), "1f1b", 1, 2, {"recompute": "none"}),
    ((2, 2, 2), "1f1b", 1, 4, {"zero": 3, "vocab_parallel": "tensor"}),
    ((2, 2, 2), "zb_v", 2, 4, {"recompute": "full"}),
    ((1, 4, 1), "eager_1f1b", 1, 4, {"vocab_parallel": "tensor"}),
    ((2, 4, 1), "gpipe", 1, 8, {"attention": "tokamax"}),
    ((2, 2, 2), "dualpipe_v", 2, 4, {"recompute": "none"}),
    ((1, 1, 4), "1f1b", 1, 2, {}),
    ((1, 4, 2), "interleaved_1f1b", 2, 8, {"sequence_parallel": False, "recompute": "full", "recompute_blocks": 1}),
    ((4, 2, 1), "zb_h1", 1, 4, {"zero": 3}),
    ((1, 2, 1), "eager_1f1b", 1, 4, {"context": 4, "vocab_parallel": "tensor"}),
]


@pytest.mark.slow  # the forward is compared in test_equivalence.py
@pytest.mark.parametrize("case", [FIRST, *LONG], ids=str)
def test_loss_and_gradients_equal_the_unpipelined_model(case):
    *sizes, options = case
    options = {"sequence_parallel": True, "recompute": "selective"} | options
    check(*sizes, options.pop("sequence_parallel"), model=small.BERT, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", [FIRST, LONG[0], LONG[3]], ids=str)
def test_norms_after_the_additions(case):
    *sizes, options = case
    check(*sizes, True, model=POST, **{"recompute": "selective"} | options)


@pytest.mark.parametrize("case", slow([FIRST, LONG[0], LONG[2], LONG[3], LONG[8]]), ids=str)
def test_classes(case):
    *sizes, options = case
    options = {"sequence_parallel": True, "recompute": "selective"} | options
    model = dataclasses.replace(small.BERT, output_heads="classification", classes=3)
    check(*sizes, options.pop("sequence_parallel"), model=model, **options)


CHOICES = [  # the four samples of a question are in one microbatch of a replica
    ((2, 2, 1), "eager_1f1b", 1, 2, {"context": 2, "vocab_parallel": "tensor", "zero": 1}),
    ((2, 2, 2), "interleaved_1f1b", 2, 2, {}),
    ((1, 2, 2), "zb_h1", 1, 4, {"recompute": "full"}),
]


def without_bias(gradients):
    """Without the bias that is added to all scores of a question, of which only differences count: its gradient is 0.

    That of the norm's bias, which all samples have in common too, is what is left of a sum 36 times as large, as the
    gradient of its scale is: in fp32 it is 1e-5 off fp64's, with and without a pipeline. The two are compared as one array.
    """
    head = gradients["shared"]["head"]
    classifier, norm = head["classifier"], np.stack([head["norm"][name] for name in ("scale", "bias")])
    np.testing.assert_allclose(classifier["bias"], 0, atol=1e-7)
    head = head | {"classifier": {"kernel": classifier["kernel"]}, "norm": norm}
    return gradients | {"shared": gradients["shared"] | {"head": head}}


@pytest.mark.parametrize("case", slow(CHOICES), ids=str)
def test_choices(case):
    loss_and_gradients(dataclasses.replace(small.BERT, output_heads="multiple_choice"), case, without_bias)


# The ranks of a context group have parts of the samples; with --vocab-parallel tensor only the last stage runs the head.
SPANS = [
    ((1, 2, 2), "interleaved_1f1b", 1, 4, {"context": 2}),
    ((2, 2, 1), "eager_1f1b", 1, 4, {"context": 2, "vocab_parallel": "tensor", "zero": 1}),
    ((2, 2, 2), "zb_v", 2, 4, {"recompute": "full"}),
    ((1, 2, 2), "1f1b", 1, 4, {"vocab_parallel": "tensor"}),
    ((1, 1, 2), "gpipe", 1, 4, {"context": 4}),
]


def without_zeros(gradients):
    """Without the biases that are added to all of a sample's scores, of which only differences count."""
    head = gradients["shared"]["head"]
    kept = {
        layer: {"rest": [leaf for name, leaf in head[layer].items() if name != "bias"]} for layer in ("norm", "spans")
    }
    for layer in kept:
        np.testing.assert_allclose(head[layer]["bias"], 0, atol=1e-7)
    return gradients | {"shared": gradients["shared"] | {"head": head | kept}}


@pytest.mark.parametrize("case", slow(SPANS), ids=str)
def test_spans(case):
    loss_and_gradients(dataclasses.replace(small.BERT, output_heads="spans"), case, without_zeros)


def loss_and_gradients(model, case, compared):
    """Equal to the unpipelined model's; `compared` takes away gradients that are 0 but for rounding."""
    mesh, schedule, chunks, microbatches, options = case
    sizes = {"schedule": schedule, "chunks": chunks, "microbatches": microbatches}
    training = small.training_of(small.make_run(mesh, model=model, **sizes, **options))
    params = small.place(training, small.busy_params(model))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    gradients, (want_loss, want) = small.canonical(gradients, training), small.expected(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(compared(gradients), compared(want), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["masked_lm_and_order", "classification"])
@pytest.mark.parametrize("options", [{}, {"context": 2}, {"context": 2, "context_exchange": "all_to_all"}], ids=str)
def test_dropout_does_not_depend_on_the_mesh(heads, options):
    model = dataclasses.replace(small.BERT, layers=4, dropout=0.3, output_heads=heads)
    data = 2 // options.get("context", 1)
    check((data, 2, 2), "interleaved_1f1b", 2, 4, True, "selective", model=model, **options)

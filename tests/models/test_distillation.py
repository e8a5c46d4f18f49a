"""The divergence from a teacher's logits against NumPy in fp64, and what refuses it.

Under both placements of the vocabulary: test_loss_options.py.
"""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.models.context import model_shapes
from megajax.ops.distillation import Teacher, distillation
from megajax.ops.vocabulary import WHOLE_VOCABULARY
from megajax.train.check import check
from megajax.train.trainer import Trainer
from tests import small

CONFIG = dataclasses.replace(small.LLAMA, layers=4)
ONE = jax.devices()[:1]
OPTIONS = {"distill_weight": 0.75, "distill_temperature": 2.0, "distill_top": 5}


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def reference(logits, ids, teacher, temperature):
    """T^2 KL in fp64, and its gradient with respect to the logits; K tokens of each position."""
    logits, teacher = np.asarray(logits, np.float64), np.asarray(teacher, np.float64)
    with np.errstate(invalid="ignore"):
        log_share, log_student = log_softmax(teacher / temperature), log_softmax(logits / temperature)
        share = np.exp(log_share)
        terms = share * (log_share - np.take_along_axis(log_student, ids, -1))
    gradient = np.exp(log_student)
    for index in np.ndindex(ids.shape):
        gradient[(*index[:-1], ids[index])] -= share[index]
    return temperature**2 * np.nansum(terms, -1), temperature * gradient


@pytest.mark.parametrize(("count", "temperature"), [(7, 3.0), pytest.param(61, 1.0, marks=pytest.mark.slow)])
def test_the_loss_is_that_of_numpy(count, temperature):
    """Of 61 tokens and 3 rows of padding; a token that the teacher has not is -inf; K = 61 is the whole vocabulary."""
    random = np.random.default_rng(count)
    logits = random.normal(size=(2, 3, 64)).astype(np.float32)
    ids = np.argsort(random.random((2, 3, 61)), -1)[..., :count].astype(np.int32)
    teacher = random.normal(size=ids.shape).astype(np.float32)
    teacher[0, 0, 1] = -np.inf
    settings = Teacher(1.0, temperature, count)
    loss = lambda logits: distillation(logits, ids, teacher, 61, settings, WHOLE_VOCABULARY)  # noqa: E731
    want, slope = reference(logits[..., :61], ids, teacher, temperature)
    np.testing.assert_allclose(loss(logits), want, rtol=2e-5, atol=1e-6)
    found = jax.grad(lambda logits: loss(logits).sum())(jnp.asarray(logits))
    np.testing.assert_allclose(found[..., :61], slope, rtol=2e-5, atol=1e-6)
    assert not np.asarray(found[..., 61:]).any()


def batch_of(run):
    batch = small.make_batch(run)
    ids = np.zeros((*batch["tokens"].shape, run.train.distill_top), np.int32)
    return batch | {"teacher_ids": ids, "teacher_logits": ids.astype(np.float32)}


class Batches:
    def __init__(self, run, *dropped):
        self.run, self.dropped = run, dropped

    def batch(self, consumed_samples):
        return {name: array for name, array in batch_of(self.run).items() if name not in self.dropped}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: Trainer(run, devices=ONE), "needs batches with teacher_ids and teacher_logits, which no text has"),
        (
            lambda run: check(run, Batches(run, "teacher_logits")),
            "head_loss reads .teacher_logits. of the microbatch",
        ),
        (
            lambda run: check(run, Batches(small.make_run(model=CONFIG, train=OPTIONS | {"distill_top": 7}))),
            r"teacher_ids of a microbatch has shape \(4, 16, 7\); expected \(4, 16, 5\), .* pass --distill-top 7",
        ),
        (lambda run: model_shapes(dataclasses.replace(run, model=small.BERT)), "which BERT has not"),
        (
            lambda run: model_shapes(run.with_layout(context=2)),
            "distill_weight does not work with context",
        ),
        (
            lambda run: small.make_run(model=CONFIG, train=OPTIONS | {"distill_weight": 1.5}),
            "distill_weight = 1.5 is a share: pass --distill-weight 1, or less",
        ),
    ],
)
def test_what_has_no_teacher_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make(small.make_run(model=CONFIG, train=OPTIONS))


@pytest.mark.slow
def test_the_example_of_the_docs_trains():
    page = (pathlib.Path(__file__).parents[2] / "docs/training.md").read_text()
    (example,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "teacher" in text]
    names: dict = {}
    exec(example, names)
    shape = (32, names["small"].sequence_length, 16)
    assert names["rows"]["teacher_ids"].shape == names["rows"]["teacher_logits"].shape == shape
    assert (np.diff(names["rows"]["teacher_logits"], axis=-1) <= 0).all() and np.isfinite(
        names["result"].metrics["loss"]
    )

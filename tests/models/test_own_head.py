"""Heads of one's own: which placement of the token tables they get, and losses that are right under both."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError
from megajax.models.bert import BERT, BertShared
from megajax.models.context import model_rules
from megajax.models.gpt import GPT, Shared
from megajax.models.interface import ModelContext, mean_loss
from megajax.models.nnx_model import NNXModel
from megajax.ops.vocabulary import IGNORED_LABEL, VocabularySharding, over_pipe
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests import small


class NaiveHead(Shared):
    """It knows nothing of shards: right only where each rank has all rows."""

    def head_loss(self, y, microbatch):
        logits = self.head(y, self.embedding).astype(jnp.float32)
        logits = jnp.where(jnp.arange(logits.shape[-1]) < self.config.vocabulary, logits, -1e30)
        picked = (jax.nn.one_hot(microbatch["labels"], logits.shape[-1]) * logits).sum(-1)
        return ((jax.nn.logsumexp(logits, -1) - picked) * microbatch["weights"]).sum()


class Naive(GPT):
    shared_module = NaiveHead


class RegularisedHead(Shared):
    """Cross entropy, a z-loss, and a bonus for entropy, by the methods of `context.vocabulary`."""

    def head_loss(self, y, microbatch):
        size, vocabulary = self.config.vocabulary, self.context.vocabulary
        logits = self.head(y, self.embedding)
        z = vocabulary.logsumexp(logits, size)
        logs = logits.astype(jnp.float32) - z[..., None]
        losses = -vocabulary.log_probabilities(logits, microbatch["labels"], size) + 0.01 * z**2
        return ((losses + 0.1 * vocabulary.sum(jnp.exp(logs) * logs, size)) * microbatch["weights"]).sum()


class Regularised(GPT):
    shared_module = RegularisedHead
    vocabulary_over_pipe = True


def test_only_a_model_that_says_so_has_tables_over_pipe():
    class OwnLoss(GPT):
        def head_loss(self, shared, y, microbatch): ...

    class Mixin:
        def logits(self, shared, y): ...

    class Mixed(Mixin, BERT): ...

    class OwnBlock(GPT):
        block_module = None

    class OwnShared(BERT):
        shared_module = BertShared

    class Later(Regularised):
        block_module = None

    placed = [model for model in (OwnLoss, Mixed, OwnShared, Naive, NNXModel) if model.vocabulary_over_pipe]
    assert not placed
    assert all(model.vocabulary_over_pipe for model in (GPT, BERT, OwnBlock, Regularised, Later))


@pytest.mark.parametrize(
    ("model", "axes"), [(GPT, ("pipe", "tensor")), (Regularised, ("pipe", "tensor")), (Naive, ("tensor",))]
)
def test_the_rules_of_a_run_follow(model, axes):
    run = small.make_run((1, 2, 2), vocab_parallel="pipe")
    assert model_rules(run, model).mesh_axes("vocabulary") == axes


def test_rules_over_pipe_are_refused_for_a_model_that_does_not_know_them():
    run = small.make_run((1, 2, 1))
    with pytest.raises(ConfigError, match="the sharding rules split vocabulary over pipe, but Naive has "):
        make_training(run, make_mesh(run.parallel), Naive, model_rules(run, GPT))


def losses_by_hand(logits, labels, weights, vocabulary):
    """float64: (sum of the weighted losses, its gradient with respect to the logits)."""
    z = logits[..., :vocabulary].astype(np.float64)
    total, slopes = 0.0, np.zeros(logits.shape)
    for place in np.ndindex(labels.shape):
        p = np.exp(z[place]) / np.exp(z[place]).sum()
        lse, entropy = np.log(np.exp(z[place]).sum()), -(p * np.log(p)).sum()
        label = np.eye(vocabulary)[labels[place]] if labels[place] != IGNORED_LABEL else None
        cross = 0 if label is None else -(label * np.log(p)).sum()
        total += weights[place] * (cross + 0.3 * lse**2 + 0.2 * entropy)
        slope = 0 if label is None else p - label
        slope = slope + 0.3 * 2 * lse * p - 0.2 * p * (np.log(p) + entropy)
        slopes[place][:vocabulary] = weights[place] * slope
    return total, slopes


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_methods_are_right_under_both_placements(ranks):
    random, vocabulary = np.random.default_rng(1), 13
    logits = 3 * random.normal(size=(2, 3, 16)).astype(np.float32)
    labels, weights = random.integers(0, vocabulary, (2, 3)), random.random((2, 3)).astype(np.float32)
    labels[1, 1] = IGNORED_LABEL
    sharding = VocabularySharding(ranks, *over_pipe(False)) if ranks > 1 else VocabularySharding()

    def local(logits):
        def loss(logits):
            z = sharding.logsumexp(logits, vocabulary)
            log = logits - z[..., None]
            entropy = -sharding.sum(jnp.exp(log) * log, vocabulary)
            losses = sharding.cross_entropy(logits, labels, vocabulary) + 0.3 * z**2 + 0.2 * entropy
            same = -sharding.log_probabilities(logits, labels, vocabulary)
            return ((0.5 * (losses + same + 0.3 * z**2 + 0.2 * entropy)) * weights).sum()

        value, vjp = jax.vjp(loss, logits)
        last = jax.lax.axis_index("pipe") == ranks - 1  # as the executor does: the other ranks' gradients are zero
        return value[None], vjp(jnp.where(last, 1.0, 0.0))[0]

    mesh = jax.make_mesh((ranks, 1), ("pipe", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = P(None, None, "pipe")
    run = jax.shard_map(local, mesh=mesh, axis_names={"pipe"}, in_specs=rows, out_specs=(P("pipe"), rows))
    with jax.set_mesh(mesh):
        values, slopes = jax.jit(run)(logits)
    want, want_slopes = losses_by_hand(logits, labels, weights, vocabulary)
    np.testing.assert_allclose(values, [want] * ranks, rtol=1e-5)
    np.testing.assert_allclose(slopes, want_slopes, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Naive, Regularised])
@pytest.mark.parametrize("placement", ["pipe", "tensor"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb_v", 2)])
def test_losses_and_gradients_are_those_without_a_pipeline(model, placement, schedule, chunks):
    config = dataclasses.replace(small.MODEL, layers=4)
    run = small.make_run((1, 2, 2), schedule=schedule, chunks=chunks, model=config, vocab_parallel=placement)
    training, params, batch = (
        make_training(run, make_mesh(run.parallel), model),
        small.busy_params(config),
        small.make_batch(run),
    )
    loss, gradients = training.loss_and_gradients(small.place(training, params), batch)
    whole = functools.partial(mean_loss, model(config, ModelContext(recompute="none")))
    want, slopes = jax.jit(jax.value_and_grad(whole))(params, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), jax.device_get(slopes), rtol=1e-5)

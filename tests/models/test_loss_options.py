"""--z-loss, --label-smoothing and --distill-weight under both placements of the vocabulary, against optax's losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megajax.config import ConfigError
from megajax.models.gpt import GPT
from megajax.models.interface import mean_loss
from megajax.ops.vocabulary import IGNORED_LABEL
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests import small

OPTIONS = {"z_loss": 0.01, "label_smoothing": 0.2}
OPTIONS |= {"distill_weight": 0.75, "distill_temperature": 2.0, "distill_top": 5}
CONFIG = dataclasses.replace(small.LLAMA, layers=4)


class Judge(GPT):
    """The losses by optax, from all logits of the vocabulary."""

    def head_loss(self, shared, y, microbatch):
        logits = self.logits(shared, y)[..., : self.vocabulary]
        labels = microbatch["labels"]
        targets = optax.smooth_labels(jax.nn.one_hot(labels, self.vocabulary), OPTIONS["label_smoothing"])
        losses = optax.softmax_cross_entropy(logits, targets)
        losses += OPTIONS["z_loss"] * jax.nn.logsumexp(logits, axis=-1) ** 2
        hot = jax.nn.one_hot(microbatch["teacher_ids"], self.vocabulary)
        teacher = (jax.nn.softmax(microbatch["teacher_logits"] / 2)[..., None] * hot).sum(-2)
        losses = 0.25 * losses + 0.75 * 4 * optax.losses.kl_divergence(jax.nn.log_softmax(logits / 2), teacher)
        return (jnp.where(labels == IGNORED_LABEL, 0, losses) * microbatch["weights"]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("placement, schedule, chunks", [("pipe", "1f1b", 1), ("tensor", "zb_v", 2)])
def test_the_loss_is_that_of_optax(placement, schedule, chunks):
    layout = {"schedule": schedule, "chunks": chunks, "vocab_parallel": placement}
    run = small.make_run((1, 2, 2), model=CONFIG, train=OPTIONS, **layout)
    training, params, batch = (
        make_training(run, make_mesh(run.parallel)),
        small.busy_params(CONFIG),
        small.make_batch(run),
    )
    plain_batch, random = dict(batch), np.random.default_rng(5)
    ids = np.argsort(random.random((*batch["tokens"].shape, CONFIG.vocabulary)), -1)[..., :5].astype(np.int32)
    batch |= {"teacher_ids": ids, "teacher_logits": random.normal(size=ids.shape).astype(np.float32)}
    batch["labels"] = batch["labels"].copy()  # a view of the tokens' array
    batch["labels"][0, 0, 3] = IGNORED_LABEL  # its weight becomes 0
    placed = small.place(training, params)
    loss, gradients = training.loss_and_gradients(placed, batch)
    batch["weights"][0, 0, 3] = 0
    judge = Judge(CONFIG, dataclasses.replace(small.build_model(CONFIG).context, recompute="none"))
    expected, slopes = jax.jit(jax.value_and_grad(lambda params: mean_loss(judge, params, batch)))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    found = small.canonical(gradients, training)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-5), found, slopes)
    plain = jax.jit(lambda params: mean_loss(small.build_model(CONFIG), params, plain_batch))(params)
    np.testing.assert_allclose(training.evaluate(placed, plain_batch), plain, rtol=1e-5)  # the cross entropy alone


def test_a_loss_without_them_refuses_them():
    run = small.make_run(model=small.BERT, train={"z_loss": 0.1})
    with pytest.raises(ConfigError, match="z_loss is of GPT's loss, which BERT has not: omit --z-loss"):
        make_training(run, make_mesh(run.parallel))
    run = small.make_run(train={"label_smoothing": 0.1})
    with pytest.raises(ConfigError, match="label_smoothing is of GPT's loss, which Judge has not"):
        make_training(run, make_mesh(run.parallel), Judge)

"""Ids outside the model's tables are refused on the host, with their place; labels of -100 do not count, as in torch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import BertConfig, ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.models.ids import Ids, checked_ids
from megajax.ops.vocabulary import cross_entropy, token_scores
from megajax.train.user_batches import UserBatches
from tests import small

BERT = {"name": "t", "layers": 2, "hidden": 32, "heads": 4, "vocabulary": 61, "sequence_length": 16, "token_types": 3}


def batch_of(config) -> dict[str, np.ndarray]:
    batch = small.make_batch(small.make_run(microbatches=4, model=config))
    return {name: array.copy() for name, array in batch.items()}  # tokens and labels are views of one array


def refused(config, name: str, place: tuple[int, ...], value: int) -> str:
    batch = batch_of(config)
    batch.setdefault(name, np.zeros_like(batch["tokens"]))[place] = value
    with pytest.raises(ConfigError) as error:
        checked_ids(batch, small.build_model(config).id_bounds())
    return str(error.value)


@pytest.mark.parametrize("value", [61, 5000, -1, -100])
def test_a_token_outside_the_vocabulary_is_refused(value):
    assert refused(small.MODEL, "tokens", (1, 2, 3), value) == (
        f"the batch's 'tokens' has {value} at microbatch 1, sample 2 (sample 6 of the run), position 3 (counted from 0): "
        "the model has ids 0 to 60"
    )


@pytest.mark.parametrize("value", [61, 127, -1, -101])
def test_a_label_outside_the_vocabulary_is_refused(value):
    assert refused(small.MODEL, "labels", (0, 0, 15), value).endswith(
        "the model has ids 0 to 60, and -100 for labels that do not count"
    )


@pytest.mark.parametrize(
    ("fields", "name", "place", "value", "legal"),
    [
        ({}, "types", (0, 1, 2), 3, "0 to 2"),
        ({}, "types", (0, 1, 2), -1, "0 to 2"),
        ({}, "padding", (0, 1), 17, "0 to 16"),
        ({}, "swapped", (0, 1), 2, "0 to 1"),
        ({}, "positions", (0, 1, 0), 16, "0 to 15"),
        ({"output_heads": "classification", "classes": 3}, "class", (3, 3), 3, "0 to 2, and -100"),
        ({"output_heads": "spans"}, "start", (3, 3), 16, "0 to 15"),
        ({"output_heads": "spans"}, "end", (3, 3), -1, "0 to 15"),
    ],
)
def test_every_kind_of_id_is_checked(fields, name, place, value, legal):
    assert f"the model has ids {legal}" in refused(BertConfig(**BERT, **fields), name, place, value)


@pytest.mark.parametrize(("config", "legal"), [(small.MODEL, False), (small.LLAMA, True)])
def test_only_learned_positions_have_a_table(config, legal):
    batch = batch_of(config) | {"positions": np.full((4, 4, 16), 16, np.int32)}
    bounds = small.build_model(config).id_bounds()
    if legal:
        assert checked_ids(batch, bounds) is batch
    else:
        with pytest.raises(ConfigError, match="'positions' has 16"):
            checked_ids(batch, bounds)


@pytest.mark.parametrize(
    ("name", "config"), [("labels", small.MODEL), ("class", BertConfig(**BERT, output_heads="classification"))]
)
def test_labels_of_minus_100_get_weight_0(name, config):
    batch = batch_of(config)
    batch["weights"] = np.ones_like(batch["weights"])
    before = batch["weights"].copy()
    batch[name][2] = -100
    got = checked_ids(batch, small.build_model(config).id_bounds())
    assert (got["weights"][2] == 0).all() and (np.delete(got["weights"], 2, 0) == 1).all()
    assert (got[name] == batch[name]).all() and got["weights"].dtype == np.float32
    np.testing.assert_array_equal(batch["weights"], before)  # the user's array is as it was


def test_floats_and_arrays_of_other_models_are_not_checked():
    batch = {"labels": np.full((1, 1, 2), -7.5), "tokens": np.zeros((1, 1, 0), np.int32), "other": np.array([99])}
    assert checked_ids(batch, {"labels": Ids(5, "weights"), "tokens": Ids(5), "missing": Ids(5)}) is batch


def test_batches_of_the_user_are_checked():
    class Data:
        def batch(self, consumed_samples):
            labels = np.full((2, 2, 4), 3, np.int32)
            labels[..., :2] = -100 if consumed_samples < 8 else 99
            return {
                "tokens": jnp.ones((2, 2, 4), jnp.int32),
                "labels": labels,
                "weights": np.ones((2, 2, 4), np.float32),
            }

    config = dataclasses.replace(small.MODEL, sequence_length=4)
    run = RunConfig(
        config, ParallelConfig(microbatch_size=2), TrainConfig(global_batch_size=4, steps=9, warmup_steps=1)
    )
    batches = UserBatches(Data(), run, small.build_model(config))
    assert batches.batch(4)["weights"].tolist() == [[[0, 0, 1, 1]] * 2] * 2
    with pytest.raises(ConfigError, match="'labels' has 99 at microbatch 0, sample 0, position 0 "):
        batches.at(8).batch(8)


def test_the_loss_and_gradient_of_a_label_of_minus_100_are_0():
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(2, 3, 8)).astype(np.float32), np.array([[1, -100, 4], [-100, 0, 6]])
    losses, vjp = jax.vjp(lambda z: cross_entropy(z, labels, 7), logits)
    [gradient] = vjp(jnp.ones_like(losses))
    z = logits[..., :7].astype(np.float64)
    softmax = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    for place in np.ndindex(labels.shape):
        label = labels[place]
        want = 0 if label < 0 else -np.log(softmax[place][label])
        slope = np.zeros(7) if label < 0 else softmax[place] - np.eye(7)[label]
        np.testing.assert_allclose(losses[place], want, rtol=1e-5)
        np.testing.assert_allclose(gradient[place][:7], slope, atol=1e-6)
    scores, best = token_scores(logits, labels, 7)
    assert (np.asarray(scores)[labels == -100] == 0).all() and not np.asarray(best)[labels == -100].any()


def a_training():
    run = small.make_run(microbatches=4, model=dataclasses.replace(small.MODEL, layers=1))
    training, batch = small.training_of(run), batch_of(run.model)
    return training, batch | {"weights": np.ones_like(batch["weights"])}, batch["weights"] == 0


def test_a_step_without_a_trainer_is_checked():
    training, batch, ignored = a_training()
    labels = np.where(ignored, -100, batch["labels"])
    assert training.loss_weight(batch | {"labels": labels}) == (~ignored).sum()
    batch["labels"][1, 0, 4] = 61
    message = "'labels' has 61 at microbatch 1, sample 0 .sample 4 of the run., position 4 "
    for call in (training.train_step, training.evaluate, training.loss_and_gradients):
        with pytest.raises(ConfigError, match=message):
            call(None, batch)


@pytest.mark.slow
def test_a_step_of_labels_of_minus_100_is_that_of_weights_0():
    training, batch, ignored = a_training()
    params = small.place(training, small.busy_params(training.run.model))
    loss, gradients = training.loss_and_gradients(params, batch | {"labels": np.where(ignored, -100, batch["labels"])})
    want, slopes = training.loss_and_gradients(params, batch | {"weights": (~ignored).astype(np.float32)})
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    small.assert_gradients_close(jax.device_get(gradients), jax.device_get(slopes), rtol=1e-6)

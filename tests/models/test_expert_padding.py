"""Padding is not counted by what balances experts, and takes none of their places; a prompt, of loss weight 0, is."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from megajax.config.batch_ramp import PADDING
from megajax.models.interface import ModelContext, mean_loss
from megajax.models.moe import Router, balance_arrays
from megajax.models.nnx_model import named_key
from tests import small

CONFIG = dataclasses.replace(small.SPARSE, balance_loss=0.3, router_z_loss=0.2, balance_bias_rate=0.01)
DROPPING = dataclasses.replace(CONFIG, expert_capacity=0.75)
LENGTH, SAMPLES = CONFIG.sequence_length, 3
configs = pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, marks=pytest.mark.slow), DROPPING], ids=["all", "capacity"]
)


@functools.cache
def hidden() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(SAMPLES, LENGTH, CONFIG.hidden)).astype(np.float32)


def padding_mask() -> np.ndarray:
    """At the end of the first sample, within the second one, and none in the third one."""
    mask = np.zeros((SAMPLES, LENGTH), np.int32)
    mask[0, 11:] = mask[1, 3:9] = 1
    return mask


def batch_of(mask: np.ndarray | None, length: int = LENGTH, samples: int = SAMPLES) -> dict:
    batch = {"tokens": np.zeros((samples, length), np.int32), "sample": np.arange(samples, dtype=np.uint32)}
    batch["weights"] = np.zeros((samples, length), np.float32)  # as if all were prompts
    batch["weights"][:, -1] = 1
    return batch | ({} if mask is None else {"padding_mask": mask})


@functools.cache
def routing(config):
    """(structure of the router, its parameters, the jitted function of `route`)."""
    router = Router(config, jax.random.key(4), ModelContext())
    router.kernel[...] *= 40
    graph, params = jax.tree.flatten(router)[1], jax.tree.leaves(router)

    def run(params, y, microbatch, real):
        weights, experts = jax.tree.unflatten(graph, params)(y, microbatch)
        return ((weights * real[..., None]) ** 2).sum(), (weights, experts)

    return graph, params, jax.jit(jax.grad(run, has_aux=True))


def route(config, y: np.ndarray, batch: dict) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(weights, experts, gradients of the router's parameters) for the sum of the squared weights of real tokens."""
    graph, params, run = routing(config)
    microbatch = jax.tree.map(np.asarray, batch | balance_arrays(batch))
    real = batch.get("padding_mask", np.zeros(y.shape[:2])) == 0
    gradients, (weights, experts) = run(params, y, microbatch, real)
    named = jax.tree.unflatten(graph, gradients)
    return (
        np.asarray(weights),
        np.asarray(experts),
        {n: np.asarray(getattr(named, n)[...]) for n in ("kernel", "bias", "losses")},
    )


@configs
def test_what_padding_holds_changes_nothing(config):
    mask, other = padding_mask(), hidden().copy()
    other[mask == 1] = np.random.default_rng(5).normal(size=(int(mask.sum()), CONFIG.hidden))
    weights, experts, gradients = route(config, hidden(), batch_of(mask))
    weights_2, experts_2, gradients_2 = route(config, other, batch_of(mask))
    np.testing.assert_array_equal(experts[mask == 0], experts_2[mask == 0])
    np.testing.assert_allclose(weights[mask == 0], weights_2[mask == 0], rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, gradients_2[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert gradients["bias"].sum() == (mask == 0).sum() * config.experts_per_token  # prompts included


@configs
def test_a_padded_sample_is_the_sample_without_its_padding(config):
    mask = padding_mask()[:1]
    weights, experts, gradients = route(config, hidden()[:1], batch_of(mask, samples=1))
    alone = route(config, hidden()[:1, :11], batch_of(None, 11, 1))
    np.testing.assert_array_equal(experts[:, :11], alone[1])
    np.testing.assert_allclose(weights[:, :11], alone[0], rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, alone[2][name], rtol=1e-5, atol=1e-7, err_msg=name)
    if config.expert_capacity:  # ceil(0.75 * 3 * 11 / 4)
        counts = [(experts == expert).sum() for expert in range(config.experts)]
        assert max(counts) == 7 and (experts[:, 11:] == config.experts).all()


def test_samples_that_fill_up_a_smaller_batch_are_padding_and_prompts_are_not():
    batch = batch_of(padding_mask()) | {"sample": np.array([0, 1, PADDING], np.uint32)}
    batch["weights"][0] = 0  # a real sample without any label
    arrays = {name: np.asarray(array).tolist() for name, array in balance_arrays(batch).items()}
    assert arrays["counted_samples"] == [1, 1, 0] and arrays["sample_shares"] == [0.5, 0.5, 0]
    np.testing.assert_allclose(arrays["token_shares"], [1 / 21, 1 / 21, 0])


def test_a_batch_of_padding_alone_has_no_losses():
    gradients = route(CONFIG, hidden(), batch_of(np.ones((SAMPLES, LENGTH), np.int32)))[2]
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.slow
def test_the_losses_are_those_of_transformers_with_an_attention_mask():
    torch = pytest.importorskip("torch")
    of = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    mask, k, count = padding_mask(), CONFIG.experts_per_token, CONFIG.experts
    kernel = (
        jax.random.normal(named_key(jax.random.key(4), "kernel"), (CONFIG.hidden, count)) * CONFIG.init_deviation * 40
    )
    kernel = torch.tensor(np.asarray(kernel), requires_grad=True)
    logits = torch.from_numpy(hidden()) @ kernel
    samples = [of((logits[n],), count, k, torch.from_numpy(1 - mask[n : n + 1])) / k for n in range(SAMPLES)]
    balance = sum(samples) / SAMPLES
    z_loss = (torch.logsumexp(logits, -1)[torch.from_numpy(mask == 0)] ** 2).mean()
    chosen = torch.softmax(logits, -1).topk(k).values[torch.from_numpy(mask == 0)]
    ((chosen**2).sum() + CONFIG.balance_loss * balance + CONFIG.router_z_loss * z_loss).backward()
    gradients = route(dataclasses.replace(CONFIG, router_normalize=False), hidden(), batch_of(mask))[2]
    np.testing.assert_allclose(gradients["losses"], [balance.item(), z_loss.item()], rtol=1e-5)
    np.testing.assert_allclose(gradients["kernel"], kernel.grad.numpy(), rtol=2e-4, atol=1e-5)


@pytest.mark.slow
@configs
def test_a_model_learns_the_same_whatever_padding_holds(config):
    model, params = small.build_model(config, recompute="none"), small.busy_params(config)
    run = small.make_run(microbatches=2, model=config)
    batch = small.make_batch(run)
    other = dict(batch)
    for name in ("tokens", "labels"):
        # Causal attention reads earlier padding: only what ends a sample is replaced.
        at_end = np.flip(np.logical_and.accumulate(np.flip(batch["padding_mask"], -1) == 1, -1), -1)
        other[name] = np.where(at_end, (batch[name] + 17) % config.vocabulary, batch[name])
    assert (other["tokens"] != batch["tokens"]).any()
    of = jax.jit(jax.value_and_grad(lambda params, batch: mean_loss(model, params, batch)))
    (loss, gradients), (loss_2, gradients_2) = of(params, batch), of(params, other)
    np.testing.assert_allclose(loss, loss_2, rtol=1e-6)
    small.assert_gradients_close(jax.tree.map(np.asarray, gradients_2), jax.tree.map(np.asarray, gradients), rtol=1e-5)

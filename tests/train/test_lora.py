"""LoRA: adapters on every layout, against the model whose weights have the adapters' product added."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.layout import named, to_canonical
from megajax.config import ConfigError
from megajax.config.lora import TARGETS, lora_targets
from megajax.models.interface import mean_loss
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests import small

GPT = dataclasses.replace(small.MODEL, layers=4, vocabulary=256, lora=3, lora_alpha=6.0, lora_targets=("all-linear",))
LLAMA = dataclasses.replace(small.LLAMA, layers=4, vocabulary=256, lora=3, lora_targets=("all-linear",))
MIXED = dataclasses.replace(LLAMA, experts=4, moe_layer_freq="2", balance_loss=0.01)
MODELS = {"gpt": GPT, "llama": LLAMA, "bert": dataclasses.replace(small.BERT, layers=4, vocabulary=256, lora=2)}
LAYOUTS = {
    "pipe and tensor": {"mesh": (1, 2, 2), "schedule": "zb_h1"},
    "zero3": {"mesh": (2, 1, 2), "zero": 3, "model": dataclasses.replace(LLAMA, lora_dropout=0.3)},
    "context": {"mesh": (1, 2, 1), "context": 2, "model": dataclasses.replace(LLAMA, lora_dropout=0.3)},
    "kinds": {"mesh": (2, 2, 1), "schedule": "1f1b", "zero": 1, "model": MIXED},
}


def merged(model, params):
    """The parameters of a model without adapters: their product is added to the kernels."""

    def of(tree):
        if "kernel" not in tree or "lora" not in tree:
            return {name: of(one) if isinstance(one, dict) else one for name, one in tree.items()}
        kernel, scale = tree["kernel"], (model.lora_alpha or model.lora) / model.lora
        for name, one in tree["lora"].items():
            delta = scale * jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(one["a"], one["b"])
            part = TARGETS[name].part
            kernel = kernel.at[(..., slice(*part), slice(None)) if part else ...].add(delta)
        return {name: one for name, one in tree.items() if name != "lora"} | {"kernel": kernel}

    return of(params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_the_model_is_that_with_merged_weights(kind):
    model = MODELS[kind]
    params, plain = small.busy_params(model), dataclasses.replace(model, lora=0, lora_alpha=None, lora_targets=())
    batch = small.make_batch(small.make_run(microbatches=1, model=model))
    own, base = (small.build_model(config, recompute="none") for config in (model, plain))
    loss, gradients = jax.jit(jax.value_and_grad(lambda p: mean_loss(own, p, batch)))(params)
    same, expected = jax.jit(jax.value_and_grad(lambda p: mean_loss(base, merged(model, p), batch)))(params)
    assert float(loss) == pytest.approx(float(same), rel=1e-6)
    for (name, one), other in zip(named(gradients).items(), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.slow  # tests/interop/test_adapters.py has one of these against peft
@pytest.mark.parametrize("layout", ["pipe and tensor", "zero3", "context", "kinds"])
def test_gradients_of_adapters_on_every_layout(layout):
    model = LAYOUTS[layout].get("model", LLAMA)
    loss, whole = small.expected(model)
    run = small.make_run(**{"model": model} | LAYOUTS[layout])
    training, whole = make_training(run, make_mesh(run.parallel)), named(whole)
    params = small.place(training, small.busy_params(model))
    found_loss, found = training.loss_and_gradients(params, small.make_batch(run))
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-6)
    found = to_canonical(found, training.where)
    assert {name for name in found if "/lora/" in name} == {name for name in whole if "/lora/" in name}
    assert all("/lora/" in name or "/router/" in name for name in found)
    for name, gradient in found.items():
        np.testing.assert_allclose(np.asarray(gradient), whole[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_targets_by_the_names_of_others():
    of = lambda *names, model=LLAMA: lora_targets(dataclasses.replace(model, lora_targets=names))  # noqa: E731
    assert of() == ("q_proj", "v_proj") and of(model=GPT) == ("linear_qkv",)
    assert of("query", "linear_fc2") == ("q_proj", "down_proj")
    assert of("up_proj") == ("up_proj",) and of("up_proj", model=GPT) == ("linear_fc1",)
    assert of("c_attn", "c_proj", model=GPT) == ("linear_qkv", "o_proj", "down_proj")
    assert of("all-linear", model=MIXED) == ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("model", [GPT, LLAMA, MIXED, *MODELS.values()])
def test_parameters_are_counted(model):
    shapes = jax.eval_shape(small.build_model(model).init, jax.random.key(0))
    rest = 128 - model.vocabulary % 128 if model.vocabulary % 128 else 0
    count = sum(
        leaf.size for name, leaf in named(shapes).items() if not name.endswith(("router/bias", "router/losses"))
    )
    assert count - rest * model.hidden == model.parameters


def test_mistakes():
    def refuse(text, **fields):
        with pytest.raises(ConfigError, match=text):
            dataclasses.replace(LLAMA, **{"lora_targets": ()} | fields).validate()

    refuse("lora_alpha = 2.0, but there are no adapters: pass --lora RANK", lora=0, lora_alpha=2.0)
    refuse("lora_targets = q is no projection: pass --lora-targets with q_proj, ", lora_targets=("q",))
    refuse("lora_targets has linear_qkv and v_proj, a part of it", lora_targets=("value", "c_attn"))
    refuse("up_proj, but matrices of experts have no adapters", lora_targets=("up_proj",), experts=4)
    refuse("pass --balance-bias-rate 0 with --lora", experts=4, balance_bias_rate=0.1)

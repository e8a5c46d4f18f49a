"""Number formats and the dynamic loss scale, against Megatron-LM's DynamicGradScaler written out in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError, TrainConfig
from megajax.models.context import model_rules, model_shapes
from megajax.pipeline.parameters import parameter_specs
from megajax.train.precision import (
    ScaleRules,
    all_finite,
    cast,
    compute_dtype,
    dynamic_loss_scale,
    make_loss_scale,
    uncast,
)
from tests import small


def test_compute_dtype_by_name():
    assert [compute_dtype(name) for name in ("bf16", "fp16", "fp32")] == [jnp.bfloat16, jnp.float16, jnp.float32]
    with pytest.raises(ConfigError, match="bf16"):
        compute_dtype("fp8")


def test_cast_leaves_integers_and_keys_alone():
    tree = {"weights": jnp.ones((2, 3)), "step": jnp.int32(4), "mask": jnp.array([True]), "key": jax.random.key(0)}
    small = cast(tree, jnp.bfloat16)
    assert small["weights"].dtype == jnp.bfloat16
    assert all(small[name].dtype == tree[name].dtype for name in ("step", "mask", "key"))


@pytest.mark.parametrize(
    ("model", "data", "zero", "drains", "want"),
    [
        (small.LLAMA, 2, 0, True, True),
        (small.LLAMA, 2, 1, True, False),  # gathered over data: in 16 bits
        (small.LLAMA, 1, 1, True, True),
        (small.LLAMA, 2, 0, False, False),
        (small.MODEL, 2, 0, True, False),  # tied: the head multiplies with it
    ],
)
def test_a_table_that_is_only_looked_up_has_no_copy_in_16_bits(model, data, zero, drains, want):
    run = small.make_run((data, 2, 2), model=model, zero=zero)
    shapes = model_shapes(run)
    kept = uncast(shapes, parameter_specs(shapes, run.parallel, model_rules(run)), drains)
    assert kept["shared"]["embedding"]["tokens"] is want
    assert sum(jax.tree.leaves(kept)) == want


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_all_finite_sees_one_bad_element(bad):
    tree = {"a": jnp.ones((3, 4)), "b": jnp.zeros(5)}
    assert all_finite(tree)
    assert not all_finite(tree | {"b": tree["b"].at[3].set(bad)})


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_no_scale_without_fp16(precision):
    scale = make_loss_scale(TrainConfig(precision=precision))
    for finite in (True, False, False, True):
        scale = scale.update(jnp.bool_(finite))
        assert scale.scale == 1


def test_fp16_has_the_runs_scale_and_megatrons_rules():
    scale = make_loss_scale(TrainConfig(precision="fp16", initial_loss_scale=4096.0, loss_scale_window=7))
    assert scale.scale == 4096
    assert scale.rules == ScaleRules(initial=4096.0, window=7, minimum=1.0, growth=2.0, backoff=0.5, hysteresis=2)


def megatron_scales(rules: ScaleRules, finites: list[bool]) -> list[float]:
    """The scale after each step by the rules of megatron/core/optimizer/grad_scaler.py."""
    scale, growth_tracker, hysteresis_tracker = rules.initial, 0, rules.hysteresis
    scales = []
    for finite in finites:
        if finite:
            growth_tracker += 1
            if growth_tracker == rules.window:
                growth_tracker, hysteresis_tracker = 0, rules.hysteresis
                scale *= rules.growth
        else:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale * rules.backoff, rules.minimum)
        scales.append(scale)
    return scales


@functools.cache
def compiled_scales(rules: ScaleRules):
    """The scale after each of 40 steps, compiled once for the examples of equal rules."""
    update = lambda state, finite: (after := state.update(finite), after.scale)  # noqa: E731
    return jax.jit(lambda finites: jax.lax.scan(update, dynamic_loss_scale(rules), finites)[1])


@settings(max_examples=30, deadline=None)
@given(
    finites=st.lists(st.sampled_from([True, True, False]), min_size=40, max_size=40),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
)
def test_scale_moves_as_megatrons(finites, window, hysteresis):
    rules = ScaleRules(initial=8.0, window=window, hysteresis=hysteresis)
    scales = compiled_scales(rules)(np.array(finites))
    assert scales.tolist() == megatron_scales(rules, finites)

"""Optimizers and layouts for tests: each with plain optax's own, and a state on a layout."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from megajax.ops.optimizers.context import OptimizerContext
from megajax.runtime.mesh import make_mesh
from megajax.train.step import Training, make_training
from tests import small

# The padding of the vocabulary is the same on all layouts.
MODEL = dataclasses.replace(small.MODEL, layers=4, vocabulary=256)
LAYOUTS = {
    "interleaved": {"mesh": (1, 2, 2), "chunks": 2},
    "zero1": {"mesh": (2, 1, 1), "zero": 1},
    "zero3": {"mesh": (2, 1, 1), "zero": 3},
    "uneven": {"mesh": (2, 2, 1), "zero": 1, "model": dataclasses.replace(MODEL, layers=3)},
}
RESUMED = {"uneven, resumed": {"mesh": (2, 1, 2), "zero": 3, "model": LAYOUTS["uneven"]["model"]}}
STEPS, MANY = 3, 20  # of quick and of slow tests
# Adam's: it divides gradients next to zero by their own size, and so would their rounding be a step. With 1e-6 the
# parameters of the unpipelined model, of a batch in 1 and in 4 microbatches, differ by 9e-6 after 20 steps.
EPSILON = 1e-5


class Case(NamedTuple):
    """An optimizer: of the trainer, and plain optax's for the tree of `split`, with its decay mask and schedules."""

    make: Callable[[OptimizerContext], optax.GradientTransformation] | None
    plain: Callable[[Any, optax.Schedule], optax.GradientTransformation]
    options: dict[str, Any] = {}  # noqa: RUF012
    model: dict[str, Any] = {}  # noqa: RUF012


def groups(tree):
    """Labels of two groups, "shared" (and what is below it) and all else."""
    return {name: "ends" if name == "shared" else "layers" for name in tree}


def two_groups(first, second):
    return {
        "layers": optax.adamw(first, b2=0.95, eps=EPSILON, weight_decay=0.1),
        "ends": optax.sgd(second, momentum=0.9),
    }


def twice(schedule):
    half = lambda count: 0.5 * schedule(count)  # noqa: E731
    return optax.chain(optax.trace(0.9), optax.scale_by_schedule(half), optax.scale_by_schedule(lambda n: -1 / (1 + n)))


def within(rate, mask):
    """Adam where the mask is True, plain gradients elsewhere."""
    return optax.chain(optax.masked(optax.scale_by_adam(eps=EPSILON), mask), optax.scale_by_learning_rate(rate))


def plain_muon(mask, rate, decayed=None):
    """Muon's matrices by their names; all weights have one rate and one decay, or none where `decayed` is False."""
    sides = {
        "attention/output/kernel": MuonDimensionNumbers((0, 1), (2,)),
        "attention/qkv/kernel": MuonDimensionNumbers((0,), (1, 2, 3)),
        "feedforward/down/kernel": MuonDimensionNumbers((0,), (1,)),
        "feedforward/up/kernel": MuonDimensionNumbers((0,), (1,)),
    }
    name = lambda path: "/".join(str(key.key) for key in path[2:])  # noqa: E731
    axes = jax.tree_util.tree_map_with_path(lambda path, _: sides.get(name(path)) if len(path) > 2 else None, mask)
    axes = {**axes, "shared": jax.tree.map(lambda _: None, mask["shared"])}
    muon = optax.contrib.muon(
        1.0, consistent_rms=0.2, eps=EPSILON, adam_b2=0.95, muon_weight_dimension_numbers=lambda _: axes
    )
    return optax.chain(
        muon, optax.scale(-1), optax.add_decayed_weights(0.1, decayed or mask), optax.scale_by_learning_rate(rate)
    )


GROUPS = {
    "lr_multiplier": ("blocks/attention=0.5", "*/scale=2"),
    "no_weight_decay": ("blocks/feedforward/up",),
    "ema_decay": 0.9,
}


def plain_muon_with_groups(mask, rate):
    """The groups of GROUPS by their names."""
    name = lambda path: "/".join(str(getattr(key, "key", key)) for key in path)  # noqa: E731
    decayed = jax.tree_util.tree_map_with_path(lambda path, own: own and "/feedforward/up/" not in name(path), mask)
    label = lambda name: "twice" if name.endswith("/scale") else "half" if "/attention/" in name else "same"  # noqa: E731
    labels = jax.tree_util.tree_map_with_path(lambda path, _: label(name(path)), mask)
    scales = {"twice": optax.scale(2.0), "half": optax.scale(0.5), "same": optax.identity()}
    return optax.chain(plain_muon(mask, rate, decayed), optax.partition(scales, labels))


def plain_adafactor(mask, rate):
    return optax.adafactor(rate, weight_decay_rate=lambda count: 0.1 * rate(count), weight_decay_mask=mask)


CASES = {
    "adamw": Case(
        None,
        lambda mask, rate: optax.adamw(rate, b2=0.95, eps=EPSILON, weight_decay=0.1, mask=mask),
        {"epsilon": EPSILON},
    ),
    "lion": Case(
        None,
        lambda mask, rate: optax.lion(rate, b2=0.95, weight_decay=0.1, mask=mask),
        {"optimizer": "lion"},
    ),
    "adafactor": Case(None, plain_adafactor, {"optimizer": "adafactor"}, {"hidden": 128}),
    "muon": Case(None, plain_muon, {"optimizer": "muon", "epsilon": EPSILON}),
    "muon, groups, average": Case(
        plain=plain_muon_with_groups, make=None, options=GROUPS | {"optimizer": "muon", "epsilon": EPSILON}
    ),
    "optax.adamw": Case(
        lambda c: optax.adamw(c.learning_rate, eps=EPSILON, mask=c.decay_mask),
        lambda mask, rate: optax.adamw(rate, eps=EPSILON, mask=mask),
    ),
    "momentum": Case(
        lambda c: optax.sgd(c.learning_rate, momentum=0.9), lambda mask, rate: optax.sgd(rate, momentum=0.9)
    ),
    "two counters": Case(lambda c: twice(c.learning_rate), lambda mask, rate: twice(rate)),
    "partition": Case(
        lambda c: optax.partition(two_groups(c.learning_rate, 1e-2), groups),
        lambda mask, rate: optax.partition(two_groups(rate, 1e-2), groups),
    ),
    "masked": Case(lambda c: within(c.learning_rate, c.decay_mask), lambda mask, rate: within(rate, mask)),
    "optax.adafactor": Case(
        lambda c: c.per_layer(optax.adafactor(c.learning_rate, min_dim_size_to_factor=16)),
        lambda mask, rate: optax.adafactor(rate, min_dim_size_to_factor=16),
    ),
    "lamb": Case(
        lambda c: c.per_layer(optax.lamb(c.learning_rate, mask=c.decay_mask, weight_decay=0.1)),
        lambda mask, rate: optax.lamb(rate, mask=mask, weight_decay=0.1),
    ),
}


def training_of(case: Case, layout: str = "interleaved", **options) -> Training:
    chosen = {"model": MODEL} | (LAYOUTS | RESUMED)[layout]
    chosen["model"] = dataclasses.replace(chosen["model"], **case.model)
    run = small.make_run(**chosen, train=case.options | options)
    return make_training(run, make_mesh(run.parallel), optimizer=case.make)


def split(tree):
    """The tree with a list of layers as blocks."""
    layers = len(jax.tree.leaves(tree["blocks"])[0])
    return {**tree, "blocks": [jax.tree.map(lambda leaf: leaf[n], tree["blocks"]) for n in range(layers)]}  # noqa: B023


def joined(tree):
    """The inverse of `split`."""
    return {**tree, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *tree["blocks"])}


def plain_optimizer(case: Case, training: Training) -> optax.GradientTransformation:
    """Plain optax's, with clipping."""
    mask, model = training.model.decay_mask(), training.run.model
    mask = {**mask, "blocks": [mask["blocks"]] * model.layers}
    batch = training.run.train.global_batch_size
    rate = lambda count: 3e-3 * jnp.minimum(1, (count + 1) * batch / (4 * batch))  # in the warm-up  # noqa: E731
    return optax.chain(optax.clip_by_global_norm(1.0), case.plain(mask, rate))


def random_gradients(params, number: int):
    random = np.random.default_rng(number)
    return jax.tree.map(lambda leaf: 0.1 * random.standard_normal(leaf.shape).astype(np.float32), params)


def start(training: Training):
    """A state of random parameters and a fresh optimizer, on the layout."""
    with jax.set_mesh(training.mesh):
        params = small.place(training, small.busy_params(training.run.model, tensor=training.run.parallel.tensor))
        init = jax.jit(training.optimizer.init, out_shardings=training.state_sharding.optimizer_state)
        return params, init(params)


def assert_close(got, want):
    """Each array within 1e-5 of its largest element."""
    small.assert_gradients_close(got, jax.tree.map(np.asarray, want), 1e-5)


@functools.cache
def updated(training: Training):
    """One update, compiled with the layout's shardings."""
    params, state = training.params_sharding, training.state_sharding.optimizer_state

    def update(params, state, gradients):
        updates, state = training.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update, in_shardings=(params, state, params), out_shardings=(params, state))

"""Any optax transformation on any layout, against plain optax on one device with each layer's arrays as parameters."""

import dataclasses
import math
import pathlib
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

from megajax.checkpoint import reader
from megajax.checkpoint.directory import choose
from megajax.checkpoint.layout import named, to_canonical
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.metadata import run_meta
from megajax.config import ConfigError, OutputConfig
from megajax.estimate.memory import bytes_per_device
from megajax.models.interface import mean_loss
from megajax.runtime.mesh import make_mesh
from megajax.sharding.whole_layers import layer_counts
from megajax.train.optimizer import make_optimizer
from megajax.train.state import started
from megajax.train.step import Training, make_training
from tests import small
from tests.train.optimizer_cases import (
    CASES,
    LAYOUTS,
    MANY,
    MODEL,
    STEPS,
    Case,
    assert_close,
    joined,
    plain_optimizer,
    random_gradients,
    split,
    start,
    training_of,
    updated,
)


def grid(*quick: tuple[str, str]):
    """Each case on each layout; those that are not named are slow."""
    pairs = [(name, layout) for name in CASES for layout in LAYOUTS]
    marked = [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]
    return pytest.mark.parametrize(("name", "layout"), marked)


@grid(
    ("adamw", "zero3"),
    ("muon", "zero1"),
    ("partition", "zero1"),
)
def test_updates_are_those_of_plain_optax(name, layout):
    training = training_of(CASES[name], layout)
    params, state = start(training)
    plain = plain_optimizer(CASES[name], training)
    want = split(small.canonical(params, training))
    plain_state = plain.init(want)
    one = jax.jit(plain.update)
    for number in range(STEPS):
        gradients = random_gradients(joined(want), number)
        with jax.set_mesh(training.mesh):
            params, state = updated(training)(params, state, small.place(training, gradients))
        changes, plain_state = one(split(gradients), plain_state, want)
        want = optax.apply_updates(want, changes)
    assert_close(small.canonical(params, training), joined(want))


def started_state(training: Training):
    params, optimizer_state = start(training)
    state = dataclasses.replace(training.init_state(), params=params, optimizer_state=optimizer_state, ema=())
    return started(training.run.train, state)


def trained(training: Training, state, steps: range):
    for step in steps:
        state, _ = training.train_step(state, small.make_batch(training.run, step))
    return state


def trees_of(training: Training, state) -> list:
    """Parameters, and their average if there is one."""
    return [small.canonical(tree, training) for tree in (state.params, state.ema) if jax.tree.leaves(tree)]


def plain_trees(case: Case, training: Training, steps: int):
    """As `trees_of`, after steps of the unpipelined model on one device with plain optax."""
    run = dataclasses.replace(training.run, parallel=small.make_run(microbatches=1, model=MODEL).parallel)
    model, plain = small.build_model(training.run.model, recompute="none"), plain_optimizer(case, training)
    params = split(small.busy_params(training.run.model))

    @jax.jit
    def step(params, state, batch):
        gradients = jax.grad(lambda params: mean_loss(model, joined(params), batch))(params)
        updates, state = plain.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, average, decay = plain.init(params), params, training.run.train.ema_decay
    for number in range(steps):
        params, state = step(params, state, small.make_batch(run, number))
        average = optax.incremental_update(params, average, 1 - (decay or 0))
    return [joined(tree) for tree in ([params] if decay is None else [params, average])]


def without_biases(case: Case) -> Case:
    """The gradient of attention's key bias is zero but for rounding, of which Adam would make a step."""
    return case._replace(model={**case.model, "biases": False})


@pytest.mark.slow
def test_training_is_that_of_the_unpipelined_model_with_plain_optax():
    training = training_of(without_biases(CASES["momentum"]), "zero1")
    got = trees_of(training, trained(training, started_state(training), range(STEPS)))
    for one, want in zip(got, plain_trees(CASES["momentum"], training, STEPS), strict=True):
        assert_close(one, want)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_resumed_on_another_layout_are_those_of_plain_optax(name, layout, tmp_path):
    """Half of them on one layout, the others after a checkpoint on another one of a model with as many layers."""
    case = without_biases(CASES[name])
    other = {"interleaved": "zero3", "zero1": "interleaved", "zero3": "zero1", "uneven": "uneven, resumed"}[layout]
    one, two = (training_of(case, on, learning_rate_decay="constant") for on in (layout, other))
    state = restored(one, two, trained(one, started_state(one), range(MANY // 2)), tmp_path)
    got = trees_of(two, trained(two, state, range(MANY // 2, MANY)))
    for tree, want in zip(got, plain_trees(case, one, MANY), strict=True):
        assert_close(tree, want)


def restored(one: Training, other: Training, state, directory):
    """A state of one layout, saved and read on another."""
    meta = run_meta(one.run, None)
    checkpoints = Checkpoints(directory, OutputConfig(), meta)
    checkpoints.save(one.state_layout, state, Progress(step=1))
    checkpoints.close()
    return reader.load(choose(directory, "auto")[0], other.run, other.state_layout, meta["tokenizer"])[0]


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("muon", ("interleaved", "zero3")),
        ("optax.adafactor", ("zero1", "interleaved")),
        pytest.param("partition", ("zero3", "interleaved"), marks=pytest.mark.slow),
        pytest.param("two counters", ("interleaved", "zero1"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_state_is_restored_on_another_layout(name, layouts, tmp_path):
    one, other = (training_of(CASES[name], layout) for layout in layouts)
    state = small.random_state(one)
    got = restored(one, other, state, tmp_path)
    for leaf, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(other.state_sharding), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    want, found = (to_canonical(tree, training.where) for tree, training in ((state, one), (got, other)))
    assert list(want) == list(found)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), want, found)


def test_a_state_of_another_optimizer_is_refused(tmp_path):
    one, other = training_of(CASES["lion"]), training_of(CASES["muon"])
    meta = run_meta(one.run, None)
    checkpoints = Checkpoints(tmp_path, OutputConfig(), meta)
    checkpoints.save(one.state_layout, small.random_state(one), Progress(step=1))
    checkpoints.close()
    with pytest.raises(
        ConfigError, match=r"has no optimizer_state/inner_states/.*: it was saved with another optimizer"
    ):
        reader.load(choose(tmp_path, "auto")[0], other.run, other.state_layout, meta["tokenizer"])


def test_adafactor_does_not_see_the_padding_of_the_vocabulary():
    """Rows of zeros would make the root mean squares of a token table smaller."""
    random = np.random.default_rng(0)
    params, gradients = (random.standard_normal((2, 200, 130)).astype(np.float32)) * [[[5]], [[1e-3]]]
    changes = []
    for rows in (200, 256, 384):
        tables = [
            {"blocks": {}, "shared": {"table": np.pad(a, [(0, rows - 200), (0, 0)])}} for a in (params, gradients)
        ]
        train, names = dataclasses.replace(small.make_run().train, optimizer="adafactor"), ("vocabulary", "hidden")
        of = lambda leaf: {"blocks": {}, "shared": {"table": leaf}}  # noqa: E731
        optimizer = make_optimizer(train, of(True), of(names), vocabulary=200)
        changes.append(optimizer.update(tables[1], optimizer.init(tables[0]), tables[0])[0]["shared"]["table"][:200])
    assert np.abs(changes[0]).max() > 1e-4
    for change in changes[1:]:
        assert_close(change, changes[0])


def test_the_example_of_the_docs_has_two_groups_and_is_placed():
    page = (pathlib.Path(__file__).parents[2] / "docs/training.md").read_text()
    (example,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "optimizer=optimizer" in text]
    names: dict[str, Any] = {}
    exec(example.replace(".fit()", "").replace("Trainer(", "trainer = Trainer("), names)
    state = named(names["trainer"].training.state_shapes)
    moments = [name for name in state if name.startswith("optimizer_state/inner_states/") and "count" not in name]
    assert all(("/ends/" in name) == ("/shared/" in name) for name in moments) and len(moments) > 10


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon"])
def test_the_memory_model_has_the_bytes_of_the_state(optimizer):
    """Small arrays of Adafactor's are replicated over tensor, which the model does not know."""
    training = training_of(CASES[optimizer], "interleaved")
    local = lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize  # noqa: E731
    held = jax.tree.map(local, training.state_shapes.optimizer_state, training.state_sharding.optimizer_state)
    assert bytes_per_device(training.run)["optimizer"] == pytest.approx(sum(jax.tree.leaves(held)), rel=0.05)


def test_the_layers_of_a_stage_are_distributed_over_replicas_and_their_tensor_groups():
    assert layer_counts(8, 4, 2) == (2, 1, 0)
    assert layer_counts(12, 1, 8) == (12, 1, 4)  # of GPT-3 175B on 8 x 8
    assert layer_counts(3, 2, 2) == (2, 1, 0)  # a layer of zeros
    assert layer_counts(4, 16, 1) == (1, 1, 0)


@pytest.mark.parametrize("layout", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_each_matrix_of_muon_is_resharded_before_and_after_newton_schulz_and_no_product_communicates(layout):
    """But for ZeRO-1 where replicas have whole layers."""
    training = training_of(CASES["muon"], layout)
    shapes = training.state_shapes
    with jax.set_mesh(training.mesh):
        lowered = updated(training).lower(shapes.params, shapes.optimizer_state, shapes.params)
    program = lowered.compile().as_text()
    assert not re.findall(r" all-gather(?:-start)?\(", program)
    sums = re.findall(r"= (.*) all-reduce(?:-start)?\(", program)
    assert all(re.fullmatch(r"\(?(?:(?:/\*index=\d+\*/)?f32\[\](?:, )?)+\)?", shape) for shape in sums)  # of the norm
    assert bool(re.findall(r" all-to-all(?:-start)?\(", program)) == (layout == "zero3")


SPARSE = dataclasses.replace(small.SPARSE, layers=4, dense_layers=1, dense_feedforward=12, vocabulary=256)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_experts_and_layers_of_several_kinds_are_updated_as_on_one_device(name):
    results = []
    layouts = [{"mesh": (1, 1, 1), "schedule": "1f1b"}, {"mesh": (2, 2, 1), "expert": 2, "zero": 1}]
    layouts.append({"mesh": (2, 1, 2), "expert": 4, "expert_tensor": 1, "zero": 1})
    for layout in layouts:
        run = small.make_run(**layout, model=SPARSE, train={"optimizer": name})
        training = make_training(run, make_mesh(run.parallel))
        params, state = start(training)
        gradients = random_gradients(small.busy_params(SPARSE), 1)
        with jax.set_mesh(training.mesh):
            params, _ = updated(training)(params, state, small.place(training, gradients))
        results.append(small.canonical(params, training))
    first, *others = results
    for other in others:
        assert_close(first, other)


@pytest.mark.slow
def test_whole_experts_of_tensor_ranks_are_not_sent_for_their_update():
    """Of such a rank Muon sends the parts of attention's and dense matrices alone."""

    def sent(**layout):
        run = small.make_run((1, 1, 2), schedule="1f1b", model=SPARSE, train={"optimizer": "muon"}, **layout)
        training = make_training(run, make_mesh(run.parallel))
        shapes = training.state_shapes
        with jax.set_mesh(training.mesh):
            lowered = updated(training).lower(shapes.params, shapes.optimizer_state, shapes.params)
        return len(re.findall(r" all-to-all(?:-start)?\(", lowered.compile().as_text()))

    assert 0 < sent(expert=2, expert_tensor=1) < sent()


def sharding_of(case: Case, layout: str, part: str) -> dict[str, tuple]:
    sharding = named(training_of(case, layout).state_sharding)
    return {name: tuple(leaf.spec) for name, leaf in sharding.items() if part in name}


def test_a_leaf_of_the_state_is_sharded_as_its_parameter_as_far_as_it_has_its_axes():
    names = sharding_of(CASES["optax.adafactor"], "interleaved", "feedforward/up/kernel")
    assert names["params/blocks/feedforward/up/kernel"] == (None, "pipe", None, None, "tensor")
    rows, columns = (names[f"optimizer_state/{v}/blocks/feedforward/up/kernel"] for v in ("v_row", "v_col"))
    assert sorted((rows, columns), key=str) == [(None, "pipe", None, "tensor"), (None, "pipe", None, None)]
    assert names["optimizer_state/v/blocks/feedforward/up/kernel"] == (None, "pipe", None, None)
    moments = sharding_of(CASES["partition"], "zero3", "down/kernel")
    assert set(moments.values()) == {(None, "pipe", None, "tensor", "data")}


def test_names_have_indices_only_where_two_leaves_would_have_one():
    names = [name for name in named(training_of(CASES["two counters"]).state_shapes) if name.startswith("opt")]
    assert [name for name in names if "count" in name] == ["optimizer_state/1/1/count", "optimizer_state/1/2/count"]
    assert "optimizer_state/trace/shared/head/norm/scale" in names and names[-1] == "optimizer_state/samples"
    assert list(named(({"a": 1},), None)) == ["a"]
    assert list(named(({"a": 1}, {"a": {"b": 2}}))) == ["0/a", "1/a/b"]


def test_the_names_of_adamw_are_those_of_earlier_versions():
    names = [name for name in named(training_of(CASES["adamw"]).state_shapes) if name.startswith("opt")]
    kernel = "blocks/attention/qkv/kernel"
    assert {"optimizer_state/count", f"optimizer_state/mu/{kernel}", f"optimizer_state/nu/{kernel}"} <= set(names)
    assert {name.split("/")[1] for name in names} == {"count", "mu", "nu", "samples"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # The layers are the largest axis of biases, or not, as the pipeline splits them.
        (
            lambda c: optax.adafactor(1e-3, min_dim_size_to_factor=1),
            r"optimizer state optimizer_state/v_col/blocks/.*per_layer",
        ),
        (lambda c: c.per_layer(optax.clip_by_global_norm(1.0)), "computes one value from several parameters"),
        (lambda c: optax.add_noise(0.1, 0.5, jax.random.key(0)), "optimizer_state/rng_key is a typed key"),
        (lambda c: "adamw", "returned str, not an optax.GradientTransformation"),
    ],
    ids=["layers", "norm", "key", "type"],
)
def test_an_optimizer_that_cannot_be_placed_is_one_line(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        training = training_of(Case(make, lambda mask, rate: None))
        shapes = training.state_shapes
        jax.eval_shape(training.optimizer.update, shapes.params, shapes.optimizer_state, shapes.params)
    assert "\n" not in str(caught.value)

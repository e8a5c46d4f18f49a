"""`pipelined_loss` and `pipelined_forward` equal `jax.value_and_grad` of the unpipelined model, in any jit."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from megajax import ConfigError, make_schedule, pipelined_forward, pipelined_loss
from megajax.models.interface import mean_loss
from megajax.schedules.schedule import ScheduleError
from megajax.train.pipelined_setup import run_of, with_all_axes
from tests import small

AXES = ("data", "pipe", "tensor")


@functools.cache
def mesh(*sizes, names=AXES):
    return jax.make_mesh(sizes or (2, 2, 2), names)


@functools.cache
def batch(model=small.MODEL):
    rows = small.make_batch(small.make_run(microbatches=1, model=model))
    return {name: array.reshape(-1, *array.shape[2:]) for name, array in rows.items()}


def equal(found, expected, tolerance=2e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=2e-5), found, expected)


@pytest.mark.parametrize(
    "schedule, options",
    [
        pytest.param("1f1b", {"zero": 1}, marks=pytest.mark.slow),
        pytest.param("interleaved_1f1b", {"chunks": 2, "vocab_parallel": "tensor"}, marks=pytest.mark.slow),
        pytest.param("zb_v", {"zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_and_its_gradients_are_those_of_the_model(schedule, options):
    """In a jit of the user's, of an expression of the loss, with an update by optax."""
    loss = pipelined_loss(small.MODEL, schedule, mesh(), microbatches=4, **options)
    canonical = small.busy_params(small.MODEL)
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params, batch):
        value, gradients = jax.value_and_grad(lambda params: 3 * loss(params, batch) ** 2)(params)
        updates, _ = optimizer.update(gradients, optimizer.init(params))
        return value, gradients, optax.apply_updates(params, updates)

    expected, gradients = small.expected(small.MODEL)
    value, found, updated = step(loss.place(canonical), batch())
    scaled = jax.tree.map(lambda g: 6 * expected * g, gradients)
    np.testing.assert_allclose(value, 3 * expected**2, rtol=1e-5)
    equal(loss.canonical(found), scaled, tolerance=2e-5)
    equal(loss.canonical(updated), jax.tree.map(lambda p, g: p - 0.1 * g, canonical, scaled))


def distillation(model, shared, y, microbatch):
    """KL(teacher, model) of the tokens that count, and each sample's part."""
    student = jax.nn.log_softmax(model.logits(shared, y))  # with the vocabulary's padding, as the teacher's
    teacher = jax.nn.log_softmax(microbatch["teacher"])
    losses = ((jnp.exp(teacher) * (teacher - student)).sum(-1) * microbatch["weights"]).sum(1)
    return losses.sum(), {"loss": losses, "index": microbatch["sample"]}


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["tensor", "pipe"])
def test_a_loss_of_the_users_has_outputs(placement):
    """Distillation from a teacher's logits, by a schedule's table, under both placements of the vocabulary."""
    table = make_schedule("1f1b", stages=2, microbatches=2)
    loss = pipelined_loss(
        small.LLAMA, table, mesh(2, 2, 2), microbatches=2, loss=distillation, has_aux=True, vocab_parallel=placement
    )
    model, canonical = small.build_model(small.LLAMA, recompute="none"), small.busy_params(small.LLAMA)
    random = np.random.default_rng(1)
    teacher = np.where(np.arange(128) < 61, random.normal(size=(small.BATCH, 16, 128)), -1e30).astype(np.float32)
    rows = batch(small.LLAMA) | {"teacher": teacher}

    def whole(params):
        microbatch = model.prepare_microbatch(rows)
        through = lambda x, of: (model.block(of[0], x, microbatch, of[1]), None)  # noqa: E731
        y, _ = lax.scan(through, model.embed(params["shared"], rows), (params["blocks"], jnp.arange(8)))
        total, outputs = distillation(model, params["shared"], y, rows)
        return total / small.BATCH, outputs

    (value, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(loss.place(canonical), rows)
    (expected, parts), slopes = jax.jit(jax.value_and_grad(whole, has_aux=True))(canonical)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    equal(outputs, parts, tolerance=1e-5)
    equal(loss.canonical(gradients), slopes)
    undifferentiated, same = loss(loss.place(canonical), rows)  # forwards only
    np.testing.assert_allclose(undifferentiated, expected, rtol=1e-5)
    equal(same, parts, tolerance=1e-5)


@pytest.mark.slow
def test_the_outputs_of_a_forward_are_those_of_the_model():
    """On a mesh without some axes, with layers in the order of zb_v."""
    collect = lambda model, shared, y, microbatch: model.token_scores(shared, y, microbatch)  # noqa: E731
    forward = pipelined_forward(small.MODEL, "zb_v", mesh(2, names=("pipe",)), microbatches=4, collect=collect)
    loss = forward.func.__self__
    rows, canonical = batch(), small.busy_params(small.MODEL)
    losses, _ = jax.jit(forward)(loss.place(canonical), rows)
    assert losses.shape == (small.BATCH, 16)
    mean = (losses * rows["weights"]).sum() / rows["weights"].sum()
    np.testing.assert_allclose(mean, small.expected_loss(small.MODEL), rtol=1e-5)


@pytest.mark.slow
def test_the_example_of_the_docs_trains():
    """With initial parameters that do not depend on the layout; its first loss is the unpipelined model's."""
    page = (pathlib.Path(__file__).parents[2] / "docs/models.md").read_text()
    example = page[page.index("## A loop of your own") :].split("```python")[1].split("```")[0]
    names: dict = {"MODEL": small.MODEL}
    exec(example.replace('preset("tiny")', "MODEL"), names)
    own, rows = small.build_model(small.MODEL), batch()
    initial = jax.jit(own.init)(jax.random.key(0))
    equal(names["loss"].canonical(names["params"]), initial)
    first = jax.jit(functools.partial(mean_loss, own))(initial, {name: array[None] for name, array in rows.items()})
    losses = names["forward"](names["params"], rows)
    np.testing.assert_allclose((losses * rows["weights"]).sum() / rows["weights"].sum(), first, rtol=1e-5)
    params, state, value = names["step"](names["params"], names["state"], rows)
    np.testing.assert_allclose(value, first, rtol=1e-5)
    assert names["step"](params, state, rows)[2] < value - 0.01


def test_a_batch_that_depends_on_the_parameters_is_refused():
    """Its gradient would be missing."""
    loss = pipelined_loss(small.MODEL, "1f1b", mesh(2, names=("pipe",)), microbatches=4)
    params = loss.place(small.busy_params(small.MODEL))

    def of(params):
        return loss(params, batch() | {"weights": batch()["weights"] * params["shared"]["head"]["norm"]["scale"][0]})

    with pytest.raises(ConfigError, match="'weights' depends on what is differentiated.*stop_gradient"):
        jax.grad(of)(params)


def shifted(model, shared, y, microbatch):
    """Moves the sequence, which is split over tensor."""
    return (jnp.roll(y, 1, axis=1) - y).astype(jnp.float32).sum()


@pytest.mark.slow
def test_a_loss_that_would_hang_is_refused():
    loss = pipelined_loss(small.MODEL, "1f1b", mesh(), microbatches=4, loss=shifted)
    with pytest.raises(ConfigError, match="would hang"):
        jax.jit(jax.grad(loss))(loss.place(small.busy_params(small.MODEL)), batch())


def test_experts_are_split_over_the_axes_of_the_mesh():
    """With expert_tensor = 1 over expert and tensor, of which there may be the second one alone."""
    of = functools.partial(run_of, small.SPARSE, "1f1b", microbatches=2, precision="fp32")
    for names, options, degree in (
        (("data", "expert", "tensor"), {}, 2),
        (("data", "expert", "tensor"), {"expert_tensor": 1}, 4),
        (("data", "pipe", "tensor"), {"expert_tensor": 1}, 2),
    ):
        one = mesh(2, 2, 2, names=names)
        found = of(mesh=one, options=options).parallel
        assert found.expert == degree and found.mesh_sizes == dict(with_all_axes(one).shape)


def make(schedule="1f1b", sizes=(2, 2, 2), names=AXES, microbatches=4, **options):
    return pipelined_loss(small.MODEL, schedule, mesh(*sizes, names=names), microbatches=microbatches, **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make("zb_w"), "'zb_w' is not known: did you mean zb_v"),
        (lambda: make("zb_v", chunks=3), "two chunks on each rank, not 3"),
        (lambda: make("interleaved_1f1b", chunks=2, microbatches=3), "multiple of the 2 stages"),
        (lambda: make(make_schedule("1f1b", stages=4, microbatches=4)), "4 stages"),
        (lambda: make(make_schedule("1f1b", stages=2, microbatches=8)), "8 microbatches, not 4"),
        (lambda: make("pipedream_2bw"), "never drains"),
        (lambda: make(names=("data", "pipe", "model")), "axis 'model': name its axes data, pipe and tensor"),
        (lambda: make(sizes=(1, 8, 1), chunks=2, schedule="interleaved_1f1b", microbatches=8), "layers = 8"),
        (lambda: make(recompte="full"), "recompte is no option.*recompute"),
        (lambda: make(precision="fp16"), "fp16 is not supported here: pass fp32 or bf16"),
        (lambda: make(has_aux=True), "are of a loss of yours"),
    ],
)
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises((ConfigError, ScheduleError), match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_batches_and_parameters_that_do_not_fit_are_said():
    loss, rows = make(), batch()
    params = loss.place(small.busy_params(small.MODEL))
    wrong = {
        "12 samples, which microbatches \\* data = 4 \\* 2 does not divide": {k: v[:12] for k, v in rows.items()},
        "different numbers of samples": rows | {"tokens": rows["tokens"][:8]},
        "a dictionary of arrays": list(rows.values()),
        "head_loss reads 'labels'": {name: array for name, array in rows.items() if name != "labels"},
        "expected integers .microbatches, samples, 16": rows | {"tokens": rows["tokens"][:, :8]},
        "the model has ids 0 to 60": rows | {"tokens": rows["tokens"] + 61},
    }
    for message, given in wrong.items():
        with pytest.raises(ConfigError, match=message):
            loss(params, given)
    with pytest.raises(ConfigError, match="pass what init or place returned"):
        loss(small.busy_params(small.MODEL), rows)
    with pytest.raises(ConfigError, match="give parameters of this model"):
        loss.place(small.busy_params(small.LLAMA))

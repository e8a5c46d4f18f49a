"""experiments/own_model.py: a user's block, loss and batches run through every schedule, ZeRO level and recompute mode.

The truth is the unpipelined model on one device in fp32, `mean_loss` through `jax.grad`.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import own_model
from megajax.config import ConfigError, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.sample import SampleConfig
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
from megajax.models.interface import ModelContext, mean_loss, model_class
from megajax.models.nnx_model import register_model
from megajax.plan.dryrun import dry_run
from megajax.runtime.mesh import make_mesh
from megajax.schedules.registry import find, names
from megajax.sharding.rules import default_rules
from megajax.train.sinks import read_steps
from megajax.train.step import make_training
from megajax.train.trainer import Trainer
from tests import small

CONFIG = own_model.DenoiserConfig(width=12)
SAMPLES = 16
CHUNKS = {"gpipe": 1, "1f1b": 1, "eager_1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zb_h1": 1, "zb_h2": 1} | {
    "zb_1p_interleaved": 2,
    "zb_v": 2,
    "dualpipe_v": 2,
    "hanayo": 2,
    "auto": 2,
}
LONG = list(itertools.product(CHUNKS, (0, 1, 3), ("none", "selective", "full")))  # ZeRO level, recompute


def make_run(schedule="1f1b", mesh=(2, 2, 2), chunks=1, train=None, **parallel) -> RunConfig:
    data, pipe, tensor = mesh
    sizes = {"data": data, "pipe": pipe, "tensor": tensor, "microbatch_size": SAMPLES // 4 // data}
    settings = {"global_batch_size": SAMPLES, "steps": 8, "warmup_steps": 2, "precision": "fp32"} | (train or {})
    return RunConfig(
        CONFIG, ParallelConfig(schedule=schedule, chunks=chunks, **sizes, **parallel), TrainConfig(**settings)
    )


class Batches:
    """`data` of the Trainer, any mesh: 4 microbatches of 4 samples."""

    def batch(self, consumed_samples: int):
        clean, noise = np.random.default_rng(consumed_samples).normal(size=(2, 4, 4, CONFIG.width)).astype(np.float32)
        return {"clean": clean, "noisy": clean + noise}


def training_of(run: RunConfig, **options):
    return make_training(run, make_mesh(run.parallel), **options)


@functools.cache
def params():
    """Canonical parameters, none of them zero or one."""
    fresh = jax.jit(own_model.Denoiser(CONFIG).init)(jax.random.key(3))
    random = np.random.default_rng(4)
    return jax.tree.map(lambda a: np.asarray(a) + random.normal(0, 0.05, a.shape).astype(np.float32), fresh)


@functools.cache
def expected():
    model = own_model.Denoiser(CONFIG, ModelContext(recompute="none"))
    loss = lambda params: mean_loss(model, params, Batches().batch(0))  # noqa: E731
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(params()))


def check(run: RunConfig, **options):
    training = training_of(run, **options)
    loss, gradients = training.loss_and_gradients(small.place(training, params()), Batches().batch(0))
    np.testing.assert_allclose(loss, expected()[0], rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), expected()[1], rtol=1e-5)
    return training


def test_the_loss_is_the_one_written_by_hand():
    """Mean over samples of the squared error, in float64 numpy."""
    weights, batch = jax.tree.map(np.float64, params()), Batches().batch(0)
    table, x = weights["shared"]["table"], np.float64(batch["noisy"])
    x = x @ table
    for up, down in zip(weights["blocks"]["up"], weights["blocks"]["down"], strict=True):
        inner = x @ up
        x = x + 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))) @ down
    loss = np.square(x @ table.T - batch["clean"]).sum() / SAMPLES
    np.testing.assert_allclose(expected()[0], loss, rtol=1e-5)


@pytest.mark.slow  # quick: another model of one's own, in pipeline/test_layer_argument.py
@pytest.mark.parametrize("case", LONG, ids=str)
def test_gradients_equal_the_unpipelined_models(case):
    schedule, zero, recompute = case
    check(make_run(schedule, chunks=CHUNKS[schedule], zero=zero, recompute=recompute))


def test_every_schedule_that_trains_is_covered():
    """Without the schedules that other tests register."""
    built_in = {spec.name: spec for spec in map(find, names()) if spec.generate.__module__.startswith("megajax.")}
    assert {name for name, spec in built_in.items() if spec.trains} == {*CHUNKS, "pipedream_2bw"}


@pytest.mark.slow
def test_gradients_with_recompute_of_groups_of_blocks():
    check(make_run("1f1b", recompute="full", recompute_blocks=2))


def test_sharding_rules_can_be_replaced():
    """The inner width replicated instead of split over tensor: same gradients, other shardings."""
    rules = default_rules().replace(feedforward=None)
    run = make_run("interleaved_1f1b", mesh=(2, 1, 2))
    training = check(run, rules=rules)
    split = training_of(run)
    assert "tensor" not in training.specs.stored["blocks"]["up"] and "tensor" in split.specs.stored["blocks"]["up"]


@pytest.mark.slow
def test_pipedream_2bw_trains_it():
    run = make_run("pipedream_2bw", train={"learning_rate": 0.01})
    training = training_of(run)
    state = training.init_state()
    losses = []
    for _ in range(12):
        state, metrics = training.train_step(state, Batches().batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]


@functools.cache
def curve(mesh, schedule, chunks=1):
    run = make_run(schedule, mesh, chunks, train={"learning_rate": 0.01})
    training = training_of(run)
    state, losses = training.init_state(), []
    for step in range(run.train.steps):
        state, metrics = training.train_step(state, Batches().batch(step * SAMPLES))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_the_mesh():
    """From initial values to the last step: initialization, optimizer and decay mask too."""
    want = curve((1, 1, 1), "1f1b")
    assert want[-1] < 0.9 * want[0]
    np.testing.assert_allclose(curve((2, 2, 2), "interleaved_1f1b", 2), want, rtol=1e-4)


def test_evaluation_gives_the_same_loss():
    training = training_of(make_run())
    loss = training.evaluate(small.place(training, params()), Batches().batch(0))
    np.testing.assert_allclose(loss, expected()[0], rtol=1e-5)


@pytest.mark.slow
def test_a_compiled_step_needs_no_data():
    """The dry run: shapes from `batch_shapes`."""
    training = training_of(make_run(zero=1))
    state, batch = training.step_shapes()
    assert {name: leaf.shape for name, leaf in batch.items()} == {"noisy": (4, 4, 12), "clean": (4, 4, 12)}
    assert training.compile_train_step(state, batch).memory_analysis() is not None


def test_the_dry_run_prices_it(capsys):
    """FLOPs by hand: two matmuls of h x 4h in each of 8 blocks, forward and twice that backward."""
    run = own_model.RUN
    assert flops_per_step(run) == 3 * 8 * 2 * (2 * 32 * 128) * run.train.global_batch_size
    training = training_of(run)
    stored = zip(jax.tree.leaves(training.state_shapes.params), jax.tree.leaves(training.params_sharding), strict=True)
    on_a_device = sum(4 * math.prod(sharding.shard_shape(leaf.shape)) for leaf, sharding in stored)
    assert bytes_per_device(run)["weights"] == pytest.approx(on_a_device, rel=0.01)
    assert dry_run(run, find_gpu("h100-80gb"), compiling=False) == 0
    assert "denoiser" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.compiler
def test_the_dry_run_compiles_it_for_gpus(capsys):
    run = dataclasses.replace(own_model.RUN, imports=("experiments.own_model",))
    assert dry_run(run, find_gpu("h100-80gb")) == 0
    assert "NOT COMPILED" not in capsys.readouterr().out


def rows_of(directory) -> list[dict]:
    return read_steps(directory / "log.jsonl")


@pytest.mark.slow
def test_the_trainer_checkpoints_logs_and_resumes_it_on_another_mesh(tmp_path):
    """Losses after a resume on another mesh with another schedule equal those of the uninterrupted run."""
    train = {"learning_rate": 0.01, "log_every": 1, "validation_batches": 0}
    output = OutputConfig(run_dir=str(tmp_path), save_every=4, tensorboard=False)
    run = make_run("interleaved_1f1b", chunks=2, zero=1, train=train)
    result = Trainer(run, data=Batches(), output=output).fit()
    whole = rows_of(tmp_path)
    assert [row["step"] for row in whole] == list(range(1, 9)) and whole[-1]["loss"] < whole[0]["loss"]
    assert result.metrics["loss"] == pytest.approx(whole[-1]["loss"])
    names = ocp.PyTreeCheckpointHandler().metadata(next(tmp_path.rglob("*4/state"))).tree["params"]
    assert set(names["blocks"]) == {"up", "down"} and set(names["shared"]) == {"table"}
    assert names["blocks"]["up"].shape == (8, 12, 48)  # layer by layer, whatever the mesh

    other = make_run("1f1b", (1, 4, 2), zero=0, train=train)
    output = dataclasses.replace(output, resume="4")
    Trainer(other, data=Batches(), output=output).fit()
    resumed = [row for row in rows_of(tmp_path)[-4:]]
    assert [row["step"] for row in resumed] == [5, 6, 7, 8]
    np.testing.assert_allclose([row["loss"] for row in resumed], [row["loss"] for row in whole[4:]], rtol=1e-4)


def test_it_generates_no_text():
    run = decoding_run(make_run(mesh=(1, 2, 2)))
    with pytest.raises(ConfigError, match="Denoiser has no logits: it cannot generate text"):
        Decoder(run, make_mesh(run.parallel), DecodeSizes(1, 4, 4), SampleConfig())
    model = model_class(CONFIG)(CONFIG)
    for call in (lambda: model.cache_arrays(1, 1), lambda: model.block_cached({}, None, None, {}, 0)):
        with pytest.raises(ConfigError, match="Denoiser has no cached decoding .*: it cannot generate text"):
            call()


@pytest.mark.parametrize(("field", "value"), [("attention", "cudnn"), ("context", 2)])
def test_options_of_attention_are_refused(field, value):
    run = make_run(mesh=(1, 2, 2))
    run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **{field: value}))
    with pytest.raises(ConfigError, match=f"{field} = {value}, but Denoiser has no attention .* leave --{field} out"):
        training_of(run)


def test_a_config_without_a_model_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Unknown:
        layers: int = 1

    with pytest.raises(ConfigError, match="no model is registered for Unknown .*DenoiserConfig.*ModelConfig"):
        model_class(Unknown())
    assert model_class(CONFIG) is own_model.Denoiser
    assert callable(register_model)


def test_it_is_about_sixty_lines():
    assert len(pathlib.Path(own_model.__file__).read_text().splitlines()) <= 61


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [("--help", 0, "A model of your own"), ("--steps", 2, "there is no option --steps"), ("x", 2, "is not an option")],
)
def test_its_command_has_help_and_refuses_other_words(word, code, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["own_model", word])
    with pytest.raises(SystemExit) as end:
        exec(
            compile(pathlib.Path(own_model.__file__).read_text(), own_model.__file__, "exec"), {"__name__": "__main__"}
        )
    shown = capsys.readouterr()
    assert end.value.code == code and message in shown.out + shown.err
    assert code == 0 or shown.err.count("\n") == 1

"""Runs with `--ema-decay`: resumed on another layout, without an average, validated, generated, evaluated and exported."""

import dataclasses
import shutil
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from megajax.checkpoint.layout import named, to_canonical
from megajax.config import ConfigError, DataConfig, ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.estimate.memory import bytes_per_device
from megajax.interop.hugging_face.export import export_run
from megajax.interop.weight_source import RunDirectorySource
from megajax.train.command import describe_shapes
from megajax.train.state import evaluated_params
from megajax.train.trainer import Trainer
from megajax.train.validation import validation_loss

MODEL = ModelConfig(name="tiny", layers=2, hidden=32, heads=4, vocabulary=257, sequence_length=32)
ZERO1 = ParallelConfig(data=2, pipe=1, tensor=1, zero=1, schedule="1f1b", microbatch_size=2)
PIPE2 = ParallelConfig(data=1, pipe=2, tensor=1, schedule="1f1b", microbatch_size=2)


def trainer_of(directory, parallel, text, *, steps=4, resume="no", ema=0.5, **train):
    settings = {"global_batch_size": 8, "learning_rate": 1e-2, "precision": "fp32", "warmup_steps": 1} | train
    settings |= {"validation_batches": 0} if "ema_validation" not in train else {"validation_batches": 1}
    run = RunConfig(MODEL, parallel, TrainConfig(steps=steps, ema_decay=ema, **settings), DataConfig(text=str(text)))
    output = OutputConfig(run_dir=str(directory), save_every=2, tensorboard=False, resume=resume)
    return Trainer(run, output=output, devices=jax.devices()[: parallel.devices])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """A run of four steps with an average, saved after two and four of them; its trainer and its state."""
    directory = tmp_path_factory.mktemp("run")
    trainer = trainer_of(directory, ZERO1, text, decay_samples=64)
    return directory, trainer, trainer.fit().state


def canonical(trainer, tree):
    return jax.tree.map(np.asarray, to_canonical(tree, trainer.training.where))


def target_of(trainer):
    """What weights are loaded for, in the layout of a trainer's parameters."""
    layout = trainer.training.state_layout
    layout = dataclasses.replace(
        layout, shapes={"params": layout.shapes.params}, shardings={"params": layout.shardings.params}
    )
    return types.SimpleNamespace(run=trainer.run, params_layout=layout, weights=lambda params: params)


@pytest.mark.slow
def test_a_run_stopped_and_resumed_on_another_layout_has_the_same_average(tmp_path, text, trained):
    directory, whole, state = trained
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    second = trainer_of(tmp_path, PIPE2, text, resume="2", decay_samples=64)
    got = canonical(second, second.fit().state.ema)
    want = canonical(whole, state.ema)
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_allclose(got[name], want[name], atol=3e-5)
    assert max(np.abs(got[name] - canonical(whole, state.params)[name]).max() for name in got) > 1e-3


@pytest.mark.slow
def test_a_checkpoint_without_an_average_starts_one_and_one_with_it_is_read_without(tmp_path, text, capsys):
    trainer_of(tmp_path, ZERO1, text, steps=2, ema=None).fit()
    trainer = trainer_of(tmp_path, PIPE2, text, steps=2, resume="auto")
    state, _ = trainer.directory.resume(trainer.training)
    jax.tree.map(
        np.testing.assert_array_equal, *map(lambda tree: jax.tree.map(np.asarray, tree), (state.params, state.ema))
    )
    assert any("the average starts from its weights" in line for line in trainer.directory.messages)
    trainer.training.train_step(state, trainer.data.batches.batch(0))  # donates both of them
    trainer.directory.close()
    other = trainer_of(tmp_path, PIPE2, text, steps=2, resume="auto", ema=None)
    assert other.directory.resume(other.training)[0].ema == ()


def test_the_average_is_validated_when_asked(trained):
    _, whole, state = trained
    batches = {"batch": staticmethod(whole.data.batches.batch), "global_batch_size": 8}

    def loss(state, **options):
        train = dataclasses.replace(whole.run.train, validation_batches=1, **options)
        training = {"run": dataclasses.replace(whole.run, train=train), "evaluate": whole.training.evaluate}
        training["loss_weight"] = whole.training.loss_weight
        return validation_loss(type("Training", (), training), state, type("Batches", (), batches))

    average = loss(dataclasses.replace(state, params=state.ema))
    assert loss(state, ema_validation=True) == average != pytest.approx(loss(state), rel=1e-4)


def test_sources_read_the_average(trained):
    directory, whole, state = trained

    for ema, want in ((False, state.params), (True, state.ema)):
        got = RunDirectorySource(str(directory), None, ema=ema).load(target_of(whole))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


def test_the_average_is_exported(trained, tmp_path):
    directory, whole, state = trained
    for name, ema in (("weights", False), ("average", True)):
        export_run(directory, tmp_path / name, ema=ema)
    weights, average = (load_file(tmp_path / name / "model.safetensors") for name in ("weights", "average"))
    key = next(name for name in weights if name.endswith("wte.weight"))
    stored = canonical(whole, {"params": state.params, "ema": state.ema})
    for part, found in (("params", weights), ("ema", average)):
        table = next(leaf for name, leaf in stored.items() if name.startswith(f"{part}/shared") and "token" in name)
        np.testing.assert_array_equal(found[key], table[:257])


@pytest.mark.slow
def test_a_run_without_an_average_is_one_line(tmp_path, text):
    trainer_of(tmp_path, PIPE2, text, steps=1, ema=None).fit()
    with pytest.raises(ConfigError, match=r"has no averaged weights: its run was without --ema-decay; omit --ema"):
        export_run(tmp_path, tmp_path / "out", ema=True)


def test_the_memory_of_the_average_is_counted(trained):
    _, whole, state = trained
    without = dataclasses.replace(whole.run, train=dataclasses.replace(whole.run.train, ema_decay=None))
    more = bytes_per_device(whole.run)["optimizer"] - bytes_per_device(without)["optimizer"]
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.ema))
    assert more == pytest.approx(local, rel=0.05)
    assert "averaged weights" in describe_shapes(whole.run)


@pytest.mark.slow
def test_frozen_weights_have_no_average_and_are_read_as_they_are(tmp_path, text):
    freeze = ("blocks/attention", "shared/embedding")
    first = trainer_of(tmp_path, ZERO1, text, steps=2, freeze=freeze)
    first.fit()
    whole = trainer_of(tmp_path, PIPE2, text, resume="auto", freeze=freeze, ema_validation=True)
    state = whole.fit().state
    own = {name for name in named(state.params) if not name.startswith(("blocks/attention/", "shared/embedding/"))}
    assert named(state.ema).keys() == own and own < named(state.params).keys()
    params, average = canonical(whole, state.params), canonical(whole, state.ema)
    assert max(np.abs(average[name] - params[name]).max() for name in own) > 1e-3
    evaluated = canonical(whole, evaluated_params(whole.run.train, state))
    got = canonical(whole, RunDirectorySource(str(tmp_path), None, ema=True).load(target_of(whole)))
    assert got.keys() == evaluated.keys() == params.keys()
    for name, leaf in params.items():
        np.testing.assert_array_equal(evaluated[name], average[name] if name in own else leaf)
        np.testing.assert_array_equal(got[name], evaluated[name])
    for name, ema in (("weights", False), ("average", True)):
        export_run(tmp_path, tmp_path / name, ema=ema)
    weights, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("weights", "average"))
    same = {name for name, tensor in weights.items() if np.array_equal(tensor, exported[name])}
    assert same == {name for name in weights if ".attn." in name or "wte" in name or "wpe" in name}
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.ema))
    without = dataclasses.replace(whole.run, train=dataclasses.replace(whole.run.train, ema_decay=None))
    more = bytes_per_device(whole.run)["optimizer"] - bytes_per_device(without)["optimizer"]
    assert more == pytest.approx(local, rel=0.05)

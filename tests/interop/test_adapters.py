"""Adapters: PEFT's gradients (make_lora_golden.py), its files in and out, merged exports; checkpoints without the model."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from megajax import OutputConfig, Trainer
from megajax.checkpoint import reader
from megajax.checkpoint.directory import NAME
from megajax.checkpoint.layout import named, to_canonical
from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.interop.hugging_face.adapters import adapter_pieces, modules_of, short_names
from megajax.interop.hugging_face.config import read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.hugging_face.tensors import axis_sizes, from_leaf
from megajax.interop.safetensors import open_file, open_tensors
from megajax.pipeline.trained import overlaid
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.interop.hugging_face import convert, golden, logits_of, model_of
from tests.interop.make_golden import GOLDEN, tokens

LAYOUTS = {
    "one device": {},
    "pipe 2 x tensor 2": {"pipe": 2, "tensor": 2},
    "data 2, ZeRO-3": {"data": 2, "zero": 3},
    "data 2, ZeRO-1": {"data": 2, "zero": 1, "schedule": "zb_h1", "pipe": 2},
}


def adapted(family):
    """The golden model with the adapters of the golden files."""
    return dataclasses.replace(model_of(family), lora=3, lora_alpha=6.0, lora_targets=("all-linear",))


def run_of(model, family, steps=1, adapters=True, ema=None, **layout):
    parallel = ParallelConfig(**{"schedule": "1f1b"} | layout)
    files = {"init_adapters": str(GOLDEN / "lora" / family)} if adapters else {}
    train = TrainConfig(
        precision="fp32", global_batch_size=2, steps=steps, warmup_steps=0, init_from=str(golden(family)), **files
    )
    train = dataclasses.replace(train, ema_decay=ema)
    return RunConfig(model, parallel, train)


class Batches:
    """The golden tokens, of which all but the last predict the next one."""

    def __init__(self, run):
        self.rows = run.microbatches

    def batch(self, consumed):
        ids = tokens().astype(np.int32)
        weights = np.ones(ids.shape, np.float32)
        weights[:, -1] = 0
        batch = {"tokens": ids, "labels": np.roll(ids, -1, 1), "weights": weights}
        batch["sample"] = (consumed + np.arange(2)).astype(np.uint32)
        return {name: a.reshape(self.rows, -1, *a.shape[1:]) for name, a in batch.items()}


def by_tensor(family, model, leaves):
    """Leaves of adapters by the names of PEFT's tensors."""
    found, sizes = {}, axis_sizes(model) | {"r": model.lora}
    for name, leaf in leaves.items():
        piece = adapter_pieces(family, name, model.layer_kinds)
        found |= {piece.name((index,)): from_leaf(piece, one, sizes) for index, one in enumerate(np.asarray(leaf))}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, layout",
    [
        ("llama", "pipe 2 x tensor 2"),
        ("gpt2", "data 2, ZeRO-3"),
        *(
            pytest.param(family, layout, marks=pytest.mark.slow)
            for family in ("llama", "gpt2")
            for layout in LAYOUTS
            if (family, layout) not in (("llama", "pipe 2 x tensor 2"), ("gpt2", "data 2, ZeRO-3"))
        ),
    ],
)
def test_gradients_are_those_of_peft(family, layout):
    run = run_of(adapted(family), family, **LAYOUTS[layout])
    run.validate()
    training = make_training(run, make_mesh(run.parallel))
    params = initial_params(str(golden(family)), training)
    loss, gradients = training.loss_and_gradients(params, Batches(run).batch(0))
    wanted = dict(np.load(GOLDEN / "lora" / family / "gradients.npz"))
    assert float(loss) == pytest.approx(float(wanted.pop("loss")), rel=1e-5)
    found = by_tensor(family, run.model, to_canonical(gradients, training.where))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max(), err_msg=name)
    moments = sum(leaf.size for leaf in jax.tree.leaves(training.state_shapes.optimizer_state) if leaf.ndim)
    assert moments == 2 * sum(gradient.size for gradient in wanted.values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run directory of two steps on pipe 2 x tensor 2 with averages, its Trainer, the trained state)."""
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    run = run_of(adapted("llama"), "llama", steps=2, ema=0.5, pipe=2, tensor=2)
    trainer = Trainer(
        run, output=OutputConfig(run_dir=str(run_dir), save_every=1), data=Batches(run), devices=jax.devices()[:4]
    )
    return run_dir, trainer, trainer.fit(initial_params=initial_params).state


def test_a_checkpoint_has_what_is_trained_alone(trained):
    run_dir, trainer, state = trained
    names = named(reader.arrays_in(run_dir / "checkpoints" / NAME.format(2)))
    params = [name for name in names if name.startswith(("params/", "ema/"))]
    assert params and all("/lora/" in name for name in params)
    log = (run_dir / "logs" / "process_0.log").read_text()
    assert "trained   " in log and "all others are frozen" in log


@pytest.mark.slow
def test_a_run_resumes_on_another_layout(trained, tmp_path):
    run_dir, _, state = trained
    run = run_of(adapted("llama"), "llama", steps=2, ema=0.5, data=2, zero=1)
    output = OutputConfig(run_dir=str(tmp_path / "run"), resume=str(run_dir / "checkpoints" / NAME.format(1)))
    trainer = Trainer(run, output=output, data=Batches(run), devices=jax.devices()[:2])
    resumed = trainer.fit(initial_params=initial_params).state
    for part in ("params", "ema"):
        pairs = (resumed, trainer.training), (state, trained[1].training)
        first, second = (to_canonical(getattr(one, part), training.where) for one, training in pairs)
        for name in named(getattr(resumed, part)):
            np.testing.assert_allclose(first[name], second[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_merged_and_peft_exports(trained, tmp_path):
    run_dir, trainer, state = trained
    plain = dataclasses.replace(model_of("llama"))
    run = dataclasses.replace(run_of(plain, "llama", adapters=False), parallel=ParallelConfig(schedule="1f1b"))
    training, found = make_training(run, make_mesh(run.parallel)), {}
    for name, params, more in (("ema", overlaid(state.params, state.ema), ["--ema"]), ("merged", state.params, [])):
        found[name] = logits_of(trainer.training, params)
        assert convert("export", run_dir, "--out", tmp_path / name, *more) == 0
        same = logits_of(training, initial_params(str(tmp_path / name), training))
        np.testing.assert_allclose(same, found[name], rtol=0, atol=2e-5)
    assert np.abs(found["ema"] - found["merged"]).max() > 1e-3
    assert open_tensors(tmp_path / "merged").keys() == open_tensors(golden("llama")).keys()

    assert convert("export", run_dir, "--out", tmp_path / "peft", "--peft") == 0
    found = open_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert found.keys() == open_file(GOLDEN / "lora" / "llama" / "adapter_model.safetensors").keys()
    config, theirs = (
        json.loads((path / "adapter_config.json").read_text())
        for path in (tmp_path / "peft", GOLDEN / "lora" / "llama")
    )
    assert sorted(theirs["target_modules"]) == config["target_modules"]
    for key in ("r", "lora_alpha", "peft_type", "task_type", "fan_in_fan_out", "bias"):
        assert config[key] == theirs[key]
    adapters = {
        name: leaf for name, leaf in to_canonical(state.params, trainer.training.where).items() if "/lora/" in name
    }
    for name, values in by_tensor("llama", adapted("llama"), adapters).items():
        np.testing.assert_array_equal(found[name].rows(0, len(values)), values)


def test_modules_are_named_by_their_ends_where_these_are_theirs_alone():
    bert = dataclasses.replace(read_config(golden("bert"))[1], lora=2)
    every = modules_of(bert, "bert")
    assert "bert.encoder.layer.0.attention.output.dense" in every and "bert.encoder.layer.1.output.dense" in every
    names = lambda *ends: [module for module in sorted(every) if module.endswith(ends)]  # noqa: E731
    assert short_names(names("query", "value"), every) == ["query", "value"]
    both = names("attention.output.dense")
    assert short_names(both, every) == both  # "output.dense" is the end of the MLP's too
    mlp = [module for module in names("output.dense") if "attention" not in module]
    assert short_names(mlp, every) == mlp
    mixed = modules_of(dataclasses.replace(model_of("qwen3_moe_mixed"), lora=2), "qwen3_moe")
    dense = [module for module in sorted(mixed) if module.endswith("gate_proj") and "experts" not in module]
    assert dense and short_names(dense, mixed) == ["mlp.gate_proj"]


def test_mistakes(trained, tmp_path, capsys):
    run = run_of(dataclasses.replace(adapted("llama"), lora=2), "llama")
    training = make_training(run, make_mesh(run.parallel))
    with pytest.raises(ConfigError, match=r"has rank 3 and alpha 6, and the run 2 and 6: pass --lora 3 --lora-alpha 6"):
        initial_params(str(golden("llama")), training)
    run = run_of(dataclasses.replace(adapted("llama"), lora_targets=("q_proj",)), "llama")
    with pytest.raises(ConfigError, match="which the run has not: pass --lora-targets"):
        initial_params(str(golden("llama")), make_training(run, make_mesh(run.parallel)))
    with pytest.raises(ConfigError, match="q_proj is no module of a gpt2, so PEFT has no such adapter"):
        adapter_pieces("gpt2", "blocks/attention/qkv/lora/q_proj/a", None)
    with pytest.raises(ConfigError, match="pass --init-from and --lora"):
        run_of(model_of("llama"), "llama").validate()

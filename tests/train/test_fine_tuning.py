"""Fine-tuning on packed answers: loss and gradients are those of each sample alone; a resumed run is the unbroken one."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from megajax import OutputConfig, Trainer
from megajax.config import DataConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.data.loader import RowLoader
from megajax.data.packing import PackedSamples
from megajax.data.sft import Answers
from megajax.models.interface import mean_loss
from megajax.runtime.mesh import make_mesh
from megajax.train.sinks import read_steps
from megajax.train.step import make_training
from tests import small
from tests.data.test_sft import some

TINY = dataclasses.replace(small.LLAMA, layers=2)
LENGTH = small.LLAMA.sequence_length


@functools.cache
def answers() -> Answers:
    """Samples that fill small.BATCH rows, one of them as long as a row."""
    for count in range(20, 90):
        found = some(count, LENGTH)
        if PackedSamples(found, LENGTH, None, 0).count == small.BATCH:
            return found
    raise AssertionError


def packed(run) -> dict[str, np.ndarray]:
    return RowLoader(PackedSamples(answers(), LENGTH, 1, 0), small.BATCH, run.microbatches).batch(0)


def alone() -> dict[str, np.ndarray]:
    """A row for each sample, without positions and documents; what follows it has weight 0, and it cannot see that."""
    found = answers()
    batch = {name: np.ones((1, found.count, LENGTH), np.int32) for name in ("tokens", "labels")}
    batch["weights"] = np.zeros((1, found.count, LENGTH), np.float32)
    for place in range(found.count):
        begin, end = found.offsets[place : place + 2]
        for name, array in {"tokens": found.ids[:-1], "labels": found.ids[1:], "weights": found.loss_mask[1:]}.items():
            batch[name][0, place, : end - begin - 1] = array[begin : end - 1]
    return batch


def test_the_answers_fill_the_rows():
    assert np.diff(answers().offsets).max() == LENGTH + 1
    run = small.make_run(model=TINY)
    batch = packed(run)
    assert batch["weights"].sum() == alone()["weights"].sum() > 50 and (batch["document"] > 2).any()


def small_case():
    """The model of one layer, its packed batch, and its parameters."""
    model = dataclasses.replace(TINY, layers=1)
    batch = packed(small.make_run(microbatches=2, model=model))
    return model, batch, small.busy_params(model)


def loss_of(model):
    functions = small.build_model(model, recompute="none")
    return lambda params, batch: mean_loss(functions, params, batch)


def test_the_loss_is_that_of_each_sample_alone():
    """No token sees another sample, and the mean is over the answers' tokens of the whole batch."""
    model, batch, params = small_case()
    loss = jax.jit(loss_of(model))
    want = loss(params, alone())
    np.testing.assert_allclose(loss(params, batch), want, rtol=1e-6)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), batch["positions"].shape)
    leaking = batch | {"positions": positions, "document": np.ones_like(batch["document"])}
    assert abs(loss(params, leaking) - want) > 1e-4  # so the masks make them equal


@functools.cache
def wanted(model):
    functions = small.build_model(model, recompute="none")
    loss = lambda params: mean_loss(functions, params, alone())  # noqa: E731
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(small.busy_params(model)))


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_each_sample_alone():
    model, batch, params = small_case()
    found, gradients = jax.jit(jax.value_and_grad(loss_of(model)))(params, batch)
    want_loss, want = wanted(model)
    np.testing.assert_allclose(found, want_loss, rtol=1e-6)
    small.assert_gradients_close(gradients, want, rtol=1e-5)


LAYOUTS = {
    "pipe": ((1, 4, 1), dict(schedule="zb_h1")),
    "interleaved x tensor": ((1, 2, 2), dict(schedule="interleaved_1f1b", chunks=2)),
    "context": ((1, 2, 1), dict(schedule="eager_1f1b", context=2)),
    "ZeRO-3": ((2, 2, 1), dict(schedule="interleaved_1f1b", chunks=2, zero=3)),
    "ZeRO-3, mixed ticks": ((2, 2, 1), dict(schedule="1f1b", zero=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    mesh, options = LAYOUTS[layout]
    run = small.make_run(mesh, model=small.LLAMA, **options)
    training = small.training_of(run)
    loss, gradients = training.loss_and_gradients(small.place(training, small.busy_params(small.LLAMA)), packed(run))
    want_loss, want = wanted(small.LLAMA)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loss_and_gradients_are_torchs(family):
    """transformers' model on each sample alone, torch's cross entropy with labels -100 outside the answers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from megajax.interop.hugging_face.read_model import initial_params
    from tests.interop.hugging_face import golden, model_of

    model = transformers.AutoModelForCausalLM.from_pretrained(golden(family), attn_implementation="eager").eval()
    found, total = answers(), 0.0
    labels = torch.where(torch.from_numpy(found.loss_mask), torch.from_numpy(found.ids).long(), -100)
    for begin, end in zip(found.offsets, found.offsets[1:], strict=False):
        logits = model(torch.from_numpy(found.ids[begin:end]).long()[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[begin + 1 : end], reduction="sum")
    (total / (alone()["weights"] > 0).sum()).backward()
    expected = float(total.detach()) / float(alone()["weights"].sum())
    table = "model.embed_tokens.weight" if family == "llama" else "transformer.wte.weight"
    wanted_table = dict(model.named_parameters())[table].grad.numpy()
    wanted_norm = np.sqrt(sum(float((one.grad.double() ** 2).sum()) for one in model.parameters()))

    parallel = ParallelConfig(pipe=2, data=2, schedule="1f1b", microbatch_size=2)
    model = dataclasses.replace(model_of(family), sequence_length=LENGTH)
    run = RunConfig(model, parallel, TrainConfig(precision="fp32", global_batch_size=small.BATCH))
    training = make_training(run, make_mesh(parallel))
    loss, gradients = training.loss_and_gradients(initial_params(str(golden(family)), training), packed(run))
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)
    ours = np.asarray(gradients["shared"]["embedding"]["tokens"])[: run.model.vocabulary]
    np.testing.assert_allclose(ours, wanted_table, rtol=0, atol=1e-5 * np.abs(wanted_table).max())
    norm = np.sqrt(sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(gradients)))
    np.testing.assert_allclose(norm, wanted_norm, rtol=1e-5)


def fine_tuning(tmp_path, steps: int, **settings) -> RunConfig:
    """A run on prompts and completions of bytes, more than an epoch of them, with a validation."""
    draw = np.random.default_rng(3)
    words = ["".join(map(chr, draw.integers(97, 123, size))) for size in draw.integers(2, 12, 80)]
    lines = [json.dumps({"prompt": one, "completion": one[::-1]}) + "\n" for one in words]
    for name, part in {"train": lines[:60], "valid": lines[60:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    data = DataConfig(sft_data=(str(tmp_path / "train.jsonl"),), valid_sft_data=(str(tmp_path / "valid.jsonl"),))
    model = dataclasses.replace(TINY, vocabulary=257, sequence_length=24)
    parallel = ParallelConfig(data=2, pipe=2, schedule="eager_1f1b", **settings)
    train = {"global_batch_size": 8, "steps": steps, "warmup_steps": 2, "learning_rate": 1e-2, "decay_samples": 80}
    return RunConfig(model, parallel, TrainConfig(**train, precision="fp32", validation_every=5), data)


def losses(directory) -> list[float]:
    return [row["loss"] for row in read_steps(directory / "log.jsonl")]


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(tmp_path, capsys):
    """Also on a mesh with context, up to rounding; the log says what the data is."""
    trainer = Trainer(
        fine_tuning(tmp_path, 10), output=OutputConfig(run_dir=str(tmp_path / "whole")), devices=jax.devices()[:4]
    )
    trainer.fit()
    out = capsys.readouterr().out
    assert "train.jsonl: 60 lines, 60 samples," in out and "epochs of them" in out and "validation loss" in out
    found = losses(tmp_path / "whole")
    assert len(found) == 10 and found[-1] < found[0]
    for name, mesh in {"same": {}, "context": {"context": 2}}.items():
        directory = str(tmp_path / name)
        devices = jax.devices()[: 4 * mesh.get("context", 1)]
        for steps, resume in ((5, "no"), (10, "auto")):
            output = OutputConfig(run_dir=directory, resume=resume)
            Trainer(fine_tuning(tmp_path, steps, **mesh), output=output, devices=devices).fit()
        tolerance = 1e-4 if mesh else 0
        np.testing.assert_allclose(losses(tmp_path / name), found, rtol=tolerance)

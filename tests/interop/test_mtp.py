"""Multi-token prediction against torch (mtp_reference.py) and against transformers' own modules: gradients, training, files.

pip install "megajax[judges]" && pytest -m slow tests/interop/test_mtp.py
"""

import copy
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from megajax.checkpoint import layout as parameters
from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.interop.hugging_face.config import read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.hugging_face.weights import Weights
from megajax.interop.safetensors import open_tensors
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.interop.described import configs, random_model, write_tokenizer
from tests.interop.hugging_face import convert
from tests.interop.make_golden import LENGTH
from tests.interop.make_mtp_golden import FACTOR, MODULES, batch
from tests.interop.torch_adamw import adamw, take_step

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
STEPS, SAMPLES = 20, 8
LAYOUTS = {
    "pipe 2, uneven": dict(pipe=2, pipeline_layout="4,2"),
    "tensor 2 x pipe 2, interleaved": dict(tensor=2, pipe=2, chunks=2, schedule="interleaved_1f1b"),
    "zb_v": dict(pipe=2, chunks=2, schedule="zb_v"),
    "dualpipe_v": dict(pipe=2, chunks=2, schedule="dualpipe_v", vocab_parallel="pipe"),
    "ZeRO-3": dict(data=2, pipe=2, zero=3, expert=2),
    "context 2, tensor 2": dict(context=2, tensor=2),
}
CASES = [("deepseek_v3", layout) for layout in LAYOUTS] + [("glm4_moe", "zb_v"), ("glm4_moe", "dualpipe_v")]


@functools.cache
def reference(family: str):
    """The model, in fp32."""
    from tests.interop.mtp_reference import Reference

    return Reference(random_model(configs()[family]), MODULES, FACTOR).eval()


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory):
    """The directory of a family's model."""

    @functools.cache
    def written(family: str):
        directory = tmp_path_factory.mktemp(f"mtp_{family}")
        reference(family).write(directory)
        write_tokenizer(directory)
        return directory

    return written


def training_of(directory, layout: str, **train):
    """The programs of the model with all modules."""
    model = read_config(directory)[1]
    assert model.mtp_num_layers == 0
    own = {"sequence_length": LENGTH, "dropout": 0.0, "mtp_num_layers": MODULES, "mtp_loss_scaling_factor": FACTOR}
    settings = {"global_batch_size": SAMPLES, "steps": 1000, "precision": "fp32"} | train
    parallel = ParallelConfig(microbatch_size=1, **LAYOUTS[layout])
    run = RunConfig(dataclasses.replace(model, **own), parallel, TrainConfig(**settings))
    run.validate()
    return make_training(run, make_mesh(parallel))


@functools.cache
def torch_gradients(family: str):
    """The losses; and a reference whose parameters are the gradients."""
    from tests.interop.mtp_reference import tensors_of

    model = reference(family).in_fp64()
    losses = model.losses(*tensors_of(batch(SAMPLES)))
    model.loss(losses).backward()
    found = copy.deepcopy(model)
    with torch.no_grad():
        for own, source in zip(found.parameters(), model.parameters(), strict=True):
            own.copy_(torch.zeros_like(own) if source.grad is None else source.grad)
    return [one.item() for one in losses], found


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_losses_and_gradients_are_torchs(family, layout, directory_of, tmp_path_factory):
    directory = directory_of(family)
    training = training_of(directory, layout)
    assert training.run.model.parameters == sum(p.numel() for p in reference(family).parameters())
    params = initial_params(str(directory), training)
    rows = {name: a.reshape(training.run.microbatches, -1, *a.shape[1:]) for name, a in batch(SAMPLES).items()}
    with jax.set_mesh(training.mesh):
        loss, gradients, *_ = jax.jit(training.execute)(params, training.place(rows), 1.0)
        gradients, measured = training.model.take_measurements(gradients)
    losses, of_torch = torch_gradients(family)
    further = [measured["outside"]["losses"][f"mtp{number}_loss"] for number in range(1, MODULES + 1)]
    np.testing.assert_allclose([loss, *further], losses, rtol=1e-6)
    written = tmp_path_factory.mktemp("gradients")
    of_torch.write(written)
    names = {
        name.removeprefix("params/"): array
        for name, array in parameters.to_canonical({"params": gradients}, training.where).items()
    }
    weights = Weights(written, open_tensors(written), family, training.run.model, list(names))
    for name, array in names.items():
        if not weights.pieces[name] or name.endswith("/router/bias"):  # what is measured is no gradient
            continue
        array = np.asarray(array)
        wanted = weights.region(name, tuple(slice(0, size) for size in array.shape), array.shape)
        assert np.abs(wanted).max() > 0, name
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max(), err_msg=name)


def rows_of(step: int):
    """A batch for each step."""
    return {name: np.roll(array, step, 1) if array.ndim == 2 else array for name, array in batch(SAMPLES).items()}


@functools.cache
def torch_steps(train: TrainConfig) -> list[list[float]]:
    """Losses of AdamW in fp64."""
    from tests.interop.mtp_reference import tensors_of

    model, found = reference("deepseek_v3").in_fp64(), []
    optimizer = adamw(model, train)
    for step in range(STEPS):
        losses = model.losses(*tensors_of(rows_of(step)))
        rate = train.learning_rate * min(1.0, (step + 1) / train.warmup_steps)
        take_step(optimizer, model, model.loss(losses), rate, train.clip_norm)
        found.append([loss.item() for loss in losses])
    return found


@pytest.mark.parametrize("layout", ["tensor 2 x pipe 2, interleaved", "zb_v", "ZeRO-3"])
def test_losses_of_20_steps_are_torchs(layout, directory_of):
    directory = directory_of("deepseek_v3")
    settings = {"learning_rate": 1e-3, "warmup_steps": 5, "minimum_learning_rate": 1e-3}
    training = training_of(directory, layout, **settings)
    state = dataclasses.replace(training.init_state(), params=initial_params(str(directory), training))
    found = []
    for step in range(STEPS):
        rows = {name: a.reshape(training.run.microbatches, -1, *a.shape[1:]) for name, a in rows_of(step).items()}
        state, metrics = training.train_step(state, rows)
        found.append([float(metrics["loss"]), *(float(value) for _, value in sorted(metrics["model"].items()))])
    np.testing.assert_allclose(found, torch_steps(training.run.train), rtol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_files_return_bit_for_bit_and_transformers_reads_the_modules(family, directory_of, tmp_path):
    source, run = directory_of(family), tmp_path / "run"
    assert convert("import", source, "--run-dir", run, "--mtp-num-layers", str(MODULES)) == 0
    assert convert("export", run, "--out", tmp_path / "out", "--max-shard-size", "20KB") == 0
    before, after = open_tensors(source), open_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.rows(0, tensor.shape[0]).tobytes() == after[name].rows(0, tensor.shape[0]).tobytes(), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == MODULES
    from transformers.modeling_layers import MtpModel

    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[67]\."]  # transformers' has released models' numbers
    further = MtpModel.from_pretrained(main).eval()
    tokens = torch.from_numpy(batch(SAMPLES)["tokens"].astype(np.int64))
    with torch.no_grad():
        wanted = reference(family).states(tokens)
        places, hidden = torch.arange(1, LENGTH)[None], main.model(tokens).last_hidden_state[:, :-1]
        hidden = further.forward_layer(0, hidden, places, None, input_ids=tokens[:, 1:])
        torch.testing.assert_close(hidden, wanted[1], rtol=0, atol=2e-5)
        hidden = further.forward_layer(1, hidden[:, :-1], places[:, 1:], None, input_ids=tokens[:, 2:])
        torch.testing.assert_close(hidden, wanted[2], rtol=0, atol=2e-5)
    # without the option they are left out, and the files say so
    assert convert("import", source, "--run-dir", tmp_path / "main") == 0
    assert convert("export", tmp_path / "main", "--out", tmp_path / "alone") == 0
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    left = {name for name in before if int((name.split(".") + ["", "", "0"])[2].isdigit() and name.split(".")[2]) < 6}
    assert open_tensors(tmp_path / "alone").keys() == left

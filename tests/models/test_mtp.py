"""Multi-token prediction: what a module reads of a batch, its configuration, its costs, and where it is refused."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.mtp import mtp_block
from megajax.estimate import model_costs
from megajax.estimate.communication import collectives
from megajax.estimate.flops import flops_per_step, forward_flops
from megajax.estimate.gpus import GPUS
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.models.context import model_shapes
from megajax.models.mtp import ahead
from megajax.models.preference import PolicyModel
from megajax.pipeline.program import StepProgram
from megajax.train.step_line import plain_line
from tests import small

LLAMA = dataclasses.replace(small.LLAMA, mtp_num_layers=2)


def test_tokens_further_on():
    """Two samples of five tokens, of which the second has two documents, and one label without weight."""
    batch = {
        "tokens": np.array([[[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]]),
        "labels": np.array([[[2, 3, 4, 5, 6], [12, 13, 14, 15, 16]]]),
        "weights": np.array([[[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]], np.float32),
        "document": np.array([[[7, 7, 7, 7, 7], [3, 3, 3, 9, 9]]]),
    }
    found = jax.jit(lambda batch: ahead(batch, 2))(batch)
    np.testing.assert_array_equal(found["mtp1_tokens"][0], [[2, 3, 4, 5, 0], [12, 13, 0, 15, 0]])
    np.testing.assert_array_equal(found["mtp1_labels"][0], [[3, 4, 5, 6, 0], [13, 14, 0, 16, 0]])
    np.testing.assert_allclose(found["mtp1_weights"][0] * 7 / 9, [[1, 1, 1, 1, 0], [1, 1, 0, 1, 0]], rtol=1e-6)
    np.testing.assert_array_equal(found["mtp2_labels"][0], [[4, 5, 6, 0, 0], [14, 0, 0, 0, 0]])
    np.testing.assert_allclose(found["mtp2_weights"][0] * 4 / 9, [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "gemma3-1b", "gpt2", "qwen3-next-80b-a3b"])
def test_parameters_are_counted(name):
    """In the configuration, in the costs, and in the arrays, but for what is measured and the padding."""
    model = dataclasses.replace(preset(name), mtp_num_layers=1)
    alone = dataclasses.replace(model, mtp_num_layers=0)
    assert model.parameters == model_costs(model).parameters
    shapes = jax.eval_shape(small.build_model(model).init, jax.random.key(0))["shared"]["mtp1"]
    router = shapes["block"]["feedforward"].get("router", {})
    measured = 1 + sum(math.prod(router[one].shape) for one in ("bias", "losses") if one in router)
    assert model.parameters - alone.parameters == sum(leaf.size for leaf in jax.tree.leaves(shapes)) - measured
    assert mtp_block(model).layer_kinds is None


def test_flops_are_counted():
    """Of 8 layers and 2 modules: a fifth of the blocks' more each, projections of 2 h^2, and the logits three times."""
    was, now = (forward_flops(model_costs(model)) for model in (small.LLAMA, LLAMA))
    assert now == {name: count * 10 // 8 for name, count in was.items()} | {
        "logits": 3 * was["logits"],
        "mtp_projection": 2 * 16 * 2 * (2 * 32 * 32),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": 4}, "mtp_num_layers = 2 trains modules, and lora = 4"),
        ({"sequence_length": 2}, "mtp_num_layers = 2 must be below sequence_length = 2"),
        ({"mtp_num_layers": -1}, "mtp_num_layers = -1"),
        ({"mtp_loss_scaling_factor": -0.1}, "mtp_loss_scaling_factor = -0.1"),
    ],
)
def test_configurations_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LLAMA, **fields).validate()


def test_layers_without_mlps_and_bert_are_refused():
    with pytest.raises(ConfigError, match="needs a block with a mixer and an MLP"):
        dataclasses.replace(preset("nemotron-h-8b"), mtp_num_layers=1).validate()
    with pytest.raises(ConfigError, match="BERT"):
        dataclasses.replace(small.BERT, mtp_num_layers=1).validate()


def test_other_losses_are_refused():
    with pytest.raises(ConfigError, match="mtp_num_layers is of GPT's loss, which PolicyModel has not"):
        model_shapes(small.make_run(model=LLAMA), PolicyModel)


def test_a_step_shows_the_losses():
    record = {"step": 3, "loss": 2.5, "mtp1_loss": 3.25, "loss_scale": 1, "skipped_steps": 0, "bad_steps": 0}
    record |= {"compiled": 1, "grad_norm": 1.0, "learning_rate": 1e-3, "step_seconds": 0.1, "batch": 4}
    assert plain_line(record, 10).startswith("step 3/10  loss 2.5000  mtp1 loss 3.2500  ")


def test_memory_communication_and_time_have_the_modules():
    """Their weights are on every stage, and their work, and what it keeps, on the last one."""
    model = preset("llama3.2-1b")
    train = TrainConfig(global_batch_size=32, precision="bf16")
    layout = ParallelConfig(pipe=4, tensor=2, schedule="1f1b", vocab_parallel="tensor", attention="cudnn")
    was, now = (RunConfig(dataclasses.replace(model, mtp_num_layers=count), layout, train) for count in (0, 1))
    before, after = bytes_per_device(was), bytes_per_device(now)
    norms_and_projection = 5 * 2048 + 2 * 2048**2
    held = (now.model.parameters - was.model.parameters - norms_and_projection) // 2 + norms_and_projection
    assert after["weights"] - before["weights"] == 4 * held == after["gradients"] - before["gradients"]
    assert after["stash"] == before["stash"] and after["workspace"] > before["workspace"]
    sent = {one.what for one in collectives(StepProgram.of(now))}
    assert "pairs of matmuls, of modules" in sent and "pairs of matmuls" in sent
    gpu = GPUS["h100-80gb"]
    took = step_time(now, gpu).total - step_time(was, gpu).total
    least = (flops_per_step(now) - flops_per_step(was)) / 2 / 989e12  # on the two devices of a stage
    assert least < took < 3 * least

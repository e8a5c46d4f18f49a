"""Waves, and stages of any number of layers: losses, gradients and checkpoints are those of the unpipelined model."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.checkpoint import layout, reader
from megajax.checkpoint.directory import choose
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.checkpoint.metadata import run_meta
from megajax.config import OutputConfig
from megajax.train import step as step_module
from tests import small
from tests.train import runs

MODEL = dataclasses.replace(small.MODEL, layers=6)
KINDS = dataclasses.replace(small.SPARSE, layers=6, dense_layers=1, moe_layer_freq="2", dense_feedforward=12)
# model, mesh (data, pipe, tensor), schedule, chunks, microbatches, options, the program of GPUs with jax 0.12
CASES = [
    (MODEL, (1, 2, 2), "hanayo", 2, 4, {}, False),
    (MODEL, (2, 2, 1), "hanayo", 4, 4, {"zero": 3, "pipeline_layout": "E|t|tt|t|t||t|L"}, False),
    (MODEL, (1, 2, 1), "hanayo", 2, 4, {"vocab_parallel": "tensor"}, True),
    (MODEL, (1, 4, 2), "1f1b", 1, 4, {"vocab_parallel": "tensor", "pipeline_layout": "E|t*4|tt|L"}, False),
    (MODEL, (1, 4, 1), "1f1b", 1, 4, {"vocab_parallel": "tensor", "pipeline_layout": "E|t*4|tt|L"}, True),
    (MODEL, (2, 2, 2), "zb_v", 2, 4, {"zero": 3, "pipeline_layout": "0,3,3,0"}, False),
    (MODEL, (2, 2, 2), "interleaved_1f1b", 2, 4, {"zero": 1, "pipeline_layout": "4,0,1,1"}, True),
    (MODEL, (1, 2, 2), "dualpipe_v", 2, 4, {"pipeline_layout": "0,2,3,1"}, True),
    (MODEL, (1, 4, 1), "gpipe", 1, 4, {"recompute": "full", "recompute_blocks": 2, "pipeline_layout": "0,4,2,0"}, False),
    (MODEL, (1, 2, 1), "interleaved_1f1b", 1, 4, {"context": 2, "pipeline_layout": "4,2"}, False),
    (MODEL, (1, 4, 1), "eager_1f1b", 1, 4, {"offload_activations": True, "pipeline_layout": "0,3,3,0"}, False),
    (KINDS, (2, 2, 1), "zb_v", 2, 4, {"expert": 2, "pipeline_layout": "0,4,2,0"}, False),
]  # fmt: skip


def training_of(case, monkeypatch=None):
    model, mesh, schedule, chunks, microbatches, options, in_place = case
    if in_place:
        monkeypatch.setattr(step_module, "updates_in_place", lambda device: True)
    run = small.make_run(mesh, schedule=schedule, chunks=chunks, microbatches=microbatches, model=model, **options)
    return small.training_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_equal_the_unpipelined_model(case, monkeypatch):
    training, model = training_of(case, monkeypatch), case[0]
    params, batch = small.place(training, small.busy_params(model)), small.make_batch(training.run)
    loss, gradients = training.loss_and_gradients(params, batch)
    want_loss, want = small.expected(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)
    np.testing.assert_allclose(training.evaluate(params, batch), want_loss, rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_other_placements_with_equal_bits(tmp_path):
    one, other = training_of(CASES[1]), training_of(CASES[3])
    state, _ = one.train_step(one.init_state(), small.make_batch(one.run))
    meta = run_meta(one.run, runs.Letters())
    checkpoints = Checkpoints(tmp_path, OutputConfig(), meta)
    checkpoints.save(one.state_layout, state, Progress(step=1, samples=16))
    checkpoints.close()
    moved, _, _ = reader.load(choose(tmp_path, "auto")[0], other.run, other.state_layout, meta["tokenizer"])
    want, got = layout.to_canonical(state, one.where), layout.to_canonical(moved, other.where)
    assert want["params/blocks/attention/qkv/kernel"].shape[0] == 6 and want.keys() == got.keys()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), want, got)

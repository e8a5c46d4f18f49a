"""Profiles for XLA's scheduler: which runs have one, steps that are compiled twice, and that XLA reads the profiles."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate import hlo
from megajax.estimate.gpus import find_gpu
from megajax.models.gpt import GPT
from megajax.pipeline.program import StepProgram
from megajax.plan.compiler import compile_for
from megajax.runtime import compat
from megajax.runtime.compat import jaxlib_version
from megajax.train import latency_estimates
from tests import small


def test_each_set_of_shapes_is_compiled_twice_and_computes_the_same():
    seen = []
    program = latency_estimates.ProfiledJit(jax.jit(lambda x, y: x @ y["w"]), lambda text: seen.append(text) or b"")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for rows in (2, 1, 2):
        np.testing.assert_allclose(program(x[:rows], {"w": jnp.ones((3, 4))}), x[:rows] @ np.ones((3, 4)))
    assert len(seen) == 2 and all("HloModule" in text for text in seen)
    program.lower(jax.ShapeDtypeStruct((5, 3), np.float32), {"w": jnp.ones((3, 4))}).compile()
    assert len(seen) == 3


def test_cpu_devices_are_compiled_for_once():
    run = small.make_run(latency_estimates="roofline")
    step = jax.jit(lambda x: x)
    assert latency_estimates.with_latencies(step, StepProgram.of(run), jax.devices("cpu")[0], GPT(run.model)) is step


@pytest.mark.parametrize("estimates", ["model", "roofline"])  # of roofline the first compilation
def test_blocks_with_collectives_have_a_profile_where_matmuls_work_in_place(estimates, monkeypatch):
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    run = small.make_run((1, 1, 2), latency_estimates=estimates)
    for version, in_place in (((0, 12, 0, 1), True), ((0, 10, 2), False)):
        monkeypatch.setattr(compat, "jaxlib_version", lambda version=version: version)
        assert bool(latency_estimates.latency_options(StepProgram.of(run), device, GPT(run.model))) == in_place
        assert (
            latency_estimates.latency_options(StepProgram.of(small.make_run((1, 2, 1))), device, GPT(run.model)) == {}
        )
    assert latency_estimates.latency_options(StepProgram.of(run), jax.devices("cpu")[0], GPT(run.model)) == {}


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
MIXTRAL = {"data": 8, "expert": 8, "expert_dispatch": "bucketed"}
AGAIN = MIXTRAL | {"recompute": "full"}


@pytest.mark.parametrize(
    ("gpu", "model", "tensor", "estimates", "known", "twice", "more"),
    [
        (H100, "gpt3-13b", 8, "model", True, False, {}),
        (H100, "gpt3-13b", 8, "roofline", True, True, {}),
        (H100, "gpt3-13b", 8, "xla", False, False, {}),
        (H100, "gpt3-175b", 16, "model", False, True, {}),  # two hosts
        (H100, "gpt3-175b", 16, "xla", False, False, {}),
        (A100, "gpt3-13b", 8, "model", False, False, {}),
        (A100, "gpt3-175b", 16, "model", False, True, {}),
        (H100, "mixtral-8x7b", 2, "model", True, False, {}),
        (H100, "mixtral-8x7b", 1, "model", True, False, MIXTRAL),
        (H100, "mixtral-8x7b", 1, "roofline", True, True, MIXTRAL),
        (H100, "mixtral-8x7b", 1, "model", True, True, AGAIN),
        (H100, "mixtral-8x7b", 1, "xla", True, False, AGAIN),
        (H100, "mixtral-8x7b", 1, "model", True, False, AGAIN | {"expert_dispatch": "gather"}),
        (H100, "mixtral-8x7b", 1, "model", True, False, AGAIN | {"zero": 3}),
        ("cpu", "gpt3-13b", 8, "roofline", False, False, {}),
    ],
)
def test_which_steps_have_which_times(gpu, model, tensor, estimates, known, twice, more, monkeypatch):
    """XLA knows the times of matmuls, with which merged ticks wait for the stash; and the step is compiled twice."""
    monkeypatch.setattr(compat, "jaxlib_version", lambda: (0, 12, 0, 1))
    device = types.SimpleNamespace(platform="cpu" if gpu == "cpu" else "gpu", device_kind=gpu)
    layout = ParallelConfig(tensor=tensor, pipe=2, schedule="eager_1f1b", latency_estimates=estimates, **more)
    run = RunConfig(preset(model), layout, TrainConfig(global_batch_size=16))
    arguments, step = (StepProgram.of(run), device, GPT(run.model)), jax.jit(lambda x: x)
    assert latency_estimates.knows_matmuls(*arguments) == known
    assert (latency_estimates.with_latencies(step, *arguments) is not step) == twice
    options = latency_estimates.compiler_options(*arguments)
    if "expert" in more:
        assert options["xla_gpu_experimental_parallel_collective_overlap_limit"] == (1 if twice else 4)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.skipif(jaxlib_version() < (0, 12), reason="needs jaxlib 0.12")
def test_xla_schedules_with_the_profiles():
    """With each a step has the same matmuls, and more of its collectives overlap one."""
    parallel = ParallelConfig(tensor=4, pipe=2, schedule="eager_1f1b", attention="xla")
    model = dataclasses.replace(preset("gpt3-13b"), layers=4)
    run = RunConfig(model, parallel, TrainConfig(global_batch_size=16))
    matmuls, hidden = {}, {}
    for name in ("xla", "model", "roofline"):
        options = dataclasses.replace(parallel, latency_estimates=name)
        text = compile_for(dataclasses.replace(run, parallel=options), find_gpu("h100-80gb"))["hlo"]
        called = (line.split(" = ")[1] for line in text.splitlines() if "__cublas" in line)
        matmuls[name] = sorted(line.split(" custom-call(")[0] for line in called)  # types of their results
        hidden[name] = sum(
            one.times for one in hlo.collectives(text) if one.in_loop and one.asynchronous and one.behind
        )
    for name in ("model", "roofline"):
        # by its own times, with which results do not wait for the stash, XLA hides 296 of 560; with these more than 340
        assert matmuls[name] == matmuls["xla"] and hidden[name] > 1.15 * hidden["xla"]

"""Times for XLA's latency hiding scheduler, by the names of instructions."""

import dataclasses
import re

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate import model_costs
from megajax.estimate.gpus import find_gpu
from megajax.estimate.latency_profile import profile_of_run
from megajax.estimate.merged_ticks import has_latencies

GPU = find_gpu("h100-80gb")


def profile(run: RunConfig, gpu=GPU) -> bytes:
    return profile_of_run(run, gpu, model_costs(run.model))


def applies(run: RunConfig, gpu=GPU) -> bool:
    return has_latencies(run, gpu, model_costs(run.model))


def times(profile: bytes) -> dict[str, float]:
    """Microseconds by the names of a ProfiledInstructionsProto in text."""
    return {
        name: float(cost) for name, cost in re.findall(r'costs \{ name: "(\S+)" cost_us: (\S+) \}', profile.decode())
    }


def run_of(model: str, precision: str = "bf16", **parallel) -> RunConfig:
    options = ParallelConfig(tensor=8, pipe=8, chunks=3, schedule="interleaved_1f1b", **parallel)
    return RunConfig(preset(model), options, TrainConfig(global_batch_size=64, precision=precision))


def test_matmuls_in_place_take_the_mean_of_a_blocks():
    """GPT-3 175B, h = 12288, on eight tensor ranks: 12 h^2 / 8 weights in four matmuls, 2,048 tokens, 71% of 989 TFLOP/s.

    And their results, (3 + 4) h / 8 and twice h elements of a token, written at 3.35 TB/s.
    """
    found = times(profile(run_of("gpt3-175b")))
    flops = 2 * 2048 * 12 * 12288**2 / 8 / 4
    written = 2 * 2048 * (7 / 8 + 2) * 12288 / 4
    seconds = flops / (0.714 * 989.4e12) + written / 3.352e12
    assert found["dynamic_slice_fusion"] == pytest.approx(1e6 * seconds, rel=0.001)
    assert found["dynamic_slice_fusion.215"] == found["dynamic_slice_fusion"]
    twice = times(profile(run_of("gpt3-175b", microbatch_size=2)))
    assert twice["dynamic_slice_fusion"] == pytest.approx(2 * found["dynamic_slice_fusion"], rel=0.05)


def test_slices_take_a_kernels_gap():
    """And nothing else has a time: XLA's own estimates remain."""
    found = times(profile(run_of("llama2-7b")))
    assert found["fusion-start"] == found["fusion-start.233"] == 2.0
    assert {name.partition(".")[0] for name in found} == {"dynamic_slice_fusion", "fusion-start"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"latency_estimates": "roofline"}, True),
        ({"latency_estimates": "xla"}, False),
        ({"tensor": 1}, False),
        ({"tensor": 16}, False),  # two hosts
        ({"axis_order": ("tensor", "data", "pipe")}, False),  # eight hosts
        ({"data": 2, "zero": 1}, True),
        ({"data": 2, "zero": 3}, False),
        ({"tensor_overlap": "ring"}, False),
    ],
)
def test_which_runs_have_a_profile(options, expected):
    run = run_of("gpt3-175b")
    assert applies(dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **options))) == expected


def test_a100s_and_experts_have_no_profile():
    assert not applies(run_of("gpt3-175b"), find_gpu("a100-80gb"))
    assert not applies(run_of("mixtral-8x7b"))


def test_without_a_published_rate_there_is_no_profile():
    assert profile(run_of("gpt3-13b"), dataclasses.replace(GPU, device_kind="a new one")) == b""

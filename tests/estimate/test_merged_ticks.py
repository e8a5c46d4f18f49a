"""Exposed collectives of merged ticks without a pipeline, by hand."""

import dataclasses

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu
from megajax.estimate.merged_ticks import exposed_of_one_stage, exposed_parts
from megajax.estimate.program_blocks import Blocks
from megajax.runtime.xla_flags import collectives_in_flight

H100 = find_gpu("h100-80gb")


def blocks(name: str, tensor: int, **model) -> Blocks:
    layout = ParallelConfig(tensor=tensor, data=8 // tensor, attention="cudnn")
    run = RunConfig(dataclasses.replace(preset(name), **model), layout, TrainConfig(global_batch_size=64))
    return Blocks(run, H100)


def test_a_collective_behind_another_waits_for_it():
    """With four tensor ranks two are behind one matmul: what two of them take longer than it is exposed."""
    of = blocks("llama3-8b", 4)
    assert collectives_in_flight(of.parallel) > 1
    one = of._collective
    gap, memory = of.rates.gap, of.rates.memory
    rate = lambda rows, inner, columns, size: (  # noqa: E731
        2 * rows * inner * columns / of.rates.matmul + size * rows * columns / of.rates.bandwidth
    )
    # Of 8,192 tokens: attention's output, 1,024 of 4,096 rows; the fp32 gradient of queries, keys and values.
    output, qkv = rate(8192, 1024, 4096, 2), rate(4096, 8192, (32 + 2 * 8) * 128 // 4, 4)
    residual = 2 * 2 * 8192 // 4 * 4096 / memory
    behind = one - output - residual - 5 * gap, 2 * one - qkv - 3 * gap, one / 32
    assert all(part > 0 for part in behind)
    assert of.merged.tensor == pytest.approx(sum(behind))


def test_with_two_ranks_each_collective_has_a_matmul_of_its_own():
    of = blocks("llama3-8b", 2)
    assert of.merged.tensor == pytest.approx(of._collective / 32)  # the first of a pass


def test_where_matmuls_are_shorter_three_collectives_are_behind_three_of_them():
    of = blocks("llama2-7b", 8)
    outputs = [of._product(one, "outputs") for one in of._products]
    assert sum(outputs) < 4 * of._collective  # on average
    gradients = [of._matmuls([of._products[place]], "weights").total for place in (0, 1, 2)]
    output = outputs[1] + 5 * of.rates.gap + 2 * of.residual / of.rates.memory
    last = 3 * of._collective - sum(gradients) - 3 * of.rates.gap
    assert of.merged.tensor == pytest.approx(of._collective * (1 + 1 / 32) - output + last)


def test_over_hosts_collectives_of_a_gated_mlp_have_short_kernels_beside_them():
    """The first beside the activation, the second behind the queries' matmul, two behind the last gradient of a weight."""
    layout = ParallelConfig(tensor=16, pipe=2, schedule="eager_1f1b", attention="cudnn")
    of = Blocks(RunConfig(preset("llama3.1-405b"), layout, TrainConfig(global_batch_size=64)), H100)
    one, gap, memory = of._collective, of.rates.gap, of.rates.memory
    widest = 8192 * 16384 * 2  # the results of attention and MLP; gate and value are 2 * 53248 / 16 wide
    qkv, down = of._matmuls([of._products[0]]).total, of._matmuls([of._products[-1]], "weights").total
    sums = 2 * gap + 2 * of.residual / memory
    beside = 1.5 * widest / memory + gap, qkv + sums, down + sums
    parts = [max(0.0, count * one - time) for count, time in zip((1, 1, 2), beside, strict=True)]
    assert sum(parts) < 2.5 * one
    assert of.merged.tensor == pytest.approx(sum(parts))


def test_others_have_their_lists_without_the_first_gather():
    for gated, full, latencies in ((False, False, True), (True, True, True), (True, False, False)):
        listed = exposed_parts(gated, full, latencies)
        assert exposed_of_one_stage(gated, full, latencies, several=True, short=False) == listed[1:]

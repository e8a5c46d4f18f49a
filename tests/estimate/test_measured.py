"""Measured rates: fits worked by hand, rates between sizes, and what they change in the estimates."""

import dataclasses
import math

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate import model_costs
from megajax.estimate.expert_dispatch import dispatch_times
from megajax.estimate.gpus import find_gpu
from megajax.estimate.measured import Link, Links, Measured, fit_link, rate_at, rates_by_size
from megajax.estimate.program_time import Program
from megajax.estimate.rates import NVLINK_HOP, START, rates_of
from megajax.estimate.roofline import EXPOSED, account
from megajax.estimate.step_time import step_time

H100 = find_gpu("h100-80gb")


def with_rates(**fields):
    return dataclasses.replace(H100, measured=Measured(**fields))


def test_a_fit_of_exact_times():
    """10 us and 2 GB/s."""
    latency, bandwidth = fit_link([(0, 10e-6), (2e3, 11e-6), (2e6, 1010e-6)])
    assert latency == pytest.approx(10e-6) and bandwidth == pytest.approx(2e9)


def test_a_fit_of_noisy_times_by_hand():
    """Times 1 and 2 of nothing, 2 of two bytes: with u = 1, 1/2, 1/2 and v = 0, 0, 1 the normal equations are

    3/2 a + 1/2 b = 2 and 1/2 a + b = 1, so that a = 6/5 and b = 2/5.
    """
    latency, bandwidth = fit_link([(0, 1), (0, 2), (2, 2)])
    assert latency == pytest.approx(1.2) and bandwidth == pytest.approx(2.5)


@pytest.mark.parametrize("points", [[(1, 0.5), (2, 2)], [(1, 2), (2, 1)]])
def test_a_latency_below_zero_and_times_that_fall_are_a_bandwidth_alone(points):
    """b = sum(sent / seconds) / sum((sent / seconds)^2) is 3/5 for both: 2 and 1 over 4 and 1, 1/2 and 2 over 1/4 and 4."""
    latency, bandwidth = fit_link(points)
    ratios = [sent / seconds for sent, seconds in points]
    assert latency == 0 and bandwidth == pytest.approx(sum(x * x for x in ratios) / sum(ratios)) and bandwidth > 0


def test_one_size_is_no_fit():
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_link([(8, 1.0), (8, 2.0)])


def test_rates_between_sizes():
    """A geometric mean of two sizes has the arithmetic mean of their rates; beyond the ends the ends' rates hold."""
    rates = rates_by_size([(1e12, 600.0), (1e9, 50.0), (1e9, 150.0), (1e10, 300.0)])
    assert rates == ((1e9, pytest.approx(75.0)), (1e10, 300.0), (1e12, 600.0))  # 2 / (1/50 + 1/150)
    assert rate_at(rates, 1e11) == pytest.approx(450.0) and rate_at(rates, 1e10) == 300.0
    assert rate_at(rates, 1.0) == pytest.approx(75.0) and rate_at(rates, 1e15) == 600.0
    assert rate_at(rates, 10 ** (9 + 1 / 3)) == pytest.approx(75 + 225 / 3)


def test_the_planners_block_by_hand():
    """GPT-3 6.7B's block, 2,048 tokens and 4,096 wide, on one GPU: products of 12 h^2 weights, attention of 32 heads."""
    model = dataclasses.replace(preset("gpt3-6.7b"), layers=1)
    run = RunConfig(model, ParallelConfig(attention="cudnn"), TrainConfig(global_batch_size=1, precision="bf16"))
    gpu = with_rates(matmuls=((1.0, 1e14),), memory=1e13, attention=(5e13, 2.5e13))
    program, h, tokens = Program(run, gpu), 4096, 2048
    ((block, _),) = program.kinds
    assert block.forward.matmul == pytest.approx(2 * tokens * 12 * h * h / 1e14)
    scores = 32 * tokens * tokens / 2
    assert block.forward.attention == pytest.approx(4 * scores * 128 / 5e13)
    assert block.backward.attention == pytest.approx(2.5 * 4 * scores * 128 / 2.5e13)
    # twice the rates of matmuls and copies, on a GPU without collectives: less time by half of theirs
    faster = with_rates(matmuls=((1.0, 2e14),), memory=2e13, attention=(5e13, 2.5e13))
    parts, less = program.parts, step_time(run, gpu).total - step_time(run, faster).total
    assert less == pytest.approx((parts.matmul + parts.traffic) / 2)
    # another precision's matmuls were not measured
    other = dataclasses.replace(gpu, measured=gpu.measured._replace(precision="fp16"))
    assert Program(run, other).blocks.matmul == Program(run, H100).blocks.matmul
    assert Program(run, other).rates.memory == 1e13


def test_small_matmuls_are_slower():
    run = RunConfig(preset("gpt3-125m"), ParallelConfig(), TrainConfig(global_batch_size=1, precision="bf16"))
    sizes = ((1e9, 1e14), (1e12, 4e14))
    seconds = Program(run, with_rates(matmuls=sizes, memory=1e15)).matmul(1000, 1000, 1000).matmul
    rate = 1e14 + 3e14 * math.log10(2) / 3  # 2e9 FLOPs
    assert seconds == pytest.approx(2e9 / rate)


LINKS = {
    "host": Links(Link(1e-5, 1e9), Link(3e-5, 5e8), None, Link(4e-5, 2e9)),
    "network": Links(Link(1e-4, 1e8), Link(2e-4, 2e8), None, Link(3e-4, 1e8)),
}


def test_measured_links_by_hand():
    """A gather and a scatter of 8 MB over eight GPUs each send 7 MB; over 16 in two hosts 7.5 MB through eight adapters."""
    gpu = with_rates(**LINKS)
    run = RunConfig(
        preset("gpt3-125m"),
        ParallelConfig(data=16, tensor=4),
        TrainConfig(global_batch_size=16, precision="bf16"),
    )
    program = Program(run, gpu)
    near = ((1e-5 + 3e6 / 1e9) + (3e-5 + 3e6 / 5e8)) / 2
    assert program.ring(4e6, 4, "tensor") == pytest.approx(near)
    # neighbours on the data axis are four places apart: two of a group in each host, with two adapters
    far = ((1e-4 + 15e6 / 2e8) + (2e-4 + 15e6 / 4e8)) / 2
    assert program.ring(16e6, 16, "data") == pytest.approx(far)
    assert program.send(1e6, "tensor", 4) == pytest.approx(4e-5 + 1e6 / 2e9)
    assert program.send(1e6, "data", 16) == pytest.approx(3e-4 + 1e6 / 1e8)


def test_experts_take_measured_rates_too():
    """Tokens of 4,096 x 4,096 in 16 bits to seven other replicas of a host, and results back by the gathers' bandwidth."""
    gpu = with_rates(memory=1e12, **LINKS)
    parallel = ParallelConfig(data=8, expert=8, expert_dispatch="gather")
    model = model_costs(dataclasses.replace(preset("mixtral-8x7b"), sequence_length=4096))
    there, back = dispatch_times(model, parallel, rates_of(gpu, "bf16"), 2)
    sent = 7 * 2 * 4096 * 4096
    assert there == pytest.approx(1e-5 + sent / 1e9) and back == pytest.approx(sent / 1e9, rel=1e-4)


GATHER = """HloModule step, is_scheduled=true

ENTRY %step (x: bf16[1000]) -> bf16[2000] {
  %x = bf16[1000]{0} parameter(0)
  ROOT %y = bf16[2000]{0} KIND(%x), replica_groups={{0,PEER}}, dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("kind", "peer", "seconds"),
    [
        ("all-gather", 1, 1e-5 + 2000 / 1e9),
        ("all-gather", 8, 1e-4 + 2000 / 1e8),
        ("all-to-all", 1, 2000 / 1e9 + START + NVLINK_HOP),  # not measured: the gather's bandwidth
    ],
)
def test_the_account_takes_each_kinds_own_link(kind, peer, seconds):
    """The pair of GPUs sends 2,000 bytes of 4,000."""
    text = GATHER.replace("KIND", kind).replace("PEER", str(peer))
    found = account(text, {}, rates_of(with_rates(**LINKS), "bf16"))
    assert found.seconds[EXPOSED] == pytest.approx(seconds)

"""The time model against the schedules' simulation, and numbers worked by hand."""

import dataclasses
import math
from collections import Counter

import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu
from megajax.estimate.hlo import merged_passes
from megajax.estimate.measured import Link
from megajax.estimate.program_account import operation_costs
from megajax.estimate.rates import JITTER, Rates, rates_of, spread
from megajax.estimate.roofline import Account
from megajax.estimate.step_time import step_time
from megajax.pipeline.program import StepProgram
from megajax.schedules.registry import SPECS, find, make_schedule
from megajax.schedules.simulate import Costs, simulate_event, simulate_lockstep

A100, H100 = find_gpu("a100-80gb"), find_gpu("h100-80gb")


def bubble_of(name, pipe, microbatches, chunks, costs, lockstep):
    parallel = ParallelConfig(pipe=pipe, chunks=chunks, schedule=name)
    run = RunConfig(preset("tiny"), parallel, TrainConfig(global_batch_size=microbatches))
    return StepProgram.of(run).bubble(costs, lockstep)


CLOSED_FORMS = [
    (name, chunks)
    for name, spec in SPECS.items()
    if spec.bubble and spec.drains
    for chunks in {"one": (1,), "two": (2,), "even": (2, 4), "any": (2, 3)}[spec.chunks]
]


@pytest.mark.parametrize(("schedule", "chunks"), CLOSED_FORMS)
@pytest.mark.parametrize(
    "costs", [Costs(1, 2, 1, 1), Costs(1, 3, 2, 1), Costs(1, 2.2, 1.2, 1), Costs(1, 2.7, 2.5, 0.2)]
)
def test_lockstep_bubbles_by_closed_form_are_those_of_the_simulation(schedule, chunks, costs):
    for pipe, microbatches in ((2, 4), (4, 4), (4, 8), (4, 16), (8, 24)):
        made = make_schedule(schedule, stages=pipe, microbatches=microbatches, chunks=chunks)
        simulated = simulate_lockstep(made, costs).makespan
        predicted = microbatches * chunks * (costs.forward + costs.backward)
        predicted += bubble_of(schedule, pipe, microbatches, chunks, costs, True)
        # the ticks of zb_v's fill and drain with few ranks, or few microbatches, are counted within one or two
        assert predicted == pytest.approx(simulated, rel=0.05 if schedule == "zb_v" else 1e-6)


@pytest.mark.parametrize(("schedule", "chunks"), [kind for kind in CLOSED_FORMS if not SPECS[kind[0]].split])
def test_free_running_bubbles_by_closed_form_are_those_of_the_simulation(schedule, chunks):
    costs = Costs(1, 3, 2, 1)
    simulated = simulate_event(make_schedule(schedule, stages=4, microbatches=12, chunks=chunks), costs)
    assert bubble_of(schedule, 4, 12, chunks, costs, False) == pytest.approx(simulated.makespan - simulated.ideal)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_bubble_without_closed_form_is_simulated(lockstep):
    """ZB-H2 (2401.10241): (p - 1) tF, with the drain included."""
    assert find("zb_h2").bubble is None
    assert bubble_of("zb_h2", 4, 8, 1, Costs(1, 2, 1, 1), lockstep) == pytest.approx(3)


@pytest.mark.parametrize(
    ("parallel", "alone", "scopes"),
    [
        (ParallelConfig(pipe=2, chunks=2, schedule="zb_v"), 16, {"F": 16, "I": 48, "W": 8, "ends": 5}),
        (ParallelConfig(pipe=2, schedule="1f1b"), 8, {"F": 8, "B": 28, "ends": 5}),
        # of 8 forwards 7 - 2 run in merged ticks, with a backward
        (ParallelConfig(pipe=2, tensor=2), 3, {"F": 3, "B": 9, "FB": 25}),
    ],
)
def test_the_bubble_of_a_compiled_program_is_of_its_own_operations(parallel, alone, scopes):
    run = RunConfig(preset("tiny"), parallel, TrainConfig(global_batch_size=8))
    found, program = Account(scopes=Counter(scopes)), StepProgram.of(run)
    assert program.passes - sum(merged_passes(program)) == alone
    costs = operation_costs(program, found)
    whole = scopes.get("B", scopes.get("I", 0) + scopes.get("W", 0)) / alone
    assert (costs.forward, costs.backward) == (1, whole)
    if parallel.schedule == "zb_v":
        assert (costs.input, costs.weight) == (3, 0.5)
    # where no operation runs alone, those of the step's time, the backward twice the forward
    found.seconds["matmul"] = 24.0
    found.scopes.clear()
    assert operation_costs(program, found) == Costs().scaled(24 / program.passes / 3)


def test_a_pipeline_that_never_drains_has_no_bubble():
    assert bubble_of("pipedream_2bw", 4, 8, 1, Costs(), True) == 0


def test_links_by_hand():
    """An A100 host has NVLink of 300 GB/s, of which collectives reach 77%, and 33.6% of eight adapters of 25 GB/s."""
    rates = rates_of(A100, "bf16")
    seconds = lambda *args: rates.collective("all-gather", *args)  # noqa: E731
    assert seconds(7e9, 8, 8) == pytest.approx(7e9 / (0.77 * 300e9) + 8.4e-6 + 7 * 3.4e-6)
    # sixteen devices over two hosts have eight adapters each: still slower than NVLink
    assert seconds(15e9, 16, 8) == pytest.approx(15e9 / (8 * 0.336 * 25e9) + 8.4e-6 + 14 * 3.4e-6 + 14e-6)
    # sixteen hosts with one each: a tree of four hops; an all-reduce goes up and down
    assert seconds(15e9, 16, 1) == pytest.approx(15e9 / (0.336 * 25e9) + 8.4e-6 + 4 * 14e-6)
    assert rates.collective("all-reduce", 0, 16, 1) == pytest.approx(8.4e-6 + 2 * 4 * 14e-6)
    assert rates.collective("all-reduce", 0, 8, 8) == pytest.approx(8.4e-6 + 2 * 7 * 3.4e-6)
    # a stream to another host, and within one
    assert rates.collective("collective-permute", 1e9, 2, 1) == pytest.approx(1e9 / (0.8 * 25e9) + 8.4e-6 + 14e-6)
    assert rates.collective("collective-permute", 1e9, 2, 2) == pytest.approx(1e9 / (0.77 * 300e9) + 8.4e-6 + 3.4e-6)


def test_a_product_writes_its_result_after_its_arithmetic():
    """By hand: 1e9 FLOPs at 1e9 a second, twice as fast in 8 bits, and 2e6 bytes at 1e6; no less than all of the traffic."""
    rates = Rates(matmul=1e9, attention=1.0, memory=1e6, host=1.0, network=1.0, host_size=8, bandwidth=1e6)
    assert rates.product(1e9, 2e6, 2e6) == 3 and rates.product(1e9, 2e6, 2e6, faster=2) == 2.5
    assert rates.product(1e9, 2e6, 5e6) == 5
    assert dataclasses.replace(rates, matmuls=((1.0, 5e8),)).product(1e9, 2e6, 1e6) == 2  # as measured, whole


def test_attention_is_slower_for_few_keys_and_small_heads():
    rates = Rates(1.0, 8.0, 1.0, 1.0, 1.0, 8, attention_keys=500, attention_score=64)
    assert rates.attention_rate(False) == 8 and rates.attention_rate(True, 500, 64) == 2
    measured = dataclasses.replace(rates, attention_backward=3.0)
    assert measured.attention_rate(True, 500, 64) == 3


@pytest.mark.parametrize(
    ("tokens", "width", "teraflops"),
    [(512, 64, 88), (2048, 64, 140), (16384, 64, 171), (512, 128, 99), (2048, 128, 155), (16384, 128, 189)],
)
def test_an_a100s_attention_is_that_of_2307_08691(tokens, width, teraflops):
    """Figure 4: causal, forward and backward, of the scores that are computed."""
    found = rates_of(A100, "bf16").attention_rate(True, tokens / 2, width)
    assert found == pytest.approx(teraflops * 1e12, rel=0.02)


def test_measured_links_replace_the_formulas():
    rates = Rates(1.0, 1.0, 1.0, 1e9, 1e8, 8, links={"all-gather": (Link(1e-5, 2e9), Link(1e-4, 1e9))})
    assert rates.collective("all-gather", 7e6, 8, 8) == pytest.approx(1e-5 + 7e6 / 2e9)
    assert rates.collective("all-gather", 15e6, 16, 8) == pytest.approx(
        1e-4 + 15e6 / 2e9
    )  # NVLink is slower than adapters
    assert rates.collective("reduce-scatter", 7e6, 8, 8) == pytest.approx(7e6 / 1e9 + 8.4e-6 + 7 * 3.4e-6)


def test_spread_follows_the_axis_order():
    parallel = ParallelConfig(data=2, pipe=4, tensor=8)
    assert [spread(parallel, axis) for axis in ("data", "pipe", "tensor")] == [32, 8, 1]
    turned = ParallelConfig(data=2, pipe=4, tensor=8, axis_order=("pipe", "data", "tensor"))
    assert [spread(turned, axis) for axis in ("data", "pipe", "tensor")] == [8, 16, 1]


def test_the_parts_sum_to_the_step_time_and_zero_1_moves_less_than_it_updates():
    run = RunConfig(
        preset("gpt3-13b"), ParallelConfig(data=8, pipe=2, tensor=4, chunks=2), TrainConfig(global_batch_size=64)
    )
    sharded = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, zero=1))
    plain, split = (step_time(one, H100) for one in (run, sharded))
    parts = ("blocks", "head", "tensor", "bubble", "sends", "data", "optimizer", "ends", "gaps", "waits")
    own = sum(getattr(plain, part) for part in parts)
    assert plain.total == pytest.approx(own + plain.slowest)
    assert plain.slowest == pytest.approx(JITTER["h100"] * math.sqrt(2 * math.log(64)) * own)
    # eight replicas share the cast, the norm and AdamW, and each sets its sums and its stash to zero
    assert plain.optimizer / 8 < split.optimizer < plain.optimizer / 2
    assert split.data < plain.data


def test_backwards_wait_for_offloaded_activations():
    parallel = ParallelConfig(pipe=2, chunks=1, schedule="1f1b", recompute="full", offload_activations=True)
    run = RunConfig(preset("gpt3-1.3b"), parallel, TrainConfig(global_batch_size=4))
    # four microbatches of the inputs of twelve blocks, 2,048 tokens of 2,048 in 16 bit, at 32 GB/s; sends are hidden
    assert step_time(run, A100).offload == pytest.approx(4 * 12 * 2048 * 2048 * 2 / 32e9)


def test_unknown_gpus_and_precisions_are_refused():
    with pytest.raises(ConfigError, match="did you mean a100-80gb"):
        find_gpu("a100-80g")
    assert A100.peak("bf16") == 312e12 and find_gpu("h100-80gb").peak("bf16") == 989.4e12

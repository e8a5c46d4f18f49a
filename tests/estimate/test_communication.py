"""What a step sends by the formulas: worked by hand, and compared with compiled programs."""

import dataclasses

import pytest

from benchmarks import communication
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate import hlo
from megajax.estimate.communication import collectives, expected
from megajax.pipeline.program import StepProgram
from megajax.runtime.mesh import make_mesh


def bytes_by_axis(model, m, **parallel) -> dict[str, list[float]]:
    layout = ParallelConfig(**parallel)
    run = RunConfig(model, layout, TrainConfig(global_batch_size=m * layout.data))
    run.validate()
    lines: dict[str, list[float]] = {}
    for line in expected(StepProgram.of(run)):
        lines.setdefault(line.axis, []).append(line.bytes)
    return lines


def test_communication_of_gpt3_by_hand():
    """175B, t = 8, p = 8, v = 3, b = 1, m = 64: 2104.04473 section 3.2's 8 bsh (t-1)/t, twelve layers a rank."""
    lines = bytes_by_axis(preset("gpt3-175b"), 64, tensor=8, pipe=8, chunks=3)
    layer_and_microbatch = 2048 * 12288 * 2 * 7 / 8
    pairs, again, ends = (count * 64 * layer_and_microbatch for count in (8 * 12, 2 * 12, 4))
    assert lines["tensor"] == [pairs, again, ends]
    activation = 2048 * 12288 / 8  # elements
    ends = 2 * 7 / 8 * 64 * activation * 4 * 2  # four sums of 16-bit elements
    positions_and_norm = 2 * 7 / 8 * 4 * (2048 + 2) * 12288
    assert lines["pipe"] == [2 * 3 * 64 * activation * 2, ends, positions_and_norm]
    assert "data" not in lines
    sends, once = bytes_by_axis(preset("gpt3-175b"), 64, tensor=8, pipe=8, chunks=3, vocab_parallel="tensor")["pipe"]
    assert sends == lines["pipe"][0]
    assert once == 2 * 7 / 8 * 4 * (51200 / 8 + 2048 + 2) * 12288


def test_degrees_recompute_and_gradients():
    model = ModelConfig(layers=4, hidden=64, heads=4, vocabulary=128, sequence_length=32)
    block = (12 * 64**2 + 7 * 64) // 2 + 6 * 64  # of a device: norms, and biases added after the sums, are not split
    outside = 128 * 64 // 2 + 32 * 64 + 2 * 64
    lines = bytes_by_axis(model, 2, data=4, tensor=2)
    assert lines["data"] == [2 * 3 / 4 * 4 * (4 * block + outside)]
    zero_1 = bytes_by_axis(model, 2, data=4, tensor=2, zero=1)["data"]
    assert zero_1 == [3 / 4 * 4 * (4 * block + outside), 3 / 4 * 2 * (4 * block + outside)]
    zero_3 = bytes_by_axis(model, 2, data=4, tensor=2, zero=3)["data"]
    assert zero_3 == [3 / 4 * 4 * (2 * 4 * block + outside), 3 / 4 * 2 * (2 * 2 * 4 * block + outside)]
    one = 2 * 4 * 32 * 64 * 2 / 2
    assert lines["tensor"] == [8 * one, 2 * one, one]  # the last: four for the ends
    assert bytes_by_axis(model, 2, tensor=2, recompute="full")["tensor"] == [8 * one, 2 * one, one, one]
    grouped = bytes_by_axis(model, 2, tensor=2, recompute="full", recompute_blocks=2)
    assert grouped["tensor"] == [8 * one, 2 * one, 1.5 * one, one]
    assert bytes_by_axis(model, 2, tensor=2, sequence_parallel=False)["tensor"] == [8 * one, one]
    ring = bytes_by_axis(model, 2, context=2, tensor=2)["data"][0]
    assert ring == 2 * 4 * (6 * 2 - 4) * 16 * 64 * 2 / 2


def test_what_is_gathered_again_depends_on_what_is_kept_and_on_the_schedule():
    """With recompute none nothing, except round a ring. W of a split backward gathers gradients; after full inputs, too."""
    model = ModelConfig(layers=4, hidden=64, heads=4, vocabulary=128, sequence_length=32)
    one = 2 * 4 * 32 * 64 * 2 / 2  # two microbatches of four layers
    assert bytes_by_axis(model, 2, tensor=2, recompute="none")["tensor"] == [8 * one, one]
    ring = bytes_by_axis(model, 2, tensor=2, recompute="none", tensor_overlap="ring")["tensor"]
    assert ring == [8 * one, 2 * one, one]
    for recompute, again in {"none": [2], "selective": [4], "full": [6, 1]}.items():
        split = bytes_by_axis(model, 2, tensor=2, recompute=recompute, schedule="zb_h1")["tensor"]
        assert split == [8 * one, *(count * one for count in again), one]


def test_stages_on_one_rank_send_nothing_to_each_other():
    """zb_v's rank 0 has the first and the last of four stages: each microbatch is sent on and back once, each way."""
    model = ModelConfig(layers=4, hidden=64, heads=4, vocabulary=128, sequence_length=32)
    activation = 32 * 64 * 2
    sends = {
        schedule: bytes_by_axis(model, 4, pipe=2, chunks=2, schedule=schedule)["pipe"][0]
        for schedule in ("zb_v", "interleaved_1f1b")
    }
    assert sends == {"zb_v": 2 * 4 * activation, "interleaved_1f1b": 3 * 4 * activation}


def test_a_tensor_group_gathers_the_tokens_of_all_replicas_whose_experts_it_has():
    """Attention's pair is of a replica. Experts gather two replicas' tokens and all-reduce; the router gathers its own."""
    model = ModelConfig(
        layers=2, hidden=64, heads=4, vocabulary=128, sequence_length=64, feedforward=32, experts=4, biases=False
    )
    one = 2 * 4 * 64 * 64 * 2 / 2
    pairs, again, _ = bytes_by_axis(model, 4, data=4, expert=2, tensor=2)["tensor"]
    assert pairs == (4 + 2 * 2 + 1 + 2 * 2 * 2) * one and again == (1 + 2 + 1) * one
    pairs, again, _ = bytes_by_axis(model, 4, data=4, tensor=2)["tensor"]
    assert pairs == (4 + 4) * one and again == 2 * one


def test_replicas_and_stages_sum_at_once_what_all_stages_hold():
    """Without ZeRO: positions and the last norm are in one all-reduce of eight devices; with it replicas are first."""
    model = ModelConfig(layers=4, hidden=64, heads=4, vocabulary=128, sequence_length=32)
    held = 4 * (32 + 2) * 64
    assert bytes_by_axis(model, 4, data=4, pipe=2)["data and pipe"] == [2 * 7 / 8 * held]
    zero = bytes_by_axis(model, 4, data=4, pipe=2, zero=1)
    assert "data and pipe" not in zero and zero["pipe"][-1] == held / 4


def test_expert_groups_send_all_tokens():
    """By hand: 8 x 64 tokens' elements of 2 bytes for each of four collectives, and of one more; experts have 2 replicas."""
    model = ModelConfig(
        layers=2, hidden=64, heads=4, vocabulary=128, sequence_length=64, feedforward=32, experts=4, biases=False
    )
    one = 2 * 4 * 64 * 64 * 2 * (2 - 1)
    assert bytes_by_axis(model, 4, data=4, expert=2, recompute="none")["expert"] == [4 * one]
    assert bytes_by_axis(model, 4, data=4, expert=2)["expert"] == [5 * one]
    chosen = 1 - 1 / 6  # two of four experts; of six pairs one is of the other replica's
    routed = bytes_by_axis(model, 4, data=4, expert=2, expert_dispatch="all_to_all")["expert"]
    assert routed == [pytest.approx(5 * chosen * one)]
    gradients = [bytes_by_axis(model, 4, data=4, expert=size)["data"][0] for size in (1, 2, 4)]
    experts = 2 * 4 * 2 * 64 * 32 * 4  # bytes
    common = gradients[2] / (2 * 3 / 4)
    assert gradients[0] == 2 * 3 / 4 * (common + experts)
    assert gradients[1] == pytest.approx(2 * 3 / 4 * common + 2 * 1 / 2 * experts / 2)


def test_tensor_ranks_with_experts_of_their_own_send_their_part_of_the_sequence():
    """By hand: two ranks of two replicas, or of one, have one or two of four experts; attention's pair is as before."""
    model = ModelConfig(
        layers=2, hidden=64, heads=4, vocabulary=128, sequence_length=64, feedforward=32, experts=4, biases=False
    )
    how, one = {"data": 4, "tensor": 2, "expert_tensor": 1}, 2 * 4 * 64 * 64 * 2 / 2
    both, alone = (bytes_by_axis(model, 4, expert=expert, **how) for expert in (4, 2))
    ends = 2 * one
    assert both["tensor"] == [4 * one, one, ends] and both["expert and tensor"] == [5 * 3 * one]
    assert alone["tensor"] == [4 * one, one, ends, 5 * one]
    full = bytes_by_axis(model, 4, expert=4, recompute="full", **how)["tensor"]
    assert full == [4 * one, one, one, ends]  # of the repeated forward attention's sum
    none = bytes_by_axis(model, 4, expert=4, recompute="none", expert_dispatch="all_to_all", **how)
    assert none["tensor"] == [4 * one, ends]
    assert none["expert and tensor"] == [pytest.approx(4 * 2 / 4 * 3 * one)]  # a token has two of the four experts
    # Experts have two replicas, or four; each device has one, or two, in two layers. All else is split as without experts.
    sums = 2 * 3 / 4 * 2 * 2 * (2 * 64 * 32) * 4 - 2 * 1 / 2 * 2 * (2 * 64 * 32) * 4
    assert alone["data"][0] - both["data"][0] == sums
    layout = ParallelConfig(expert=4, recompute="full", **how)
    found = collectives(StepProgram.of(RunConfig(model, layout, TrainConfig(global_batch_size=16))))
    small = [(sent.axis, sent.kind, sent.times, sent.each) for sent in found if not sent.in_papers]
    logits, choices = 64 * 4 * 4 / 2, 64 * 2 * 4  # bytes that a device sends: half of four logits, and two choices
    assert sorted(small) == [
        ("expert", "all-gather", 2 * 4 * 4, choices),
        ("expert", "all-to-all", 2 * 4, choices),
        ("tensor", "all-gather", 2 * 2 * 4, logits),
        ("tensor", "all-reduce", 2 * 4, 64 * 2 * 4),  # of two choices' weights, twice half of them
        ("tensor", "all-reduce", 2 * 4, 64 * 4 * 4),  # of the router's 64 x 4
    ]


DENSE = ModelConfig(layers=2, hidden=64, heads=4, vocabulary=128, sequence_length=64)


def compiled(
    axis: str, kind: str = "", model: ModelConfig = DENSE, dispatched: str | None = None, **parallel
) -> tuple[list[float], float]:
    """(the formulas for `axis`, bytes sent along it by collectives of a kind, or all) of a run compiled for CPU devices."""
    layout = ParallelConfig(**parallel)
    train = TrainConfig(global_batch_size=2 * layout.data, precision="fp32", expert_dispatch_dtype=dispatched)
    run = RunConfig(model, layout, train)
    run.validate()
    shape = tuple(layout.mesh_sizes.values())
    found = hlo.read(
        communication.step_text(run, make_mesh(layout)), hlo.loop_trip_counts(run, on_cpu=True)
    ).collectives
    sent = hlo.most_sent(one for one in found if one.axes(shape) == (axis,) and kind in one.kind)
    return [line.bytes for line in expected(StepProgram.of(run)) if line.axis == axis], sent


@pytest.mark.slow
def test_a_tensor_ring_sends_what_the_formulas_say():
    formulas, sent = compiled("tensor", "permute", data=2, tensor=4, tensor_overlap="ring")
    assert sent == sum(formulas[:2])  # the ends' are not in rings


@pytest.mark.slow
def test_keys_and_values_are_sent_around_the_ring_as_the_formula_says():
    formulas, sent = compiled("data", "permute", context=4)
    assert sent == formulas[0]


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_replicas_send_what_the_formulas_say(zero):
    formulas, sent = compiled("data", data=4, zero=zero)
    assert sent == pytest.approx(sum(formulas), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "fp8"])
@pytest.mark.parametrize("dispatch", ["gather", "all_to_all"])
def test_replicas_that_split_experts_send_what_the_formulas_say(dispatch, dtype):
    """With capacity: without, a CPU's all-to-all has room for more rows than were routed."""
    model = dataclasses.replace(DENSE, experts=4, expert_capacity=1.0, feedforward=32, biases=False)
    formulas, sent = compiled("expert", model=model, dispatched=dtype, data=8, expert=4, expert_dispatch=dispatch)
    # 64 tokens to three replicas, of two layers and microbatches: two choices' numbers and weights in forward and backward,
    # and the weights' gradients.
    choices = 3 * 64 * 2 * 2 * (2 * 2 * (4 + 4) + 2 * 4)
    assert sent == pytest.approx(sum(formulas) + choices, rel=1e-3)


@pytest.mark.slow
def test_a_pipeline_sends_once_per_tick(capsys):
    """m = 8: sends of m + p - 1 ticks each way; the formula counts m."""
    words = "--devices cpu:8 --data 2 --pipe 2 --tensor 2 --chunks 1 --layers 2 --global-batch-size 16"
    assert communication.main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("pipe"))
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    words = (
        next(line for line in lines[start:] if what in line).split()
        for what in ("2 v bsh/t", "compiled:", "collective-permute")
    )
    formula, compiled, sends = (float(number) * units[unit] for number, unit, *_ in words)
    assert sends / formula == pytest.approx((8 + 1) / 8, rel=2e-3)
    assert compiled >= sends


def test_a_wrong_option_is_one_line(capsys):
    assert communication.main(["--tensor", "3"]) == 2
    assert capsys.readouterr().err.startswith("error: ")

"""Models with dense and sparse layers: bytes, FLOPs and seconds are those of their layers, counted by hand and by kind."""

import dataclasses

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.branch_counts import counts_of_ranks
from megajax.estimate.collective_order import check
from megajax.estimate.communication import expected
from megajax.estimate.flops import flops_per_step, hardware_flops_per_step
from megajax.estimate.gpus import find_gpu
from megajax.estimate.hlo import loop_trip_counts, read
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.program_account import account_arguments, account_of
from megajax.estimate.roofline import account
from megajax.estimate.step_time import chunk_costs
from megajax.pipeline.program import StepProgram
from megajax.plan import dryrun
from megajax.plan.explain import explain
from megajax.plan.search import Question, search
from tests import gpu, small

H100 = find_gpu("h100-80gb")
# Two dense layers, then four with experts: on two stages d d s and s s s.
SPARSE = dataclasses.replace(small.SPARSE, layers=6)
MIXED = dataclasses.replace(SPARSE, dense_layers=2, dense_feedforward=10)
DENSE = dataclasses.replace(SPARSE, experts=0, experts_per_token=2, feedforward=10)


def run_of(model=MIXED, batch=16, **parallel):
    run = RunConfig(model, ParallelConfig(**{"schedule": "1f1b", **parallel}), TrainConfig(global_batch_size=batch))
    run.validate()
    return run


def test_parameters_of_a_rank():
    """Each of two ranks has room for two dense and three sparse layers, of which the second rank leaves the first empty."""
    common = 4 * 8 * 8 + 2 * 8
    dense, sparse, experts = common + 3 * 8 * 10, common + 8 * 4, 4 * 3 * 8 * 6
    shared = 64 * 8 + 8  # half of the token table, and the last norm
    assert bytes_per_device(run_of(pipe=2))["gradients"] == 4 * (2 * dense + 3 * (sparse + experts) + shared)
    found = bytes_per_device(run_of(data=4, expert=2, pipe=2, zero=1))
    assert found["gradients"] == 4 * (2 * dense + 3 * (sparse + experts // 2) + shared)
    assert found["optimizer"] == 8 * ((2 * dense + 3 * sparse + shared) // 4 + 3 * experts // 2 // 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_kept_is_that_of_the_slots(schedule, recompute):
    """As of models with three sparse layers, and with two dense ones, on each of two stages."""
    parallel = {"pipe": 2, "schedule": schedule, "recompute": recompute}
    three, two = (
        bytes_per_device(run_of(dataclasses.replace(model, layers=layers), **parallel))
        for model, layers in ((SPARSE, 6), (DENSE, 4))
    )
    found = bytes_per_device(run_of(**parallel))
    for part in ("stash", "copies", "input to weight gradients"):
        assert found[part] == three[part] + two[part]
    assert found["inboxes"] == two["inboxes"] and found["workspace"] == max(three["workspace"], two["workspace"])


def test_ticks_of_such_a_program_merge_and_one_stage_alone_does_not():
    """So it has one slot more than the schedule, and a choice of branches in each tick; but if all stages are alike."""
    how = {"pipe": 2, "data": 2, "expert": 2, "schedule": "interleaved_1f1b"}
    alike, mixed = run_of(SPARSE, **how), run_of(**how)
    assert StepProgram.of(alike).slots == StepProgram.of(mixed).slots
    every_second = run_of(dataclasses.replace(MIXED, dense_layers=0, moe_layer_freq="2", layers=8), **how)
    counts = {run: loop_trip_counts(run) for run in (mixed, every_second)}
    merged = StepProgram.of(mixed).merged_ticks
    assert counts[mixed]["FB/cond"] == counts[every_second]["FB/cond"] == merged > 0
    assert counts[mixed]["F/cond"] == counts[every_second]["F/cond"] == mixed.microbatches - merged
    assert not StepProgram.of(run_of(data=2, expert=2)).merges


def test_pairs_of_chunks_are_counted_in_the_branches_of_their_orders():
    """Stages d, d s, s s and s: a forward beside a backward, on rank 0 of stages d and s s, on rank 1 of d s and s."""
    model = dataclasses.replace(SPARSE, layers=6, dense_layers=2, dense_feedforward=10)
    how = {"pipe": 2, "chunks": 2, "data": 2, "expert": 2, "schedule": "interleaved_1f1b"}
    program = StepProgram.of(run_of(model, 32, **how, pipeline_layout="Et|tt|tt|tL"))
    assert program.layers.stage_kinds == (("dense",), ("dense", "sparse"), ("sparse",) * 2, ("sparse",))
    ticks = program.merged_ticks
    # Two branches for each pair of chunks: (0, 0), (0, 1), (1, 0) and (1, 1); a single s is before s s, and d before d s.
    for own, counts in zip(({0, 2, 5, 7}, {1, 3, 4, 6}), counts_of_ranks(program), strict=True):
        found = [counts[f"FB/cond/8/{branch}"] for branch in range(8)]
        assert sum(found) == ticks and {branch for branch, count in enumerate(found) if count} == own
        for op in "FB":  # those that do not merge: of three orders on each chunk, two
            alone = sum(count for key, count in counts.items() if key.startswith(f"{op}/cond"))
            assert alone == program.passes - ticks


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved_1f1b", 2), ("eager_1f1b", 1), ("zb_v", 2)])
def test_each_order_of_kinds_is_counted_as_often_as_stages_have_it(schedule, chunks):
    """One dense layer, seven sparse ones: on a first chunk of four ranks one d and three s, or d s and three times s s."""
    model = dataclasses.replace(SPARSE, dense_layers=1, dense_feedforward=10, layers=8)
    run = run_of(model, pipe=4, schedule=schedule, chunks=chunks)
    counts, passes = loop_trip_counts(run), run.microbatches
    for op in ("F", "I", "W") if schedule == "zb_v" else ("F", "B"):
        # In ticks in which a rank may idle a last branch does nothing.
        every = [counts.get(f"{op}/cond/{chunks + 1}/{index}", 0) for index in range(chunks + 1)]
        some = [counts[f"{op}/cond/{chunks + 2}/{index}"] for index in range(chunks + 1)]
        assert [sum(both) for both in zip(every, some, strict=True)] == [
            passes / 4,
            passes * 3 / 4,
            *[passes] * (chunks - 1),
        ]


def test_the_first_rank_has_the_dense_layer():
    model = dataclasses.replace(SPARSE, dense_layers=1, dense_feedforward=10, layers=8)
    run = run_of(model, pipe=4, schedule="zb_h1")
    first, *others = counts_of_ranks(StepProgram.of(run))
    each = lambda counts: [counts[f"{op}/cond/3/{order}"] for op in ("F", "I", "W") for order in range(2)]  # noqa: E731
    assert each(first) == [run.microbatches, 0] * 3 and [each(one) for one in others] == 3 * [[0, run.microbatches] * 3]
    assert counts_of_ranks(StepProgram.of(run_of(SPARSE, pipe=2))) == []


def test_overlapping_parts_of_uneven_stages_are_counted_in_their_branches():
    """Ranks of dualpipe_v have stages r and 7 - r: rank 0 d s and s s, the others s s twice.

    A forward overlaps a backward of the other chunk, in parts of one block each, so there are eight branches: of chunks
    (0, 1), d s beside s s and s s beside s s; of (1, 0), s s beside both; each of two parts.
    """
    model = dataclasses.replace(SPARSE, dense_layers=1, dense_feedforward=10, layers=16)
    run = run_of(model, 64, pipe=4, schedule="dualpipe_v", chunks=2)
    counts, passes = loop_trip_counts(run), run.microbatches
    for rank, own in enumerate(counts_of_ranks(StepProgram.of(run))):
        parts = [own[f"FB/cond/9/{index}"] for index in range(8)]
        assert parts[::2] == parts[1::2]
        assert [number for number, count in enumerate(parts[::2]) if count] == ([1, 3] if rank else [0, 2])
    whole = {op: [counts[f"{op}/cond/4/{index}"] for index in range(3)] for op in "FI"}  # chunk 0: d s, s s; 1: s s
    beside = [counts[f"FB/cond/9/{index}"] for index in range(0, 8, 2)]
    forwards, backwards = (*beside[:2], sum(beside[2:])), (beside[2], beside[3], sum(beside[:2]))
    for op, overlapping in (("F", forwards), ("I", backwards)):
        ran = [one + other for one, other in zip(whole[op], overlapping, strict=True)]
        assert ran == [passes / 4, passes * 3 / 4, passes]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved_1f1b", 2), ("1f1b", 1), ("dualpipe_v", 2)])
def test_matmuls_of_a_compiled_program_are_those_of_the_layers(schedule, chunks):
    """One dense layer and seven or fifteen sparse ones on four ranks, which have a quarter of them on average."""
    large = dataclasses.replace(gpu.LARGE, norm="rmsnorm", activation="swiglu", biases=False, feedforward=1536)
    layers = 16 if schedule == "dualpipe_v" else 8
    more = {"dense_layers": 1, "dense_feedforward": 8192, "layers": layers, "experts": 8, "experts_per_token": 2}
    model, layout = dataclasses.replace(large, **more), {"pipe": 4, "schedule": schedule, "chunks": chunks}
    text, _ = gpu.compile_step(model, 8, attention="xla", **layout)
    run = gpu.run_of(model, 8, attention="xla", **layout)
    module = read(text, loop_trip_counts(run))
    sparse = 8 * (layers - 1) / 4
    assert module.kernels["grouped_matmul_product"] == pytest.approx(4 * sparse)
    assert module.kernels["grouped_matmul_add"] == pytest.approx(2 * sparse)
    found = account_of(run, H100, text)
    ranks = [
        account(text, loop_trip_counts(run) | counts, *account_arguments(run, H100)[1:]).total
        for counts in counts_of_ranks(StepProgram.of(run))
    ]
    assert found.account.total == pytest.approx(sum(ranks) / 4, rel=0.01) and found.seconds > max(ranks)


@pytest.mark.slow
@pytest.mark.compiler
def test_dispatch_of_a_merged_tick_overlaps_the_other_chunk_of_whatever_kind():
    """The layers of the program above, with an expert on each of four replicas: kernels and order are as there."""
    large = dataclasses.replace(gpu.LARGE, norm="rmsnorm", activation="swiglu", biases=False, feedforward=1536)
    more = {"dense_layers": 1, "dense_feedforward": 8192, "layers": 8, "experts": 4, "experts_per_token": 2}
    model, layout = dataclasses.replace(large, **more), {"pipe": 2, "data": 4, "expert": 4, "chunks": 2}
    layout |= {"schedule": "interleaved_1f1b", "expert_dispatch": "gather"}
    text, _ = gpu.compile_step(model, 8, attention="xla", **layout)
    run = gpu.run_of(model, 8, attention="xla", **layout)
    assert check(text).consistent and StepProgram.of(run).merged_ticks > 8
    module = read(text, loop_trip_counts(run))
    assert module.kernels["grouped_matmul_product"] == pytest.approx(4 * 8 * 7 / 2)
    rows = [one for one in module.collectives if one.shape[-1:] == (1024,) and len(one.shape) == 3 and one.conditional]
    sent = [one.times * one.bytes for one in rows if one.kind in ("all-gather", "reduce-scatter")]
    hidden = [one.times * one.bytes for one in rows if one.kind in ("all-gather", "reduce-scatter") and one.behind]
    assert sum(hidden) > sum(sent) / 2


@pytest.mark.slow
@pytest.mark.compiler
def test_kernels_of_a_compiled_program_with_a_ring_are_those_of_the_layers():
    """A block's kind is chosen by a loop of zero or one iteration. Bubbles run blocks too: a third of the ticks more."""
    large = dataclasses.replace(gpu.LARGE, norm="rmsnorm", activation="swiglu", biases=False, feedforward=1536)
    more = {"moe_layer_freq": "2", "dense_feedforward": 8192, "layers": 8, "experts": 8, "experts_per_token": 2}
    model, layout = dataclasses.replace(large, **more), {"pipe": 2, "context": 2, "schedule": "eager_1f1b"}
    text, _ = gpu.compile_step(model, 8, attention="xla", **layout)
    module = read(text, loop_trip_counts(gpu.run_of(model, 8, attention="xla", **layout)))
    sparse = {name: count for name, count in module.kernels.items() if "grouped" in name}
    print(sparse)
    assert sparse["grouped_matmul_product"] == pytest.approx(4 * 2 * (8 + 1))


def test_flops_by_hand():
    """Of 16 tokens: attention in all six layers, three matrices of 10 in two and of 6, for three experts, in four."""
    attention = 4 * 8 * 8 + 2 * 16 * 8
    layers = 6 * attention + 2 * 3 * 8 * 10 + 4 * (8 * 4 + 3 * 3 * 8 * 6)
    assert flops_per_step(run_of(batch=4)) == 3 * 2 * 16 * (layers + 8 * 128) * 4
    again = 2 * 16 * 6 * 2 * 16 * 8  # selective recomputes the scores
    assert hardware_flops_per_step(run_of(batch=4)) - flops_per_step(run_of(batch=4)) == 4 * again // 2


def test_the_slowest_stage_takes_the_time():
    """With narrow dense layers the stage s s s, as in a model without dense layers; with wide ones d d s."""
    large = dataclasses.replace(SPARSE, hidden=1024, heads=8, feedforward=512, sequence_length=1024, norm="layernorm")
    times = {}
    for name, model in {
        "sparse": large,
        "narrow": dataclasses.replace(large, dense_layers=2, dense_feedforward=512),
        "wide": dataclasses.replace(large, dense_layers=2, dense_feedforward=65536),
        "dense": dataclasses.replace(large, experts=0, experts_per_token=2, feedforward=65536),
    }.items():
        parallel = {"pipe": 2, "data": 2, "expert": min(2, max(1, model.experts)), "attention": "cudnn"}
        times[name] = chunk_costs(run_of(model, expert_dispatch="gather", **parallel), H100)
    assert times["narrow"] == times["sparse"]
    for part in ("forward", "backward", "input", "weight"):
        wide, dense, sparse = (getattr(times[name], part) for name in ("wide", "dense", "sparse"))
        assert wide == pytest.approx(dense * 2 / 3 + sparse / 3)


def test_bytes_sent_are_those_of_the_layers_on_the_stage_with_most():
    parallel = {"pipe": 2, "data": 2, "expert": 2, "tensor": 2, "expert_dispatch": "gather"}
    sent = {
        name: {line.what: line.bytes for line in expected(StepProgram.of(run_of(model, **parallel)))}
        for name, model in {"mixed": MIXED, "sparse": SPARSE}.items()
    }
    for what in ("tokens and experts' results", "pairs of matmuls"):
        assert sent["mixed"][what] == sent["sparse"][what] > 0


OLMOE = dataclasses.replace(preset("olmoe-1b-7b"), dense_feedforward=8192)
QWEN3 = dataclasses.replace(preset("qwen3-30b-a3b"), sequence_length=4096, dense_feedforward=6144)
# Peaks of programs compiled for 8 H100s with jax 0.12.0.1, in bytes.
COMPILED = [
    (dataclasses.replace(OLMOE, dense_layers=1), {}, 30613193504),
    (dataclasses.replace(OLMOE, moe_layer_freq="2"), {"schedule": "interleaved_1f1b", "chunks": 2}, 25.46e9),
    (dataclasses.replace(QWEN3, moe_layer_freq="2"), {"recompute": "full"}, 48317829416),
]


@pytest.mark.parametrize(("model", "how", "peak"), COMPILED)
def test_memory_is_within_5_percent_of_the_compiled_programs(model, how, peak):
    run = run_of(model, 64, data=4, expert=4, pipe=2, zero=1, attention="cudnn", **how)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, precision="bf16"))
    assert sum(bytes_per_device(run).values()) == pytest.approx(peak, rel=0.05)


def test_the_planner_finds_layouts_and_explains_them():
    model = dataclasses.replace(OLMOE, dense_layers=1)
    found = search(Question(model, 8, H100, 64, recomputes=("selective",), microbatches=(1,)))
    assert found[0].fits and {one.run.parallel.expert for one in found} == {1, 2, 4, 8}
    piped = [one for one in found if one.fits and one.run.parallel.pipe == 2]
    assert "1 dense, 15 sparse layers; slots on each of 2 ranks: " in explain(piped)


def test_the_dry_run_says_what_each_rank_has_room_for_and_how_to_make_it_fit(capsys):
    words = "--model qwen3-30b-a3b --gpu h100-80gb --dense-layers 3 --dense-feedforward 6144 --model-only --pipe 2"
    assert dryrun.main(f"{words} --chunks 1 --data 4 --expert 4 --global-batch-size 64".split()) == 1
    out = capsys.readouterr().out
    assert "3 dense, 45 sparse layers; slots on each of 2 ranks: 3 dense, 24 sparse; 6 of 54 slots idle (11.1%)" in out
    assert "the smallest change that makes it fit: " in out

"""The best-first search finds what the exhaustive one finds; its bounds are below what they are bounds of."""

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.auto import placements
from megajax.estimate.gpus import find_gpu
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.program_blocks import Blocks
from megajax.estimate.step_time import step_time
from megajax.plan.best import DEGREES, MODES, SHAPES, best_layouts, fastest, on_mesh
from megajax.plan.bounds import Bounds
from megajax.plan.explain import COMPARED, reasons
from megajax.plan.search import NoLayout, Question, best_by, search
from megajax.schedules.registry import check_sizes, find, search_order
from megajax.schedules.simulate import Costs

ROWS = 4
MODEL = ModelConfig(name="small", layers=6, hidden=2048, heads=16, vocabulary=32000, sequence_length=4096)
SPARSE = dataclasses.replace(MODEL, experts=4, experts_per_token=2, biases=False)
LONG = dataclasses.replace(MODEL, sequence_length=65536, hidden=4096, heads=32, layers=12)
# Three of 13 layers, at the start, are dense: with 8 stages the usual numbers of layers need slots for two of them.
KINDS = dataclasses.replace(SPARSE, layers=13, dense_layers=3, dense_feedforward=4096)
MODELS = [MODEL, SPARSE, LONG, dataclasses.replace(MODEL, layers=7, kv_heads=4), KINDS]
searched = functools.cache(search)
QUESTION = Question(MODEL, 8, find_gpu("h100-80gb"), 8, zero=(0, 1, 3), context=None, vocab_parallel="auto")


def rows_of(candidates, count):
    """(seconds, bytes, layout) of the first rows that the planner prints."""
    fitting = (one for one in candidates if one.fits)
    best = list(best_by(fitting, lambda one: one.mesh).values())[:count]
    return [(one.time.total, one.peak, one.run) for one in best]


def check(question):
    """The first rows and the best of each group are those of the exhaustive search, and so is its refusal."""
    try:
        every = searched(question)
    except NoLayout as error:
        with pytest.raises(NoLayout, match="no layout of") as found:
            best_layouts(question)
        assert str(found.value) == str(error)
        return
    groups = DEGREES + SHAPES
    found = best_layouts(question, ROWS, groups)
    assert found.priced <= len(every) and not found.slower
    if not every[0].fits:
        assert fastest(question) is None and not any(one.fits for one in found.candidates)
        assert [one.peak for one in found.candidates] == [one.peak for one in every[:3]]
        return
    assert rows_of(found.candidates, ROWS) == rows_of(every, ROWS)
    assert fastest(question).run == fastest(question, every[0].time.total).run == every[0].run
    assert fastest(question, every[0].time.total * 0.999) is None
    assert rows_of(best_layouts(question, ROWS).candidates, ROWS) == rows_of(every, ROWS)
    for group in groups:
        of = lambda one: group(one.run.parallel)  # noqa: B023, E731
        mine, theirs = (best_by((one for one in some if one.fits), of) for some in (found.candidates, every))
        assert {key: one.run for key, one in mine.items()} == {key: one.run for key, one in theirs.items()}
        assert {of(one) for one in found.candidates} == {of(one) for one in every}
    mesh = every[0].mesh
    assert on_mesh(question, mesh) == [one for one in every if one.mesh == mesh]


FEW = ("1f1b", "interleaved_1f1b", "zb_h1")
questions = st.builds(
    lambda model, gpus, batch, gpu, schedules, zero, also, **fields: Question(
        model, gpus, find_gpu(gpu), batch, schedules=schedules, zero=zero, also=also, context=None, **fields
    ),
    st.sampled_from(MODELS),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([4, 6, 8, 16]),
    st.sampled_from(["h100-80gb", "a100-40gb", "a10g", "gb200-nvl72"]),
    st.sampled_from([FEW, ("interleaved_1f1b",), ("eager_1f1b", "zb_v")]),
    st.sampled_from([(0,), (0, 1, 3), (1,)]),
    st.sampled_from([(), ("axis_order",), ("tensor_overlap",), ("offload_activations", "recompute_blocks")]),
    vocab_parallel=st.sampled_from(["auto", "pipe", "tensor"]),
    microbatches=st.sampled_from([(1, 2), (1, 4)]),
    sequence_parallel=st.booleans(),
    attention=st.sampled_from(["auto", "xla"]),
    optimizer=st.sampled_from(["adamw", "muon"]),
    memory_margin=st.sampled_from([0.05, 0.9]),
)


@pytest.mark.slow
@settings(max_examples=3, derandomize=True, deadline=None)
@given(question=questions)
def test_rows_are_those_of_the_exhaustive_search(question):
    check(question)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(question=questions)
def test_rows_are_those_of_the_exhaustive_search_of_many_questions(question):
    check(question)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt3-13b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_all_schedules_of_real_models(name):
    check(dataclasses.replace(QUESTION, model=preset(name), gpus=16, global_batch=32, microbatches=(1, 2)))


@pytest.mark.slow
def test_orders_of_axes_and_stages_with_fewer_slots():
    """On two hosts, so that it matters which axis is outermost."""
    question = dataclasses.replace(QUESTION, model=KINDS, gpus=16, context=(1,), microbatches=(1,), zero=(1,))
    question = dataclasses.replace(question, schedules=("1f1b", "interleaved_1f1b"), recomputes=("full",))
    check(question)
    found = [one.run.parallel for one in searched(question)]
    assert {one.axis_order[0] for one in found if one.expert > 1} == {"data", "pipe"}
    for replicas in (1, 2):  # of one replica the order of axes does not matter
        folded = [one for one in found if one.experts_over_tensor and one.expert_replicas == replicas]
        assert {one.axis_order[0] for one in folded if one.pipe > 1} == {"data", *["pipe"] * (replicas > 1)}
    assert {one.pipeline_layout for one in found if one.pipe * one.chunks == 8} == {"E(t|)*2(tt|)*5tL"}


def least_of_mesh(bounds, run):
    """What the search knows of a run before its level of ZeRO and its recompute mode."""
    mesh = run.with_layout(zero=0, recompute="none", recompute_blocks=1)
    return bounds.least(mesh, kernels=True, modes=MODES, once=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_bounds_are_below_what_they_bound(model):
    question = dataclasses.replace(QUESTION, model=model, also=("axis_order", "tensor_overlap"))
    bounds = Bounds(question.gpu, question.gpus)
    for one in searched(question):
        run = one.run.with_layout(vocab_parallel="auto")
        memory = bounds.memory(run), bounds.memory_of_a_microbatch(run), bounds.scheduled_memory(run)
        assert max(memory) <= one.peak
        if one.fits:
            quick, first = bounds.least(run), least_of_mesh(bounds, run)
            seconds = [bounds.unscheduled_seconds(run, least) for least in (quick, first)]
            seconds += [bounds.seconds(run, least) for least in (quick, first, bounds.least(run, kernels=True), None)]
            assert max(seconds) <= one.time.total


layouts_of_blocks = st.builds(
    lambda model, sequence, tensor, pipe, matmuls, **fields: RunConfig(
        dataclasses.replace(model, sequence_length=sequence),
        ParallelConfig(tensor=tensor, pipe=pipe, sequence_parallel=tensor > 1, expert_dispatch="gather", **fields),
        TrainConfig(global_batch_size=64, precision="bf16", matmul_dtype=None if model.experts else matmuls),
    ).with_layout(data=64 // (tensor * pipe)),
    st.sampled_from([*MODELS, dataclasses.replace(MODEL, norm="rmsnorm", activation="swiglu", biases=False)]),
    st.sampled_from([64, 256, 1024, 8192]),
    tensor=st.sampled_from([1, 2, 4]),
    pipe=st.sampled_from([2, 4]),
    matmuls=st.sampled_from([None, "fp8"]),
    microbatch_size=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    zero=st.sampled_from([0, 1, 3]),
    attention=st.sampled_from(["xla", "cudnn"]),
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(run=layouts_of_blocks, gpu=st.sampled_from(["h100-80gb", "l40s"]))
def test_blocks_of_split_backwards_take_no_less(run, gpu):
    """So that a bound of blocks with whole backwards is one of all schedules."""
    for kind in layers_of_kinds(run):
        whole, split = (Blocks(kind.run.with_layout(schedule=name), find_gpu(gpu)) for name in ("1f1b", "zb_h1"))
        assert not whole.program.splits and split.program.splits
        assert whole.forward.total + whole.backward.total < split.forward.total + split.backward.total


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    run=layouts_of_blocks,
    expert=st.sampled_from([(1, "gather"), (2, "gather"), (4, "gather"), (4, "bucketed")]),
    over=st.booleans(),
    gpu=st.sampled_from(["h100-80gb", "a100-80gb", "l40s"]),
)
def test_bounds_are_below_those_of_more_that_is_known(run, expert, over, gpu):
    """Of each operation of a block; and below the time of a step with each schedule."""
    if run.model.experts:
        run = run.with_layout(expert=expert[0], expert_dispatch=expert[1])
        run = run.with_layout(expert_tensor=1) if over and expert[0] % run.parallel.tensor == 0 else run
    bounds = Bounds(find_gpu(gpu), 64)
    mesh, known = least_of_mesh(bounds, run), bounds.least(run, kernels=True)
    for first, second in zip(mesh.blocks, known.blocks, strict=True):
        assert all(one <= other * (1 + 1e-9) for one, other in zip(first, second, strict=True))
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)):
        one = run.with_layout(schedule=schedule, chunks=chunks)
        seconds = [bounds.seconds(one, least) for least in (mesh, known, None)]
        if None not in seconds:
            assert max(seconds) <= min(step_time(placed, find_gpu(gpu)).total for placed in placements(one))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    name=st.sampled_from([name for name in search_order() if find(name).bubble]),
    stages=st.integers(2, 16),
    microbatches=st.integers(1, 64),
    chunks=st.integers(1, 6),
    operations=st.tuples(*[st.floats(0, 1)] * 3).filter(sum),
)
def test_a_step_is_shortest_where_its_operations_take_equally_long(name, stages, microbatches, chunks, operations):
    """With which `Bounds` computes a bubble where it knows only the sum of the three."""
    spec = find(name)
    if check_sizes(name, stages=stages, microbatches=microbatches, chunks=chunks):
        return
    if spec.split and microbatches < stages:
        return

    def step(forward, part, weight):
        costs = Costs(forward, part + weight, part, weight)
        bubble = spec.bubble(stages, microbatches, chunks, costs, True)
        return microbatches * chunks * (forward + part + weight) + bubble

    assert step(*[sum(operations) / 3] * 3) <= step(*operations) * (1 + 1e-9)


@pytest.mark.parametrize(("gigabytes", "fit"), [(80, 216), (6, 20)])
def test_reasons_are_those_of_all_layouts_of_a_mesh(gigabytes, fit):
    """Of which those are not priced that are slower, or larger, than others with the same schedule and so on."""
    question = dataclasses.replace(QUESTION, model=SPARSE, global_batch=32, microbatches=(1, 2), zero=(1,))
    question = dataclasses.replace(question, context=(1,), schedules=("1f1b", "interleaved_1f1b", "zb_h1"))
    question = dataclasses.replace(question, gpu=dataclasses.replace(question.gpu, memory=int(gigabytes * 1e9)))
    mesh = 1, 2, 4
    every, fewer = on_mesh(question, mesh), on_mesh(question, mesh, COMPARED)
    assert sum(one.fits for one in every) == fit
    assert reasons(fewer) == reasons(every)
    assert len(fewer) < len(every) / 3


def test_few_layouts_are_priced():
    """Of 13B on 32 GPUs, which the exhaustive search prices 18,000 of; with context, ZeRO and both placements."""
    found = best_layouts(dataclasses.replace(QUESTION, model=preset("gpt3-13b"), gpus=32, global_batch=64))
    assert found.candidates[0].fits and found.priced < 600


@pytest.mark.slow
def test_long_sequences_are_split():
    """405B at 128k tokens on 16,384 GPUs: context 16, and no bubble of 84% as without context parallelism."""
    model = dataclasses.replace(preset("llama3.1-405b"), sequence_length=131072)
    question = dataclasses.replace(QUESTION, model=model, gpus=16384, global_batch=128)
    within = dataclasses.replace(question, tensor_sizes=(1, 2, 4, 8))  # a host
    best = fastest(within)
    parallel = best.run.parallel
    assert (*best.mesh, parallel.context, parallel.chunks, parallel.zero) == (8, 16, 8, 16, 4, 1)
    assert best.time.total - best.time.slowest < 14 and best.time.bubble / best.time.total < 0.2
    assert fastest(question).time.total <= best.time.total


def test_groups_beyond_the_time_that_is_looked_at_are_named():
    """On slow networks large tensor groups are slower by far; they are not looked for, and are not said not to fit."""
    question = dataclasses.replace(QUESTION, schedules=FEW, microbatches=(1, 2), context=(1,))
    found = best_layouts(question, 1, DEGREES, within=1.2)
    limit = 1.2 * found.candidates[0].time.total
    every = best_layouts(question, 1, DEGREES)
    best = best_by((one for one in every.candidates if one.fits), lambda one: DEGREES[0](one.run.parallel))
    assert {key for key in found.slower if key[0] == "tensor"} == {
        k for k, one in best.items() if one.time.total > limit
    }
    assert found.slower and found.priced < every.priced


def test_matmuls_in_8_bits_are_considered_where_they_are_asked_for():
    question = dataclasses.replace(QUESTION, model=preset("llama2-7b"), schedules=FEW, global_batch=256)
    plain, either = fastest(question), fastest(dataclasses.replace(question, fp8=True))
    assert plain.run.train.matmul_dtype is None and either.run.train.matmul_dtype == "fp8"
    assert either.time.total < plain.time.total
    with pytest.raises(ConfigError, match="a100-80gb has no tensor cores for it: omit --fp8"):
        fastest(dataclasses.replace(question, fp8=True, gpu=find_gpu("a100-80gb")))


def test_tokens_in_8_bits_are_considered_where_they_are_sent():
    """And not for layouts that send none, which only would round them; experts' matmuls in 8 bits for all."""
    model = dataclasses.replace(preset("olmoe-1b-7b"), layers=2)
    question = dataclasses.replace(
        QUESTION, model=model, gpus=4, schedules=FEW[:1], zero=(1,), global_batch=16, fp8=True
    )
    found = search(question)
    degrees = lambda name: {one.run.parallel.expert for one in found if getattr(one.run.train, name) == "fp8"}  # noqa: E731
    every = {one.run.parallel.expert for one in found}
    assert degrees("expert_dispatch_dtype") == every - {1} and degrees("expert_matmul_dtype") == every
    assert all(one.run.train.matmul_dtype is None for one in found)
    assert fastest(question).time.total == found[0].time.total


def test_memory_of_dense_and_sparse_layers_is_bounded_closely():
    """Three of DeepSeek-V3's 61 layers are dense: a rank's share of them says nothing of the experts that it holds."""
    question = dataclasses.replace(QUESTION, model=preset("deepseek-v3"), gpus=1024, global_batch=15360)
    run = question.base.with_layout(pipe=16, data=64, expert=16, zero=1, attention="cudnn", vocab_parallel="pipe")
    memory = bytes_per_device(run.with_layout(schedule="1f1b"))
    state = sum(memory[part] for part in ("weights", "optimizer", "gradients", "16-bit weights"))
    bounds = Bounds(question.gpu, question.gpus)
    assert 0.65 * state < bounds.memory(run) <= state  # by the share of dense layers 0.06
    assert bounds.memory(run) + memory["workspace"] < bounds.memory_of_a_microbatch(run) <= sum(memory.values())

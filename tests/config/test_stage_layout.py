"""`--pipeline-layout`: Megatron-LM's notation, refusals, and what memory and time models make of such stages."""

import dataclasses
import json

import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.stage_layout import layers_of_stages
from megajax.estimate.gpus import find_gpu
from megajax.estimate.hlo import loop_trip_counts
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.program_time import Program
from megajax.pipeline.program import StepProgram
from megajax.schedules.errors import UserError
from megajax.schedules.io import save
from megajax.schedules.registry import make_schedule

MODEL = dataclasses.replace(preset("gpt3-1.3b"), layers=8)


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("0,4,4,0", (0, 4, 4, 0)),
        ("E|t*4|tttt|L", (0, 4, 4, 0)),
        ("Et*3|(tt|)*29,L", (3, *[2] * 29, 0)),
        ("Ett|(t*2|)*2ttL", (2, 2, 2, 2)),
        ("EL", (0,)),
        ("E,t*0|L", (0, 0)),
        ("((Et|)*1t)*1L", (1, 1)),
    ],
)
def test_layouts(layout, layers):
    assert layers_of_stages(layout) == layers
    assert layers_of_stages(None) is None


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tt|ttL", "must begin with E, end with L, and have both once"),
        ("Et|E|L", "must begin with E, end with L, and have both once"),
        ("Et|tL|", "must begin with E, end with L, and have both once"),
        ("Et|m|L", r"has 'm' \(modules of --mtp-num-layers are always on the last stage\)"),
        ("Et|(tt|L", r"has '\('"),
        ("", "must begin with E"),
        ("E" + "(" * 9 + "t" + ")*99999" * 9 + "L", "more than 20000 layers and stages"),
        ("1,-2", "has '1'"),
    ],
)
def test_what_is_no_layout_is_refused(layout, message):
    with pytest.raises(ConfigError, match=message):
        layers_of_stages(layout)


def run_of(model=MODEL, **parallel) -> RunConfig:
    run = RunConfig(model, ParallelConfig(**parallel), TrainConfig(global_batch_size=16, precision="bf16"))
    run.validate()
    return run


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"pipe": 2, "pipeline_layout": "E|t*8|L"}, r"has 3 stages, but pipe \* chunks = 2 \* 1: pass --pipe 3"),
        ({"pipe": 2, "pipeline_layout": "E|t*8|t|L"}, "pass --pipe 4, or --chunks 2, or another --pipeline-layout"),
        ({"pipe": 4, "pipeline_layout": "E|t*4|t*5|L"}, "has 9 layers in its stages, but layers = 8: pass --layers 9"),
        (
            {"pipe": 2, "pipeline_layout": "3,5", "recompute": "full", "recompute_blocks": 2},
            "recompute_blocks = 2 does not divide",
        ),
    ],
)
def test_a_layout_that_is_not_the_runs_is_refused(parallel, message):
    with pytest.raises(ConfigError, match=message):
        run_of(**{"schedule": "1f1b", **parallel})


def test_a_file_has_layers_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_schedule("1f1b", stages=4, microbatches=16)
    save(dataclasses.replace(made, placement=dataclasses.replace(made.placement, layers=(0, 5, 3, 0))), "x.json")
    program = StepProgram.of(run_of(pipe=4, schedule="x.json"))
    assert program.layers.counts == (0, 5, 3, 0) and program.schedule.placement == program.placement
    assert program.layers.describe() == "8 layers on 4 stages: 0, 5, 3, 0; 12 of 20 slots idle (60.0%)"
    with pytest.raises(ConfigError, match=r"pipeline_layout is given, but x\.json has layers of its own"):
        run_of(pipe=4, schedule="x.json", pipeline_layout="0,4,4,0")
    with pytest.raises(ConfigError, match=r"x\.json has 8 layers in its stages, but layers = 9: pass --layers 8"):
        run_of(dataclasses.replace(MODEL, layers=9), pipe=4, schedule="x.json")
    with pytest.raises(UserError, match="has 4 stages and the run 2: pass --pipe 4"):
        assert StepProgram.of(run_of(pipe=2, schedule="x.json")).schedule
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["placement"] == [[0, 1, 2, 3]] and content["layers"] == [0, 5, 3, 0]


def test_memory_and_time_of_ends_on_stages_of_their_own():
    """On four ranks the two in the middle have two layers instead of one; the head's time is beside theirs."""
    model, options = dataclasses.replace(MODEL, layers=4), {"pipe": 4, "schedule": "1f1b", "vocab_parallel": "tensor"}
    equal, alone = (run_of(model, **options, pipeline_layout=layout) for layout in (None, "E|tt|tt|L"))
    assert StepProgram.of(alone).layers.skips_slots and not StepProgram.of(equal).layers.skips_slots
    state = [bytes_per_device(run)["gradients"] for run in (equal, alone)]
    block = 12 * MODEL.hidden**2 + 13 * MODEL.hidden
    assert state[1] - state[0] == 4 * block
    gpu = find_gpu("a100-80gb")
    times = [Program(run, gpu) for run in (equal, alone)]
    assert times[1].blocks.total == pytest.approx(2 * times[0].blocks.total, rel=0.01)
    assert 0 < times[1].ends.total < times[0].ends.total
    # With the ends split over all ranks nothing is hidden.
    options["vocab_parallel"] = "pipe"
    shared = [Program(run_of(model, **options, pipeline_layout=layout), gpu) for layout in (None, "E|tt|tt|L")]
    assert shared[0].ends.total == pytest.approx(shared[1].ends.total)


def test_ticks_do_not_merge_where_stages_differ():
    merged = {"pipe": 4, "tensor": 2, "schedule": "eager_1f1b"}
    assert StepProgram.of(run_of(**merged)).merges
    assert not StepProgram.of(run_of(**merged, pipeline_layout="0,4,4,0")).merges
    assert StepProgram.of(run_of(**merged, pipeline_layout="2,2,2,2")).merges


def test_the_loops_of_a_program_are_those_of_the_layers():
    """Of four layers a rank has two, in each of 16 microbatches; in a loop whose length is known at run time only."""
    options = {"pipe": 2, "schedule": "eager_1f1b", "chunks": 1}
    model = dataclasses.replace(MODEL, layers=4)
    of = lambda layout: loop_trip_counts(run_of(model, **options, pipeline_layout=layout))  # noqa: E731
    assert of("2,2") == of(None)
    assert of("4,0")["F"] == of("4,0")["B"] == 16 * 2 > of(None)["F"]


@pytest.mark.parametrize(("pipe", "chunks", "routes"), [(2, 4, 2), (4, 2, 4)])
def test_a_wave_is_priced(pipe, chunks, routes):
    """A rank sends an activation and a gradient for each chunk, but none where a wave turns."""
    run = run_of(pipe=pipe, schedule="hanayo", chunks=chunks)
    program, loop = StepProgram.of(run), StepProgram.of(run_of(pipe=pipe, schedule="interleaved_1f1b", chunks=chunks))
    assert (program.routes, program.placement.turns, loop.routes) == (routes, True, 2)
    inner = chunks if pipe > 2 else chunks // 2  # of a rank between two others, in each direction
    assert program.sends[0] == 16 * 2 * inner
    assert Program(run, find_gpu("a100-80gb")).ticks.total > 0
    memory = [bytes_per_device(one.run)["stash"] / one.slots.stash for one in (program, loop)]
    assert memory[0] == memory[1] and program.slots.stash <= (chunks + 1) * pipe

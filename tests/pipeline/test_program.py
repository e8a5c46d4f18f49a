"""`StepProgram`, which everything prices, against the tables that the executor runs, on random legal runs."""

import dataclasses
import random
from collections import Counter

import jax
import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.pipeline.options import merged_ticks, stashes_nothing
from megajax.pipeline.program import StepProgram
from megajax.pipeline.slots import slot_tables
from megajax.runtime.mesh import make_mesh
from megajax.schedules.registry import SPECS
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT
from megajax.train.step import Training, make_training

MODEL = dataclasses.replace(preset("tiny"), layers=24)
COUNT = 60


def random_runs(count: int) -> list[RunConfig]:
    """Legal runs of all schedules whose table is a step, on up to eight devices, the same in every process."""
    draw, found = random.Random(0), []
    names = sorted(name for name, spec in SPECS.items() if spec.trains and spec.drains)
    while len(found) < count:
        parallel = ParallelConfig(
            data=draw.choice([1, 2]),
            pipe=draw.choice([1, 2, 3, 4]),
            tensor=draw.choice([1, 2, 2]),
            context=draw.choice([1, 1, 1, 2]),
            chunks=draw.choice([1, 2]),
            expert=draw.choice([1, 1, 2]),
            schedule=names[len(found) % len(names)],
            recompute=draw.choice(["none", "selective", "full"]),
            zero=draw.choice([0, 1, 3]),
            tensor_overlap=draw.choice(["none", "none", "ring"]),
            offload_activations=draw.random() < 0.1,
            attention="xla",
        )
        train = TrainConfig(global_batch_size=parallel.data * draw.randint(1, 12), precision="fp32")
        run = RunConfig(draw.choice([MODEL, preset("moe-tiny")]), parallel, train)
        try:
            run.validate()
        except ConfigError:
            continue
        rings_in_bubbles = bool(parallel.rings) and not StepProgram.of(run).paired  # refused when the program is built
        if parallel.devices <= 8 and not rings_in_bubbles:
            found.append(run)
    return found


def as_on_a_gpu(run: RunConfig, monkeypatch) -> Training:
    """The run's programs as on GPUs with jax 0.12; nothing is compiled."""
    monkeypatch.setattr("megajax.train.step.updates_in_place", lambda device: True)
    return make_training(run, make_mesh(run.parallel, jax.devices()))


RUNS = random_runs(COUNT)


@pytest.mark.parametrize("number", range(COUNT))
def test_slots_and_merged_ticks_are_those_of_the_table_that_runs(number):
    program = StepProgram.of(RUNS[number])
    table = slot_tables(program.executed)
    assert program.slots == (table.stash_slots, table.kept_slots, sum(table.inbox_slots.values()) + 2)
    assert program.merged_ticks == (merged_ticks(program.executed) if program.merges else 0)
    assert program.paired == program.schedule.paired
    assert not program.unrolls or stashes_nothing(program.executed)


OWN = [("interleaved_1f1b", 1, 1, 1), ("eager_1f1b", 2, 1, 3), ("looped_bfs", 1, 1, 3)]


@pytest.mark.parametrize(("schedule", "pipe", "chunks", "microbatches"), OWN)
def test_no_tick_merges_where_one_with_both_passes_has_the_backward_of_its_own_forward(
    schedule, pipe, chunks, microbatches
):
    """Nor in the schedule with later backwards."""
    parallel = ParallelConfig(tensor=2, pipe=pipe, chunks=chunks, schedule=schedule)
    program = StepProgram.of(RunConfig(preset("tiny"), parallel, TrainConfig(global_batch_size=microbatches)))
    assert program.merges and program.paired and any(one.full for one in program.executed.segments)
    assert program.merged_ticks == merged_ticks(program.executed) == 0


@pytest.mark.parametrize("number", range(COUNT))
def test_sends_and_split_backwards_are_those_of_the_table_that_runs(number):
    program = StepProgram.of(RUNS[number])
    table, sent, split, whole = program.executed, Counter(), Counter(), Counter()
    for works, rank in ((works, rank) for row in table.ticks for rank, works in enumerate(row)):
        for work in works:
            stage, op = table.stage(work.chunk, rank), table.does(work)
            split[rank] += op == INPUT
            whole[rank] += op == BACKWARD and work.part == 0
            after = {FORWARD: stage + 1, BACKWARD: stage - 1, INPUT: stage - 1}.get(op, -1)
            if (op == INPUT or work.part == work.parts - 1) and 0 <= after <= table.last_stage:
                sent[rank] += table.home(after)[1] != rank
    work, idle = program.sends
    assert work == max(sent.values(), default=0) and idle >= 0
    assert program.split_backwards == pytest.approx(split.total() / (split + whole).total())
    assert {*(split + whole).values()} == {program.passes}


def test_sends_by_hand():
    """zb_v's rank 0 has the first stage and the last one; a rank sends in ticks without work, too."""
    train = TrainConfig(global_batch_size=8, precision="fp32")
    sends = {
        name: StepProgram.of(
            RunConfig(MODEL, ParallelConfig(pipe=2, schedule=name, **fields), train), None, False
        ).sends
        for name, fields in {"zb_v": {"chunks": 2}, "eager_1f1b": {}, "interleaved_1f1b": {"chunks": 2}}.items()
    }
    assert [work for work, _ in sends.values()] == [2 * 8, 8, (2 * 2 - 1) * 8]
    assert sends["eager_1f1b"] == (8, 1)  # activations in all ticks but the last p - 1 of m + 2 (p - 1)


@pytest.mark.parametrize("number", range(0, COUNT, 6))
def test_the_program_that_is_built_is_the_one_described(number, monkeypatch):
    """The executor's options as on a GPU with jax 0.12, of a program that is built and not compiled."""
    run, training = RUNS[number], as_on_a_gpu(RUNS[number], monkeypatch)
    program, options = StepProgram.of(run), training.executor_options
    assert training.program == program and training.schedule.ticks == program.schedule.ticks
    assert (options.in_place, options.merged, options.unrolled) == (program.in_place, program.merges, program.unrolls)
    assert training.where == program.layers and options.share_ends == program.vocabulary_over_pipe
    assert options.compute_bubbles == bool(run.parallel.rings) and not (options.compute_bubbles and options.in_place)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, COUNT, 12))
def test_the_traced_step_has_the_ticks_and_the_buffers_of_the_program(number, monkeypatch):
    """One scan for each segment of ticks; its carry has as many buffers as the memory model counts."""
    run, training = RUNS[number], as_on_a_gpu(RUNS[number], monkeypatch)
    program, (state, batch) = training.program, training.step_shapes()
    with jax.set_mesh(training.mesh):
        step = jax.make_jaxpr(training.traced_step)(state, batch, jax.ShapeDtypeStruct((), np.int32))
    scans = ticks_of(step.jaxpr)
    assert [one.params["length"] for one in scans] == [one.stop - one.start for one in program.executed.segments]
    if program.unrolls or run.parallel.offload_activations:
        return  # without a stash, or with it in host memory
    buffers = {x.aval.shape[:2] for x in scans[0].invars if x.aval.ndim > 2}
    blocks, apart = program.layers.in_groups.slots, program.merges and slot_tables(program.executed).slots_apart
    counts = (1 if apart else program.slots.stash, program.slots.kept)  # apart: an array for each slot
    assert {(count, blocks) for count in counts if count} <= buffers


def test_a_program_describes_itself():
    model = dataclasses.replace(preset("tiny"), layers=7)
    parallel = ParallelConfig(data=2, pipe=2, chunks=2, schedule="zb_v", attention="xla")
    run = RunConfig(model, parallel, TrainConfig(global_batch_size=16))
    assert StepProgram.of(run).describe() == [
        "attention xla: as requested; tensor overlap none",
        "schedule  zb_v, 2 chunks a rank, 8 microbatches of 1: bubble 2.1% of the ideal time, 49 ticks",
        "layers    7 layers on 4 stages: 3 of 2 layers, 1 of 1 (the last); 1 of 8 slots idle (12.5%)",
    ]
    program = StepProgram.of(run)
    assert program.layers.placement.name == "v" and program.vocabulary_over_pipe
    assert not StepProgram.of(run, vocabulary_over_pipe=False).vocabulary_over_pipe  # of a user's rules
    assert program.schedule_of(4).microbatches == 4


def test_blocks_with_experts_run_in_a_loop():
    """Their gradients are added to sums of all layers; without a loop OLMoE's took 22 GB more on 8 A100s, and 13% longer."""
    layout = ParallelConfig(data=8, attention="cudnn")

    def unrolls(model: str) -> bool:
        return StepProgram.of(RunConfig(preset(model), layout, TrainConfig(global_batch_size=8))).unrolls

    assert unrolls("llama3.2-1b") and not unrolls("olmoe-1b-7b")


@pytest.mark.slow
def test_one_stage_of_experts_over_replicas_merges_ticks_and_does_not_unroll(monkeypatch):
    """A merged tick is a loop over blocks with a stash; both at once did not trace."""
    parallel = ParallelConfig(data=2, expert=2, recompute="none", attention="xla")
    run = RunConfig(preset("moe-tiny"), parallel, TrainConfig(global_batch_size=8, precision="fp32"))
    training = as_on_a_gpu(run, monkeypatch)
    assert training.program.merges and not training.program.unrolls
    with jax.set_mesh(training.mesh):
        jax.make_jaxpr(training.traced_step)(*training.step_shapes(), jax.ShapeDtypeStruct((), np.int32))


def ticks_of(jaxpr) -> list:
    """The scans over ticks: those that are not in another loop, in the step's only `shard_map` over pipe that has any."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            found.append(equation)
        elif equation.primitive.name in ("shard_map", "jit", "pjit"):
            found += ticks_of(getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"]))
    return found

"""No compiled program of ours can deadlock: all schedules with what changes their collectives, evaluation and generation.

And each rank reaches as many collectives as the trip counts that its schedule determines say.
"""

import dataclasses
import time

import jax
import numpy as np
import pytest

from benchmarks import compiled
from megajax.config import ConfigError, RunConfig
from megajax.estimate.collective_order import Verdict, check
from megajax.estimate.hlo import loop_trip_counts, read
from megajax.generate.decoder import DecodeSizes
from megajax.pipeline.program import StepProgram
from megajax.plan.compiler import compile_for
from megajax.runtime.compat import compiled_text
from megajax.schedules.registry import SPECS
from tests import small
from tests.generate import test_decoder
from tests.pipeline.test_program import RUNS
from tests.train import test_deadlocks

EXPERTS = dataclasses.replace(
    small.MODEL, experts=4, experts_per_token=2, activation="swiglu", biases=False, norm="rmsnorm", positions="rotary"
)
TWO_LAYERS = dataclasses.replace(small.MODEL, layers=2)
VARIANTS = {
    "zero 0": ((2, 2, 2), {"zero": 0}),
    "zero 1": ((2, 2, 2), {"zero": 1}),
    "zero 3": ((2, 2, 2), {"zero": 3}),
    "four stages": ((1, 4, 2), {"recompute": "full"}),
    "gather": ((2, 2, 2), {"model": EXPERTS, "expert": 2, "expert_dispatch": "gather"}),
    "all-to-all": ((2, 2, 2), {"model": EXPERTS, "expert": 2, "expert_dispatch": "all_to_all"}),
    "bucketed": ((2, 2, 2), {"model": EXPERTS, "expert": 2, "expert_dispatch": "bucketed"}),
    "context": ((1, 2, 2), {"context": 2, "zero": 1}),
    "context, zero 3": ((2, 2, 1), {"context": 2, "zero": 3}),
    "ring": ((2, 2, 2), {"tensor_overlap": "ring", "sequence_parallel": True}),
    "one block": ((2, 2, 2), {"model": TWO_LAYERS}),
    "ring, one block": ((2, 2, 2), {"model": TWO_LAYERS, "tensor_overlap": "ring", "sequence_parallel": True}),
    "offload": ((2, 2, 2), {"offload_activations": True, "recompute": "full"}),
}


def legal(schedule: str, mesh, options) -> RunConfig | None:
    """The run, if it is legal."""
    if options.get("offload_activations") and not SPECS[schedule].drains:
        return None
    chunks = 2 if SPECS[schedule].chunks != "one" else 1
    try:
        run = small.make_run(mesh, schedule=schedule, chunks=chunks, microbatches=4, **options)
    except ConfigError:
        return None
    return None if run.parallel.rings and not StepProgram.of(run).paired else run


SCHEDULES = sorted(name for name, spec in SPECS.items() if spec.trains)
STEPS = {
    f"{schedule}, {variant}": run
    for schedule in SCHEDULES
    for variant, (mesh, options) in VARIANTS.items()
    if (run := legal(schedule, mesh, options))
}
DRAWN = [number for number, run in enumerate(RUNS) if run.parallel.devices > 1][::3]


def step_of(run: RunConfig) -> str:
    training = small.training_of(run)
    return compiled_text(training.compile_train_step(*training.step_shapes()))


def assert_consistent(text: str) -> Verdict:
    verdict = check(text)
    assert verdict.consistent, str(verdict)
    return verdict


def check_step(run: RunConfig) -> None:
    text = step_of(run)
    verdict = assert_consistent(text)
    assert verdict.ranks == run.parallel.devices
    assert bool(verdict.shared) == (run.parallel.expert_dispatch == "bucketed")  # a group agrees on its rounds
    assert bool(verdict.assumed) != SPECS[run.parallel.schedule].drains
    counted = sum(one.times for one in read(text, loop_trip_counts(run, on_cpu=True)).collectives)
    assert verdict.fewest - 1e-6 <= counted <= verdict.most + 1e-6, (verdict.fewest, counted, verdict.most)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    check_step(STEPS[name])


@pytest.mark.slow
@pytest.mark.parametrize("number", DRAWN)
def test_random_steps(number):
    check_step(RUNS[number])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b, zero 3", "interleaved_1f1b, context, zero 3", "zb_v, zero 0", "1f1b, gather"])
def test_evaluations(name):
    training = small.training_of(STEPS[name])
    state, batch = training.step_shapes()
    with jax.set_mesh(training.mesh):
        program = training._evaluate.lower(state.params, batch).compile()
    assert assert_consistent(compiled_text(program)).most > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 2), (2, 4, 1)], ids=str)
def test_generation(mesh):
    decoder = test_decoder.decoder_on(mesh, test_decoder.LLAMA, DecodeSizes(8, 16, 17, chunk=8))
    decoder.compile(test_decoder.loaded(decoder, test_decoder.LLAMA))
    for program in ("prefill", "decode"):
        assert assert_consistent(compiled_text(decoder.compiled(program))).most > 0


# Of benchmarks/compiled_cases.txt, and how many ranks each has.
BIG = {
    "175b": 64,
    "175b-zb_v": 64,
    "175b-ring": 64,
    "1t": 512,
    "405b": 1024,
    "llama2-7b-zero3": 8,
    "llama2-7b-context-pipe": 8,
    "llama2-7b-offload": 4,
    "mixtral": 16,
    "mixtral-expert": 32,
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.compiler
@pytest.mark.parametrize("name", BIG)
def test_programs_for_gpus(name):
    run = compiled.run_of(compiled.SETS["time"][name])
    text = compile_for(run, compiled.GPU, timeout=1500)["hlo"]
    start = time.perf_counter()
    verdict = assert_consistent(text)
    assert time.perf_counter() - start < 180
    assert verdict.ranks == run.parallel.devices == BIG[name] and verdict.fewest > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [{"block": "roll"}, {"ends": "class token"}, {"ends": "vocabulary"}], ids=str)
def test_a_model_of_ones_own_that_would_hang(case, monkeypatch):
    """As `train.deadlocks` refuses, here found by following the ranks."""
    monkeypatch.setattr("megajax.train.step.with_check", lambda function, *_: function)
    training = test_deadlocks.training_of(**case)
    verdict = check(compiled_text(training.compile_train_step(*training.step_shapes())))
    assert any(
        "waits at collective-permute" in fault or "wait at collective-permute" in fault for fault in verdict.faults
    )


def test_there_are_programs_of_every_schedule_and_kind():
    assert len(STEPS) + len(DRAWN) >= 60
    for variant in VARIANTS:
        assert sum(name.endswith(f", {variant}") for name in STEPS) >= 2, variant
    assert {run.parallel.schedule for run in STEPS.values()} == set(SCHEDULES)
    assert np.mean([run.parallel.devices == 8 for run in STEPS.values()]) == 1

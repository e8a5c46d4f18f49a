"""What differs between two programs, from their descriptions; nothing is compiled."""

import dataclasses
import json

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.communication import collectives
from megajax.ops.attention_choice import Choice
from megajax.pipeline.program import StepProgram
from megajax.verify.programs import differences, facts
from tests.pipeline.test_program import random_runs

RUNS = random_runs(60)


def program_of(name="tiny", samples=8, updates_in_place=True, attention=None, **parallel) -> StepProgram:
    layout = ParallelConfig(attention="xla", **parallel)
    run = RunConfig(preset(name), layout, TrainConfig(global_batch_size=samples * layout.data))
    run.validate()
    return StepProgram.of(run, attention, updates_in_place)


def words(a: StepProgram, b: StepProgram) -> dict[str, tuple[str, str]]:
    return {name: of for name, *of in (one.cells for one in differences(facts(a), facts(b)))}


def test_equal_programs_have_no_difference():
    assert differences(facts(program_of(pipe=2)), facts(program_of(pipe=2))) == []


def test_schedules_of_two_pipelines():
    """A backward takes two of 1f1b's ticks, which are 3 (m + p - 1), m = 8 and p = 2. What is equal is left out."""
    assert words(program_of(pipe=2, schedule="1f1b"), program_of(pipe=2, schedule="gpipe")) == {
        "schedule": ["1f1b, 27 ticks", "gpipe, 17 ticks"],
        "slots": ["stash 2, inbox 4", "stash 9, inbox 11"],
        "sends": ["8 with work, 17 without: 819.2 kB", "8 with work, 1 without: 294.9 kB"],
    }


def test_degrees_of_parallelism():
    found = words(program_of(samples=8), program_of(samples=8, data=2, pipe=2, tensor=2, chunks=2, zero=1))
    assert found["schedule"] == ["1 stage, 1 chunk a rank, 8 ticks", "2 stages, 2 chunks a rank, 21 ticks"]
    assert found["layers of a rank"] == ["4", "2 on each of 2"]
    assert found["parameters"] == ["whole on each device; 1 replica", "pipe 2, tensor 2; ZeRO-1 over 2 replicas"]
    assert found["vocabulary"] == ["whole on each device", "pipe 2, tensor 2"]
    assert [name for name in found if name.startswith("over ")] == ["over tensor", "over pipe", "over data"]
    assert len(found) <= 12


def test_experts_over_tensor_ranks():
    how = {"data": 2, "tensor": 2, "expert": 2}
    found = words(program_of("moe-tiny", **how), program_of("moe-tiny", **how | {"expert": 4, "expert_tensor": 1}))
    assert found["parameters"] == [
        "tensor 2, expert 2; 2 replicas",
        "tensor 2, expert 4, of tensor ranks too; 2 replicas",
    ]
    over = {name: cells for name, cells in found.items() if name.startswith("over ")}
    assert over.keys() == {"over tensor", "over expert", "over expert and tensor"}
    assert over["over expert and tensor"][0] == "nothing"


def test_a_choice_of_attention_and_ticks_that_merge():
    a = program_of(pipe=2, tensor=2, chunks=2, attention=Choice("cudnn", "the fastest that these devices have"))
    found = words(a, program_of(pipe=2, tensor=2, chunks=2, updates_in_place=False))
    assert found["attention"] == ["cudnn: the fastest that these devices have", "xla: as requested"]
    assert found["merged ticks"] == [str(a.merged_ticks), "0"] and a.merged_ticks > 0
    assert found["blocks"] == ["in place", ""]
    assert words(program_of(recompute="none"), program_of())["blocks"] == [
        "recompute none, unrolled",
        "recompute selective",
    ]


def test_ticks_in_another_order_are_a_difference():
    """Of two versions of a schedule that have the same name and as many ticks."""
    here, program = program_of(pipe=2, schedule="gpipe"), program_of(pipe=2, schedule="gpipe")
    ticks = program.executed.ticks
    vars(program)["executed"] = dataclasses.replace(program.executed, ticks=(*ticks[1:], ticks[0]))
    found = {one.name for one in differences(facts(here), facts(program))}
    assert "order of operations" in found and "schedule" not in found


def test_facts_of_another_version_are_shown_as_they_are():
    here = facts(program_of())
    other = here | {"attention": "cudnn", "slots": {"stash": 9}, "new": 1}
    found = {name: of for name, *of in (one.cells for one in differences(other, here))}
    assert found["attention"] == ["cudnn", "xla: as requested"] and found["new"] == ["1", "nothing"]


@pytest.mark.parametrize("number", range(0, len(RUNS), 2))
def test_facts_are_json_and_have_all_collectives(number):
    program = StepProgram.of(RUNS[number], updates_in_place=False)
    found = facts(program)
    assert json.loads(json.dumps(found)) == found
    sent = [
        kind for name, kinds in found.items() if name == "sends" or name.startswith("over ") for kind in kinds.values()
    ]
    assert sum(one["bytes"] for one in sent) == pytest.approx(sum(one.bytes for one in collectives(program)))
    assert sum(one["count"] for one in sent) == pytest.approx(sum(one.times for one in collectives(program)))
    assert all(len(name) < 20 and cell for one in differences({}, found) for name, _, cell in [one.cells])

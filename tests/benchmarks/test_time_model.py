"""The time model and the memory model against compiled programs: the layouts of `python -m benchmarks.compiled time`."""

import pytest

from benchmarks import compiled
from benchmarks.compiled import SETS
from megajax.estimate.program_time import Program
from megajax.estimate.roofline import EXPOSED
from megajax.ops.attention_choice import cudnn_installed
from megajax.runtime.compat import jaxlib_version

ROWS = {name: rows[0] for (kind, name), rows in compiled.read().items() if kind == "time" and rows}


@pytest.fixture(scope="module")
def compared():
    return {name: compiled.Comparison(one) for name, one in ROWS.items()}


def test_the_layouts_are_of_every_kind():
    runs = [compiled.run_from_json(one["run"]) for one in ROWS.values()]
    assert list(ROWS) == list(SETS["time"])
    assert len(runs) >= 34 and len({run.model.name for run in runs}) >= 6
    assert len({run.parallel.schedule for run in runs}) >= 5
    assert {run.parallel.recompute for run in runs} == {"none", "selective", "full"}
    assert {run.parallel.vocab_parallel for run in runs} == {"pipe", "tensor"}
    assert any(run.parallel.offload_activations for run in runs) and any(run.parallel.context > 1 for run in runs)


def test_times_are_those_of_the_compiled_programs(compared):
    errors = {name: abs(found.error) for name, found in compared.items()}
    assert sum(errors.values()) / len(errors) < 0.015
    assert max(errors.values()) < 0.05


def test_the_classes_are_those_of_the_compiled_programs(compared):
    """No error of one class makes up for another's: the sum of their errors is a small part of the step."""
    for found in compared.values():
        off = sum(abs(modelled - compiled) for compiled, modelled in found.classes.values())
        assert off < 0.12 * found.work[0]


def test_memory_is_that_of_the_compiled_programs(compared):
    assert max(abs(found.peak_error) for found in compared.values()) < 0.03


def test_held_out_programs_take_the_predicted_time_and_memory():
    """Nothing was read from them: contexts, fp8, ZeRO-3, experts, uneven stages, small models, L40S and A10G."""
    rows = [row for (kind, _), some in compiled.read().items() for row in some if kind == "held-out"]
    found = {row["name"]: compiled.Comparison(row) for row in rows}
    assert list(found) == list(SETS["held-out"]) and len(found) == 24
    errors = sorted(abs(one.error) for one in found.values())
    assert sum(errors) / len(errors) < 0.02 and errors[-1] < 0.101
    memory = [one.peak_error for one in found.values()]
    assert sum(map(abs, memory)) / len(memory) < 0.02
    assert -0.02 < min(memory) and max(memory) < 0.07


def test_sharing_the_vocabulary_costs_what_the_programs_say():
    """GPT-3 175B: less matmul and memory traffic, more exposed communication, and about the same time."""
    shared, own = ROWS["175b"]["seconds"], ROWS["175b-vocab-tensor"]["seconds"]
    runs = [compiled.run_from_json(ROWS[name]["run"]) for name in ("175b", "175b-vocab-tensor")]
    gpu = compiled.accounted_gpu(ROWS["175b"])
    parts = [Program(run, gpu).parts for run in runs]
    exposed = [one.tensor + one.pipe + one.data for one in parts]
    assert parts[1].matmul - parts[0].matmul == pytest.approx(own["matmul"] - shared["matmul"], rel=0.05)
    assert exposed[0] - exposed[1] == pytest.approx(shared[EXPOSED] - own[EXPOSED], abs=0.03)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.compiler
@pytest.mark.skipif(not cudnn_installed(), reason="pip install nvidia-cudnn-cu12")
@pytest.mark.skipif(jaxlib_version() < (0, 12), reason="the results are of the program of jaxlib 0.12")
@pytest.mark.parametrize("name", SETS["time"])
def test_the_programs_compile_to_what_is_on_file(name):
    found = compiled.measure(compiled.run_of(SETS["time"][name]), compiled.GPU)
    assert sum(found["seconds"].values()) == pytest.approx(sum(ROWS[name]["seconds"].values()), rel=0.03)
    assert found["memory"]["peak"] == pytest.approx(ROWS[name]["memory"]["peak"], rel=0.03)

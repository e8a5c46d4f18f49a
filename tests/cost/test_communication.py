"""What a step sends on paper, by hand; and what compiled programs send, beside it."""

import pytest

from benchmarks import communication
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.cost import program
from megajax.cost.communication import expected
from megajax.mesh import make_mesh


def bytes_by_axis(model, m, **parallel) -> dict[str, list[float]]:
    layout = ParallelConfig(**parallel)
    run = RunConfig(model, layout, TrainConfig(global_batch_size=m * layout.data))
    run.validate()
    lines: dict[str, list[float]] = {}
    for line in expected(run):
        lines.setdefault(line.axis, []).append(line.bytes)
    return lines


def test_gpt3_by_hand():
    """175B, t = 8, p = 8, v = 3, b = 1, m = 64: 2104.04473 section 3.2's 8 bsh (t-1)/t, twelve layers a rank."""
    lines = bytes_by_axis(preset("gpt3-175b"), 64, tensor=8, pipe=8, chunks=3)
    layer_and_microbatch = 2048 * 12288 * 2 * 7 / 8
    assert lines["tensor"] == [8 * 12 * 64 * layer_and_microbatch, 2 * 12 * 64 * layer_and_microbatch]
    sends, shared = lines["pipe"]
    assert sends == 2 * 3 * 64 * 2048 * 12288 * 2 / 8
    assert shared == pytest.approx(2 * 7 / 8 * 4 * (50257 + 2048 + 2) * 12288 / 8, rel=0.02)  # the vocabulary is padded
    assert "data" not in lines


def test_degrees_recompute_and_gradients():
    model = ModelConfig(layers=4, hidden=64, heads=4, vocabulary=128, sequence_length=32)
    block = 12 * 64**2 + 13 * 64
    outside = 128 * 64 + 32 * 64 + 2 * 64
    assert model.parameters == 4 * block + outside
    lines = bytes_by_axis(model, 2, data=4, tensor=2)
    assert lines["data"] == [2 * 3 / 4 * 4 * model.parameters / 2]
    one = 2 * 4 * 32 * 64 * 2 / 2
    assert lines["tensor"] == [8 * one, 2 * one]
    assert bytes_by_axis(model, 2, tensor=2, recompute="full")["tensor"] == [8 * one, 2 * one, one]
    grouped = bytes_by_axis(model, 2, tensor=2, recompute="full", recompute_blocks=2)
    assert grouped["tensor"] == [8 * one, 2 * one, 1.5 * one]
    assert bytes_by_axis(model, 2, tensor=2, sequence_parallel=False)["tensor"] == [8 * one]
    ring = bytes_by_axis(model, 2, context=2, tensor=2)["data"][0]
    assert ring == 2 * 4 * (6 * 2 - 4) * 16 * 64 * 2 / 2


def test_rings_send_what_the_formulas_say():
    """Both kinds in one small run, compiled for CPU devices: a tensor group's matmuls, and keys and values of a context."""
    model = ModelConfig(layers=2, hidden=64, heads=4, vocabulary=128, sequence_length=64)
    layout = ParallelConfig(context=4, tensor=2, tensor_overlap="ring")
    run = RunConfig(model, layout, TrainConfig(global_batch_size=2, precision="fp32"))
    run.validate()
    found = program.collectives(communication.step_text(run, make_mesh(layout)))
    sent = lambda axis: program.most_sent(  # noqa: E731
        [c for c in found if c.kind == "collective-permute" and c.axes((4, 1, 2)) == (axis,)]
    )
    formulas = {(line.axis, line.what): line.bytes for line in expected(run)}
    assert sent("tensor") == sum(count for (axis, _), count in formulas.items() if axis == "tensor")
    assert sent("data") == formulas["data", "keys, values round a ring"]


def test_a_pipeline_sends_once_a_tick(capsys):
    """m = 8: sends of m + p - 1 ticks each way; the formula counts m."""
    asked = "--devices cpu:8 --data 2 --pipe 2 --tensor 2 --chunks 1 --layers 2 --global-batch-size 16"
    assert communication.main(asked.split()) == 0
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

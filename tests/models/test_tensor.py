"""Collectives of tensor and sequence parallelism in a block, in a step compiled for H100s."""

import pytest

from megajax.estimate import hlo
from tests import gpu


@pytest.mark.compiler
def test_a_block_gathers_six_times_and_scatters_four_times():
    """2205.05198 section 4.2.2: two and two forward, the conjugates backward, and two inputs gathered again for dW.

    The gradient of a row-parallel product in particular is gathered once, not for each of the matmuls that take it. In the
    three merged ticks a backward gathers that of its next block an iteration ahead: once more than it has blocks.
    """
    layout = {"data": 2, "tensor": 2, "recompute": "selective", "attention": "xla"}
    text, _ = gpu.compile_step(gpu.LARGE, 4, **layout)
    counts = hlo.loop_trip_counts(gpu.run_of(gpu.LARGE, 4, **layout))
    found = [c for c in hlo.read(text, counts).collectives if c.in_loop and c.scope != "ends"]
    runs = 4 * gpu.LARGE.layers
    whole = gpu.LARGE.sequence_length * gpu.LARGE.hidden * 2
    made = {kind: sum(c.times * c.bytes for c in found if c.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    assert made == {
        "all-gather": (6 * runs + 3) * whole,
        "reduce-scatter": 4 * runs * whole / 2,
    }  # XLA may join several
    rest = [c for c in found if c.kind not in ("all-gather", "reduce-scatter")]
    assert (
        sum(c.times * c.bytes for c in rest) < runs * whole / 100
    )  # gradients of norms and biases, whose sequence is split

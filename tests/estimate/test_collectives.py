"""The description of a step's collectives, against the programs that XLA compiles for CPU devices of random legal runs.

By mesh axis and kind. What the compiled programs have besides is counted term by term in `allowed`.
"""

from collections import Counter

import jax
import pytest

from benchmarks import communication
from megajax.config import RunConfig
from megajax.estimate import hlo, model_costs
from megajax.estimate.communication import BLOCKS, ENDS, GATHER, PERMUTE, REDUCE, SCATTER, collectives
from megajax.estimate.hlo import EACH_END
from megajax.pipeline.program import StepProgram
from megajax.runtime.mesh import make_mesh
from tests.pipeline.test_program import COUNT, random_runs

RUNS = random_runs(COUNT)
Key = tuple[str, str, bool]
SUMS = "sums"  # all-reduces and reduce-scatters
ALL = "all"  # kinds, over replicas: ZeRO all-reduces the gradients of an array that it cannot shard, and gathers no weights
SCALARS = 2048  # bytes at most: losses, norms, a few numbers for each expert
FP32 = 4


def covered(run: RunConfig) -> bool:
    """Whether the description is of the run's program on CPU devices.

    With a ring, ranks run blocks in bubbles, too, and the description says that it leaves them out. And where a tensor group
    is alone in the mesh, XLA's CPU compiler gathers all weights when the step starts, which the GPUs' does not.
    """
    parallel = run.parallel
    rings_in_bubbles = parallel.rings and parallel.pipe > 1
    alone = parallel.devices == parallel.tensor
    return not (rings_in_bubbles or alone)


def described(run: RunConfig) -> Counter:
    """Bytes by (axis, kind, whether of embedding and head).

    The CPU compiler has an all-reduce for each reduce-scatter over `tensor`, except the embedding's.
    """
    found: Counter = Counter()
    for one in collectives(StepProgram.of(run, updates_in_place=False)):
        twice = one.bytes * (1 if one.part == BLOCKS else 1 / 2) if one.axis == "tensor" and one.kind == SCATTER else 0
        found[key_of(axis_of(one.axis), one.kind, one.part == ENDS)] += one.bytes + twice
    return found


def key_of(axis: str, kind: str, ends: bool) -> Key:
    kind = SUMS if kind in (REDUCE, SCATTER) else kind
    return axis, ALL if "data" in axis and kind != PERMUTE else kind, ends


def axis_of(name: str) -> str:
    """The replicas of a group that splits experts are replicas: their axes are one here."""
    return " and ".join(dict.fromkeys(name.replace("expert", "data").split(" and ")))


def compiled(run: RunConfig) -> Counter:
    """Likewise of the compiled program, on the device that sends most."""
    mesh = make_mesh(run.parallel, jax.devices()[: run.parallel.devices])
    text = communication.step_text(run, mesh)
    shape, found = tuple(run.parallel.mesh_sizes.values()), {}
    for one in hlo.read(text, hlo.loop_trip_counts(run, on_cpu=True)).collectives:
        axis = axis_of(" and ".join(one.axes(shape)))
        if axis:
            found.setdefault(key_of(axis, one.kind, one.scope in EACH_END), []).append(one)
    return Counter({key: hlo.most_sent(several) for key, several in found.items()})


def allowed(run: RunConfig, axis: str, kind: str, ends: bool) -> tuple[float, float]:
    """(bytes that XLA may save, bytes that it may send besides), counted.

    Only of collectives of vectors: the largest, which is once a step, are the learned positions' gradients.
    """
    parallel, model, m = run.parallel, model_costs(run.model), run.microbatches
    t, p, replicas = parallel.tensor, parallel.pipe, parallel.data * parallel.context
    rows = parallel.microbatch_size * model.sequence_length // parallel.context
    positions = model.sequence_length * model.hidden * FP32
    blocks = StepProgram.of(run).layers.rank_slots * m
    ring = lambda degree: (degree - 1) / degree  # noqa: E731
    # Each device of a tensor group sums the positions' gradients of its part of the sequence, and gathers them at the end.
    saved = lambda degree: 2 * ring(degree) * positions * (1 - 1 / t)  # noqa: E731
    if ends:  # softmax, and over tensor the last norm's gradients
        head = {"tensor": 3 * rows + 2 * model.hidden, "pipe": 4 * rows}.get(axis, 0) * (kind == SUMS)
        # Parts of a sequence have their tokens' positions, and gather the gradients of these apart.
        apart = rows * (model.hidden + 1) * (parallel.context > 1) if (axis, kind) == ("tensor", GATHER) else 0
        return 0, m * (2 * ring(t if axis == "tensor" else p) * head + ring(t) * apart) * FP32
    if (axis, kind) == ("tensor", SUMS):
        norms = blocks * model.block.whole * FP32  # and biases: their gradients, for each block
        return 0, 2 * ring(t) * norms + SCALARS
    if (axis, kind) == ("tensor", GATHER):
        return 0, ring(t) * positions + SCALARS
    if (axis, kind) == ("pipe", SUMS):
        return saved(p) / (replicas if parallel.zero else 1), SCALARS
    if axis == "data and pipe":
        return saved(replicas * p), 2 * SCALARS
    if (axis, kind) == ("data", ALL):
        vectors = model.block.on_device(t) - sum(
            one.inputs * one.outputs / (t if one.split else 1)
            for one in model.matmuls
            if not one.name.startswith("experts")
        )
        routers = 0
        if model.experts:  # their routers' numbers for each expert
            vectors -= model.experts.on_device(t, 1)
            routers = model.experts.choice.count
        # ZeRO-3 gathers no biases in the backward, and sums once the gradients of arrays that it cannot shard. W of a split
        # backward computes norms again.
        each = ring(replicas) * blocks * FP32 if parallel.zero == 3 else 0
        late = StepProgram.of(run).split_backwards * vectors
        return saved(replicas) + 2 * each * vectors, each * (3 * routers + late) + SCALARS
    return 0, SCALARS


def check(run: RunConfig) -> None:
    """Fails where the compiled program sends less or more of a kind over an axis than the description and `allowed` say."""
    want, found = described(run), compiled(run)
    assert any(key[0] == "data" for key in want) == (run.parallel.data * run.parallel.context > 1)
    for key in want | found:
        less, more = allowed(run, *key)
        assert -less - 1 <= found[key] - want[key] <= more + 1, (key, found[key], want[key], less, more)


# Every second run, and all whose replicas split experts.
CHOSEN = [number for number, run in enumerate(RUNS) if covered(run) and (number % 2 == 0 or run.parallel.expert > 1)]


@pytest.mark.slow
@pytest.mark.parametrize("number", CHOSEN)
def test_compiled_programs_send_what_the_description_says(number):
    check(RUNS[number])

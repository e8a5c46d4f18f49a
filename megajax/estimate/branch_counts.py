"""How often each branch of the conditionals on blocks is taken, where stages differ: in the kinds of their layers, or in how
many they have and run.

`stage.Stack` writes one conditional for an operation of a tick, with a branch for each chunk, order of kinds and part
(`ChunkParts.choices`), and where a rank may idle a last one that does nothing; and one for a merged tick, or for parts that
overlap, with a branch for each two chunks, their orders and part (`ChunkParts.pairs`). The schedule's table says which of
them each rank takes in each tick.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megajax.estimate.hlo_parser import EACH, branch_key
from megajax.pipeline.chunk_work import Choice, ChunkParts, Pair
from megajax.pipeline.options import KIND, MERGED, is_merged
from megajax.pipeline.program import StepProgram
from megajax.pipeline.slots import OperationRow, slot_tables
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, OVERLAP_PARTS, WEIGHT

__all__ = ["branch_counts", "counts_of_ranks", "kind_loops"]

VERSIONS = 2  # of PipeDream-2BW's weights, each a chunk
Row = tuple[int, int, int, int, int]  # rank, chunk, stage, part, parts
# The operation, whether every rank has it in all of its ticks, the branches, and how often each (rank, branch) is taken.
Conditional = tuple[str, bool, Sequence[Choice | Pair], Mapping[tuple[int, Choice | Pair], float]]


def branch_counts(program: StepProgram) -> dict[str, float]:
    """How often a rank takes each branch in a step, by `hlo_parser.branch_key`, of F, B, I, W, and FB (`options.MERGED`).

    Where ranks differ, it is their mean. Empty where all branches are alike: stages have the same layers.
    """
    total: Counter[str] = Counter()
    ranks = counts_of_ranks(program)
    for counts in ranks:
        total.update(counts)
    return {key: count / len(ranks) for key, count in total.items()}


def counts_of_ranks(program: StepProgram) -> list[dict[str, float]]:
    """As `branch_counts`, of each rank; none where all branches are alike."""
    layers, blocks = program.layers, program.layers.in_groups
    if not (program.skips_slots or (layers.kinds and not layers.same_stages)):
        return []
    kinds = layers if layers.kinds else None
    chunk = ChunkParts((kinds or blocks).slots, kinds, blocks.counts if program.skips_slots else None)
    found: list[dict[str, float]] = [{} for _ in range(program.schedule.stages)]
    for op, always, choices, taken in _conditionals(program, chunk):
        keys = [branch_key(op, len(choices) + (not always), index) for index in range(len(choices))]
        for counts in found:  # those that no rank takes too: without them the parser would not know these conditionals
            counts |= {key: counts.get(key, 0.0) for key in keys}
        for (rank, choice), times in taken.items():
            found[rank][keys[choices.index(choice)]] += times
    return found


def kind_loops(program: StepProgram) -> dict[str, float]:
    """The share of a rank's slots for blocks that have each kind, of a program that chooses by loops of 0 or 1 iteration."""
    layers = program.layers
    slots = layers.stages * layers.slots
    return {f"{KIND}{number}{EACH}": layers.kinds.count(kind) / slots for number, kind in enumerate(layers.kind_names)}


def _conditionals(program: StepProgram, chunk: ChunkParts) -> Iterator[Conditional]:
    """Those of all segments of a step."""
    if not program.drains:
        yield from _without_table(program, chunk)
        return
    schedule, chunks = program.executed, program.run.parallel.chunks
    table = slot_tables(schedule)
    forward, backward, weight = table.rows.forward, table.rows.backward, table.rows.weight
    for segment in schedule.segments:
        ticks = slice(segment.start, segment.stop)
        inside = np.zeros_like(forward.on)
        inside[ticks] = 1
        if program.merges and is_merged(schedule, segment):
            yield MERGED, True, *_of_pairs(chunk, table.pairs(segment, "chunk"), [1], forward, backward, inside)
            continue
        if schedule.paired:
            for op, rows in ((FORWARD, forward), (BACKWARD, backward)):
                if op in segment.ops:
                    yield op, segment.full, *_of_rows(chunk, chunks, op, [1], _count(rows, rows.on & inside))
            continue
        both = forward.on & backward.on & inside
        if segment.overlaps:
            pairs = table.pairs(segment, "chunk")
            yield MERGED, False, *_of_pairs(chunk, pairs, [OVERLAP_PARTS], forward, backward, both)
        whole = {INPUT: [1], WEIGHT: [1]} if schedule.split else {BACKWARD: table.backward_parts}
        for op, parts in {FORWARD: [1], **whole}.items():
            rows = {FORWARD: forward, WEIGHT: weight}.get(op, backward)
            counts = _count(rows, rows.on & inside & ~both, ignores_parts=op in (INPUT, WEIGHT))
            yield op, False, *_of_rows(chunk, chunks, op, parts, counts)


def _without_table(program: StepProgram, chunk: ChunkParts) -> Iterator[Conditional]:
    """Those of PipeDream-2BW: a rank has one stage, whose two versions it runs equally often."""
    schedule = program.schedule
    ranks, each = range(schedule.stages), program.passes / VERSIONS
    rows = Counter({(rank, version, rank, 0, 1): each for version in range(VERSIONS) for rank in ranks})
    for op in (FORWARD, BACKWARD):
        yield op, all(segment.full for segment in schedule.segments), *_of_rows(chunk, VERSIONS, op, [1], rows)


def _of_rows(
    chunk: ChunkParts, chunks: int, op: str, parts: Sequence[int], rows: Mapping[Row, float]
) -> tuple[list[Choice], Counter]:
    """The branches of an operation's conditional, and how often (rank, branch) occurs; arguments as for `choices`."""
    backwards, taken = op in (BACKWARD, INPUT), Counter()
    for (rank, number, stage, *part), times in rows.items():
        low, high = chunk.part_bounds(*part, backwards=backwards)
        if low < high:
            taken[rank, Choice(number, chunk.order_of(stage), low, high)] += times
    return chunk.choices(chunks, parts, backwards=backwards), taken


def _count(rows: OperationRow, on: np.ndarray, *, ignores_parts: bool = False) -> Counter[Row]:
    """How often each row is one of those that are on."""
    columns = [column[on == 1].tolist() for column in (rows.chunk, rows.stage, rows.part, rows.parts)]
    ranks = np.nonzero(on == 1)[1].tolist()
    if ignores_parts:
        columns[2:] = [0] * len(ranks), [1] * len(ranks)
    return Counter(zip(ranks, *columns, strict=True))


def _of_pairs(
    chunk: ChunkParts,
    chunks: Sequence[tuple[int, int]],
    parts: Sequence[int],
    forward: OperationRow,
    backward: OperationRow,
    on: np.ndarray,
) -> tuple[list[Pair], Counter]:
    """The branches of a conditional on pairs, and how often (rank, pair) occurs where `on` is 1; see `ChunkParts.pairs`."""
    columns = [column[on == 1].tolist() for row in (forward, backward) for column in (row.chunk, row.stage)]
    part = [column[on == 1].tolist() for column in (forward.part, forward.parts)]
    taken: Counter = Counter()
    for rank, ahead, stage, back, other, *of in zip(np.nonzero(on == 1)[1].tolist(), *columns, *part, strict=True):
        low, high = chunk.part_bounds(*of)
        if low < high:
            taken[rank, Pair((ahead, back), (chunk.order_of(stage), chunk.order_of(other)), low, high)] += 1
    return chunk.pairs(chunks, parts), taken

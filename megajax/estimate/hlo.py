"""Reads compiled HLO (the text of `compiled.as_text()`): its collectives, their bytes, and its matmuls.

Counts are for one run of the module. An operation in a loop counts once for each iteration, if the text gives the trip count
(XLA's known_trip_count). The trip counts of other loops are dynamic, and operations in them are marked `conditional`:
megajax's executor writes "if" as a loop of zero or one iteration, and its loops over blocks are dynamic in ticks in which a
rank may idle. The schedule determines their total iterations in a step; `loop_trip_counts` returns them by scope.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megajax.config import RunConfig
from megajax.config.parallel import MESH_AXES
from megajax.estimate.branch_counts import branch_counts, kind_loops
from megajax.estimate.hlo_parser import (
    BRANCHES,
    KINDS,
    Line,
    Visit,
    array_bytes,
    arrays,
    average_trip_counts,
    called_by,
    computations,
    is_grouped,
    is_matmul,
    kernel_name,
    known_trip_count,
    matmul_flops,
    numbers,
    operands,
    scope_of,
    second_part,
    visits,
)
from megajax.estimate.parameters import Sharding
from megajax.ops.expert_rounds import ROUNDS
from megajax.pipeline.embedding_and_head import ENDS
from megajax.pipeline.options import MERGED, SEND, embeds_ahead, merged_ticks
from megajax.pipeline.program import StepProgram
from megajax.pipeline.slots import slot_tables
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, OVERLAP_PARTS, WEIGHT

# Bytes that a device sends for each byte that the collective returns, in a group of g, by a ring: the fewest possible.
SENT = {
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-gather": lambda g: (g - 1) / g,
    "reduce-scatter": lambda g: g - 1,
    "all-to-all": lambda g: (g - 1) / g,
    "ragged-all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
}
COMPUTE = ("fusion", "custom-call", "dot", "while", "call", "conditional")
EACH_END = ("embed", "head", "embed_backward")  # the executor's scopes of embedding and head, one by one
BLOCKS = (FORWARD, BACKWARD, INPUT, WEIGHT)  # and of blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective(Visit):
    """One collective of a module, on a call path to its computation, from which it has `times`, `scope` and others.

    Attributes:
      kind: of KINDS.
      shape: of its (first) result on one device.
      bytes: of all its results on one device.
      groups: the devices of each group, or (source, target) pairs of a permute: by their index in the mesh, whose last
        axis varies fastest, independent of the devices' ids.
      asynchronous: whether it is a start and a done that XLA does not run as one.
      behind: number of matmuls, attention kernels and operations certain to run some between its start and its done, which
        it can overlap. A loop with a dynamic trip count is not certain to, except the loops over blocks (on ranks that do
        not idle).
      overlapped: number of all computing operations between its start and its done.
    """

    kind: str
    shape: tuple[int, ...]
    bytes: float
    groups: tuple[tuple[int, ...], ...]
    asynchronous: bool
    behind: int
    overlapped: int

    def axes(self, shape: Sequence[int]) -> tuple[str, ...]:
        """Axes along which the devices of a group differ, of a mesh of data (, expert), pipe and tensor."""
        names = MESH_AXES if len(shape) == len(MESH_AXES) else (MESH_AXES[0], "expert", *MESH_AXES[1:])
        places = np.indices(shape).reshape(len(shape), -1).T
        differ = np.any([(places[list(group)] != places[group[0]]).any(0) for group in self.groups], axis=0)
        return tuple(name for name, along in zip(names, differ, strict=True) if along)

    def sent(self) -> dict[int, float]:
        """Bytes that each device sends in all runs; devices that send nothing are omitted."""
        size = len(self.groups[0])
        if self.kind == "collective-permute":
            pairs = [(source, 1) for source, target in self.groups if source != target]
        else:
            pairs = [(device, SENT[self.kind](size)) for group in self.groups for device in group if size > 1]
        return {device: self.times * factor * self.bytes for device, factor in pairs}


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matmul of a module: its result's shape on one device, FLOPs of all its runs, scope as of a `Collective`, and
    whether it is one of experts, whose FLOPs are of all rows that a device has for them.
    """

    shape: tuple[int, ...]
    flops: float
    scope: str
    grouped: bool = False


@dataclasses.dataclass(frozen=True)
class HloModule:
    """Counts of a compiled module on each device.

    Attributes:
      collectives: all of them, in the order of the text.
      matmuls: XLA's and the libraries', except those inside attention kernels.
      kernels: how often each custom call runs, by `hlo_parser.kernel_name`.
      sliced: bytes of slices that are copied from larger arrays before use, in all runs. A matmul takes a whole array, so
        a block's weights are copied each time the block runs.
    """

    collectives: tuple[Collective, ...]
    matmuls: tuple[Matmul, ...]
    kernels: dict[str, float]
    sliced: float

    def flops(self, *scopes: str, routed_part: float = 1.0) -> float:
        """FLOPs of the matmuls in the loops with these names, or of all; for `routed_part` see `rates.Rates`."""
        chosen = (one for one in self.matmuls if not scopes or one.scope in scopes)
        return sum(one.flops * (routed_part if one.grouped else 1) for one in chosen)


def collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of a module."""
    return read(text).collectives


def loop_trip_counts(run: RunConfig, on_cpu: bool = False) -> dict[str, float]:
    """How often what is known at run time only happens in a run's step, by scope (`EACH_END`, `ENDS` and `BLOCKS`).

    F: iterations of all loops with a dynamic trip count in this scope, one for each of a rank's (groups of) blocks, except
    in ticks in which no rank idles, whose trip counts are static; `on_cpu`, in a step compiled for CPU devices, those of
    one block are dynamic too (`Operations.block_range`). F/cond: how often a conditional in this scope takes a branch that
    does something, one for each of a rank's chunks, or parts of one. So for B, I and W. `EACH_END`: iterations, one for
    each microbatch, on the ranks that compute them, or branches outside of merged and mixed ticks; ends/cond: how often
    those have any of the three. FB/cond: how often a rank chooses the chunks of a merged tick, or of parts that overlap
    (`pipeline.options.MERGED`), which then is in neither F/cond nor B/cond. send/cond: how often there is a send, in
    schedules that overlap. F/cond/N/I: where stages have other layers, of conditionals with N branches how often they take
    branch I (`branch_counts`); of loops that choose a block's kind see `kind_loops`. Where ranks differ, it is their mean.
    Loops over experts' rounds have no iteration: routing is balanced.
    """
    program, parallel = StepProgram.of(run), run.parallel
    schedule, layers = program.schedule, program.layers
    blocks, one_order = layers.in_groups.slots, layers.same_stages if layers.kinds else not program.skips_slots
    each = layers.layers / layers.group / layers.stages if program.skips_slots else blocks
    no_choice = parallel.chunks == 1 and one_order and program.drains  # 2BW has two versions
    every = [works for tick in schedule.ticks for works in tick]
    parts = {work.parts for works in every if not schedule.overlaps(works) for work in works}
    total, full, ticks = program.passes, Counter(), Counter()
    for segment in schedule.segments:
        full.update(dict.fromkeys(segment.ops, (segment.stop - segment.start) * segment.full))
        ticks.update(dict.fromkeys(segment.ops, segment.stop - segment.start))
    dynamic, (merged, pairs) = on_cpu and blocks == 1, merged_passes(program)
    found = dict.fromkeys(EACH_END, float(run.microbatches)) | _end_branches(program) | {ROUNDS: 0.0}
    for op in BLOCKS:
        static = full[op] if no_choice else 0
        several = min(max(parts), blocks) if op == BACKWARD and not schedule.split else 1
        chosen = total - pairs - (merged if merged and op in MERGED else static)
        loops = total - full[op] * (not (program.skips_slots or dynamic))
        loops = ticks[op] if dynamic and program.computes_bubbles else loops
        if schedule.split and op != FORWARD:  # a pair's backward is whole
            loops = pairs if op == BACKWARD else total - pairs
        found |= {op: loops * each, op + BRANCHES: chosen * several}
    found |= (
        {MERGED + BRANCHES: merged + pairs * min(OVERLAP_PARTS, blocks)} | branch_counts(program) | kind_loops(program)
    )
    return found | {SEND + BRANCHES: float(slot_tables(schedule).rows.sends[:, 0].sum())} if pairs else found


def merged_passes(program: StepProgram) -> tuple[int, float]:
    """How many of a rank's forwards of a chunk run in merged ticks, and how many overlap a backward in parts."""
    schedule, merged = program.schedule, merged_ticks(program.executed) if program.merges else 0
    every = (works for tick in schedule.ticks for works in tick)
    return merged, sum(map(schedule.overlaps, every)) / OVERLAP_PARTS / schedule.stages


def _end_branches(program: StepProgram) -> dict[str, float]:
    """How often conditionals run the embedding, the head and the embedding's backward, alone and together."""
    if not program.drains:  # each runs once per microbatch, as no ticks are merged
        return {end + BRANCHES: float(program.run.microbatches) for end in EACH_END}
    schedule, shared = program.executed, Sharding.from_config(program.run).vocabulary_over_pipe
    table, found = slot_tables(schedule, share_ends=shared), Counter()
    for segment in schedule.segments:
        if embeds_ahead(schedule, segment, program.merges):
            found["embed" + BRANCHES] += table.rows.embed.on[segment.start].sum()
            together = table.end_combinations(segment)
            found[ENDS + BRANCHES] += together.total() - together[()]
        else:
            for end in EACH_END:
                found[end + BRANCHES] += getattr(table.rows, end).on[segment.start : segment.stop].sum()
    return {name: float(count) / (schedule.stages if shared else 1) for name, count in found.items()}


def read(text: str, trip_counts: Mapping[str, float] | None = None, ragged_part: float = 1.0) -> HloModule:
    """Reads a module.

    Args:
      text: the module.
      trip_counts: as for `average_trip_counts`.
      ragged_part: of the rows that a ragged all-to-all has room for, the part that it sends (`rates.Rates`).
    """
    modules, entry = computations(text)
    heavy = _with_matmuls(modules)
    each = average_trip_counts(modules, entry, trip_counts)
    found, matmuls, kernels, sliced = [], [], Counter(), 0.0
    for visit in visits(modules, Visit(entry), each):
        lines = modules[visit.name]
        types = {line.name: line.type for line in lines}
        for place, line in enumerate(lines):
            kind = line.op.removesuffix("-start")
            if kind in KINDS:
                shape, count = collective_size(line, kind, types, ragged_part)
                found.append(_collective(lines, place, kind, shape, count, heavy, visit))
            if flops := matmul_flops(line, types):
                matmuls.append(Matmul(arrays(line.type)[0][1], visit.times * flops, visit.scope, is_grouped(line)))
            if line.op == "fusion" and modules[called_by(line.rest)[0]][-1].op == "dynamic-slice":
                sliced += visit.times * sum(map(array_bytes, arrays(line.type)))
            if line.op == "custom-call":
                kernels[kernel_name(line)] += visit.times
    return HloModule(tuple(found), tuple(matmuls), dict(kernels), sliced)


def _multiplies(line: Line, heavy: set[str]) -> bool:
    """Whether a line is a matmul, or is certain to call a computation that has one (on ranks that do not idle)."""
    dynamic = line.op == "conditional" or (line.op == "while" and known_trip_count(line) is None)
    perhaps = dynamic and scope_of(line, (*EACH_END, ENDS, *BLOCKS, MERGED)) not in (*BLOCKS, MERGED)
    return is_matmul(line) or (not perhaps and not heavy.isdisjoint(called_by(line.rest)))


def _with_matmuls(computations: dict[str, list[Line]]) -> set[str]:
    """Names of the computations that have matmuls, or call one that has."""
    calls = {
        name: {called for line in lines for called in called_by(line.rest)} for name, lines in computations.items()
    }
    heavy = {name for name, lines in computations.items() if any(map(is_matmul, lines))}
    while more := {name for name, called in calls.items() if called & heavy} - heavy:
        heavy |= more
    return heavy


def collective_size(
    line: Line, kind: str, types: Mapping[str, str], ragged_part: float
) -> tuple[tuple[int, ...], float]:
    """(shape of the first result, bytes that `SENT` is a factor of); `types`: of the lines of its computation.

    The bytes are those of the results. A ragged all-to-all has room for all rows that could be sent either where they come
    from or where they go, and `ragged_part` of that is sent.
    """
    started = line.op.endswith("-start")
    # A start returns its operands, then its results; before jax 0.12 an all-reduce-start returned its results alone.
    with_operands = started and (kind != "all-reduce" or line.type.startswith("(("))
    returned = arrays(second_part(line.type) if with_operands else line.type)
    if kind == "ragged-all-to-all":
        rows = max(array_bytes(one) for one in (*arrays(types[operands(line)[0]]), *returned))
        return returned[0][1], ragged_part * rows
    return returned[0][1], sum(map(array_bytes, returned))


def _collective(lines, place, kind, shape, count, heavy, visit: Visit) -> Collective:
    line, done = lines[place], f"{kind}-done"
    end = next((i for i in range(place, len(lines)) if lines[i].op == done and _uses(lines[i], line.name)), place)
    between = lines[place + 1 : max(end, place + 1)]
    return Collective(
        **vars(visit),
        kind=kind,
        shape=shape,
        bytes=count,
        groups=collective_groups(line.rest),
        asynchronous=line.op.endswith("-start") and '"is_sync":true' not in line.rest,
        behind=sum(_multiplies(other, heavy) for other in between),
        overlapped=sum(other.op in COMPUTE for other in between),
    )


def _uses(line: Line, name: str) -> bool:
    return re.match(rf"%?{re.escape(name)}[,)]", line.rest) is not None


def collective_groups(rest: str) -> tuple[tuple[int, ...], ...]:
    """The groups in the text, in one of three forms.

    A list, {{0,1},{2,3}}; an iota, [2,2]<=[4] or [2,2]<=[2,2]T(1,0); or axes of a mesh, mesh['a'=2,'b'=4] {'b'}, whose
    devices may be permuted, device_ids=([4,2]T(1,0)).
    """
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", rest)
    if listed:
        return tuple(numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        ids = _iota(iota[2], iota[3]).reshape(numbers(iota[1]))
        return tuple(map(tuple, ids.tolist()))
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", rest
    )
    assert mesh, f"replica groups in an unknown form: {rest}"
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    shape = [int(size) for size in sizes.values()]
    ids = _iota(mesh[2] or str(math.prod(shape)), mesh[3]).reshape(shape)
    meeting = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", mesh[4])]
    ids = np.moveaxis(ids, meeting, range(-len(meeting), 0))
    return tuple(map(tuple, ids.reshape(-1, math.prod(shape[axis] for axis in meeting)).tolist()))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(numbers(sizes))).reshape(numbers(sizes))
    return ids.transpose(numbers(order)) if order else ids


def most_sent(found: Iterable[Collective]) -> float:
    """Bytes that the device that sends most sends in these collectives."""
    totals: dict[int, float] = {}
    for collective in found:
        for device, sent in collective.sent().items():
            totals[device] = totals.get(device, 0) + sent
    return max(totals.values(), default=0.0)

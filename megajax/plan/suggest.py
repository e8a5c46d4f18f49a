"""The smallest change to a run that makes it fit on its GPUs."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable
from typing import Any

from megajax.config import ConfigError, RunConfig, option
from megajax.config.errors import divisors
from megajax.config.run_schedule import schedule_arguments
from megajax.estimate import model_costs
from megajax.estimate.gpus import Gpu, is_fused, with_attention
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.ops.attention_choice import FUSED
from megajax.pipeline.program import StepProgram
from megajax.plan.search import chunk_counts, usable_bytes
from megajax.schedules.registry import Slots, find, search_order
from megajax.schedules.schedule import ScheduleError

MODES = ("none", "selective", "full")
LARGEST_TENSOR, LARGEST_CONTEXT = 8, 16
# Tables of schedules that a search may make, in forwards: some seconds. `auto` makes and simulates dozens for each.
MOST_FORWARDS, AUTO_TABLES = 100_000, 50

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """A run that fits.

    Attributes:
      options: the command line options that make the change.
      peak: bytes, by the memory model.
      cost: the change in the time of a step, in words.
    """

    run: RunConfig
    options: str
    peak: float
    cost: str


def smallest_change(run: RunConfig, gpu: Gpu, correction: float = 1.0, keep: Collection[str] = ()) -> Change | None:
    """The change of fewest options that fits, on the same number of GPUs if possible; of several the fastest.

    Any option of the layout, and any two, the mesh being one of them, are tried. Those that need another table of a
    schedule without closed forms come last, and few of them are tried.

    Args:
      run: a run that does not fit.
      gpu: its GPUs.
      correction: factor on the memory model's bytes, e.g. from a compilation of `run`.
      keep: fields of the layout that must not change.
    """
    tables, fused = _Tables(run), _fused_attention(run, gpu)
    for growth in (1, 2, 4, 8, 16):
        changes = _changes(run, run.parallel.devices * growth, fused)
        allowed = sorted((fields for fields in changes if not set(fields) & set(keep)), key=len)
        for _, equally_many in itertools.groupby(allowed, key=len):
            fits = _fitting(run, equally_many, tables, gpu, usable_bytes(gpu) / correction)
            if fits:
                timed = [(step_time(changed, gpu).total, peak, fields, changed) for fields, changed, peak in fits]
                time, peak, fields, changed = min(timed, key=lambda found: found[:2])
                cost = f"{time / step_time(run, gpu).total - 1:+.0%} time a step"
                more = "" if growth == 1 else f" on {growth} times the GPUs"
                options = " ".join(_option(name, value) for name, value in fields.items())
                return Change(changed, options, correction * peak, cost + more)
    return None


class _Tables:
    """Limits the tables that a search makes of schedules whose slots or bubble have no closed form."""

    def __init__(self, run: RunConfig):
        self.made, self.left = {self._key(run)}, MOST_FORWARDS

    def forwards(self, run: RunConfig) -> int:
        """Forwards of the table that the run needs; 0 if it needs none, or one that has been made."""
        spec, parallel = StepProgram.of(run).spec, run.parallel
        if (spec.slots and spec.bubble) or self._key(run) in self.made:
            return 0
        each = AUTO_TABLES if "costs" in spec.options else 1
        return each * parallel.pipe * parallel.chunks * run.microbatches

    def allow(self, run: RunConfig) -> bool:
        """Whether the run's table may still be made; if so it is counted."""
        forwards = self.forwards(run)
        if forwards > self.left:
            return False
        self.left -= forwards
        self.made.add(self._key(run))
        return True

    @staticmethod
    def _key(run: RunConfig) -> tuple:
        return run.parallel.schedule, *sorted(schedule_arguments(run).items())


def _fitting(
    run: RunConfig, changes: Iterable[Fields], tables: _Tables, gpu: Gpu, limit: float
) -> list[tuple[Fields, RunConfig, int]]:
    """The legal changes whose peak is at most `limit` bytes: fields, changed run and peak."""
    candidates = []
    for fields in changes:
        changed = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **fields))
        # Without the schedule's slots, which may need a table, most changes are ruled out.
        if _is_legal(changed, gpu) and sum(bytes_per_device(changed, slots=Slots(0, 0, 0)).values()) <= limit:
            candidates.append((fields, changed))
    candidates.sort(key=lambda candidate: tables.forwards(candidate[1]))
    fits = []
    for fields, changed in candidates:
        if tables.forwards(changed) and (fits or not tables.allow(changed)):
            break
        try:
            peak = sum(bytes_per_device(changed).values())
        except ScheduleError:  # of a generator with rules of its own, or of a file's sizes
            continue
        if peak <= limit:
            fits.append((fields, changed, peak))
    return fits


def _is_legal(run: RunConfig, gpu: Gpu) -> bool:
    try:
        run.validate()
        with_attention(run, gpu)
    except ConfigError:
        return False
    return True


def _option(name: str, value: Any) -> str:
    """A field and its value as an option of the command line."""
    if isinstance(value, bool):
        return option(name) if value else option(f"no_{name}")
    return f"{option(name)} {'none' if value is None else value}"


def _changes(run: RunConfig, devices: int, fused: str | None) -> Iterable[Fields]:
    """Fields to change, for this number of devices: one option or two, or the mesh, alone or with an option."""
    choices = [*_choices(run), [{"attention": fused}] if fused else []]
    single = [fields for alternatives in choices for fields in alternatives]
    meshes = [fields for fields in _meshes(run, devices) if fields]
    if devices == run.parallel.devices:
        yield from single
        for one, other in itertools.combinations(choices, 2):
            yield from _together(one, other)
    yield from meshes
    yield from _together(meshes, single)


def _together(some: Iterable[Fields], others: Collection[Fields]) -> Iterable[Fields]:
    """The pairs that do not change the same field."""
    for one in some:
        yield from (one | other for other in others if not set(one) & set(other))


def _choices(run: RunConfig) -> list[list[Fields]]:
    """For each option of the layout but the mesh, the fields of its other values that may need less memory."""
    parallel = run.parallel
    spec, stages = StepProgram.of(run).spec, parallel.pipe
    chunks = chunk_counts(stages, run.model.layers) if spec.chunks == "any" and stages > 1 else []
    groups = [size for size in divisors(run.model.layers) if parallel.recompute_blocks < size <= 8]
    full = {} if parallel.recompute == "full" else {"recompute": "full"}
    experts = model_costs(run.model).experts
    live = parallel.live_chunks or run.microbatches * parallel.chunks
    return [
        [{"recompute": mode} for mode in MODES[MODES.index(parallel.recompute) + 1 :]],
        [{"recompute_blocks": size} | full for size in groups],
        [{"microbatch_size": size} for size in divisors(parallel.microbatch_size)[:-1]],
        [{"chunks": count} for count in chunks if count != parallel.chunks],
        list(_schedules(run)),
        [{"live_chunks": live // by} for by in (2, 4, 8) if "live_chunks" in spec.options and live // by],
        [] if parallel.group_size is None else [{"group_size": None}],
        [{"zero": level} for level in (1, 3) if level > parallel.zero],
        [{"expert": size} for size in divisors(experts.count if experts else 1) if size != parallel.expert],
        [] if parallel.sequence_parallel or parallel.tensor == 1 else [{"sequence_parallel": True}],
        [] if parallel.offload_activations else [{"offload_activations": True}],
        [{"vocab_parallel": "pipe"}] if parallel.vocab_parallel == "tensor" and stages > 1 else [],
    ]


def _fused_attention(run: RunConfig, gpu: Gpu) -> str | None:
    """The fused attention that the GPU supports, if the run has none."""
    auto = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, attention="auto"))
    attention = with_attention(auto, gpu).parallel.attention
    return attention if attention in FUSED and not is_fused(run.parallel) else None


def _schedules(run: RunConfig) -> Iterable[Fields]:
    """The other schedules, with the chunks that each needs and without the options of the present one."""
    parallel = run.parallel
    if parallel.pipe == 1:
        return
    for spec in map(find, search_order()):
        if spec.name == parallel.schedule:
            continue
        own = {"one": 1, "two": 2}.get(spec.chunks, parallel.chunks)
        chunks = {"chunks": own} if own != parallel.chunks else {}
        unused = {
            name: None
            for name in ("group_size", "live_chunks")
            if getattr(parallel, name) is not None and name not in spec.options
        }
        yield {"schedule": spec.name} | chunks | unused


def _meshes(run: RunConfig, devices: int) -> Iterable[Fields]:
    """Meshes of `devices` GPUs with a tensor degree that fits a host, as the fields that differ from the run's."""
    parallel = run.parallel
    contexts = [size for size in divisors(devices) if size <= max(LARGEST_CONTEXT, parallel.context)]
    for tensor, context in itertools.product((1, 2, 4, LARGEST_TENSOR), contexts):
        rest = devices // (tensor * context)
        for pipe in divisors(rest) if rest * tensor * context == devices else []:
            wanted = {"data": rest // pipe, "context": context, "pipe": pipe, "tensor": tensor}
            fields = {axis: size for axis, size in wanted.items() if size != getattr(parallel, axis)}
            if pipe <= run.model.layers:
                fewest = parallel.chunks > 1 and (pipe == 1 or run.model.layers < pipe * parallel.chunks)
                yield fields | ({"chunks": 1} if fields and fewest else {})

"""The smallest change to a run that makes it fit on its GPUs."""

import dataclasses
from collections.abc import Iterable

from megajax.config import ConfigError, RunConfig, option
from megajax.estimate.gpus import Gpu
from megajax.estimate.memory import bytes_per_device, slots_of
from megajax.estimate.step_time import step_time
from megajax.plan.search import usable_bytes
from megajax.schedules.registry import ScheduleSpec, check_sizes, find, search_order

MODES = ("none", "selective", "full")


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


def smallest_change(run: RunConfig, gpu: Gpu, correction: float = 1.0) -> Change | None:
    """The change of fewest options that fits, on the same number of GPUs if possible; of several the fastest.

    Args:
      run: a run that does not fit.
      gpu: its GPUs.
      correction: factor on the memory model's bytes, e.g. from a compilation of `run`.
    """
    parallel = run.parallel
    here = parallel.devices
    for growth in (1, 2, 4, 8, 16):
        fits = []
        for fields in _changes(run, here * growth):
            changed = dataclasses.replace(run, parallel=dataclasses.replace(parallel, **fields))
            if not _is_legal(changed):
                continue
            peak = correction * sum(bytes_per_device(changed).values())
            if peak <= usable_bytes(gpu):
                fits.append((len(fields), step_time(changed, gpu).total, peak, fields, changed))
        if fits:
            _, time, peak, fields, changed = min(fits, key=lambda found: found[:2])
            now = step_time(run, gpu).total
            cost = f"{time / now - 1:+.0%} time a step" + ("" if growth == 1 else f" on {growth} times the GPUs")
            return Change(changed, " ".join(f"{option(name)} {value}" for name, value in fields.items()), peak, cost)
    return None


def _changes(run: RunConfig, devices: int) -> Iterable[dict]:
    """Fields to change, for this number of devices in all: one or two of them, and the mesh."""
    parallel = run.parallel
    single: list[dict] = []
    single += [{"recompute": mode} for mode in MODES[MODES.index(parallel.recompute) + 1 :]]
    single += [{"microbatch_size": size} for size in (1, 2, 4, 8) if size < parallel.microbatch_size]
    single += [{"chunks": chunks} for chunks in range(2, parallel.chunks)]
    leanest = _leanest_schedule(run)
    if parallel.pipe > 1 and parallel.schedule != leanest:
        single.append({"schedule": leanest} | ({"chunks": 1} if parallel.chunks > 1 else {}))
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        single.append({"sequence_parallel": True})
    meshes = [fields for fields in _meshes(run, devices) if fields]
    pairs = [one | two for index, one in enumerate(single) for two in single[index + 1 :] if not set(one) & set(two)]
    more = single + pairs if devices == parallel.devices else []
    yield from (*more, *meshes, *(mesh | one for mesh in meshes for one in single if not set(mesh) & set(one)))


def _leanest_schedule(run: RunConfig) -> str:
    """The one-chunk schedule that holds the fewest activations; of equal ones the simplest."""
    specs = [spec for spec in map(find, search_order()) if spec.chunks == "one" and spec.drains]

    def held(spec: ScheduleSpec) -> int:
        parallel = dataclasses.replace(run.parallel, schedule=spec.name, chunks=1, group_size=None, live_chunks=None)
        slots = slots_of(dataclasses.replace(run, parallel=parallel))
        return slots.stash + slots.kept

    sizes = {"stages": run.parallel.pipe, "microbatches": run.microbatches, "chunks": 1}
    return min((spec for spec in specs if not check_sizes(spec, **sizes)), key=held).name


def _meshes(run: RunConfig, devices: int) -> Iterable[dict]:
    """Meshes of `devices` GPUs with a tensor degree that fits a host, as the fields that differ from the run's."""
    parallel = run.parallel
    for tensor in (1, 2, 4, 8):
        for pipe in range(1, run.model.layers + 1):
            if devices % (tensor * pipe) == 0:
                wanted = {"data": devices // tensor // pipe, "pipe": pipe, "tensor": tensor}
                fields = {axis: size for axis, size in wanted.items() if size != getattr(parallel, axis)}
                fewest = parallel.chunks > 1 and (pipe == 1 or run.model.layers < pipe * parallel.chunks)
                yield fields | ({"chunks": 1} if fields and fewest else {})


def _is_legal(run: RunConfig) -> bool:
    try:
        run.validate()
    except ConfigError:
        return False
    return True

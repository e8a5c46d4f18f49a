"""The options of a layout that the planner chooses, each with its values, and the layouts that they make.

`FIELDS` declares them once. A search takes all values that its question allows, a suggestion those layouts that differ least
from a run: both are `layouts` with a filter for each field. A new field of `ParallelConfig` needs an entry in `FIELDS`, and
what has none, such as `latency_estimates`, is not searched.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megajax.config import ConfigError, ParallelConfig, RunConfig
from megajax.config.errors import divisors
from megajax.config.layer_kinds import layer_kinds
from megajax.config.parallel import MESH_AXES
from megajax.estimate import model_costs
from megajax.estimate.context_exchange import exchanges
from megajax.schedules.registry import search_order, specs
from megajax.schedules.stages import StageLayers, loop

__all__ = ["ALIKE", "FIELDS", "PARTS", "Fields", "Filter", "layouts", "passes", "usual_filters"]

Fields = dict[str, Any]  # of a ParallelConfig
Filter = Callable[[Sequence, Fields], Iterable]  # of a field's declared values, in a layout, those that are taken
# Orders of the mesh's axes that are searched if none are asked for: with the first replicas are in different hosts, where
# they send least; with the second neighbouring replicas share a host, for tokens that are sent to their experts.
ORDERS = (("data", "pipe", "tensor"), ("pipe", "data", "tensor"))
MOST_CHUNKS = 12  # of a rank; with more, the additional sends cost more than the smaller bubble gains
MOST_CONTEXT, MOST_BLOCKS = 16, 8  # ranks that share a sample; blocks that are recomputed together


def layouts(run: RunConfig, gpus: int, filters: Mapping[str, Filter]) -> Iterator[Fields]:
    """All combinations of the filtered values of `FIELDS` for a run's model and batch, legal or not, found one by one.

    Args:
      run: has the values of the fields that do not vary.
      gpus: number of GPUs.
      filters: of the fields that vary, each with a function from the declared values, and from the fields before it, to
        the values that are taken.
    """

    def extended(found: Iterable[Fields], name: str) -> Iterator[Fields]:
        declared, wanted, alike = FIELDS[name], filters[name], ALIKE.get(name)
        for layout in found:
            values = wanted(declared(run, gpus, layout), layout)
            for value in [*values][:1] if alike and alike(layout) else values:
                yield {**layout, name: value}

    return functools.reduce(extended, sorted(filters, key=[*FIELDS].index), iter([vars(run.parallel)]))


def passes(*checks: Callable[[], Any]) -> bool:
    """Whether no check raises a ConfigError."""
    try:
        for check in checks:
            check()
    except ConfigError:
        return False
    return True


def _tensor(run: RunConfig, gpus: int, layout: Fields) -> list[int]:
    """The degrees that split the model's layers."""
    alone = {size: ParallelConfig(tensor=size, sequence_parallel=False) for size in divisors(gpus)}
    return [size for size, parallel in alone.items() if passes(replace(run, parallel=parallel).validate)]


def _pipe(run: RunConfig, gpus: int, layout: Fields) -> list[int]:
    """The fewest stages for each size of the largest one.

    With more stages of that size, of which some have an empty slot, a microbatch would take as long, and fewer replicas
    would share the batch.
    """
    sizes = divisors(gpus // (layout["tensor"] * layout["context"]))
    return _fewest([size for size in sizes if size <= run.model.layers], run.model.layers)


def _microbatch_size(run: RunConfig, gpus: int, layout: Fields) -> list[int]:
    return [size for samples in _quotient(run.train.global_batch_size, layout["data"]) for size in divisors(samples)]


def _schedule(run: RunConfig, gpus: int, layout: Fields) -> list[str]:
    """The simplest first, and after them those that are searched by name only."""
    trains = {spec.name: spec for spec in specs() if spec.trains}
    names = dict.fromkeys([*search_order(), *trains])
    return [name for name in names if layout["pipe"] > 1 or trains[name].chunks not in ("two", "even")]


def _chunks(run: RunConfig, gpus: int, layout: Fields) -> list[int]:
    """The fewest for each size of the largest stage.

    More chunks of that size have the same bubble, and a rank more slots, of which some are empty.
    """
    spec = next((spec for spec in specs() if spec.name == layout["schedule"]), None)  # of a file there is none
    if layout["pipe"] == 1 or spec is None or spec.chunks not in ("any", "even"):
        return [2 if spec and spec.chunks == "two" else 1]
    most, step = min(run.model.layers // layout["pipe"], MOST_CHUNKS), 2 if spec.chunks == "even" else 1
    counts = _fewest(range(step, most + 1, step), run.model.layers, layout["pipe"])
    return [count for count in counts if count > 1 or not spec.one_chunk]


def _live_chunks(run: RunConfig, gpus: int, layout: Fields) -> list[int | None]:
    """All of a rank's, a half, a quarter, ..."""
    if not any(spec.name == layout["schedule"] and "live_chunks" in spec.options for spec in specs()):
        return [None]
    every = run.train.global_batch_size // (layout["data"] * layout["microbatch_size"]) * layout["chunks"]
    return [None, *(every >> halvings for halvings in range(1, every.bit_length()))]


def _pipeline_layout(run: RunConfig, gpus: int, layout: Fields) -> list[str | None]:
    """The usual one, and of a model with layers of several kinds one that needs fewer slots for them."""
    kinds, stages = layer_kinds(run.model), layout["pipe"] * layout["chunks"]
    own = _fewer_slots(kinds, stages) if kinds and stages <= len(kinds) else None
    return [None, own] if own else [None]


@functools.lru_cache(maxsize=256)
def _fewer_slots(kinds: tuple[str, ...], stages: int) -> str | None:
    """A `pipeline_layout` in which the first stages give up slots, if some kind of layers then needs fewer on a stage.

    Every rank has slots for the most layers of each kind that any stage has (`estimate/kinds.py`): of DeepSeek-V3's 61
    layers on 32 stages, three of which are empty slots, for one of the three dense layers at its start instead of two.
    """
    usual = StageLayers(len(kinds), stages, kinds=kinds)
    counts = [usual.slots] * stages
    for stage in [-1, *range(stages - 1)][: usual.idle]:  # the last one has the head
        counts[stage] -= 1
    own = StageLayers(len(kinds), stages, placement=replace(loop(stages, 1), layers=tuple(counts)), kinds=kinds)
    before, after = usual.kind_slots, own.kind_slots
    return _notation(counts) if before != after and all(after[kind] <= before[kind] for kind in before) else None


def _notation(counts: Sequence[int]) -> str:
    """As one writes `--pipeline-layout`: "E(t|)*2(tt|)*29tL"."""
    runs = [(count * "t", len([*same])) for count, same in itertools.groupby(counts[:-1])]
    return f"E{''.join(f'({stage}|)*{times}' for stage, times in runs)}{counts[-1] * 't'}L"


def _expert_tensor(run: RunConfig, gpus: int, layout: Fields) -> list[int | None]:
    """That of the tensor group, and with several ranks that the number of experts is a multiple of one device for each."""
    return [None, 1] if layout["tensor"] > 1 and _experts(run) % layout["tensor"] == 0 else [None]


def _expert(run: RunConfig, gpus: int, layout: Fields) -> list[int]:
    """The degrees that split the experts, and that the replicas, or all devices of these, can be grouped by."""
    ranks = layout["tensor"] if layout["expert_tensor"] == 1 else 1
    return [size for size in divisors(_experts(run)) if size % ranks == _replicas(layout) * ranks % size == 0]


def _experts(run: RunConfig) -> int:
    """How many experts the model has; 1 without."""
    experts = model_costs(run.model).experts
    return experts.choice.count if experts else 1


def _expert_dispatch(run: RunConfig, gpus: int, layout: Fields) -> list[str]:
    """The run's, and of experts over several replicas the one of other memory; what "auto" is follows from the layout."""
    own = run.parallel.expert_dispatch
    return [own] if layout["expert"] == 1 else ["auto" if own == "bucketed" else own, "bucketed"]


def _axis_order(run: RunConfig, gpus: int, layout: Fields) -> list[tuple[str, ...]]:
    """Those that differ: of axes with one device the place does not matter."""
    sizes = {"data": _replicas(layout), "pipe": layout["pipe"], "tensor": layout["tensor"]}
    found = {}
    for order in itertools.permutations(MESH_AXES):
        found.setdefault(tuple(axis for axis in order if sizes[axis] > 1), order)
    return [*found.values()]


def usual_filters(host_size: int) -> dict[str, Filter]:
    """The filters of fields that a search narrows unless it is asked for them, on hosts of so many GPUs.

    Of orders of axes the first, with expert parallelism both, unless tensor groups fill a host: then all other neighbours
    are on different ones in any order. Of `pipeline_layout` the value with fewest slots.
    """

    def orders(declared: Sequence[tuple[str, ...]], layout: Fields) -> list[tuple[str, ...]]:
        replicas = layout["expert"] // (layout["tensor"] if layout["expert_tensor"] == 1 else 1)  # of a group
        usual = ORDERS if replicas > 1 and layout["tensor"] < host_size else ORDERS[:1]
        return [order for order in declared if order in usual]

    return {"axis_order": orders, "pipeline_layout": lambda declared, layout: declared[-1:]}


def _context_exchange(run: RunConfig, gpus: int, layout: Fields) -> list[str]:
    """Those that the heads of a device allow."""
    if layout["context"] == 1:
        return ["ring"]
    one = run.with_layout(tensor=layout["tensor"], context=layout["context"])
    return ["all_to_all", "ring"] if exchanges(one) else ["ring"]


def _replicas(layout: Fields) -> int:
    return layout["data"] * layout["context"]


def _quotient(number: int, divisor: int) -> list[int]:
    """Of whole numbers; none if it is not one."""
    return [] if number % divisor else [number // divisor]


def _fewest(counts: Sequence[int], layers: int, each: int = 1) -> list[int]:
    """For each size that the largest of `count * each` parts of the layers can have, the smallest count."""
    return sorted({-(-layers // (count * each)): count for count in reversed(counts)}.values())


# The values of each field, the simplest first: a function of a run (its model and batch), the number of GPUs, and a layout
# in which the fields above this one are known.
FIELDS: dict[str, Callable[[RunConfig, int, Fields], Sequence]] = {
    "tensor": _tensor,
    "context": lambda run, gpus, layout: [n for n in divisors(gpus // layout["tensor"]) if n <= MOST_CONTEXT],
    "context_exchange": _context_exchange,
    "pipe": _pipe,
    "data": lambda run, gpus, layout: _quotient(gpus, layout["tensor"] * layout["context"] * layout["pipe"]),
    "expert_tensor": _expert_tensor,
    "expert": _expert,
    "expert_dispatch": _expert_dispatch,
    "microbatch_size": _microbatch_size,
    "sequence_parallel": lambda run, gpus, layout: (True, False),
    "vocab_parallel": lambda run, gpus, layout: ("pipe", "tensor"),
    "attention": lambda run, gpus, layout: ("xla", "cudnn", "tokamax"),
    "offload_activations": lambda run, gpus, layout: (False, True),
    "tensor_overlap": lambda run, gpus, layout: ("none", "ring")[: 1 + layout["sequence_parallel"]],
    "axis_order": _axis_order,
    "zero": lambda run, gpus, layout: (0, 1, 3) if _replicas(layout) > 1 else (0,),
    "schedule": _schedule,
    "chunks": _chunks,
    "group_size": lambda run, gpus, layout: (None,),
    "live_chunks": _live_chunks,
    "pipeline_layout": _pipeline_layout,
    "recompute_blocks": lambda run, gpus, layout: [n for n in divisors(run.model.layers) if n <= MOST_BLOCKS],
    "recompute": lambda run, gpus, layout: ("none", "selective", "full")[2 * (layout["recompute_blocks"] > 1) :],
}
# Where all values of a field make the same program, so that one is enough.
ALIKE: dict[str, Callable[[Fields], bool]] = {
    "schedule": lambda layout: layout["pipe"] == 1,
    "sequence_parallel": lambda layout: layout["tensor"] == 1,
    "vocab_parallel": lambda layout: layout["pipe"] == 1,
    "tensor_overlap": lambda layout: layout["tensor"] == 1,
    "axis_order": lambda layout: sum(layout[axis] > 1 for axis in ("pipe", "tensor")) + (_replicas(layout) > 1) < 2,
}
# The fields in the order of `FIELDS`, in parts that a search chooses one after the other. Most values of the first cannot be
# the fastest whatever the rest is.
LATER = (
    ("zero",),
    ("schedule", "chunks", "group_size", "live_chunks", "pipeline_layout"),
    ("recompute_blocks", "recompute"),
)
PARTS = (tuple(name for name in FIELDS if name not in itertools.chain(*LATER)), *LATER)

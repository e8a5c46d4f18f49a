"""Which layers each stage of the pipeline has; a number of layers that the stages do not divide is legal.

All ranks run one program, so every stage has the same number of *slots* for layers, the fewest possible: L layers on S
stages have n = ceil(L / S) slots each, and nS - L stages have n - 1 layers and leave their last slot empty. These are, in
this order, the stages with other work: the last one (head), the first one (embedding), then the one before the last, the
one before that, and so on. So Llama 3.1 405B has one layer fewer on its first and last stage (2407.21783 section 3.3.2):
126 layers on 16 stages are 7, 14 times 8, and 7. For 7 layers on 2 ranks with 2 chunks each, "-" being an empty slot:

    placement "loop"    rank 0    rank 1        placement "v"    rank 0    rank 1
    chunk 0             0 1       2 3           chunk 0          0 1       2 3
    chunk 1             4 5       6 -           chunk 1          6 -       4 5

Layers that are recomputed together are not separated: the unit that is placed is then the group. This file imports no jax.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from megajax.schedules.errors import UserError, shown

__all__ = ["PLACEMENTS", "KindLayers", "StageLayers", "placement_problem", "stage_number"]

PLACEMENTS = ("loop", "v")


def placement_problem(placement: str, chunks: int) -> str:
    """Why stages cannot be placed on ranks in this way; "" if they can: every stage is then on one rank, once."""
    if placement not in PLACEMENTS:
        return f'placement is {shown(placement)}; it must be "loop" or "v"'
    if placement == "v" and chunks != 2:
        return f'placement "v" is for two chunks on each rank, not {chunks}'
    return ""


def stage_number(chunk: int, rank: int, ranks: int, placement: str) -> int:
    """The stage that a rank holds as its chunk `chunk`; chunks are assigned round-robin (2104.04473 section 2.2)."""
    return 2 * ranks - 1 - rank if placement == "v" and chunk == 1 else chunk * ranks + rank


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """The layers of each stage.

    Attributes:
      layers: of the model; at least one (group) for each stage.
      ranks: of the pipeline.
      chunks: of each rank; a chunk is a stage.
      placement: of the stages on ranks, "loop" or "v" (`Schedule.placement`).
      group: layers that stay together; it divides `layers`.
      kinds: the kind of each layer, of a model whose layers have different parameters (`of`). None: they have the same.
    """

    layers: int
    ranks: int = 1
    chunks: int = 1
    placement: str = "loop"
    group: int = 1
    kinds: tuple[str, ...] | None = None

    def __post_init__(self):
        """Raises UserError for chunks that the placement is not for."""
        if problem := placement_problem(self.placement, self.chunks):
            raise UserError(problem)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage, in the order of the model."""
        stages = self.stages
        order = [stages - 1, 0, *range(stages - 2, 0, -1)]
        short = set(order[: self.idle // self.group])
        return tuple(self.slots - self.group * (stage in short) for stage in range(stages))

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first layer of each stage."""
        return tuple(itertools.accumulate(self.counts[:-1], initial=0))

    @property
    def slots(self) -> int:
        """Slots of a stage: the layers of the largest."""
        return -(-self.layers // (self.group * self.stages)) * self.group

    @property
    def rank_slots(self) -> int:
        """Slots of a rank."""
        return self.chunks * self.slots

    @property
    def idle(self) -> int:
        """Empty slots of all stages."""
        return self.stages * self.slots - self.layers

    @functools.cached_property
    def stage_kinds(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of the layers of each stage, of a model that has kinds."""
        kinds = iter(self.kinds)
        return tuple(tuple(next(kinds) for _ in range(count)) for count in self.counts)

    @property
    def orders(self) -> list[tuple[str, ...]]:
        """The different ones of `stage_kinds`, sorted."""
        return sorted(set(self.stage_kinds))

    @property
    def same_stages(self) -> bool:
        """Whether all stages have layers of the same kinds in the same order."""
        return len(self.orders) == 1

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The kinds that there are, sorted; none for a model without."""
        return tuple(sorted(set(self.kinds or ())))

    def of(self, kind: str) -> "KindLayers":
        """Where the layers of one kind are."""
        counts = tuple(stage.count(kind) for stage in self.stage_kinds)
        numbers = tuple(number for number, one in enumerate(self.kinds) if one == kind)
        return KindLayers(len(numbers), self.ranks, self.chunks, self.placement, stage_counts=counts, numbers=numbers)

    @property
    def numbers(self) -> Sequence[int]:
        """The layers' numbers in the model."""
        return range(self.layers)

    @property
    def without_kinds(self) -> "StageLayers":
        """The layers of each stage, for arrays that have a row for each layer of any kind."""
        return dataclasses.replace(self, kinds=None)

    @property
    def in_groups(self) -> "StageLayers":
        """The groups of each stage, as layers."""
        return dataclasses.replace(self, layers=self.layers // self.group, group=1)

    @property
    def unequal_counts(self) -> tuple[int, ...] | None:
        """(Groups of) layers of each stage if these are not equal; None: they are."""
        return self.in_groups.counts if self.idle else None

    @property
    def kind_slots(self) -> dict[str, int]:
        """For each kind the slots of a rank: its parameters are stacked apart, and every chunk has room for the most."""
        return {kind: self.of(kind).rank_slots for kind in self.kind_names}

    def describe_kinds(self) -> str:
        """In words: "1 dense, 7 sparse layers; slots on each of 2 ranks: 1 dense, 4 sparse; 2 of 10 slots idle (20.0%)"."""
        named = lambda counts: ", ".join(f"{count} {kind}" for kind, count in counts.items())  # noqa: E731
        slots = self.ranks * sum(self.kind_slots.values())
        idle = slots - self.layers
        text = f"{named({kind: self.kinds.count(kind) for kind in self.kind_names})} layers"
        if self.ranks > 1:
            text += f"; slots on each of {self.ranks} ranks: {named(self.kind_slots)}"
        return text + (f"; {idle} of {slots} slots idle ({idle / slots:.1%})" if idle else "")

    @property
    def remarks(self) -> list[str]:
        """What a run says about its layers: that stages have unequal numbers of them, and which kinds they are."""
        return [self.describe()] * (self.idle > 0) + ([self.describe_kinds()] if self.kinds else [])

    def describe(self) -> str:
        """In words: "126 layers on 16 stages: 14 of 8 layers, 2 of 7 (the first and the last); 2 of 128 slots idle"."""
        stages, slots = self.stages, self.slots
        text = f"{self.layers} layers on {stages} stage{'s' * (stages > 1)}"
        if not self.idle:
            return f"{text}: {slots} on each"
        short = sum(count < slots for count in self.counts)
        which = {1: "the last", 2: "the first and the last"}.get(short, f"the first and the last {short - 1}")
        total = stages * slots
        return (
            f"{text}: {stages - short} of {slots} layers, {short} of {slots - self.group} ({which}); {self.idle} of {total} "
            f"slots idle ({self.idle / total:.1%})"
        )


@dataclasses.dataclass(frozen=True)
class KindLayers(StageLayers):
    """Where the layers of one kind are, `layers` in all: any number of them on each stage.

    Attributes:
      stage_counts: of each stage.
      numbers: of these layers in the model.
    """

    stage_counts: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        return self.stage_counts

    @property
    def slots(self) -> int:
        return max(self.stage_counts)

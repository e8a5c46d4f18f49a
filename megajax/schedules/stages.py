"""Which stage each chunk of a rank is (`Placement`), and which layers each stage has (`StageLayers`).

A number of layers that the stages do not divide is legal. All ranks run one program, so every stage has the same number of
*slots* for layers, the fewest possible: L layers on S stages have n = ceil(L / S) slots each, and nS - L stages have n - 1
layers and leave their last slot empty. These are, in this order, the stages with other work: the last one (head), the first
one (embedding), then the one before the last, the one before that, and so on. So Llama 3.1 405B has one layer fewer on its
first and last stage (2407.21783 section 3.3.2): 126 layers on 16 stages are 7, 14 times 8, and 7. For 7 layers on 2 ranks
with 2 chunks each, "-" being an empty slot:

    loop       rank 0    rank 1        wave       rank 0    rank 1
    chunk 0    0 1       2 3           chunk 0    0 1       2 3
    chunk 1    4 5       6 -           chunk 1    6 -       4 5

A placement may give the numbers of layers itself: any, and none on a stage that only embeds or computes the loss. Where
they differ by more than one (group), a stage does not run its empty slots (`skips_slots`).

Layers that are recomputed together are not separated: the unit that is placed is then the group. This file imports no jax.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from megajax.schedules.errors import UserError, shown

__all__ = ["KindLayers", "Placement", "StageLayers", "loop", "skips_slots", "wave"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which stage of the model each chunk of each rank is: data, which `loop` and `wave` make.

    Attributes:
      stage_of: `stage_of[chunk][rank]`, the number of the stage. A rank's chunks are in the order of the model.
      layers: of each stage, in the order of the model; 0 is legal. None: as equal as possible (`StageLayers`).
    """

    stage_of: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...] | None = None

    def __post_init__(self):
        """Raises UserError unless every stage is on one rank, once."""
        rows, layers = self.stage_of, self.layers
        every = sorted(itertools.chain.from_iterable(rows))
        if len({len(row) for row in rows}) != 1 or every != list(range(len(every))) or not every:
            raise UserError(
                f"placement is {shown(rows)}; it must have a row for each chunk, with a stage for each rank, and each of "
                "the stages 0, 1, ... once"
            )
        for rank, own in enumerate(zip(*rows, strict=True)):
            if list(own) != sorted(own):
                raise UserError(f"placement has chunks {shown(own)} on rank {rank}; a rank's stages must ascend")
        if layers is not None and (len(layers) != len(every) or min(layers) < 0):
            raise UserError(
                f"placement has layers {shown(layers)}; it must have a number for each of {len(every)} stages"
            )

    @property
    def ranks(self) -> int:
        return len(self.stage_of[0])

    @property
    def chunks(self) -> int:
        """Of each rank."""
        return len(self.stage_of)

    @functools.cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """The (chunk, rank) of each stage."""
        places = itertools.product(range(self.chunks), range(self.ranks))
        return tuple(sorted(places, key=lambda place: self.stage_of[place[0]][place[1]]))

    @property
    def turns(self) -> bool:
        """Whether a rank sends to itself: it has two stages that follow each other."""
        return self.ranks > 1 and any(a[1] == b[1] for a, b in itertools.pairwise(self.homes))

    @property
    def name(self) -> str:
        """One of "loop", "v", "wave" and "own"; the layers do not count."""
        bare = dataclasses.replace(self, layers=None)
        if bare == loop(self.ranks, self.chunks):
            return "loop"
        return "own" if bare != wave(self.ranks, self.chunks) else "v" if self.chunks == 2 else "wave"


@functools.lru_cache(maxsize=1024)
def loop(ranks: int, chunks: int) -> Placement:
    """Chunks round-robin: chunk c of rank r is stage c * ranks + r (2104.04473 section 2.2)."""
    return Placement(tuple(tuple(range(chunk * ranks, (chunk + 1) * ranks)) for chunk in range(chunks)))


@functools.lru_cache(maxsize=1024)
def wave(ranks: int, chunks: int) -> Placement:
    """Down the ranks and up again: a V of two chunks (2401.10241), a W of four (2308.15762), and so on."""
    return Placement(tuple(row[:: -1 if chunk % 2 else 1] for chunk, row in enumerate(loop(ranks, chunks).stage_of)))


def skips_slots(counts: Sequence[int]) -> bool:
    """Whether stages with these numbers of (groups of) layers run the layers that they have only, and no empty slots.

    If they differ by one, the stages with fewer wait for the others in any case.
    """
    return max(counts) - min(counts) > 1 or min(counts) == 0


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """The layers of each stage.

    Attributes:
      layers: of the model; at least one (group) for each stage, unless the placement says otherwise.
      ranks: of the pipeline.
      chunks: of each rank; a chunk is a stage.
      placement: of the stages on ranks. None is replaced by `loop`.
      group: layers that stay together; it divides `layers`.
      kinds: the kind of each layer, of a model whose layers have different parameters (`of`). None: they have the same.
    """

    layers: int
    ranks: int = 1
    chunks: int = 1
    placement: Placement | None = None
    group: int = 1
    kinds: tuple[str, ...] | None = None

    def __post_init__(self):
        """Raises UserError for ranks, chunks or layers that the placement is not for."""
        placement = self.placement or loop(self.ranks, self.chunks)
        object.__setattr__(self, "placement", placement)
        if (placement.chunks, placement.ranks) != (self.chunks, self.ranks):
            given = f"{placement.chunks} chunks on each of {placement.ranks} ranks"
            raise UserError(f"the placement is for {given}, not for {self.chunks} on each of {self.ranks}")
        if (own := placement.layers) and (sum(own) != self.layers or any(count % self.group for count in own)):
            groups = f", in groups of {self.group} that are recomputed together" if self.group > 1 else ""
            raise UserError(f"the stages have {_runs(own)} layers, but the model has {self.layers}{groups}")

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage, in the order of the model."""
        if self.placement.layers is not None:
            return self.placement.layers
        stages = self.stages
        order = [stages - 1, 0, *range(stages - 2, 0, -1)]
        short = set(order[: self.idle // self.group])
        slots = self.slots
        return tuple(slots - self.group * (stage in short) for stage in range(stages))

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first layer of each stage."""
        return tuple(itertools.accumulate(self.counts[:-1], initial=0))

    @property
    def slots(self) -> int:
        """Slots of a stage: the layers of the largest."""
        own = self.placement.layers
        return max(own) if own else -(-self.layers // (self.group * self.stages)) * self.group

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
        placement = dataclasses.replace(self.placement, layers=None)
        return KindLayers(len(numbers), self.ranks, self.chunks, placement, stage_counts=counts, numbers=numbers)

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
        own = self.placement.layers
        counts = own and tuple(count // self.group for count in own)
        placement = dataclasses.replace(self.placement, layers=counts)
        return dataclasses.replace(self, layers=self.layers // self.group, placement=placement, group=1)

    @property
    def unequal_counts(self) -> tuple[int, ...] | None:
        """(Groups of) layers of each stage if these are not equal; None: they are."""
        return self.in_groups.counts if self.idle else None

    @functools.cached_property
    def skips_slots(self) -> bool:
        """As the function, of (groups of) layers of one kind."""
        return not self.kinds and skips_slots(self.in_groups.counts)

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
        total = stages * slots
        unused = f"{self.idle} of {total} slots idle ({self.idle / total:.1%})"
        if self.placement.layers:
            return f"{text}: {_runs(self.counts)}; {unused}"
        short = sum(count < slots for count in self.counts)
        which = {1: "the last", 2: "the first and the last"}.get(short, f"the first and the last {short - 1}")
        return f"{text}: {stages - short} of {slots} layers, {short} of {slots - self.group} ({which}); {unused}"


def _runs(counts: Sequence[int]) -> str:
    """Numbers in words, those that are repeated once: "0, 14 times 9, 0"."""
    runs = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return ", ".join(
        f"{times} times {count}" if times > 2 else ", ".join([str(count)] * times) for count, times in runs
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

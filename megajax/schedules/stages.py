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

__all__ = ["StageLayers", "stage_number"]


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
    """

    layers: int
    ranks: int = 1
    chunks: int = 1
    placement: str = "loop"
    group: int = 1

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

    @property
    def in_groups(self) -> "StageLayers":
        """The groups of each stage, as layers."""
        return dataclasses.replace(self, layers=self.layers // self.group, group=1)

    @property
    def unequal_counts(self) -> tuple[int, ...] | None:
        """(Groups of) layers of each stage if these are not equal; None: they are."""
        return self.in_groups.counts if self.idle else None

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

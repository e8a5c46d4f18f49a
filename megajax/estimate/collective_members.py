"""Who takes part in the collectives of an HLO module, and how messages name them."""

import re
from collections.abc import Sequence

from megajax.estimate.hlo import collective_groups
from megajax.estimate.hlo_demand import base
from megajax.estimate.hlo_parser import Line

MOST_NAMED = 8  # ranks, or ranges of them, in a message
Groups = tuple[tuple[int, ...], ...]
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
ACROSS_ONE_AXIS = ("all-to-all", "ragged-all-to-all", "collective-broadcast", "collective-permute")


class Unsupported(Exception):
    """Something that decides a collective is not understood; the message names it."""


class Members:
    """The ranks of each group of a collective, of a module of so many replicas and partitions.

    A rank is replica * partitions + partition.
    """

    def __init__(self, replicas: int, partitions: int):
        self.replicas, self.partitions = replicas, partitions
        self._found: dict[str, Groups] = {}

    def of(self, line: Line) -> Groups:
        """Its groups; of a permute, all ranks."""
        if base(line) == "collective-permute":
            return (tuple(range(self.replicas * self.partitions)),)
        if line.rest not in self._found:
            self._found[line.rest] = self._groups(line)
        return self._found[line.rest]

    def pairs(self, line: Line) -> Groups:
        """(source, target) of each transfer of a permute."""
        return self._ranks(self._listed(line), "channel_id=" in line.rest)

    def _listed(self, line: Line) -> Groups:
        if re.search(r"(replica_groups|source_target_pairs)=\{\}", line.rest):
            return ()
        try:
            return collective_groups(line.rest)
        except (AssertionError, ValueError):
            raise Unsupported(f"the groups of {line.op} {place(line)} have an unknown form") from None

    def _groups(self, line: Line) -> Groups:
        listed, channel = self._listed(line), "channel_id=" in line.rest
        if "use_global_device_ids=true" in line.rest:
            return listed or (tuple(range(self.replicas * self.partitions)),)
        if base(line) in ACROSS_ONE_AXIS or not channel:
            sizes = self.partitions if channel else self.replicas
            return self._ranks(listed or (tuple(range(sizes)),), channel)
        everywhere = listed or (tuple(range(self.replicas)),)  # replicas, each with all its partitions
        return tuple(
            tuple(replica * self.partitions + partition for replica in group for partition in range(self.partitions))
            for group in everywhere
        )

    def _ranks(self, groups: Groups, of_partitions: bool) -> Groups:
        """Groups of partitions in each replica, or of replicas in each partition."""
        if of_partitions:
            return tuple(
                tuple(replica * self.partitions + one for one in group)
                for replica in range(self.replicas)
                for group in groups
            )
        return tuple(
            tuple(one * self.partitions + partition for one in group)
            for partition in range(self.partitions)
            for group in groups
        )


def place(line: Line) -> str:
    """Where an operation is in the code, by its name scopes; the line's name if it has none."""
    found = OP_NAME.search(line.rest)
    return found[1].replace("\\'", "'") if found else line.name


def describe(line: Line) -> str:
    """A collective: its kind, channel and place in the code."""
    channel = re.search(r"channel_id=(\d+)", line.rest)
    return f"{base(line)}{f' (channel {channel[1]})' if channel else ''} {place(line)}"


def named(ranks: Sequence[int]) -> str:
    """As "rank 3", "ranks 0-3, 8", or "ranks 0, 8, 16, ... (64)"."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in parts[:MOST_NAMED]]
    count, more = len(set(ranks)), len(parts) > MOST_NAMED
    return f"rank{'s' if count > 1 else ''} {', '.join(texts)}{f', ... ({count})' if more else ''}"

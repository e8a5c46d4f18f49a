"""What routers choose: k of E experts for a token, of a few groups of them; and on how many replicas these are."""

import dataclasses
import functools
import math
from typing import Any

__all__ = ["Choice"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A token's k experts of E, all of m of the n groups that consecutive experts are cut into.

    With a group on each node this is DeepSeek-V3's node-limited routing (2412.19437 section 2.1.2): a token is sent to few
    replicas. With one group a token may choose any experts.

    Attributes:
      count: E.
      chosen: k.
      groups: n.
      groups_chosen: m.
    """

    count: int
    chosen: int
    groups: int = 1
    groups_chosen: int = 1

    @classmethod
    def of(cls, model: Any) -> "Choice":
        """That of a `ModelConfig` with experts."""
        return cls(model.experts, model.experts_per_token, model.router_groups, model.router_group_choices)

    def most(self, degree: int) -> int:
        """Experts of a token that are on one of `degree` replicas, at most."""
        return min(self.chosen, self.count // degree)

    def destinations(self, degree: int) -> int:
        """On how many of `degree` replicas the experts of a token are, at most."""
        size, own = self.count // self.groups, self.count // degree
        nested = size % own == 0 or own % size == 0
        spanned = max(1, size // own) if nested else (size + own - 2) // own + 1  # replicas with experts of a group
        return min(self.chosen, degree, self.groups_chosen * spanned)

    def balanced_share(self, degree: int) -> float:
        """The part of the tokens that choose any expert of one of `degree` replicas, with balanced routing; the largest.

        All choices of k experts are equally likely. With groups all choices of m are, and each of these has k / m of the
        token's experts, rounded up: a group is chosen for its best experts, so that it has some of them.
        """
        anywhere = _share(self.count, degree, self.chosen)
        if self.groups == 1:
            return anywhere
        each = math.ceil(self.chosen / self.groups_chosen)
        return min(anywhere, _share(self.count, degree, each, self.groups, self.groups_chosen))


@functools.cache
def _share(count: int, degree: int, each: int, groups: int = 1, groups_chosen: int = 1) -> float:
    """`Choice.balanced_share` of tokens that choose `each` experts of `groups_chosen` of `groups` groups."""
    own, size = count // degree, count // groups
    smallest, ways = 1.0, math.comb(size, each)
    for first in range(0, own * degree, own):
        # sums[m]: over all choices of m of the groups so far, of the part of them that has no expert of this replica
        sums = [1.0] + [0.0] * groups_chosen
        for start in range(0, count, size):
            here = max(0, min(first + own, start + size) - max(first, start))
            for m in range(groups_chosen, 0, -1):
                sums[m] += math.comb(size - here, each) / ways * sums[m - 1]
        smallest = min(smallest, sums[groups_chosen] / math.comb(groups, groups_chosen))
    return 1 - smallest

"""Estimates a step's time from its compiled program: the kernels in XLA's order, each at its roofline (`rates.py`).

    kernel       max(FLOPs / rate of its class, bytes / HBM bandwidth) + the gap before the next kernel
    collective   bytes sent by a ring / bandwidth of the slowest link; runs beside the kernels between its start and its
                 done, one collective at a time; the rest is exposed. Transfers to host memory likewise
    loop         its body times its trip count; where the trip count is dynamic, the host waits for the device before each
                 iteration and at the end (and at each branch)

The account is of a rank that computes all of its microbatches, without the time in which it idles in the pipeline's fill
and drain: multiply by 1 + bubble for the step's time. No kernel was run; the rates are what well-tuned kernels reach.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megajax.estimate.hlo import BLOCKS, EACH_END, SENT, collective_groups, collective_size
from megajax.estimate.hlo_parser import (
    KINDS,
    Line,
    average_trip_counts,
    branch_shares,
    called_by,
    computations,
    iterations_of,
    known_trip_count,
    operands,
    scheduling_name,
    scope_of,
    working_share,
)
from megajax.estimate.kernels import kernel_of
from megajax.estimate.rates import Rates
from megajax.pipeline.embedding_and_head import ENDS
from megajax.pipeline.options import MERGED

HOST_MEMORY, TRANSFER = "S(5)", "host transfer"
COMBINED = 4  # conditionals of a computation; a tick that is not in a loop over ticks has its own
SCOPES = (*BLOCKS, MERGED, *EACH_END, ENDS)
GAPS, SYNCS, EXPOSED = "gaps between kernels", "host synchronisation", "exposed collectives"
_counter = functools.partial(dataclasses.field, default_factory=Counter)


@dataclasses.dataclass(frozen=True)
class Account:
    """What a step of a compiled program takes on one GPU.

    Attributes:
      seconds: by class: those of `kernels.CLASSES`, exposed collectives, gaps, host synchronisation.
      read, written: bytes of HBM by class of kernel.
      flops: of matmuls and of attention.
      kernels: launched, by class.
      synchronisations: how often the host waits for the device.
      hidden, exposed: seconds of collectives by kind, beside kernels and not.
      scopes: seconds of the loops and branches of the executor's scopes (`SCOPES`), without ends in those of blocks.
    """

    seconds: Counter = _counter()
    read: Counter = _counter()
    written: Counter = _counter()
    flops: Counter = _counter()
    kernels: Counter = _counter()
    synchronisations: float = 0.0
    hidden: Counter = _counter()
    exposed: Counter = _counter()
    scopes: Counter = _counter()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def __add__(self, other: "Account") -> "Account":
        return Account(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> "Account":
        scaled = {
            name: Counter({key: times * one for key, one in value.items()})
            if isinstance(value, Counter)
            else times * value
            for name, value in vars(self).items()
        }
        return Account(**scaled)


def _sum(parts: Sequence[Account]) -> Account:
    """As `sum`, which would make an account for each addition."""
    total = Account(synchronisations=sum(part.synchronisations for part in parts))
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, Counter):
                vars(total)[name].update(value)
    return total


def account(text: str, trip_counts: Mapping[str, float], rates: Rates, places: Sequence[int] | None = None) -> Account:
    """The account of one run of a module.

    Args:
      text: the module, scheduled, as `compiled.as_text()`.
      trip_counts: total iterations of the loops with dynamic trip counts (`hlo.loop_trip_counts`).
      rates: of the GPU.
      places: of the module's devices on the list of the cluster's, of which a host has consecutive ones; None: in order.
    """
    return next(accounts(text, [trip_counts], rates, places))


def accounts(
    text: str, trip_counts: Iterable[Mapping[str, float]], rates: Rates, places: Sequence[int] | None = None
) -> Iterator[Account]:
    """As `account`, for each of several ranks that run the module, which differ in their trip counts."""
    modules, entry = computations(text)
    return (_Reader(modules, entry, counts, rates, places).computation(entry) for counts in trip_counts)


def seconds_by_name(
    text: str, trip_counts: Mapping[str, float], rates: Rates, places: Sequence[int] | None = None
) -> dict[str, float]:
    """Seconds of one execution of each kernel, loop, conditional and collective, by its name when XLA scheduled it.

    Arguments as for `account`.
    """
    modules, entry = computations(text)
    reader = _Reader(modules, entry, trip_counts, rates, places)
    return dict(itertools.chain.from_iterable(map(reader.by_name, modules.values())))


class _Reader:
    """Reads computations once each: what one execution takes does not depend on the caller.

    Arguments: the module as `hlo_parser.computations` returns it; for the others see `account`.
    """

    def __init__(
        self,
        modules: dict[str, list[Line]],
        entry: str,
        trip_counts: Mapping[str, float],
        rates: Rates,
        places: Sequence[int] | None,
    ):
        self.modules, self.each = modules, average_trip_counts(modules, entry, trip_counts)
        self.rates, self.places = rates, places
        self._read: dict[str, Account] = {}
        # By the line's id, and whether its branch works.
        self._parts: dict[tuple[int, bool | None], Account | None] = {}

    def computation(self, name: str) -> Account:
        """The account of an average execution of a computation.

        Which kernels a collective overlaps depends on which conditionals do something, so each combination is priced, of
        the first COMBINED of them; the others take their average time.
        """
        if name not in self._read:
            lines, shares = self.modules[name], {}
            for line in lines:
                share = working_share(line, self.modules, self.each) if line.op == "conditional" else None
                if share is not None and 0 < share < 1 and len(shares) < COMBINED:
                    shares[line.name] = share
            total = Account()
            for works in itertools.product((True, False), repeat=len(shares)):
                chance = math.prod(s if one else 1 - s for s, one in zip(shares.values(), works, strict=True))
                total += self._execute(lines, dict(zip(shares, works, strict=True))) * chance
            self._read[name] = total
        return self._read[name]

    def by_name(self, lines: list[Line]) -> Iterable[tuple[str, float]]:
        """(name, seconds) of the lines of a computation that take time, without what overlaps them."""
        types = {line.name: line.type for line in lines}
        for line in lines:
            kind = line.op.removesuffix("-start")
            if kind in KINDS:
                yield scheduling_name(line), self._collective_seconds(line, kind, types)
            elif (seconds := self._transfer_seconds(line, types)) is not None:
                yield scheduling_name(line), seconds
            elif (part := self._part(line, None, types)) is not None:
                yield scheduling_name(line), part.total

    def _execute(self, lines: list[Line], works: Mapping[str, bool]) -> Account:
        """The account of an execution in which the named conditionals do something, or not."""
        types = {line.name: line.type for line in lines}
        total, parts = Account(), []
        now = free = 0.0  # `free`: when the collectives started so far will have ended
        ends, transferred = {}, 0.0  # of transfers to host memory, by the name of the start, and of the last one
        pending: dict[str, float] = {}  # by the name of the start: its end
        queue: list[tuple[float, float, str]] = []  # begin, end and kind of each collective, one after the other
        for line in lines:
            kind = line.op.removesuffix("-start").removesuffix("-done")
            if kind in KINDS:
                if line.op.endswith("-done"):
                    end = pending.pop(operands(line)[0])
                else:
                    begin = max(now, free)
                    end = free = begin + self._collective_seconds(line, kind, types)
                    queue.append((begin, end, kind))
                    total.hidden[kind] += end - begin
                    if line.op.endswith("-start"):
                        pending[line.name] = end
                        if '"is_sync":true' not in line.rest:
                            continue
                for begin, until, one in queue:
                    waited = max(0.0, min(end, until) - max(now, begin))
                    total.exposed[one] += waited
                    total.hidden[one] -= waited
                total.seconds[EXPOSED] += max(0.0, end - now)
                now = max(now, end)
                continue
            if (seconds := self._transfer_seconds(line, types)) is not None:
                ends[line.name] = transferred = max(now, transferred) + seconds
                total.hidden[TRANSFER] += seconds
                continue
            if line.op == "fusion-done" and (name := operands(line)[0]) in ends:
                waited = max(0.0, ends[name] - now)
                total.exposed[TRANSFER] += waited
                total.hidden[TRANSFER] -= waited
                total.seconds[EXPOSED] += waited
                now += waited
                continue
            part = self._part(line, works.get(line.name), types)
            if part is not None:
                parts.append(part)
                now += part.total
        return _sum([total, *parts])

    def _transfer_seconds(self, line: Line, types: Mapping[str, str]) -> float | None:
        """Seconds of a transfer to or from host memory that starts here; None if none does."""
        if line.op != "fusion-start":
            return None
        on_host = HOST_MEMORY in line.type or any(HOST_MEMORY in types.get(name, "") for name in operands(line))
        kernel = kernel_of(line, types, self.modules) if on_host else None
        return kernel and max(kernel.read, kernel.written) / self.rates.pcie

    def _part(self, line: Line, works: bool | None, types: Mapping[str, str]) -> Account | None:
        """The account of one line that is no collective; None if it takes nothing. `works`: see `_called`."""
        if (id(line), works) not in self._parts:
            part = self._called(line, works)
            if part and (scope := line.op in ("while", "conditional") and scope_of(line, SCOPES)):
                part = dataclasses.replace(part, scopes=Counter({scope: part.total}))
            self._parts[id(line), works] = part or self._kernel(line, types)
        return self._parts[id(line), works]

    def _kernel(self, line: Line, types: Mapping[str, str]) -> Account | None:
        kernel = kernel_of(line, types, self.modules)
        if kernel is None:
            return None
        if kernel.routed:
            read, written = (round(self.rates.routed_part * size) for size in (kernel.read, kernel.written))
            kernel = dataclasses.replace(kernel, read=read, written=written)
        attention = self.rates.attention_part if kernel.part is None else kernel.part
        flops = kernel.flops * {"attention": attention, "experts": self.rates.routed_part}.get(kernel.kind, 1)
        part = Account()
        if kernel.kind == "attention":
            rate = self.rates.attention_rate(kernel.backward, attention * kernel.keys, kernel.width)
            part.seconds[kernel.kind] = max(flops / rate, kernel.bytes / self.rates.memory)
        else:
            written = kernel.written if flops else 0
            part.seconds[kernel.kind] = self.rates.product(flops, written, kernel.bytes, 2 if kernel.fp8 else 1)
        part.seconds[GAPS] = self.rates.gap
        part.read[kernel.kind], part.written[kernel.kind] = kernel.read, kernel.written
        part.flops[kernel.kind], part.kernels[kernel.kind] = flops, 1
        return part

    def _called(self, line: Line, works: bool | None) -> Account | None:
        """The account of a loop, of a conditional (its average branch, or if unknown its longest), or of a call.

        `works`: whether a conditional does something; None: always. Returns None for other lines.
        """
        if line.op not in ("while", "conditional", "call", "async-start"):
            return None
        parts = [self.computation(name) for name in called_by(line.rest) if name in self.modules]
        if line.op == "while":
            condition, body = (self.computation(_attribute(line, name)) for name in ("condition", "body"))
            known = known_trip_count(line)
            if known is not None:
                return body * known
            turns = iterations_of(scope_of(line, self.each), self.each)
            return body * turns + (condition + self._synchronisation()) * (turns + 1)
        if line.op == "conditional":
            if working_share(line, self.modules, self.each) is None:
                return max(parts, key=lambda part: part.total) + self._synchronisation()
            shares = branch_shares(line, self.modules, self.each)
            total = sum(shares.values())
            if works is False or not total:
                return self._synchronisation()
            average = _sum([self.computation(name) * share for name, share in shares.items()])
            return average * (1 / total if works else 1) + self._synchronisation()
        return parts[0] if parts else None

    def _synchronisation(self) -> Account:
        part = Account(synchronisations=1.0)
        part.seconds[SYNCS] = self.rates.synchronisation
        return part

    def _collective_seconds(self, line: Line, kind: str, types: Mapping[str, str]) -> float:
        size = collective_size(line, kind, types, self.rates.ragged_part)[1]
        groups = collective_groups(line.rest)
        if kind in ("all-to-all", "ragged-all-to-all"):
            part, ragged = size / len(groups[0]), kind != "all-to-all"
            return max(self.rates.all_to_all(part, *spans, ragged) for spans in self._spans(kind, groups))
        sent = SENT[kind](len(groups[0])) * size
        return max(self.rates.collective(kind, sent, *spans) for spans in self._spans(kind, groups))

    def _spans(self, kind: str, groups: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
        """(devices of a group, those of them in each host) of all groups; a pair of a permute has one adapter."""
        place = lambda device: device if self.places is None else self.places[device]  # noqa: E731
        hosts = [Counter(place(device) // self.rates.host_size for device in group) for group in groups]
        if kind == "collective-permute":
            return {(2, 2 if all(len(one) == 1 for one in hosts) else 1)}
        return {(len(group), min(one.values())) for group, one in zip(groups, hosts, strict=True)}


def _attribute(line: Line, name: str) -> str:
    return line.rest.split(f"{name}=%", 1)[1].split(",")[0].split(" ")[0].rstrip(")")

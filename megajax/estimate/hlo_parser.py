"""Parses compiled HLO (the text of `compiled.as_text()`) into computations, and walks them with their trip counts.

hlo.py counts collectives and matmuls, kernels.py the bytes of every kernel, roofline.py estimates times.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# The kernels of megajax/ops/flash_attention.py, grouped_kernels.py, tokamax_kernels.py and others, by op name: Pallas's, in
# Triton or in Mosaic. In the names of tokamax's, its own follow.
OWN = re.compile(r'/((?:flash_attention|grouped_matmul|quantize|gated|norm)_\w+)/(?:[^"]*/)?(?:pallas_call|mpmd_map)"')
GROUPED = "grouped_matmul"  # their names begin so
PLAIN = (
    "gated_gradients",
    "gated_rows_gradients",
    "norm_gradients",
    "norm_and_save",
    "quantize_blocks",
    "quantize_rows",
)  # of megajax/ops/gated_down.py, norm_kernel.py and grouped_fp8.py, without a matmul
# Custom calls, attention's included.
MATMULS = re.compile(rf"__cublas|__cutlass|__onednn\$matmul|__cudnn\$fmha|{OWN.pattern}")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
NAME = re.compile(r"%?([\w.\-]+)")
OPERAND = re.compile(r"%([\w.\-]+)")
HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
BRANCHES = "/cond"  # ends the keys of conditionals, by scope
EACH = "/each"  # ends the keys of loops of which the iterations of one execution are known, not those of all
SCOPES = re.compile(r'op_name="([^"]*)/(?:while|cond)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
LOGITS = "head"  # the scope of the head in a tick
MOVES = ("parameter", "tuple", "get-tuple-element", "copy", "bitcast", "constant", "transpose", "reshape")
CALLED = re.compile(r"(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)=")
SCHEDULED = re.compile(r'scheduling_name="([^"]*)"')
SCALAR_CODE = ("reduce", "reduce-window", "sort", "scatter", "map", "select-and-scatter", *KINDS)  # call it per element


@dataclasses.dataclass(frozen=True)
class Visit:
    """One call path to a computation.

    Attributes:
      name: of the computation.
      times: how often it runs.
      conditional: whether it is in a loop with a dynamic trip count, or in a branch.
      scope: the name of that loop, if its iterations were given; otherwise "".
      in_loop: whether it is in a `while`.
    """

    name: str
    times: float = 1
    conditional: bool = False
    scope: str = ""
    in_loop: bool = False


@dataclasses.dataclass(frozen=True)
class Line:
    """One operation: its result's name and type, its opcode, operands and attributes as in the text (`rest`), and whether
    its result is the computation's.
    """

    name: str
    type: str
    op: str
    rest: str
    is_root: bool = False


def computations(text: str) -> tuple[dict[str, list[Line]], str]:
    """The computations by name, and the entry's name."""
    computations, lines, entry = {}, [], ""
    for row in text.splitlines():
        head = HEAD.match(row)
        if head:
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif match := LINE.match(row):
            lines.append(Line(*match.groups()[1:], is_root=bool(match[1])))
    return computations, entry


def visits(computations: dict, visit: Visit, each: Mapping[str, float]) -> Iterator[Visit]:
    """Every call path to a computation.

    `each`: by scope, iterations of one execution of a loop with a dynamic trip count; for conditionals see `branch_shares`.
    """
    yield visit
    for line in computations[visit.name]:
        if line.op in SCALAR_CODE:
            continue
        after = visit
        if line.op == "while":
            known, scope = known_trip_count(line), scope_of(line, each)
            count = iterations_of(scope, each) if known is None else known
            after = dataclasses.replace(visit, times=visit.times * count, in_loop=True)
            if known is None:
                after = dataclasses.replace(
                    after, conditional=True, scope=visit.scope if scope + EACH in each else scope
                )
        elif line.op == "conditional":
            after = dataclasses.replace(visit, conditional=True, scope=scope_of(line, each) or visit.scope)
            for called, share in branch_shares(line, computations, each).items():
                yield from visits(
                    computations, dataclasses.replace(after, name=called, times=visit.times * share), each
                )
            continue
        for called in called_by(line.rest):
            if called in computations:
                yield from visits(computations, dataclasses.replace(after, name=called), each)


def average_trip_counts(computations: dict, entry: str, trip_counts: Mapping[str, float] | None) -> dict[str, float]:
    """Iterations of one execution of a loop with a dynamic trip count, by scope, and shares of conditionals; see `visits`.

    Args:
      trip_counts: total iterations of all such loops of a scope (`jax.named_scope`, the innermost one given), and, by
        SCOPE/cond, how often its conditionals do something, or by `branch_key` how often those with so many branches take
        each of them. They are divided equally among the executions, without the iterations of the head that XLA has taken
        out of loops (`_inlined_heads`), and without loops of which XLA left only the counter. By SCOPE/each: iterations of
        one execution. Loops in no given scope count as one.
    """
    executions, totals = Counter(), dict(trip_counts or {})
    if LOGITS in totals:
        totals[LOGITS] = max(0.0, totals[LOGITS] - _inlined_heads(computations, entry, totals))
    by_branch = {key: key.rsplit("/", 1)[0] for key in totals if BRANCHES + "/" in key}  # the conditionals of a key
    for visit in visits(computations, Visit(entry), {key: 1 for key in totals if key not in by_branch}):
        for line in computations[visit.name]:
            if line.op == "while" and known_trip_count(line) is None and not _only_counts(line, computations):
                executions[scope_of(line, totals)] += visit.times
            elif line.op == "conditional":
                key = branch_key(scope_of(line, totals), len(called_by(line.rest)), 0)
                executions[by_branch.get(key) or scope_of(line, totals) + BRANCHES] += visit.times
    of = lambda key: executions[by_branch.get(key, key)]  # noqa: E731
    known = {key: count for key, count in totals.items() if key.endswith(EACH)}
    return {key: count / of(key) for key, count in totals.items() if of(key)} | known


def _only_counts(line: Line, computations: Mapping[str, list[Line]]) -> bool:
    """Whether a loop computes scalars only. XLA took out the rest, which nothing reads: in the last tick, which it peels
    off, the embedding for the next one.
    """
    results = (one.type for name in called_by(line.rest) for one in computations.get(name, ()) if one.op != "parameter")
    return not any(sizes for result in (*results, line.type) for _, sizes in arrays(result))


def _inlined_heads(computations: dict, entry: str, totals: Mapping[str, float]) -> float:
    """Iterations of the head's loops that run outside of them.

    Where XLA peels the last tick off a loop, the tick's row of the tables is a constant, and so is whether it has a head. A
    tick has it once: as often as the matmul of one op name is there. Ticks do not share this with the blocks, whose loops
    have known trip counts where they run in all ticks (`hlo.loop_trip_counts`).
    """
    inlined = 0.0
    for visit in visits(computations, Visit(entry), dict.fromkeys(totals, 1)):
        if visit.scope != LOGITS:
            names = (OP_NAME.search(line.rest) for line in computations[visit.name] if is_matmul(line))
            found = Counter(name[1] for name in names if name and f"/{LOGITS}/while/body/" in name[1])
            inlined += visit.times * min(found.values(), default=0)
    return inlined


def iterations_of(scope: str, each: Mapping[str, float]) -> float:
    """Iterations of one execution of a loop with a dynamic trip count in this scope; 1 if it is not known."""
    return each.get(scope + EACH, each.get(scope, 1.0))


def branch_key(scope: str, branches: int, index: int) -> str:
    """The key of how often conditionals of a scope with so many branches take one of them, for `average_trip_counts`."""
    return f"{scope}{BRANCHES}/{branches}/{index}"


def branches_of(line: Line) -> list[str]:
    """The branches of a conditional, in the order of its index; of a predicate, that of False first."""
    names = called_by(line.rest)
    return names[::-1] if "true_computation=" in line.rest else names


def branch_shares(line: Line, computations: Mapping[str, list[Line]], each: Mapping[str, float]) -> dict[str, float]:
    """The shares of a conditional's executions in which it takes each of its branches that do something.

    By `branch_key` if `each` has that; otherwise they are equal parts of SCOPE/cond, or if that is not known, each 1.
    """
    scope, names, working = scope_of(line, each), branches_of(line), working_branches(line, computations)
    shares: dict[str, float] = dict.fromkeys(working, 0.0)
    by_branch = branch_key(scope, len(names), 0) in each
    for index, name in enumerate(names):
        if name in shares:  # XLA may make one computation of branches that are alike
            own = each.get(branch_key(scope, len(names), index), 0.0) if by_branch else 1.0
            shares[name] += own
    whole = None if by_branch else each.get(scope + BRANCHES)
    total = sum(shares.values())
    return shares if whole is None else {name: whole * share / total for name, share in shares.items()}


def working_share(line: Line, computations: Mapping[str, list[Line]], each: Mapping[str, float]) -> float | None:
    """The share of a conditional's executions in which it takes any working branch; None if it is not known."""
    scope, count = scope_of(line, each), len(called_by(line.rest))
    if branch_key(scope, count, 0) in each:
        return sum(branch_shares(line, computations, each).values())
    return each.get(scope + BRANCHES)


def working_branches(line: Line, computations: Mapping[str, list[Line]]) -> list[str]:
    """The branches of a conditional that do more than return their operands, perhaps in another layout."""

    def moves(one: Line) -> bool:
        inner = called_by(one.rest) if one.op == "fusion" else []
        return one.op in MOVES or (bool(inner) and all(other.op in MOVES for other in computations[inner[0]]))

    names = [name for name in branches_of(line) if name in computations]
    return [name for name in names if not all(map(moves, computations[name]))]


def known_trip_count(line: Line) -> int | None:
    """XLA's trip count of a `while`; None if it is dynamic."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line.rest)
    return int(found[1]) if found else None


def scope_of(line: Line, scopes: Iterable[str]) -> str:
    """The innermost of these named scopes around a loop or a conditional, "" if there is none."""
    names = SCOPES.search(line.rest)
    known = {name.partition("/")[0] for name in scopes}
    return next((name for name in reversed(names[1].split("/")) if name in known), "") if names else ""


def called_by(rest: str) -> list[str]:
    """Names of the computations that an operation calls."""
    names = []
    for match in CALLED.finditer(rest):
        after = rest[match.end() :]
        listed = after[1 : after.index("}")].split(",") if after.startswith("{") else [after]
        names += [NAME.match(word.strip())[1] for word in listed]
    return names


def operands(line: Line) -> list[str]:
    """Names of the operands."""
    return OPERAND.findall(line.rest.split(")")[0])


def scheduling_name(line: Line) -> str:
    """The line's name when XLA scheduled it, by which a profile for its latency hiding scheduler has it."""
    found = SCHEDULED.search(line.rest)
    return found[1] if found else line.name


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and sizes of each array of a type."""
    return [(name, numbers(sizes)) for name, sizes in ARRAY.findall(type_)]


def array_bytes(array: tuple[str, tuple[int, ...]]) -> int:
    """Bytes of one array; the name of its type has the bits, except pred's."""
    bits = re.match(r"[a-z]+(\d+)", array[0])
    return math.prod(array[1]) * max(1, int(bits[1]) // 8 if bits else 1)


def is_matmul(line: Line) -> bool:
    """Whether a line is a matmul or fused attention."""
    if line.op == "custom-call":
        return MATMULS.search(line.rest) is not None and kernel_name(line) not in PLAIN
    return line.op == "dot"


def kernel_name(line: Line) -> str:
    """The target of a custom call, or the name of one of Pallas's kernels: Triton's all have one target, and Mosaic's."""
    return (OWN.search(line.rest) or TARGET.search(line.rest))[1]


def is_grouped(line: Line) -> bool:
    """Whether a line is a grouped matmul of Pallas or tokamax."""
    return line.op == "custom-call" and kernel_name(line).startswith(GROUPED)


def matmul_flops(line: Line, types: Mapping[str, str]) -> float:
    """2 for each multiply-add; 0 if the line is not a matmul. Of a grouped matmul: of all rows, those of no group too."""
    if not is_matmul(line):
        return 0.0
    if is_grouped(line):
        matrices = [shape for name in operands(line) for _, shape in arrays(types.get(name, "")) if len(shape) == 2]
        return 2.0 * math.prod(matrices[0]) * arrays(line.type)[0][1][-1]  # rows [R, i], and a result [.., o]
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]', line.rest)
    operand = ARRAY.search(line.rest.split("%")[0]) or ARRAY.search(types.get(NAME.search(line.rest)[1], ""))
    if not contracted or not operand:
        return 0.0
    sizes = numbers(operand[2])
    length = math.prod(sizes[axis] for axis in numbers(contracted[1].replace('"', "")))
    return 2.0 * math.prod(arrays(line.type)[0][1]) * length


def second_part(type_: str) -> str:
    """The second part of a tuple's type: a start returns its operands, then its results."""
    depth, parts = 0, [""]
    for letter in type_[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts[1]


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as "4,2"."""
    return tuple(int(number) for number in text.split(",") if number)

"""A second account of a compiled GPU program, to test the first: it shares no code with `megajax.estimate`.

It walks the program from its entry, with the number of times that each computation runs, and sums over single lines of text.
"""

import collections
import math
import re

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
NOT_KERNELS = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier".split()
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BRANCHES = ("branch_computations", "true_computation", "false_computation")


def size(text: str) -> int:
    """Bytes of all arrays that a type names."""
    found = re.findall(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", text)
    return sum(BYTES.get(kind, 0) * math.prod(map(int, filter(None, sizes.split(",")))) for kind, sizes in found)


def balanced(text: str) -> int:
    """The length of the parenthesis that `text` starts with."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    raise ValueError(text)


class Line:
    """`name = type op(operands), attributes`."""

    def __init__(self, text: str):
        left, right = text.strip().removeprefix("ROOT ").split(" = ", 1)
        self.root, self.name, self.text = text.strip().startswith("ROOT"), left.lstrip("%"), text
        cut = balanced(right) if right.startswith("(") else right.index(" ")
        self.type, rest = right[:cut], right[cut:].strip()
        self.op, rest = rest.split("(", 1)
        end = balanced("(" + rest) - 2
        self.operands = re.findall(r"%([\w.\-]+)", rest[:end])
        self.attributes = rest[end:]

    def calls(self, *names: str) -> list[str]:
        """Names of the computations of an attribute."""
        found = []
        for name in names:
            for one, several in re.findall(rf"\b{name}=(?:%([\w.\-]+)|\{{(.*?)\}})", self.attributes):
                found += [one] if one else re.findall(r"%([\w.\-]+)", several)
        return found

    def scope(self, scopes) -> str:
        path = re.search(r'op_name="([^"]*)"', self.attributes)
        return next((part for part in reversed(path[1].split("/")) if part in scopes), "") if path else ""


class Counter:
    """Totals of one run of a program.

    Attributes:
      bytes: read and written by kernels.
      flops: of matmuls, library calls included.
      kernels: launched.
      syncs: loop conditions and branches that the host reads from the device.
    """

    def __init__(self, text: str, loops: dict[str, float], branches: dict[str, float]):
        """`loops` and `branches`: by scope, the iterations of all dynamic loops, and how often a branch is taken."""
        self.computations, self.entry = {}, None
        for block in re.split(r"\n\n", text):
            head, *lines = block.strip("\n").split("\n")
            name = re.match(r"(ENTRY )?%?([\w.\-]+) \(", head)
            if name:
                self.computations[name[2]] = [Line(line) for line in lines if " = " in line]
                self.entry = name[2] if name[1] else self.entry
        self.scopes = {*loops, *branches}
        self.executions = collections.Counter()
        self._count_choices(self.entry, 1.0)
        self.loops, self.branches = loops, branches
        self.bytes = self.flops = self.kernels = self.syncs = 0.0
        self._run(self.entry, 1.0)

    def _count_choices(self, name: str, times: float) -> None:
        """How often loops and conditionals of each scope are reached, if every branch ran and every loop ran once."""
        for line in self.computations[name]:
            inner, known = times, re.search(r'known_trip_count":\{"n":"(\d+)"', line.attributes)
            if line.op == "while":
                inner = times * (int(known[1]) if known else 1)
                if not known:
                    self.executions["loop", line.scope(self.scopes)] += times
            elif line.op == "conditional":
                self.executions["branch", line.scope(self.scopes)] += times
            for called in self._bodies(line):
                self._count_choices(called, inner)

    def _bodies(self, line: Line) -> list[str]:
        if line.op == "while":
            return line.calls("body")
        if line.op == "conditional":
            return [name for name in line.calls(*BRANCHES) if self._works(name)]
        return line.calls("to_apply", "calls") if line.op in ("call", "async-start") else []

    def _works(self, name: str) -> bool:
        return any(line.op not in {*NOT_KERNELS, "copy"} for line in self.computations[name])

    def _run(self, name: str, times: float) -> None:
        types = {line.name: line.type for line in self.computations[name]}
        for line in self.computations[name]:
            if line.op == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line.attributes)
                scope = line.scope(self.scopes)
                average = self.loops.get(scope, 0.0) / self.executions["loop", scope] if scope and not known else 1
                turns = int(known[1]) if known else average
                self.syncs += 0 if known else times * (turns + 1)
                for body in line.calls("body"):
                    self._run(body, times * turns)
                for condition in [] if known else line.calls("condition"):
                    self._run(condition, times * (turns + 1))
            elif line.op == "conditional":
                scope, bodies = line.scope(self.scopes), self._bodies(line)
                self.syncs += times
                taken = self.branches[scope] / self.executions["branch", scope]
                for body in bodies:
                    self._run(body, times * taken / len(bodies))
            elif self._bodies(line):
                for body in self._bodies(line):
                    self._run(body, times)
            elif line.op.startswith(COLLECTIVES):
                continue  # not kernels of their own
            elif line.op not in NOT_KERNELS and not line.op.endswith(("-done", "-update")):
                self.kernels += times
                self.bytes += times * self._traffic(line, types)
                self.flops += times * self._flops(line, types)

    def _traffic(self, line: Line, types: dict[str, str]) -> float:
        """Bytes of one kernel: of a slice or an update in place, only these."""
        called = line.calls("calls")
        if line.op in ("fusion", "fusion-start"):
            return self._fused_traffic(self.computations[called[0]])
        ends = [size(types[name]) for name in line.operands]
        if "gpu.triton" in line.attributes:
            ends = self._parts_of_stacks(line.type, [types[name] for name in line.operands])
        out = size(re.sub(r"s8\[\d+\]", "", line.type))  # without a library's workspace
        if line.op in ("dynamic-slice", "slice", "gather"):
            return 2 * out
        if line.op == "dynamic-update-slice":
            return 2 * ends[1]
        if line.op == "copy-start":
            return 2 * sum(ends)
        return out + (min(sum(ends), out) if line.op in ("iota", "broadcast") else sum(ends))

    @staticmethod
    def _parts_of_stacks(result: str, operands: list[str]) -> list[float]:
        """Bytes that a kernel of our own reads: of a stack of arrays like another of its arrays, one at a given place."""
        sizes = set(re.findall(r"\[([\d,]*)\]", " ".join([result, *operands])))
        stacks = [re.search(r"\[(\d+),([\d,]+)\]", one) for one in operands]
        return [
            size(one) / int(found[1]) if found and found[2] in sizes else size(one)
            for one, found in zip(operands, stacks, strict=True)
        ]

    def _fused_traffic(self, lines: list[Line]) -> float:
        by_name, views = {line.name: line for line in lines}, ("bitcast", "reshape")
        readers = collections.defaultdict(list)
        for line in lines:
            for place, name in enumerate(line.operands):
                readers[name].append((place, line))

        def read(name, whole):
            total = 0
            for place, reader in readers[name]:
                if reader.op in views:
                    total += read(reader.name, whole)
                elif place == 0 and reader.op in ("dynamic-slice", "slice", "gather"):
                    total += size(reader.type)
                elif not (place == 0 and reader.op in ("dynamic-update-slice", "scatter")):
                    return whole
            return min(total, whole)

        def written(name):
            line = by_name[name]
            if line.op in views or line.op == "get-tuple-element":
                return written(line.operands[0]) if line.op in views else size(line.type) * ("s8[" not in line.type)
            if line.op == "dynamic-update-slice":
                return size(by_name[line.operands[1]].type)
            if line.op == "scatter":
                return size(by_name[line.operands[2]].type)
            return size(re.sub(r"s8\[\d+\]", "", line.type))

        root = next(line for line in lines if line.root)
        results = root.operands if root.op == "tuple" else [root.name]
        return sum(read(line.name, size(line.type)) for line in lines if line.op == "parameter") + sum(
            map(written, results)
        )

    def _flops(self, line: Line, types: dict[str, str]) -> float:
        if line.op in ("fusion", "fusion-start"):
            inner = self.computations[line.calls("calls")[0]]
            inside = {one.name: one.type for one in inner}
            return sum(self._flops(one, inside) for one in inner)
        if "__cudnn$fmha" in line.attributes:
            batch, queries, heads, width = self._sizes(types[line.operands[0]])
            keys = self._sizes(types[line.operands[1]])[1]
            return (
                (5 if "Backward" in line.attributes else 2) * batch * heads * queries * keys * width
            )  # the causal half
        contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]', line.attributes)
        if not contracted or not (line.op == "dot" or "matmul" in line.attributes or "gemm" in line.attributes):
            return 0.0
        left = self._sizes(types[line.operands[0]])
        summed = math.prod(left[int(axis)] for axis in contracted[1].replace('"', "").split(",") if axis)
        return 2.0 * math.prod(self._sizes(line.type)) * summed

    @staticmethod
    def _sizes(type_: str) -> list[int]:
        return [int(one) for one in re.search(r"\[([\d,]*)\]", type_)[1].split(",") if one]

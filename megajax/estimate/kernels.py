"""The kernels of a compiled GPU program: bytes that each reads and writes, its FLOPs, and its class.

A kernel is an operation of the scheduled HLO that runs on the GPU: a fusion, a library call, a copy. Bytes are those that
it touches in HBM: of an array that it only slices, the slice; of an array that it updates in place, the update.
XLA's own cost analysis counts the whole stack of weights for a fusion that slices one layer's.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from megajax.estimate.hlo_parser import (
    KINDS,
    Line,
    array_bytes,
    arrays,
    called_by,
    is_grouped,
    is_matmul,
    kernel_name,
    matmul_flops,
    operands,
)

# In the order of the report.
CLASSES = {
    "matmul": "matmuls, with what is fused into them",
    "experts": "grouped matmuls of experts",
    "attention": "fused attention",
    "accumulation": "adding to an accumulator in place, outside a matmul",
    "copy": "slices cut out of arrays, copies and transposes: nothing is computed",
    "stash": "writing into a buffer in place",
    "elementwise": "everything else",
}
# Operations without a kernel. The ends of asynchronous ones are counted at their start.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "while", "conditional", "call", "async-start", "async-update", "async-done", "fusion-done", "copy-done",
    *KINDS, *(f"{kind}-start" for kind in KINDS), *(f"{kind}-done" for kind in KINDS),
}  # fmt: skip
MOVES = {
    *("copy", "copy-start", "slice", "dynamic-slice", "transpose"),
    *("bitcast", "reshape", "concatenate", "pad", "reverse"),
}
VIEWS = {"bitcast", "reshape"}
MASK = re.compile(r'"mask_type": ?"(\w+)"')
WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')  # 0: none
# Matmuls in the two kernels of a backward of megajax/ops/flash_attention.py or of tokamax, by the number of gradients.
OWN_BACKWARD = "flash_attention_backward"
OWN_PRODUCTS = {1: 3, 2: 4}
# Own kernels that read or update one part of a stack in place, and the number of a stack's axes.
PRODUCT = "grouped_matmul_product"
IN_STACKS = {
    PRODUCT: 4,
    "grouped_matmul_add": 4,
    "gated_gradients": 3,
    "gated_rows_gradients": 3,
    "norm_gradients": 3,
    "norm_and_save": 3,
    "quantize_blocks": 4,
}
ONLY_WRITES, ROUTED = "norm_and_save", ("gated_rows_gradients", "quantize_rows")
SCALAR = 1024  # bytes: what a fusion does with smaller arrays (loop counters, slots) does not decide its class


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, for one execution.

    Attributes:
      name: XLA's.
      kind: of CLASSES.
      read, written: bytes.
      flops: of its matmuls; of attention those of the whole square of scores, see `_attention_flops`; of experts those of
        all rows.
      fp8: whether its matmuls multiply 8-bit floats.
      backward: whether it is of attention's backward.
      part: of the square of scores, the part that attention computes; None: the program does not say.
      keys, width: of attention, the keys that its operands have, and the elements of a head.
      routed: whether it is elementwise and leaves out places that no experts' row has.
    """

    name: str
    kind: str
    read: int
    written: int
    flops: float = 0.0
    part: float | None = None
    fp8: bool = False
    backward: bool = False
    keys: float = math.inf
    width: float = math.inf
    routed: bool = False

    @property
    def bytes(self) -> int:
        return self.read + self.written


def kernel_of(line: Line, types: Mapping[str, str], computations: Mapping[str, Sequence[Line]]) -> Kernel | None:
    """The kernel of a line; None if it has none. `types`: of the results in the line's computation, by name."""
    if line.op in FREE:
        return None
    if line.op in ("fusion", "fusion-start"):
        return _fusion(line, computations[called_by(line.rest)[0]])
    out, inputs = _size(line.type), [_size(types.get(name, "")) for name in operands(line)]
    read, written = sum(inputs), out
    if line.op == "custom-call":  # cuBLAS, cuDNN: operands and results are read and written whole
        written = _results(line)
        if stack_axes := IN_STACKS.get(kernel_name(line).rstrip("0123456789.")):
            read -= sum(_other_parts(types.get(name, ""), stack_axes) for name in operands(line))
            written -= _other_parts(line.type, stack_axes)
            if kernel_name(line) == ONLY_WRITES:
                read -= inputs[0] - _other_parts(types.get(operands(line)[0], ""), stack_axes)
            elif kernel_name(line) == PRODUCT and len(arrays(line.type)[0][1]) == stack_axes:
                read -= written  # the stack that it writes its result to is an operand, too
        plain = Kernel(line.name, "elementwise", read, written, routed=kernel_name(line) in ROUTED)
        return _products(line.name, read, written, [line], types) or plain
    if line.op in ("dynamic-slice", "slice", "gather"):
        read = out
    elif line.op == "dynamic-update-slice":
        read = written = inputs[1]
    elif line.op == "copy-start":
        read = written = array_bytes(arrays(line.type)[0])
    elif line.op in ("iota", "broadcast"):
        read = min(read, out)
    kind = "copy" if line.op in MOVES else "stash" if line.op == "dynamic-update-slice" else "elementwise"
    flops = matmul_flops(line, types)
    return Kernel(line.name, "matmul" if flops else kind, read, written, flops)


def _size(type_: str) -> int:
    return sum(map(array_bytes, arrays(type_)))


def _other_parts(type_: str, stack_axes: int) -> int:
    """Bytes of the parts that a kernel does not touch of the arrays that are stacks, those of so many axes."""
    stacks = [array for array in arrays(type_) if len(array[1]) == stack_axes]
    return sum(array_bytes(stack) // stack[1][0] * (stack[1][0] - 1) for stack in stacks)


def _results(line: Line) -> int:
    """Bytes of a library call's results; the workspace, bytes, is not counted."""
    return sum(array_bytes(array) for array in arrays(line.type) if array[0] != "s8")


def _products(name: str, read: int, written: int, lines: Sequence[Line], types: Mapping[str, str]) -> Kernel | None:
    """The kernel of these lines if they have attention, grouped matmuls or matmuls; None if not."""
    if fused := [one for one in lines if _is_attention(one)]:
        flops, part = sum(_attention_flops(one, types) for one in fused), _attention_part(fused[0])
        keys, width = _attended(fused[0], types)
        backward = _is_backward(fused[0])
        return Kernel(name, "attention", read, written, flops, part, backward=backward, keys=keys, width=width)
    if not any(map(is_matmul, lines)):
        return None
    kind = "experts" if any(map(is_grouped, lines)) else "matmul"
    flops, fp8 = sum(matmul_flops(one, types) for one in lines), any(_is_fp8(one, types) for one in lines)
    return Kernel(name, kind, read, written, flops, fp8=fp8)


def _is_fp8(line: Line, types: Mapping[str, str]) -> bool:
    """Whether a line multiplies 8-bit floats."""
    eight = [types.get(name, "").startswith("f8") for name in operands(line)]
    return is_matmul(line) and (any(eight) if is_grouped(line) else all(eight[:2]))


def _is_attention(line: Line) -> bool:
    return line.op == "custom-call" and kernel_name(line).startswith(("__cudnn$fmha", "flash_attention"))


def _is_backward(line: Line) -> bool:
    """Whether a kernel of attention is cuDNN's backward, or one of the two of megajax's or tokamax's."""
    name = kernel_name(line)
    return name.startswith(OWN_BACKWARD) or "Backward" in name


def _attention_flops(line: Line, types: Mapping[str, str]) -> float:
    """FLOPs of a fused kernel's matmuls on the whole square: two in a forward, five in cuDNN's backward.

    megajax's backward and tokamax's have two kernels, which both compute the scores and the probabilities' gradients. With
    cuDNN's sliding window, whose length is in the program, FLOPs are twice those of the scores that are not hidden, as they
    are on the whole square of a causal mask. The documents and windows of the other kernels are not in the program.
    Operands are queries, keys and values [batch, sequence, heads, head dimension]; tokamax's of a batch of 1 without it. In
    cuDNN's, values may have another head dimension: that of one product of a forward, and of two of a backward.
    """
    name = kernel_name(line)
    products = 5 if "Backward" in name else 2
    if name.startswith(OWN_BACKWARD):
        products = OWN_PRODUCTS[len(arrays(line.type))]
    shapes = _attention_shapes(line, types)
    (queries, heads, width), keys, of_values = shapes[0][-3:], shapes[1][-3], products // 2
    batch, hidden = math.prod(shapes[0][:-3]), keys - _window(line, keys)
    widths = (products - of_values) * width + of_values * shapes[2][-1]
    return 2.0 * batch * heads * (queries * keys - hidden**2) * widths


def _attention_shapes(line: Line, types: Mapping[str, str]) -> list[tuple[int, ...]]:
    """Of queries, keys and values."""
    return [found[0][1] for name in operands(line)[:3] if (found := arrays(types.get(name, "")))]


def _window(line: Line, keys: int) -> int:
    """The keys of a sliding window; without one all."""
    window = WINDOW.search(line.rest)
    return min(keys, int(window[1])) if window and int(window[1]) else keys


def _attended(line: Line, types: Mapping[str, str]) -> tuple[float, float]:
    """(keys of a query by the whole square of scores, as `_attention_flops` counts it; elements of a head)."""
    (queries, _, width), (keys, *_) = (shape[-3:] for shape in _attention_shapes(line, types)[:2])
    return keys - (keys - _window(line, keys)) ** 2 / queries, width


def _attention_part(line: Line) -> float | None:
    """Half under cuDNN's causal mask, else 1; ring attention calls both. Other kernels do not say."""
    mask = MASK.search(line.rest)
    return mask and (0.5 if "CAUSAL" in mask[1] else 1.0)


def _fusion(line: Line, inner: Sequence[Line]) -> Kernel:
    lines = {one.name: one for one in inner}
    users: dict[str, list[Line]] = {}
    for one in inner:
        for name in operands(one):
            users.setdefault(name, []).append(one)
    read = sum(_read_of(one, users) for one in inner if one.op == "parameter")
    roots = _roots(next(one for one in inner if one.is_root), lines)
    written = sum(_written_by(root, lines) for root in roots)
    types = {name: other.type for name, other in lines.items()}
    return _products(line.name, read, written, inner, types) or Kernel(
        line.name, _class_of(roots, inner, lines, users), read, written
    )


def _uses(name: str, users: Mapping[str, Sequence[Line]]) -> Iterator[tuple[str, Line]]:
    """(operand's name, user) of a value, through views of it."""
    for user in users.get(name, ()):
        if user.op in VIEWS:
            yield from _uses(user.name, users)
        else:
            yield name, user


def _read_of(value: Line, users: Mapping[str, Sequence[Line]]) -> int:
    """Bytes that a fusion reads of a parameter: of one that it only slices the slices, or what it slices of them."""
    whole, partial, uses = _size(value.type), 0, list(_uses(value.name, users))
    for name, user in uses:
        names = operands(user)
        if user.op in ("dynamic-slice", "slice", "gather") and names[0] == name:
            partial += _read_of(user, users)
        elif not (user.op in ("dynamic-update-slice", "scatter") and names[0] == name):
            return whole
    return min(whole, partial) if uses or value.op == "parameter" else whole  # a result of the fusion


def _roots(root: Line, lines: Mapping[str, Line]) -> list[Line]:
    """The results of a fusion."""
    names = operands(root) if root.op == "tuple" else [root.name]
    return [_behind_views(lines[name], lines) for name in names]


def _behind_views(line: Line, lines: Mapping[str, Line]) -> Line:
    while line.op in VIEWS:
        line = lines[operands(line)[0]]
    return line


def _written_by(root: Line, lines: Mapping[str, Line]) -> int:
    if root.op == "dynamic-update-slice":
        return _size(lines[operands(root)[1]].type)
    if root.op == "scatter":
        return _size(lines[operands(root)[-1]].type)
    source = lines[operands(root)[0]] if root.op == "get-tuple-element" else root
    return _results(root) if source.op == "custom-call" else _size(root.type)


def _class_of(
    roots: Sequence[Line], inner: Sequence[Line], lines: Mapping[str, Line], users: Mapping[str, Sequence[Line]]
) -> str:
    """The class of a fusion without a matmul, from what it does with arrays that are not tiny."""
    updates = [root for root in roots if root.op in ("dynamic-update-slice", "scatter")]
    for root in updates:
        buffer = _behind_views(lines[operands(root)[0]], lines)
        sliced = any(user.op in ("dynamic-slice", "gather") for _, user in _uses(buffer.name, users))
        if sliced and any(one.op == "add" and one.type.split("[")[0] == root.type.split("[")[0] for one in inner):
            return "accumulation"
    if updates:
        return "stash"
    large = (one for one in inner if _size(one.type) >= SCALAR and one.op not in ("parameter", "constant", "broadcast"))
    return "copy" if all(one.op in MOVES or one.op == "tuple" for one in large) else "elementwise"

"""Evaluates integer and boolean operations of an HLO module on all ranks at once; values are those of `rank_labels`."""

import math
import re
from collections.abc import Sequence

import numpy as np

from megajax.estimate.hlo_parser import ARRAY, Line, numbers
from megajax.estimate.rank_labels import Value

BITS = (8, 16, 32, 64)
TYPES = {"pred": "?"} | {f"s{bits}": f"i{bits // 8}" for bits in BITS} | {f"u{bits}": f"u{bits // 8}" for bits in BITS}
LARGEST = 1 << 22  # elements of an array of integers that is evaluated
LAYOUT = re.compile(r"\]\{([\d,]*)")
SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
ATTRIBUTES = re.compile(r", metadata=.*| ?/\*index=\d+\*/")
REDUCTIONS = {
    "add": np.add,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
MOVES = ("broadcast", "reshape", "bitcast", "copy", "slice", "transpose", "reverse", "dynamic-slice")
COMPARISONS = dict(EQ=np.equal, NE=np.not_equal, LT=np.less, LE=np.less_equal, GT=np.greater, GE=np.greater_equal)


def shape_of(type_: str) -> tuple[str, tuple[int, ...]]:
    """Element type and sizes."""
    found = ARRAY.search(type_)
    return found[1], numbers(found[2])


def is_evaluated(type_: str) -> bool:
    """Whether values of this type are evaluated, or have a label for how they were computed: integers, and one number."""
    if type_.startswith("(") or not (found := ARRAY.match(type_)):
        return False
    size = math.prod(numbers(found[2]))
    return size == 1 or (found[1] in TYPES and size <= LARGEST)


def attribute(line: Line, name: str) -> str | None:
    """The text of an attribute, without its braces."""
    found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", line.rest)
    return (found[1] if found[1] is not None else found[2]) if found else None


def constant(line: Line) -> Value | None:
    """An integer or boolean constant; None if it is another one, or its elements are not in the text."""
    kind, shape = shape_of(line.type)
    body = ATTRIBUTES.sub("", line.rest)
    if kind not in TYPES or "..." in body:
        return None
    words = re.findall(r"-?\d+|true|false", body[: body.rindex(")")])
    array = np.array([{"true": 1, "false": 0}.get(word) if word[0] in "tf" else int(word) for word in words], object)
    return Value(array.astype(TYPES[kind]).reshape(1, *shape))


def bound(line: Line, operands: Sequence[Value]) -> int | None:
    """An upper bound of the elements of a result that is not known: that of a shift, and of what moves elements."""
    kind, _ = shape_of(line.type)
    if line.op in MOVES:
        return operands[0].most
    if line.op == "shift-right-logical" and kind.startswith("u") and is_known(operands[1]):
        by = int(operands[1].array.min())
        return (1 << int(kind[1:])) - 1 >> by
    return None


def decided(line: Line, operands: Sequence[Value]) -> Value | None:
    """A comparison for equality that the bound of an operand decides (`pipeline.loops.wait_for`)."""
    if line.op != "compare" or attribute(line, "direction") not in ("EQ", "NE"):
        return None
    for one, other in (operands, operands[::-1]):
        if one.most is not None and is_known(other) and other.array.min() > one.most:
            return Value(np.full((1, *shape_of(line.type)[1]), attribute(line, "direction") == "NE"))
    return None


def is_known(value: Value) -> bool:
    """Whether it is on all ranks."""
    return value.labels is None


def evaluate(line: Line, operands: Sequence[np.ndarray], reduction: str = "") -> np.ndarray | None:
    """The result on arrays with an axis of ranks before their own; None if the operation is not one that is known.

    `reduction`: the opcode that a reduce applies.
    """
    try:
        with np.errstate(all="ignore"):
            return _evaluate(line, operands, reduction)
    except (TypeError, ValueError):  # of a boolean, or of an array without elements
        return None


def _evaluate(line: Line, operands: Sequence[np.ndarray], reduction: str) -> np.ndarray | None:
    kind, shape = shape_of(line.type)
    if kind not in TYPES:
        return None
    if line.op in ELEMENTWISE:
        return ELEMENTWISE[line.op](*operands).astype(TYPES[kind], copy=False)
    if line.op == "compare":
        return COMPARISONS[attribute(line, "direction")](*operands)
    if line.op == "select":
        return np.where(*_expanded(operands, len(shape)))
    if line.op == "clamp":
        low, x, high = _expanded(operands, len(shape))
        return np.minimum(np.maximum(x, low), high)
    if line.op == "convert":
        return operands[0].astype(TYPES[kind])
    if line.op in ("reduce", "reduce-window") and reduction in REDUCTIONS and len(operands) == 2:
        return (_reduce if line.op == "reduce" else _reduce_window)(line, *operands, REDUCTIONS[reduction])
    if line.op in STRUCTURAL:
        result = STRUCTURAL[line.op](line, operands, shape)
        same_type = result is not None and result.dtype == np.dtype(TYPES[kind])
        return result if same_type else None
    return None


def _expanded(operands: Sequence[np.ndarray], rank: int) -> list[np.ndarray]:
    """Scalars with as many axes as the others."""
    return [one.reshape(len(one), *[1] * rank) if one.ndim == 1 else one for one in operands]


def _in_range(x, by):
    return (by >= 0) & (by < 8 * x.dtype.itemsize)


def _shift(function):
    """Nothing is left where the distance is negative, or the number of bits or more."""

    def shift(x, by):
        valid = _in_range(x, by)
        return np.where(valid, function(x, np.where(valid, by, 0).astype(x.dtype)), 0)

    return shift


def _logical_right(x, by):
    unsigned = x.view(f"u{x.dtype.itemsize}")
    return (unsigned >> by.astype(unsigned.dtype)).view(x.dtype)


def _divide(x, y):
    """Rounds to zero, as C; a division by zero gives -1."""
    one, other = (x.astype(np.int64), y.astype(np.int64)) if x.dtype.itemsize < 8 else (x, y)
    quotient = np.abs(one) // np.maximum(np.abs(other), 1)
    return np.where(other == 0, -1, np.where((one < 0) != (other < 0), -quotient, quotient)).astype(x.dtype)


def _remainder(x, y):
    return np.where(y == 0, x, x - _divide(x, y) * y)


def _invert(x):
    return np.logical_not(x) if x.dtype == bool else np.invert(x)


def _negate(x):
    return (0 - x).astype(x.dtype)


ELEMENTWISE = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": _divide,
    "remainder": _remainder,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": _invert,
    "negate": _negate,
    "abs": np.abs,
    "sign": np.sign,
    "shift-left": _shift(np.left_shift),
    "shift-right-logical": _shift(_logical_right),
    "shift-right-arithmetic": lambda x, by: (
        x >> np.where(_in_range(x, by), by, 8 * x.dtype.itemsize - 1).astype(x.dtype)
    ),
    "copy": lambda x: x,
}


def _broadcast(line: Line, operands, shape):
    x, axes = operands[0], numbers(attribute(line, "dimensions") or "")
    sizes = [1] * len(shape)
    for axis, size in zip(axes, x.shape[1:], strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(len(x), *sizes), (len(x), *shape))


def _bitcast(line: Line, operands, shape):
    """The same elements in memory order; the operand's layout is that of its type, row-major if it is not given."""
    order = numbers(LAYOUT.search(line.type)[1]) if LAYOUT.search(line.type) else tuple(range(len(shape)))[::-1]
    major = order[::-1]  # axes from the slowest to the fastest
    flat = operands[0].reshape(len(operands[0]), *(shape[axis] for axis in major))
    return np.moveaxis(flat, range(1, 1 + len(major)), [1 + axis for axis in major])


def _slice(line: Line, operands, shape):
    parts = SLICE.findall(re.search(r"slice=\{([^}]*)\}", line.rest)[1])
    return operands[0][(slice(None), *(slice(int(a), int(b), int(c or 1)) for a, b, c in parts))]


def _window(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Indices of a window of these sizes; starts are clamped, as XLA's are."""
    ranks = max(map(len, (x, *starts)))
    indices = [np.arange(len(x)).reshape(-1, *[1] * len(sizes))]
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        first = np.clip(start.astype(np.int64), 0, x.shape[1 + axis] - size)
        along = first[:, None] + np.arange(size)
        indices.append(along.reshape(len(start), *[1] * axis, size, *[1] * (len(sizes) - axis - 1)))
    return tuple(np.broadcast_to(one, (ranks, *sizes)) for one in indices)


def _dynamic_slice(line: Line, operands, shape):
    x, *starts = operands
    return x[_window(x, starts, shape)]


def _dynamic_update_slice(line: Line, operands, shape):
    x, update, *starts = operands
    ranks = max(map(len, operands))
    x = np.array(np.broadcast_to(x, (ranks, *shape)))
    x[_window(x, starts, update.shape[1:])] = update
    return x


def _concatenate(line: Line, operands, shape):
    ranks = max(map(len, operands))
    return np.concatenate(
        [np.broadcast_to(x, (ranks, *x.shape[1:])) for x in operands], 1 + int(attribute(line, "dimensions"))
    )


def _iota(line: Line, operands, shape):
    axis = int(attribute(line, "iota_dimension") or 0)
    along = np.arange(shape[axis] if shape else 1).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(along, shape)[None].astype(TYPES[shape_of(line.type)[0]])


def _pad(line: Line, operands, shape):
    x, value = operands
    ranks = max(len(x), len(value))
    padded = np.array(np.broadcast_to(value.reshape(len(value), *[1] * len(shape)), (ranks, *shape)))
    edges = [tuple(map(int, one.split("_"))) for one in re.search(r"padding=([\w\-]+)", line.rest)[1].split("x")]
    if any(min(edge[:2]) < 0 or len(edge) > 2 for edge in edges):
        return None
    padded[(slice(None), *(slice(low, size - high) for (low, high), size in zip(edges, shape, strict=True)))] = x
    return padded


def _reduce(line: Line, x, start, function):
    axes = tuple(1 + axis for axis in numbers(attribute(line, "dimensions") or ""))
    reduced = function.reduce(x, axes, dtype=x.dtype)
    return function(reduced, start.reshape(len(start), *[1] * (reduced.ndim - 1)))


def _reduce_window(line: Line, x, start, function):
    """Without dilation."""
    window = dict(word.split("=") for word in attribute(line, "window").split())
    if window.keys() - {"size", "stride", "pad"} or (start != start[:1]).any():
        return None
    sizes = [int(size) for size in window["size"].split("x")]
    strides = [int(stride) for stride in window.get("stride", "x".join("1" * len(sizes))).split("x")]
    edges = [
        [int(edge) for edge in one.split("_")] for one in window.get("pad", "x".join(["0_0"] * len(sizes))).split("x")
    ]
    padded = np.pad(x, [(0, 0), *edges], constant_values=start.flat[0])
    views = np.lib.stride_tricks.sliding_window_view(padded, sizes, tuple(range(1, x.ndim)))
    chosen = views[(slice(None), *(slice(None, None, stride) for stride in strides))]
    return function(function.reduce(chosen, tuple(range(x.ndim, chosen.ndim)), dtype=x.dtype), start.flat[0])


STRUCTURAL = {
    "broadcast": _broadcast,
    "reshape": lambda line, operands, shape: operands[0].reshape(len(operands[0]), *shape),
    "bitcast": _bitcast,
    "transpose": lambda line, operands, shape: np.transpose(
        operands[0], (0, *(1 + axis for axis in numbers(attribute(line, "dimensions"))))
    ),
    "reverse": lambda line, operands, shape: np.flip(
        operands[0], [1 + axis for axis in numbers(attribute(line, "dimensions"))]
    ),
    "slice": _slice,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "concatenate": _concatenate,
    "iota": _iota,
    "pad": _pad,
}


def in_memory_order(x: np.ndarray, type_: str) -> np.ndarray:
    """A bitcast's operand with its axes from the slowest to the fastest in memory."""
    layout = LAYOUT.search(type_)
    return np.transpose(x, (0, *(1 + axis for axis in numbers(layout[1])[::-1]))) if layout else x

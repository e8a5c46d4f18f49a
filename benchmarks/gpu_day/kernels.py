"""Each kernel on this device, against the same formula in numpy in fp64."""

import itertools

import numpy as np

from benchmarks.gpu_day.implementations import GROUPED, attention_kernel
from benchmarks.gpu_day.outcomes import Wrong
from benchmarks.gpu_day.programs import Programs, compiled

# Of the largest element of each array.
LIMITS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
LENGTH, TINY_LENGTH = 1000, 80
# Head size, key/value heads of 4, causal, mask.
SHAPES = [
    (64, 4, True, None),
    (128, 2, True, None),
    (80, 4, True, None),
    (256, 1, True, None),
    (64, 4, False, None),
    (64, 2, True, "documents"),
    (128, 2, True, "documents"),
    (96, 2, True, "window"),
    (128, 4, False, "padding"),
]
ROWS, INTO, OUT = 1500, 264, 500
SIZES = {"even": (375,) * 4, "uneven": (10, 640, 0, 850), "rows of no group": (0, 3, 640, 160), "none": (0,) * 4}


def attention(name: str, tiny: bool) -> dict:
    """The kernel of a value of --attention: output and gradients by shape, mask and dtype."""
    import jax.numpy as jnp

    programs = Programs()
    kernel, fused = attention_kernel(name, programs.device), programs.on_gpu and name != "xla"
    length = TINY_LENGTH if tiny else LENGTH
    rows = []
    for dtype, shape in itertools.product((jnp.bfloat16, jnp.float16, jnp.float32), SHAPES[::3] if tiny else SHAPES):
        size, groups, causal, mask = shape
        if fused and (dtype == jnp.float32 or (name == "cudnn" and mask)):
            continue  # fused kernels compute in 16 bits, and cuDNN's has no such mask
        arrays, first = _attention_inputs(length, size, groups, mask, dtype)
        text = f"{jnp.dtype(dtype).name}, heads of {size}, {groups} of 4 for keys, {mask or ('causal' if causal else 'all')}"
        found = programs.call(f"{name}: {text}", _attention_of(kernel, causal), *arrays, first)
        if found is not None:
            expected = attention_in_numpy(*arrays, causal, first)
            errors = [error(np.float64(x), y) for x, y in zip(found, expected, strict=True)]
            rows.append(row_of(f"{name}: {text}", max(errors[:2]), max(errors[2:]), dtype))
    return checked(rows) if programs.rows is None else compiled(programs.rows)


def _attention_inputs(length, size, groups, mask, dtype):
    """Queries, keys, values and a gradient of the output, and the first key that each query sees."""
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    shapes = [(2, length, heads, size) for heads in (4, groups, groups, 4)]
    arrays = [np.asarray(jnp.asarray(draw.normal(size=shape), dtype)) for shape in shapes]
    place = np.arange(length, dtype=np.int32)
    first = {
        None: None,
        "documents": np.stack([place // (length // 5) * (length // 5), place // (length // 3) * (length // 3)]),
        "window": np.stack([np.maximum(place - 40, 0)] * 2),
        "padding": np.stack([np.full(length, 5), np.full(length, length // 3)]),
    }[mask]
    return arrays, None if first is None else first.astype(np.int32)


def _attention_of(kernel, causal: bool):
    """(queries, keys, values, gradient of the output, first) -> output, statistics, and gradients of the first three."""

    def both(query, key, value, gradient, first):
        output, statistics = kernel.forward(query, key, value, causal, first)
        return output, statistics, *kernel.backward(query, key, value, output, statistics, gradient, causal, first)

    return both


def attention_in_numpy(query, key, value, gradient, causal, first):
    """Output, statistics, and gradients of queries, keys and values, in fp64; no query may see no key.

    Heads are before the sequence, so that numpy multiplies matrices.
    """
    query, key, value, gradient = (np.float64(a).transpose(0, 2, 1, 3) for a in (query, key, value, gradient))
    scale, shape, shared = query.shape[-1] ** -0.5, key.shape, query.shape[1] // key.shape[1]
    key, value = (np.repeat(a, shared, axis=1) for a in (key, value))  # one for each head
    seen = np.tril(np.ones((query.shape[2], key.shape[2]), bool)) if causal else np.True_
    if first is not None:
        seen = seen & (np.arange(key.shape[2]) >= first[:, None, :, None])
    p = np.where(seen, np.exp(scale * query @ key.swapaxes(-1, -2)), 0)
    total = p.sum(-1, keepdims=True)
    p /= total
    dp = gradient @ value.swapaxes(-1, -2)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    by_group = [
        (a.swapaxes(-1, -2) @ b).reshape(shape[0], shape[1], shared, *shape[2:]).sum(2)
        for a, b in ((ds, query), (p, gradient))
    ]
    output, *gradients = (a.transpose(0, 2, 1, 3) for a in (p @ value, ds @ key, *by_group))
    return output, np.log(total[..., 0]), *gradients


def grouped(name: str, tiny: bool) -> dict:
    """The grouped matmul `name` of experts: products, products with the transposed, and the kernels' gradient."""
    import jax.numpy as jnp

    programs = Programs()
    kernel = GROUPED[name](programs.device)

    def by_kernel(rows, kernels, slopes, sizes):
        products = kernel.product(rows, kernels, sizes), kernel.product(slopes, kernels, sizes, transposed=True)
        return *products, kernel.gradient(rows, slopes, sizes)

    def in_place(rows, kernels, slopes, sizes):
        """The same with kernels in a stack, and the gradient added to one of a stack of ones."""
        place, stack = jnp.int32(1), jnp.stack([jnp.zeros_like(kernels), kernels])
        products = (kernel.product(x, stack, sizes, y, place) for x, y in ((rows, False), (slopes, True)))
        total = kernel.add(jnp.ones(stack.shape, jnp.float32), place, rows, slopes, sizes)
        others = jnp.where((total[0] == 1).all(), 0.0, jnp.inf)  # another part of the stack was written
        return *products, total[1] - 1 + others

    rows, draw = [], np.random.default_rng(0)
    for dtype, (text, sizes) in itertools.product((jnp.bfloat16, jnp.float16, jnp.float32), SIZES.items()):
        if text != "uneven" and (tiny or programs.rows is not None):  # other sizes are the same program
            continue
        shapes = (ROWS, INTO), (len(sizes), INTO, OUT), (ROWS, OUT)
        arrays = [np.asarray(jnp.asarray(draw.normal(size=shape), dtype)) for shape in shapes]
        for how, call in ({"": by_kernel} | ({", in place": in_place} if kernel.add else {})).items():
            label = f"{name}: {jnp.dtype(dtype).name}, {text}{how}"
            found = programs.call(label, call, *arrays, np.array(sizes, np.int32))
            if found is not None:
                errors = [error(np.float64(x), y) for x, y in zip(found, grouped_in_numpy(*arrays, sizes), strict=True)]
                rows.append(row_of(label, max(errors[:2]), errors[2], dtype))
    return checked(rows) if programs.rows is None else compiled(programs.rows)


def grouped_in_numpy(rows, kernels, slopes, sizes):
    rows, kernels, slopes = (np.float64(a) for a in (rows, kernels, slopes))
    results = np.zeros((len(rows), kernels.shape[2])), np.zeros_like(rows), np.zeros_like(kernels)
    start = 0
    for group, size in enumerate(sizes):
        own = slice(start, start := start + size)
        results[0][own] = rows[own] @ kernels[group]
        results[1][own] = slopes[own] @ kernels[group].T
        results[2][group] = rows[own].T @ slopes[own]
    return results


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest element; NaN counts as infinite."""
    difference = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
    return float(difference) if np.isfinite(difference) else float("inf")


def row_of(label: str, output: float, gradients: float, dtype) -> dict:
    """A kernel's errors, and their limit for the type."""
    return {"label": label, "output": output, "gradients": gradients, "limit": LIMITS[np.dtype(dtype).name]}


def checked(rows: list[dict]) -> dict:
    """The result with these rows; raises Wrong if an error is larger than its limit."""
    wrong = [row["label"] for row in rows if not max(row["output"], row["gradients"]) <= row["limit"]]
    if wrong:
        raise Wrong(
            f"{len(wrong)} of {len(rows)} differ from fp64 by more than their limit: {wrong[0]}", {"rows": rows}
        )
    return {"rows": rows}

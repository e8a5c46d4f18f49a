"""Parameters that have two names in a file: the output of a model whose embeddings are tied."""

import math
from collections.abc import Mapping

import numpy as np

from megajax.interop.hugging_face.tables import TABLES
from megajax.interop.hugging_face.tensors import Table
from megajax.interop.safetensors import Tensor

__all__ = ["absent_prefix", "differing_tie"]

COMPARED_BYTES = 32 * 2**20  # of fp32, at once


def absent_prefix(tensors: Mapping[str, Tensor], table: Table) -> str:
    """The prefix that a model without its head leaves out of its tensors' names; empty if they have it."""
    return "" if any(name.startswith(table.prefix) for name in tensors) else table.prefix


def differing_tie(tensors: Mapping[str, Tensor], family: str) -> str | None:
    """The second name of a tied parameter if the file has both with different values: transformers does not tie them."""
    table = TABLES[family]
    cut = absent_prefix(tensors, table)
    for names in table.tied.items():
        second, first = (tensors.get(name.removeprefix(cut)) for name in names)
        if second is not None and first is not None and not _equal(second, first):
            return names[0]
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; some rows at a time, until they differ."""
    if one.shape != other.shape:
        return False
    step = max(1, COMPARED_BYTES // 4 // max(1, math.prod(one.shape[1:])))
    for start in range(0, one.shape[0], step):
        first, second = (tensor.rows(start, min(start + step, one.shape[0])) for tensor in (one, other))
        if not np.array_equal(first.astype(np.float32), second.astype(np.float32)):
            return False
    return True

"""Checkpoints larger than host memory: leaves that are written in parts as they are made, and read in parts.

`writer.write` takes arrays that exist. A `StreamedLeaf` is made part by part while orbax writes it, so a checkpoint can be
converted from another format with one part in memory. The files are those of any other checkpoint.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers

from megajax.checkpoint.object_store import Path, is_remote
from megajax.checkpoint.store_drivers import kvstore

__all__ = ["Part", "StreamedLeaf", "open_leaf", "streaming_handler"]

Part = tuple[tuple[slice, ...], np.ndarray]  # a region of the leaf, and its values


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """A leaf of a checkpoint that is made while it is written.

    Attributes:
      shape: of the whole leaf.
      dtype: of its elements.
      chunk: shape of a part; parts start at multiples of it. It is also the shape in which the file is compressed.
      parts: this process's parts, each of them made when the one before it has been written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    parts: Callable[[], Iterable[Part]]


class _Handler(type_handlers.TypeHandler):
    """Writes StreamedLeafs, one part at a time, as what orbax calls a jax.Array."""

    def typestr(self) -> str:
        return "jax.Array"

    async def metadata(self, infos):
        raise NotImplementedError("streamed leaves are written only")

    async def deserialize(self, infos, args=None):
        raise NotImplementedError("streamed leaves are written only")

    async def serialize(self, values: Sequence[StreamedLeaf], infos, args=None):
        """Writes all parts before it returns: the caller of `writer.write` waits in any case."""
        for leaf, info in zip(values, infos, strict=True):
            if hasattr(info, "await_path_creation"):
                await info.await_path_creation()
            spec = type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=info.is_ocdbt_checkpoint,
                global_shape=leaf.shape,
                local_shape=leaf.chunk,
                dtype=leaf.dtype,
                process_index=jax.process_index(),
            )
            array = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
            for region, values_of_part in leaf.parts():
                await array[region].write(values_of_part)
        return []

    def memory_size(self, values):
        return [(0, 0)] * len(values)


def streaming_handler() -> ocp.PyTreeCheckpointHandler:
    """A handler for `writer.write` whose leaves are StreamedLeafs."""
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, type_handlers.ArrayHandler()), (StreamedLeaf, _Handler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def open_leaf(path: Path, name: str):
    """A leaf of a complete checkpoint as a TensorStore, of which regions can be read.

    Args:
      path: the checkpoint's directory.
      name: the leaf's, "params/blocks/...".
    """
    state = path / "state"
    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": kvstore(f"{state}/") if is_remote(path) else state.absolute().as_uri() + "/",
            "path": name.replace("/", ".") + "/",
        },
    }
    return tensorstore.open(spec, open=True, read=True).result()

"""Checkpoints of megatron-core's distributed format (--ckpt-format torch_dist), which torch.distributed.checkpoint reads.

Tensors are global, in whatever shards they were written: nothing of the run's layout is needed. Equal layers are one tensor
with an axis of layers first (decoder.layers.mlp.linear_fc2.weight [L, h, f]), or one tensor each (decoder.layers.3....).
common.pt has the arguments. One layer's tensor is read at once, and kept until another one is read.
"""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.interop.megatron.rank_files import arguments_of
from megajax.interop.megatron.tensors import FC1, canonical_name, split_gated
from megajax.interop.megatron.torch_files import DAMAGED, load, load_metadata, torch_library
from megajax.interop.safetensors import Tensor

__all__ = ["read_distributed"]

STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.*)")
BYTES = "BytesStorageMetadata"


def read_distributed(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments, and the tensors by the names of `megatron/tensors.py`.

    Raises:
      ConfigError: see `megatron.checkpoint.open_checkpoint`.
    """
    args = arguments_of(load(path / "common.pt"), path / "common.pt")
    shards, found = _Shards(path), {}
    gated = bool(args.get("swiglu") or args.get("gated_linear_unit"))
    for stored in shards.names():
        name = canonical_name(stored)
        if name is None:
            continue
        stack = STACKED.fullmatch(name)
        if stack:
            layers = shards.shape(stored)[0]
            named = {
                canonical_name(f"decoder.layers.{layer}.{stack[1]}"): StoredTensor(shards, stored, layer)
                for layer in range(layers)
            }
        else:
            named = {name: StoredTensor(shards, stored)}
        for one, tensor in named.items():
            if gated and one.endswith(FC1):
                found[f"{one}_w"], found[f"{one}_v"] = split_gated(tensor)
            else:
                found[one] = tensor
    return args, found


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, or one layer of a stack."""

    shards: "_Shards"
    name: str
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, of one layer."""
        shape = self.shards.shape(self.name)
        return shape if self.layer is None else shape[1:]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis, fp32."""
        return self.shards.read(self.name, self.layer)[start:stop].float().numpy()


class _Shards:
    """The shards of a checkpoint's tensors, and where its files have them."""

    def __init__(self, path: pathlib.Path):
        """Reads the metadata, and checks that the files have all bytes that it names."""
        torch = torch_library(path)
        self.path = path
        self.metadata = load_metadata(path / ".metadata")
        self.reader = torch.distributed.checkpoint.FileSystemReader(path)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._kept: tuple[Any, Any] = (None, None)
        wanted = set(self.names())
        for index, place in self.metadata.storage_data.items():
            if index.fqn in wanted:
                self._check_file(place.relative_path, place.offset + place.length)
        for name in wanted:
            kind = self.metadata.state_dict_metadata[name].properties.dtype
            if not kind.is_floating_point or kind.itemsize < 2:
                raise ConfigError(f"{path}: {name} is of {kind}: only fp32, bf16 and fp16 are read")

    def _check_file(self, name: str, size: int) -> None:
        file = self.path / name
        if pathlib.PurePath(name).name != name:
            raise ConfigError(f"{self.path / '.metadata'} names the file {name}, which is not in its directory")
        try:
            found = file.stat().st_size
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}; copy the checkpoint again") from None
        if found < size:
            raise ConfigError(
                f"{file} is truncated: it has {found} bytes of at least {size}; copy the checkpoint again"
            )

    def names(self) -> Sequence[str]:
        """Of the model's tensors: neither the optimizer's nor other objects."""
        found = self.metadata.state_dict_metadata.items()
        return [name for name, one in found if type(one).__name__ != BYTES and canonical_name(name) is not None]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, layers included."""
        return tuple(self.metadata.state_dict_metadata[name].size)

    def read(self, name: str, layer: int | None) -> Any:
        """A tensor, or one layer of a stack, of torch's."""
        if self._kept[0] != (name, layer):
            self._kept = ((name, layer), None)  # frees the last one first
            self._kept = ((name, layer), self._read(name, layer))
        return self._kept[1]

    def _read(self, name: str, layer: int | None) -> Any:
        torch = torch_library(self.path)
        from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

        stored = self.metadata.state_dict_metadata[name]
        shape = list(stored.size)
        first = 0 if layer is None else layer
        if layer is not None:
            shape[0] = 1
        out, items, read = torch.empty(shape, dtype=stored.properties.dtype), [], 0
        for chunk in stored.chunks:
            offsets, sizes, inside = list(chunk.offsets), list(chunk.sizes), [0] * len(shape)
            if layer is not None:
                if not offsets[0] <= first < offsets[0] + sizes[0]:
                    continue
                inside[0], sizes[0], offsets[0] = first - offsets[0], 1, 0
            index, target = MetadataIndex(name, chunk.offsets), torch.Size(offsets)
            place = MetadataIndex(name, target)
            items.append(ReadItem(LoadItemType.TENSOR, place, target, index, torch.Size(inside), torch.Size(sizes)))
            read += torch.Size(sizes).numel()
        if read != out.numel():
            raise ConfigError(f"{self.path}: {name} has {read} of {out.numel()} elements: copy the checkpoint again")

        class IntoTensor(DefaultLoadPlanner):
            """Puts what is read into `out`."""

            def resolve_tensor(self, read_item: Any) -> Any:
                found = out
                for axis, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
                    found = found.narrow(axis, start, size)
                return found

            def commit_tensor(self, read_item: Any, tensor: Any) -> None:
                """Nothing is left to do."""

        try:
            self.reader.read_data(LoadPlan(items), IntoTensor()).wait()
        except (OSError, *DAMAGED) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{self.path}: {name} is damaged ({reason}): copy the checkpoint again") from None
        return out if layer is None else out[0]

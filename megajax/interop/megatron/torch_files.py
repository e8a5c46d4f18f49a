"""torch's files of a Megatron-LM checkpoint, read without running anything that they contain.

A pickle can name any function to be called. `torch.load(weights_only=True)` calls torch's own only, and here every class
that Megatron-LM adds to its checkpoints (enums of the arguments, states of random numbers) is replaced by `Unread`, which
does nothing. A file that names something else is refused before it is read.
"""

import contextlib
import io
import pathlib
import pickle
import pickletools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megajax.config import ConfigError

__all__ = ["Unread", "load", "load_metadata", "torch_library"]

# Objects in checkpoints that Megatron-LM wrote; a prefix ends with a dot. None of them is made: see `Unread`.
KNOWN = (
    *("megatron.", "torch.", "numpy.", "transformer_engine.", "apex.", "pathlib.", "collections."),
    *("_io.BytesIO", "signal.Signals", "functools.partial", "types.SimpleNamespace", "datetime.timedelta"),
    "builtins.getattr",  # with which Python 3.11 stores enums
)
ARGUMENTS = "argparse.Namespace"
# What torch.distributed.checkpoint puts into .metadata.
STRUCTURES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
}
DAMAGED = (RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError, pickle.UnpicklingError)
LARGEST = 2**28  # bytes of .metadata; that of a model with 1,000,000 shards
INSTALL = "pip install 'megajax[megatron]'"


class Unread:
    """Stands for an object of a checkpoint that is not read: it takes any argument, state and item, and keeps none."""

    def __init__(self, *given: Any, **named: Any):
        """Ignores its arguments."""

    def __new__(cls, *given: Any, **named: Any):
        """Ignores its arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Ignores the state."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignores the item."""

    def __hash__(self) -> int:
        """Keys of dictionaries may be such objects."""
        return id(self)

    def append(self, item: Any) -> None:
        """Ignores the item."""

    def extend(self, items: Any) -> None:
        """Ignores the items."""


class Properties:
    """The dtype of a stored tensor. A newer torch stores more fields than an older one's own class takes (2.15: six)."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Takes the first field, the dtype, and ignores the others."""
        self.dtype = state[0]


def torch_library(what: Any) -> ModuleType:
    """torch.

    Raises:
      ConfigError: it is missing, or too old; the message says what to install.
    """
    try:
        import torch
        import torch.distributed.checkpoint
        from torch.serialization import get_unsafe_globals_in_checkpoint  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"reading {what} needs torch 2.6 or newer ({error}): {INSTALL}") from None
    return torch


def load(path: pathlib.Path) -> dict[str, Any]:
    """The dictionary in a file of torch.save; its tensors are mapped memory, read when they are used.

    Raises:
      ConfigError: it cannot be read, is truncated, is no dictionary, or names a function or class that no checkpoint has.
    """
    torch = torch_library(path)
    with _readable(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        for name in names:
            _check(path, name)
        import argparse

        allowed = [(argparse.Namespace if name == ARGUMENTS else Unread, name) for name in names]
        with torch.serialization.safe_globals(allowed):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has a {type(found).__name__}, not a checkpoint's dictionary: give another directory")
    return found


def load_metadata(path: pathlib.Path) -> Any:
    """The `Metadata` of torch.distributed.checkpoint in a .metadata file.

    Raises:
      ConfigError: as of `load`.
    """
    torch = torch_library(path)
    with _readable(path), open(path, "rb") as file:
        data = file.read(LARGEST + 1)
        check_pickle(data)
        found = _Metadata(io.BytesIO(data), path, torch).load()
        if not isinstance(found, torch.distributed.checkpoint.Metadata):
            raise ValueError(f"it has a {type(found).__name__}")
        return found


def check_pickle(data: bytes) -> None:
    """Raises ValueError if a pickle would take much more memory than its own size.

    A few bytes name an entry of the memo by its number, for which Python's unpickler makes a table of that size, or the
    length of an array that is made before its bytes are read.
    """
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MB")
    for code, argument, place in pickletools.genops(io.BytesIO(data)):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > place:
            raise ValueError(f"it has an entry {argument} after {place} bytes")


class _Metadata(pickle.Unpickler):
    """Makes the structures of torch.distributed.checkpoint, and `Unread` of other classes of Megatron-LM's."""

    def __init__(self, file: Any, path: pathlib.Path, torch: ModuleType):
        super().__init__(file)
        self.path, self.torch = path, torch

    def find_class(self, module: str, name: str) -> Any:
        """The class that the pickle names, if it is one of those."""
        if module == "torch" and isinstance(getattr(self.torch, name, None), self.torch.dtype):
            return getattr(self.torch, name)
        if (module, name) == ("torch.distributed.checkpoint.metadata", "TensorProperties"):
            return Properties
        if name in STRUCTURES.get(module, ()):
            return super().find_class(module, name)
        _check(self.path, f"{module}.{name}")
        return Unread


def _check(path: pathlib.Path, name: str) -> None:
    """Raises ConfigError if no checkpoint of Megatron-LM has objects of this name."""
    if name != ARGUMENTS and not any(name == known or (known[-1] == "." and name.startswith(known)) for known in KNOWN):
        raise ConfigError(
            f"{path} names {name}, which Megatron-LM's checkpoints do not have: loading it could run code, so it is not "
            "read; save the checkpoint again without it"
        )


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Errors of a file that is missing or damaged as a ConfigError."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; give a complete checkpoint") from None
    try:
        yield
    except ConfigError:
        raise
    except (OSError, *DAMAGED) as error:  # torch seeks before the beginning of a truncated file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path} is truncated, damaged or of a torch before 1.6 ({reason}): copy it again, or save it "
            "again with torch.save"
        ) from None

"""The files of a run in an object store: gs://BUCKET/FOLDER or s3://BUCKET/FOLDER (extra `stores`).

Names are those of universal_pathlib, which has pathlib's operators for every file system of fsspec: the code of a run on a
disk takes them as it takes a `pathlib.Path`. etils.epath, which orbax uses, keeps lists of objects that other processes
have changed since, knows a fixed set of stores, and cannot create an object on condition that there is none.

Writing an object is atomic; it can be neither renamed nor appended to. A directory is a prefix of objects' keys: it exists
while there is an object whose key has this prefix.

Every function raises an OSError with a `strerror` for whatever its library raises: a store that does not answer is an error
and never an empty folder.
"""

import contextlib
import errno
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from megajax.config import ConfigError
from megajax.data.remote import store_settings
from megajax.schedules.paths import is_store

__all__ = [
    *("Path", "blocks", "children", "create", "errors_of", "exists", "files_below", "is_remote", "move_tree", "place"),
    *("read", "remove", "remove_tree", "size_of", "store_errors", "write"),
]

Path = Any  # pathlib.Path, or universal_pathlib's UPath
BLOCK = 1 << 24  # bytes read at once
LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}
KINDS = (FileNotFoundError, FileExistsError, PermissionError)
LONGEST = 300  # characters of a library's message


def is_remote(path: str | Path) -> bool:
    """Whether a path is of an object store."""
    return is_store(path) if isinstance(path, str) else hasattr(path, "fs")


def place(path: str | Path) -> Path:
    """The absolute path of a directory of this machine, or that of a folder in an object store.

    Raises:
      ConfigError: the library of the store is not installed.
    """
    if not is_remote(path):
        return pathlib.Path(path).absolute()
    if not isinstance(path, str):
        return path
    try:
        import upath

        scheme, settings = path.partition("://")[0], store_settings(path)
        if scheme == "s3" and "AWS_MAX_ATTEMPTS" not in os.environ:  # of each of the five tries of s3fs
            settings.setdefault("config_kwargs", {"retries": {"total_max_attempts": 5, "mode": "standard"}})
        __import__(LIBRARIES[scheme])
        found = upath.UPath(path.rstrip("/"))
        with store_errors():
            _ = found.fs  # connects
    except ImportError as error:
        raise ConfigError(f"{path} is in an object store ({error}): pip install 'megajax[stores]'") from None
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from None
    return found


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turns what the libraries of a store raise into an OSError with a `strerror`."""
    try:
        yield
    except (ConfigError, ImportError):
        raise
    except Exception as error:
        kind = next((kind for kind in KINDS if isinstance(error, kind)), OSError)
        raise kind(getattr(error, "errno", None) or errno.EIO, _reason(error)) from error


def errors_of(path: Path) -> contextlib.AbstractContextManager[None]:
    """`store_errors` where a library opens a path itself; for a directory of this machine, nothing."""
    return store_errors() if is_remote(path) else contextlib.nullcontext()


def _reason(error: Exception) -> str:
    """The cause on one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    text = re.sub(r"(https?://[^\s\"'?]+)\?[^\s\"']*", r"\1", text)  # of a request, whose query may be signed
    if isinstance(error, FileNotFoundError):
        return text if "bucket" in text.lower().split() else "there is no such object or bucket"
    if isinstance(error, PermissionError):
        text = f"permission denied ({text})" if text else "permission denied"
    text = text or type(error).__name__
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def exists(path: Path) -> bool:
    """Whether there is such an object, or a folder with any."""
    if not is_remote(path):
        return path.exists()
    try:
        with store_errors():
            path.fs.info(path.path)
    except FileNotFoundError:
        return False
    return True


def read(path: Path) -> bytes:
    """The content of a file or object."""
    if not is_remote(path):
        return path.read_bytes()
    with store_errors():
        return path.fs.cat_file(path.path)


def size_of(path: Path) -> int:
    """Bytes of a file or object."""
    if not is_remote(path):
        return path.stat().st_size
    with store_errors():
        return path.fs.info(path.path)["size"]


def blocks(path: Path, size: int = BLOCK) -> Iterator[bytes]:
    """The content of a file or object in parts."""
    if not is_remote(path):
        with open(path, "rb") as file:
            while block := file.read(size):
                yield block
        return
    with store_errors():
        end = size_of(path)
        for start in range(0, end, size):
            block = path.fs.cat_file(path.path, start=start, end=min(start + size, end))
            if len(block) != min(size, end - start):
                raise OSError(errno.EIO, "the store sent a part of an object")
            yield block


def write(path: Path, data: bytes) -> None:
    """Writes an object whole; a file of this machine too, whose directory exists."""
    if not is_remote(path):
        path.write_bytes(data)
        return
    with store_errors():
        path.fs.pipe_file(path.path, data)


def create(path: Path, data: bytes) -> bool:
    """Writes an object if there is none of its name, in one step of the store; returns whether there was none."""
    try:
        with store_errors():
            path.fs.pipe_file(path.path, data, mode="create")
    except FileExistsError:
        return False
    return True


def children(path: Path) -> list[Path]:
    """The objects and folders in a folder; none if it does not exist."""
    try:
        with store_errors():
            found = path.fs.ls(path.path, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    own = path.path.strip("/")
    return [path / name.rstrip("/").rpartition("/")[2] for name in found if name.strip("/") != own]


def files_below(path: Path) -> dict[str, int]:
    """Bytes of every file below a directory or folder, by its name relative to it; none if it does not exist.

    A file that another process renames or deletes meanwhile may be missing.
    """
    if not is_remote(path):
        sizes = {}
        for parent, _, names in os.walk(path):
            for file in (pathlib.Path(parent, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    sizes[str(file.relative_to(path))] = file.lstat().st_size
        return sizes
    with store_errors():
        found = path.fs.find(path.path, detail=True)
    own = path.path.strip("/") + "/"
    sizes = {name.strip("/"): about["size"] for name, about in found.items()}
    return {name.removeprefix(own): size for name, size in sizes.items() if name.startswith(own) and name != own}


def remove(path: Path) -> None:
    """Deletes an object, if it is there."""
    with contextlib.suppress(FileNotFoundError), store_errors():
        path.fs.rm_file(path.path)


def remove_tree(path: Path) -> None:
    """Deletes all objects below a folder."""
    names = [f"{path.path}/{name}" for name in files_below(path)]
    if names:
        with contextlib.suppress(FileNotFoundError), store_errors():
            path.fs.rm(names)


def move_tree(source: Path, target: Path) -> None:
    """Copies all objects below a folder to another one, in the store itself, and deletes them."""
    for name in files_below(source):
        with store_errors():
            source.fs.cp_file(f"{source.path}/{name}", f"{target.path}/{name}")
    remove_tree(source)

"""Opens files where they are: on a disk, or at a URL, which the library fsspec reads (extra `data`); writes to stores.

Credentials are those that the libraries of fsspec find by themselves: in the environment, or in their own files.
"""

import contextlib
import glob
import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from megajax.config import ConfigError
from megajax.schedules.paths import is_store

__all__ = [
    "compare",
    "exists",
    "expanded",
    "is_url",
    "open_binary",
    "probe",
    "read_range",
    "remote_errors",
    "remove",
    "size_of",
    "store_settings",
    "upload",
    "version_of",
    "write_errors",
]

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
BUFFER = 1 << 20  # bytes that are asked of a store at once
COMPARED = 1 << 24  # bytes of an object that are compared at once


def is_url(path: str) -> bool:
    """Whether a path is a URL, SCHEME://REST."""
    return bool(URL.match(path))


def open_binary(path: str) -> BinaryIO:
    """A file or URL, opened for reading; raises OSError for a file, any exception for a URL: see `remote_errors`."""
    if not is_url(path):
        return open(path, "rb")
    system, name = _system(path)
    return io.BufferedReader(system.open(name, "rb"), BUFFER)


def size_of(path: str) -> int:
    """Bytes of a file or URL, 0 if that is not known; raises as `open_binary`."""
    if not is_url(path):
        return os.path.getsize(path)
    system, name = _system(path)
    return int(system.size(name) or 0)


def read_range(path: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a URL; raises as `open_binary`."""
    system, name = _system(path)
    return system.cat_file(name, start=start, end=stop)


def version_of(path: str) -> str:
    """A text that changes when the object at a URL is replaced; raises as `open_binary`."""
    system, name = _system(path)
    about = system.info(name)
    kinds = ("ETag", "etag", "generation", "md5Hash", "crc32c", "LastModified", "updated", "mtime", "created")
    return " ".join(f"{kind}={about[kind]}" for kind in kinds if kind in about)


def exists(path: str) -> bool:
    """Whether there is an object at a URL; raises as `open_binary`."""
    system, name = _system(path)
    try:
        system.info(name)
    except FileNotFoundError:
        return False
    return True


def probe(path: str) -> None:
    """Writes an object at a URL and deletes it; raises as `open_binary`."""
    system, name = _system(path)
    system.pipe_file(name, b"")
    system.rm_file(name)


def remove(path: str) -> None:
    """Deletes the object at a URL, if there is one; raises as `open_binary`."""
    system, name = _system(path)
    with contextlib.suppress(FileNotFoundError):
        system.rm_file(name)


def upload(local: str, path: str) -> None:
    """Copies a file of this machine to a URL; raises as `open_binary`."""
    system, name = _system(path)
    system.put_file(local, name)


def compare(local: str, path: str) -> None:
    """Reads the object at a URL; raises OSError if it has not the bytes of a file of this machine, else as `open_binary`."""
    size = os.path.getsize(local)
    if (stored := size_of(path)) != size:
        raise OSError(f"it has {stored:,} of the {size:,} bytes that were copied")
    with open(local, "rb") as file:
        for start in range(0, size, COMPARED):
            if read_range(path, start, min(start + COMPARED, size)) != file.read(COMPARED):
                raise OSError(f"its bytes from {start:,} on are not those that were copied")


def expanded(paths: Sequence[str], option: str) -> list[str]:
    """Paths and URLs with each pattern (* ? [abc], ** for folders) replaced by the files that it matches, sorted.

    Raises:
      ConfigError: nothing matches a pattern, or its store cannot be listed.
    """
    found = []
    for path in paths:
        if not _is_pattern(path):
            found.append(path)
            continue
        matches = _matches(path, option)
        if not matches:
            raise ConfigError(f"{option} {path}: no file has such a name; pass another pattern, or a file")
        found += matches
    return found


@contextlib.contextmanager
def remote_errors(path: str, remedy: str) -> Iterator[None]:
    """Turns whatever the libraries raise about a URL into a ConfigError; of a file's path, nothing."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not is_url(path):
            raise
        raise ConfigError(f"cannot read {path}: {_reason(path, error)}; {remedy}") from None


@contextlib.contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Turns whatever the libraries raise about a URL that is written into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "there is no such bucket" if missing else _reason(path, error)
        raise ConfigError(f"cannot write {path}: {reason}") from None


def _is_pattern(path: str) -> bool:
    if path.startswith(("http://", "https://")):  # a question mark begins their query
        return "*" in path
    return bool(re.search(r"[*?\[]", path)) and not (not is_url(path) and os.path.exists(path))


def _matches(path: str, option: str) -> list[str]:
    if not is_url(path):
        return sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    with remote_errors(path, f"pass {option} another"):
        system, name = _system(path)
        return [system.unstrip_protocol(found) for found in sorted(system.glob(name))]


def _system(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the name in it."""
    try:
        import fsspec.core
    except ImportError as error:
        raise ConfigError(f"{path} is a URL, which fsspec reads ({error}): pip install 'megajax[data]'") from None
    if is_store(path):
        store_settings(path)
    return fsspec.core.url_to_fs(path)


def store_settings(path: str) -> dict[str, Any]:
    """fsspec's settings of an object store for this process; other processes change the objects: lists are never kept.

    gcsfs logs a traceback for every error that it also raises: it is silenced, unless a level was set (GCSFS_DEBUG).
    """
    import fsspec.config

    logger = logging.getLogger("gcsfs")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    settings = fsspec.config.conf.setdefault(path.partition("://")[0], {})
    settings.setdefault("use_listings_cache", False)
    return settings


def _reason(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "permission denied; the libraries of fsspec look for credentials in the environment or their own files"
    text = " ".join(str(error).split())[:300]
    if isinstance(error, ImportError):
        extra = ": pip install 'megajax[stores]'" if is_store(path) else ""
        return f"the library for {URL.match(path)[0]} is not installed ({text}){extra}"
    if isinstance(error, ValueError) and text.startswith("Protocol not known"):
        return f"fsspec knows no {URL.match(path)[0]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

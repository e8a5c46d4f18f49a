"""Opens files where they are: on a disk, or at a URL, which the library fsspec reads (extra `data`).

Credentials are those that the libraries of fsspec find by themselves: in the environment, or in their own files.
"""

import contextlib
import glob
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from megajax.config import ConfigError
from megajax.schedules.paths import is_store

__all__ = [
    "expanded",
    "is_url",
    "open_binary",
    "read_range",
    "remote_errors",
    "size_of",
    "store_settings",
    "version_of",
]

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
BUFFER = 1 << 20  # bytes that are asked of a store at once


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
    """fsspec's settings of an object store for this process; other processes change the objects: lists are never kept."""
    import fsspec.config

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

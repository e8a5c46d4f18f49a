"""Arrays that are built once and then mapped from disk by every process of every run that needs the same ones."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from filelock import FileLock

from megajax.config import ConfigError


def cached_arrays(
    folder: str | os.PathLike,
    description: Mapping,
    content: Iterable[np.ndarray],
    build: Callable[[], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """What `build` returns, from FOLDER/HASH if it is there, else built and stored there.

    HASH is of all that the arrays depend on, not of a path or a date: a file that was moved is found again, one that was
    replaced is not mistaken for the old one. Of several processes that ask at once, one builds and the others wait. The
    entry gets its name when it is complete; if the lock does not work, as on some network filesystems, all build, the
    first to finish wins, and the result is the same.

    Args:
      folder: of the cache; made if need be.
      description: settings that the arrays depend on; stored beside them to be read by people.
      content: arrays that they depend on.
      build: makes the arrays, by name.

    Returns:
      Read-only maps of the files.

    Raises:
      ConfigError: the folder cannot be written to.
    """
    text = json.dumps(description, sort_keys=True, indent=1)
    digest = hashlib.sha256(text.encode())
    for array in content:
        digest.update(np.ascontiguousarray(array).data)
    entry = pathlib.Path(folder) / digest.hexdigest()[:32]
    if not entry.is_dir():
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{entry}.lock"):
                if not entry.is_dir():
                    _store(entry, text, build())
        except OSError as error:
            raise ConfigError(
                f"cannot store the sample index in {folder}: {error.strerror or error}; "
                "type --data-cache DIR with a folder that can be written to"
            ) from None
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))}


def _store(entry: pathlib.Path, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    unfinished = entry.with_name(f"{entry.name}.unfinished-{os.uname().nodename}-{os.getpid()}")
    try:
        unfinished.mkdir()
        (unfinished / "description.json").write_text(text + "\n")
        for name, array in arrays.items():
            with open(unfinished / f"{name}.npy", "wb") as stream:
                np.save(stream, array)
                os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            os.rename(unfinished, entry)
    except OSError:
        if not entry.is_dir():  # somebody else's, complete: "directory not empty"
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

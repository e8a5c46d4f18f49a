"""Forces files and directories to the disk: after a power loss a file may have its new name but not its content."""

import os
import pathlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor


def sync(path: str | pathlib.Path) -> None:
    """Returns when a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(files: Iterable[pathlib.Path]) -> None:
    """`sync` of several files at the same time."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync, files))


def sync_tree(root: pathlib.Path) -> None:
    """`sync` of all files below a directory, then of all directories, the inner ones first."""
    files, directories = [], []
    for parent, _, names in os.walk(root, topdown=False):
        directories.append(pathlib.Path(parent))
        files += [pathlib.Path(parent) / name for name in names]
    sync_files(files)
    for directory in directories:
        sync(directory)

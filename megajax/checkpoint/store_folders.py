"""The folders of checkpoints in an object store: deleted and moved so that half a checkpoint is never complete."""

from megajax.checkpoint.directory import COMMITTED, PROBE, step_of
from megajax.checkpoint.object_store import Path, children, exists, move_tree, read, remove, remove_tree, write
from megajax.config import ConfigError

SETTLES = 60.0  # seconds after a failed save in which the libraries may still send its requests


def make_writable(directory: Path) -> None:
    """Tries to write, and deletes what killed saves have left.

    Raises:
      ConfigError: the folder cannot be written.
    """
    try:
        write(directory / PROBE, b"")
        remove_unfinished(directory)
    except OSError as error:
        raise ConfigError(f"cannot write checkpoints to {directory}: {error.strerror}; pass --run-dir DIR") from error


def remove_unfinished(directory: Path) -> None:
    """Deletes the folders of failed or killed saves, and of deletions that did not end."""
    for path in children(directory):
        if step_of(path) is not None and not exists(path / COMMITTED):
            remove_tree(path)


def delete(path: Path) -> None:
    """Deletes a checkpoint; an error leaves a folder that is no checkpoint, for `remove_unfinished`."""
    remove(path / COMMITTED)
    remove_tree(path)


def move(path: Path, target: Path) -> None:
    """Gives a checkpoint another name: its objects are copied in the store."""
    marker = read(path / COMMITTED)
    remove(path / COMMITTED)
    move_tree(path, target)
    write(target / COMMITTED, marker)

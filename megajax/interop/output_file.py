"""What a command writes to: the file of `--out` of generation and evaluation, the directory of an import or export."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import jax

from megajax.checkpoint.object_store import Path, files_below, is_remote, remove_tree, store_errors
from megajax.checkpoint.writer import on_all_processes, reason_of
from megajax.config import ConfigError
from megajax.schedules.paths import tell_replaced

__all__ = ["OutputFile", "replace_directory", "unwritable"]

TEMPORARY = ".unfinished"


class OutputFile:
    """A text file that appears complete or not at all."""

    def __init__(self, path: str):
        """Creates and deletes the unfinished file beside it, so that a wrong path is found before the work.

        Raises:
          ConfigError: it cannot be written.
        """
        self.path = pathlib.Path(path)
        self.unfinished = self.path.with_name(self.path.name + TEMPORARY)
        try:
            if self.path.is_dir():
                raise IsADirectoryError(21, "Is a directory")
            self.unfinished.write_text("")
            self.unfinished.unlink()
        except (OSError, ValueError) as error:
            raise unwritable(self.path, error) from error

    def write(self, text: str) -> None:
        """Writes the text, and renames the file to its name.

        Raises:
          ConfigError: it cannot be written, for example to a full disk.
        """
        tell_replaced(self.path)
        try:
            self.unfinished.write_text(text, encoding="utf-8")
            os.replace(self.unfinished, self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error
        finally:
            self.unfinished.unlink(missing_ok=True)


def unwritable(path: pathlib.Path, error: Exception) -> ConfigError:
    """The error of a file of `--out` that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot write {path}: {reason}; give --out the path of a file.")


@contextlib.contextmanager
def replace_directory(path: Path, option: str) -> Iterator[pathlib.Path]:
    """A temporary directory beside `path`, renamed to it at the end, and deleted after an error. All processes enter it.

    Of an object store it is in this machine's folder of temporary files, and is copied at the end.

    Raises:
      ConfigError: `path` has files, or cannot be written.
    """
    if is_remote(path):
        with _folder_of_store(path, option) as folder:
            yield folder
        return
    path = path.absolute()
    unfinished, is_first = path.with_name(path.name + TEMPORARY), jax.process_index() == 0

    def start() -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} exists and is not an empty directory: pass another {option}")
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def finish() -> None:
        if is_first:
            if path.exists():
                path.rmdir()
            unfinished.rename(path)

    try:
        on_all_processes(f"{option}/start", start)
        yield unfinished
        on_all_processes(f"{option}/finish", finish)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}; pass another {option}") from None
    finally:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _folder_of_store(path: Path, option: str) -> Iterator[pathlib.Path]:
    """`replace_directory` of a folder in an object store. The file that readers look for, config.json, is copied last."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"{option} {path} is in an object store, which one process writes: pass a directory, or run one"
        )
    try:
        if files_below(path):
            raise ConfigError(f"{path} exists and is not an empty directory: pass another {option}")
        with tempfile.TemporaryDirectory(prefix="megajax-export-") as folder:
            yield pathlib.Path(folder)
            try:
                for name in sorted(files_below(pathlib.Path(folder)), key=lambda name: (name == "config.json", name)):
                    with store_errors():
                        path.fs.put_file(os.path.join(folder, name), (path / name).path)
            except OSError:
                with contextlib.suppress(OSError):
                    remove_tree(path)
                raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}; pass another {option}") from None

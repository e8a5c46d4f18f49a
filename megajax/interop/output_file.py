"""The file that a command writes its results to: `--out` of generation and evaluation."""

import os
import pathlib

from megajax.config import ConfigError
from megajax.schedules.paths import tell_replaced

__all__ = ["OutputFile", "unwritable"]


class OutputFile:
    """A text file that appears complete or not at all."""

    def __init__(self, path: str):
        """Creates and deletes the unfinished file beside it, so that a wrong path is found before the work.

        Raises:
          ConfigError: it cannot be written.
        """
        self.path = pathlib.Path(path)
        self.unfinished = self.path.with_name(self.path.name + ".unfinished")
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

"""Pairs for an object store: written in a folder of this machine, and copied to gs://BUCKET/NAME or s3://BUCKET/NAME.

An object cannot be appended to, so a pair needs its room in TMPDIR. Of a pair, the .bin is copied first and the .idx last,
without which it is none; every object is read back and compared with its file. A pair that is replaced has its .idx deleted
first. If the store fails, the files stay, and the error says where: no text is tokenized twice.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from megajax.config import ConfigError
from megajax.data.remote import compare, exists, probe, remove, upload, write_errors
from megajax.schedules.paths import is_store

__all__ = ["PairPlaces"]

ENDS = (".bin", ".sums.json", ".idx")  # in the order in which they are copied


class PairPlaces:
    """A context manager: where pairs are written, and what copies them to a store, if that is where they belong.

    Attributes:
      local: prefixes of this machine: those that were passed, or others in a temporary folder.
    """

    def __init__(self, prefixes: Sequence[str], overwrite: bool):
        """Asks the store, and tries to write to it.

        Args:
          prefixes: of the pairs, all in a store or none.
          overwrite: replace existing pairs.

        Raises:
          ConfigError: a pair exists, or the store cannot be written.
        """
        self.prefixes, self._folder, self.local = list(prefixes), None, list(prefixes)
        self._stored = is_store(prefixes[0])
        if not self._stored:
            return
        for prefix in prefixes:
            found = [prefix + end for end in (".bin", ".idx") if self._try(exists, prefix + end)]
            if found and not overwrite:
                raise ConfigError(f"{found[0]} already exists: pass --overwrite to replace it, or another --out")
        self._try(probe, prefixes[0] + ".unfinished")
        try:
            self._folder = tempfile.mkdtemp(prefix="megajax-pair-")
        except OSError as error:
            raise ConfigError(f"cannot make a temporary folder: {error.strerror}; set TMPDIR") from None
        self.local = [os.path.join(self._folder, prefix.rpartition("/")[2]) for prefix in prefixes]

    def __enter__(self) -> "PairPlaces":
        return self

    def __exit__(self, *error) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def copy(self) -> None:
        """Copies the pairs to the store, if that is their place.

        Raises:
          ConfigError: the store fails; the pairs stay in the temporary folder.
        """
        if not self._stored:
            return
        try:
            for local, prefix in zip(self.local, self.prefixes, strict=True):
                self._try(remove, prefix + ".idx")
                for end in ENDS:
                    self._try(upload, local + end, prefix + end)
                    self._try(compare, local + end, prefix + end)
        except ConfigError as error:
            kept, self._folder = self._folder, None
            raise ConfigError(f"{error}; the pair is in {kept}: copy its .bin and .sums.json, then its .idx") from None

    @staticmethod
    def _try(work: Callable[..., Any], *words: str) -> Any:
        with write_errors(words[-1]):
            return work(*words)

"""Tokenizers that transformers has read, kept as files of the `tokenizers` library.

To import transformers takes longer than to tokenize a megabyte of text. What it makes of a directory depends on its files
and on the libraries' versions alone, so it is kept under their checksum, in megajax/tokenizers of the user's cache.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from megajax.data.hub import local_directory
from megajax.data.hugging_face import tokenizer_files
from megajax.data.tokenizer_files import find_file
from megajax.data.tokenizers import TOKENIZERS

__all__ = ["Kept", "find", "keep", "key_of"]

MOST = 8  # tokenizers; the oldest one is removed
LIBRARIES = ("transformers", "tokenizers")


class Kept(NamedTuple):
    """A tokenizer's file, the number of its ids, and the token that ends documents."""

    file: str
    vocabulary: int
    end_of_document: str


def key_of(name: str, end_of_document: str | None) -> str | None:
    """Digits that depend on all that decides on a tokenizer; None if it is none that transformers reads.

    Args:
      name: of a tokenizer, as `load_tokenizer` takes it.
      end_of_document: likewise.

    Raises:
      ConfigError: see `find_file`.
    """
    found = find_file(local_directory(name, "--tokenizer")) if name not in TOKENIZERS else name
    if name in TOKENIZERS or not os.path.isdir(found):
        return None
    digest = hashlib.sha256()
    try:
        for part in _parts(pathlib.Path(found), end_of_document):
            digest.update(len(part).to_bytes(8, "little") + part)
    except (OSError, importlib.metadata.PackageNotFoundError):  # which the reader will name
        return None
    return digest.hexdigest()


def find(key: str | None) -> Kept | None:
    """The tokenizer that is kept under a key; None if there is none, or it is damaged."""
    if key is None:
        return None
    file = _folder() / f"{key}.json"
    try:
        kept = json.loads(file.with_suffix(".about").read_text())
        if hashlib.sha256(file.read_bytes()).hexdigest() != kept["sha256"]:
            return None
        return Kept(str(file), int(kept["vocabulary"]), str(kept["end_of_document"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(key: str | None, inner: Any, vocabulary: int, end_of_document: str) -> None:
    """Keeps a tokenizers.Tokenizer, if the cache can be written."""
    if key is None:
        return
    folder, content = _folder(), inner.to_str().encode()
    about = {"vocabulary": vocabulary, "end_of_document": end_of_document}
    about["sha256"] = hashlib.sha256(content).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, written in ((f"{key}.json", content), (f"{key}.about", json.dumps(about).encode())):
            unfinished = folder / f"{name}.{os.getpid()}"
            unfinished.write_bytes(written)
            unfinished.replace(folder / name)
        for old in sorted(folder.glob("*.about"), key=lambda file: file.stat().st_mtime)[:-MOST]:
            old.unlink(missing_ok=True)
            old.with_suffix(".json").unlink(missing_ok=True)
    except OSError:
        return


def _folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "megajax" / "tokenizers"


def _parts(directory: pathlib.Path, end_of_document: str | None) -> Iterator[bytes]:
    yield json.dumps([end_of_document, [importlib.metadata.version(name) for name in LIBRARIES]]).encode()
    for file in tokenizer_files(directory):
        yield file.name.encode()
        yield file.read_bytes()

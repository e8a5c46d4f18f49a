"""The kinds of sources: what a path, URL or name of a dataset holds, by its name and its first bytes."""

import os
import pathlib
import re
import stat
from collections.abc import Mapping
from typing import NamedTuple

from megajax.config import ConfigError
from megajax.data.read_file import first_bytes
from megajax.data.remote import is_url, open_binary

__all__ = ["HUB", "LONGEST", "ROWS", "SPLITS", "TEXTS", "Wanted", "check_options", "kind_of", "source_kind"]

JSONL = (".jsonl", ".json", ".ndjson")
TABLES = (".csv", ".tsv")
HUB = "hub:"
LONGEST = 1 << 30  # bytes of a document
COMPRESSED = re.compile(r"\.(gz|zst|bz2|xz)$", re.IGNORECASE)
# Kinds that have rows, by the endings of names.
ENDINGS = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".tar": "tar", ".tgz": "tar"}
ROWS = ("table", "tar", "parquet", "arrow", "saved", "hub")
SPLITS, SAVED = "dataset_dict.json", ("state.json", "dataset_info.json")  # files that save_to_disk writes


class Wanted(NamedTuple):
    """The texts that are read of each row of a source.

    Attributes:
      keys: its columns; each document has a text of every one.
      split: of a dataset that has several; None: "train", or the only one.
      subset: of a dataset on the Hub; None: its only one.
      longest: bytes of a document in a file of text or JSON lines, with its line's other bytes; longer ones are bad lines.
    """

    keys: tuple[str, ...] = ("text",)
    split: str | None = None
    subset: str | None = None
    longest: int = LONGEST


TEXTS = Wanted()


def kind_of(path: str, text_documents: str) -> str:
    """The unit of a document in a file, by the file's name: "jsonl", or `text_documents` for any other file."""
    return "jsonl" if _ending(path) in JSONL else text_documents


def source_kind(path: str, text_documents: str) -> str:
    """The kind of a source: "jsonl", `text_documents`, or one of ROWS. A file on a disk is looked into; a URL is not."""
    if path.startswith(HUB):
        return "hub"
    if is_url(path):
        named = _named(path, text_documents)
        return "saved" if named == text_documents and not _ending(path) and _is_saved_url(path) else named
    if os.path.isdir(path):
        names = set(os.listdir(path)) if os.access(path, os.R_OK) else set()
        return "saved" if SPLITS in names or names.issuperset(SAVED) else text_documents
    try:
        head = first_bytes(path) if stat.S_ISREG(os.stat(path).st_mode) else b""
    except OSError:  # which the reader names
        head = b""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if head[257:262] == b"ustar":
        return "tar"
    return _named(path, text_documents)


def check_options(kinds: Mapping[str, str], wanted: Wanted) -> None:
    """Refuses several keys of sources that have none, and parts of sources that are whole; `kinds`: by their paths.

    Raises:
      ConfigError: one is so.
    """
    if wanted.longest != LONGEST and kinds and set(kinds.values()) <= set(ROWS):
        raise ConfigError(
            "--longest-document: no source is text or JSON lines, and rows are read whole; omit the option"
        )
    plain = [path for path, kind in kinds.items() if kind not in ("jsonl", *ROWS)]
    if plain and len(wanted.keys) > 1:
        raise ConfigError(f"--keys {' '.join(wanted.keys)}: {plain[0]} is not a .jsonl file and has no keys")
    if len(set(wanted.keys)) < len(wanted.keys):
        raise ConfigError(f"--keys {' '.join(wanted.keys)}: a key is named twice; name each once")
    for name, value, having in (("split", wanted.split, ("saved", "hub")), ("subset", wanted.subset, ("hub",))):
        if value is not None and not set(having) & set(kinds.values()):
            raise ConfigError(f"--{name} {value}: no source is a dataset that has one; omit the option")


def _named(path: str, text_documents: str) -> str:
    """The kind by the name alone."""
    ending = _ending(path)
    return "table" if ending in TABLES else ENDINGS.get(ending) or kind_of(path, text_documents)


def _ending(path: str) -> str:
    name = path.partition("?")[0] if path.startswith(("http://", "https://")) else path
    return pathlib.PurePath(COMPRESSED.sub("", name)).suffix.lower()


def _is_saved_url(path: str) -> bool:
    """Whether a URL is a folder of save_to_disk."""
    for name in (SPLITS, SAVED[0]):
        try:
            open_binary(f"{path.rstrip('/')}/{name}").close()
            return True
        except Exception:  # of many types: there is none, or the reader will name the problem
            continue
    return False

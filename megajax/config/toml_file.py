"""Reads TOML files that anybody may have written: bounded in size, depth and time.

`tomllib` takes minutes for a key of 200,000 parts, and recurses for each nested bracket.
"""

import os
import pathlib
import re
import tomllib
from typing import Any

LARGEST = 2**24  # bytes
MOST_PARTS = 32  # of a dotted key; a configuration has 2
PART = r"(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')[ \t]*+"
LONG_KEY = re.compile(rf"(?<![\w\"'.-])(?:{PART}\.[ \t]*+){{{MOST_PARTS}}}")


def read_toml(path: str | os.PathLike) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not TOML in UTF-8, or is too large or too deep.
    """
    with open(path, "rb") as file:
        data = file.read(LARGEST + 1)
    return parse_toml(data)


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables of the content of a TOML file. Raises ValueError as `read_toml`."""
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MB")
    text = data.decode("utf-8")
    if LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_toml_with(path: pathlib.Path, sections: tuple[str, ...]) -> bool:
    """Whether a file is TOML and has one of these sections."""
    try:
        return any(section in read_toml(path) for section in sections)
    except (OSError, ValueError):
        return False

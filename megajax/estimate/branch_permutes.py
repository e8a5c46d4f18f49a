"""Collective permutes that only some stages of a compiled program reach.

All devices of a collective permute must reach it. XLA's partitioner makes one of an operation that moves elements along an
axis that tensor splits: a slice, a concatenation, a roll, a pad. In work that only one stage does at a time the other
stages never come to it, and the program hangs. Sends between stages are permutes too, but their pairs are of two stages.
"""

import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megajax.estimate.hlo_parser import Line, Visit, computations, visits

PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
OP_NAME = re.compile(r'op_name="([^"]*)"')
FRAME = re.compile(r"stack_frame_id=(\d+)")
SOURCE = re.compile(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?')
TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep
# A scope around a stage's work, by the name that its errors give it.
PARTS = {"embed_backward": "embed", "embed": "embed", "head": "head_loss"}


class StagePermute(NamedTuple):
    """One permute within a stage.

    Attributes:
      operation: the JAX primitive that it was made of.
      part: the function of the model: "embed", "block" or "head_loss".
      source: "FILE, line N" of the model; "" if it is not known.
    """

    operation: str
    part: str
    source: str


def stage_permutes(text: str, stages: Sequence[int]) -> list[StagePermute]:
    """The permutes between devices of one stage, in loops and branches that depend on the stage; each place once.

    `text`: of the compiled program; `stages`: of each device, in the order of the mesh's devices.
    """
    if "collective-permute" not in text:
        return []
    bodies, entry = computations(text)
    conditional = {visit.name for visit in visits(bodies, Visit(entry), {}) if visit.conditional}
    lines = [
        line
        for name in bodies
        if name in conditional
        for line in bodies[name]
        if line.op.removesuffix("-start") == "collective-permute" and _within_a_stage(line, stages)
    ]
    tables = {name: _table(text, name) for name in TABLES if lines}
    return list(dict.fromkeys(_describe(line, tables) for line in lines))


def _within_a_stage(line: Line, stages: Sequence[int]) -> bool:
    found = PAIRS.search(line.rest)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else []
    return bool(pairs) and all(stages[int(source)] == stages[int(target)] for source, target in pairs)


def _describe(line: Line, tables: Mapping[str, Mapping[str, str]]) -> StagePermute:
    found = OP_NAME.search(line.rest)
    path = found[1].split("/") if found else ["an operation"]
    part = next((PARTS[name] for name in reversed(path) if name in PARTS), "block")
    return StagePermute(path[-1], part, _source(line, tables))


def is_library(file: str) -> bool:
    """Whether a Python file is megajax's or an installed package's, and not the user's."""
    return "/site-packages/" in file or file.startswith((PACKAGE, "<"))


def _source(line: Line, tables: Mapping[str, Mapping[str, str]]) -> str:
    """The place in the user's files that a line was traced from: the innermost frame that is in no library."""
    if found := SOURCE.search(line.rest):  # older than jax 0.11
        return f"{found[1]}, line {found[2]}"
    number, seen = (FRAME.search(line.rest) or ["", ""])[1], set()
    while number in tables["StackFrames"] and number not in seen:
        seen.add(number)
        frame = _fields(tables["StackFrames"][number])
        place = _fields(tables["FileLocations"].get(frame.get("file_location_id", ""), ""))
        file = tables["FileNames"].get(place.get("file_name_id", ""), "").strip('"')
        if file and not is_library(file):
            return f"{file}, line {place.get('line')}"
        number = frame.get("parent_frame_id", "")
    return ""


def _table(text: str, name: str) -> dict[str, str]:
    """A table before the program: number -> the rest of its row."""
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = (row.partition(" ") for row in found[1].splitlines()) if found else ()
    return {number: rest for number, _, rest in rows}


def _fields(text: str) -> Mapping[str, str]:
    return dict(re.findall(r"(\w+)=(\d+)", text))

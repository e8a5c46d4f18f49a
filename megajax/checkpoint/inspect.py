"""What is in a checkpoint, without the run: `python -m megajax.checkpoint.manager inspect DIR [--verify] [--arrays]`."""

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from megajax.checkpoint import checksums, layout
from megajax.checkpoint.manager import NAME, complete_steps, format_size
from megajax.checkpoint.reader import arrays_in, read_meta
from megajax.config import ConfigError
from megajax.runtime.mesh import start_devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what a run's directory, or a checkpoint's, holds; returns 0, or 2 if something is wrong with it."""
    parser = argparse.ArgumentParser(prog="python -m megajax.checkpoint.manager", description=__doc__)
    inspect = parser.add_subparsers(required=True, metavar="inspect").add_parser("inspect", help="show what is in DIR")
    inspect.add_argument("directory", metavar="DIR", help="a run's directory, its checkpoints', or one checkpoint's")
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its sum")
    inspect.add_argument("--arrays", action="store_true", help="list every array of the newest: name, shape, bytes")
    values = parser.parse_args(arguments)
    start_devices("cpu")  # orbax asks jax which process this is; no GPU is needed for that
    try:
        paths = _checkpoints(pathlib.Path(values.directory).absolute())
        sound = [_show(path, values.verify) for path in paths]
        for line in _arrays(paths[-1]) if values.arrays else []:
            print(line)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(sound) else 2


def _checkpoints(directory: pathlib.Path) -> list[pathlib.Path]:
    if (directory / "state").is_dir():
        return [directory]
    for parent in (directory / "checkpoints", directory):
        if steps := complete_steps(parent):
            return [parent / NAME.format(step) for step in steps]
    raise ConfigError(f"there is no checkpoint in {directory}: give a run's directory, or a checkpoint's")


def _show(path: pathlib.Path, verify: bool) -> bool:
    """Prints one checkpoint's lines; whether it is sound, as far as that was looked at."""
    meta = read_meta(path)
    model, parallel, train = (meta["config"][part] for part in ("model", "parallel", "train"))
    at = meta["progress"]
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(meta["time"]))
    print(f"{path}")
    print(f"  step {at['step']}, {at['samples']:,} samples, {at['skipped']} skipped; {format_size(size)}, saved {when}")
    print(
        f"  {model['name']}: {model['layers']} layers, hidden {model['hidden']}, {model['heads']} heads, vocabulary "
        f"{model['vocabulary']}, {model['sequence_length']} tokens; tokenizer {meta['tokenizer']['name']} "
        f"({meta['tokenizer']['hash']})"
    )
    print(
        f"  written on data {parallel['data']} x pipe {parallel['pipe']} x tensor {parallel['tensor']}, "
        f"{parallel['schedule']}, {train['precision']}; megajax {meta['megajax']}"
    )
    if not verify:
        return True
    found = checksums.problems(path)
    for problem in found:
        print(f"  DAMAGED: {problem}")
    if not found:
        print("  every file is as it was written")
    return not found


def _arrays(path: pathlib.Path) -> list[str]:
    rows: list[tuple[str, Any]] = list(layout.named(arrays_in(path)).items())
    width = max(len(name) for name, _ in rows)
    lines = [
        f"  {name.ljust(width)}  {array.dtype}{list(array.shape)}  {math.prod(array.shape) * array.dtype.itemsize:,}"
        for name, array in rows
    ]
    total = sum(math.prod(array.shape) * array.dtype.itemsize for _, array in rows)
    return [*lines, f"  {len(rows)} arrays, {format_size(total)}"]

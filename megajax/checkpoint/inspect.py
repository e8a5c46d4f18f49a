"""Shows what a checkpoint contains, without the run: `python -m megajax.checkpoint.inspect DIR [--verify] [--arrays]`.

With --sample N it shows a sample of the run's training data instead: tokens, text, document and file; with --batch N all
of the batch of step N; with --statistics the documents of each source. After -- stand options of a training in place of DIR:

python -m megajax.checkpoint.inspect --batch 1 --html batch.html -- --data-path corpus --tokenizer gpt2 --model gpt3-1.3b
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from megajax.checkpoint import checksums, layout
from megajax.checkpoint.data_view import show_data
from megajax.checkpoint.directory import NAME, is_complete, steps_of
from megajax.checkpoint.manager import format_size
from megajax.checkpoint.object_store import Path, files_below, is_remote, place
from megajax.checkpoint.reader import arrays_in, read_meta
from megajax.config import ConfigError
from megajax.config.options import Parser, add_trust
from megajax.runtime.mesh import start_devices
from megajax.schedules.arguments import whole
from megajax.schedules.errors import counted, exit_code, one_line
from megajax.schedules.paths import local_path, store_path
from megajax.schedules.pictures import picture_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the checkpoints in a directory; returns 0, or 2 if one cannot be read or, with --verify, is damaged."""
    parser = Parser(prog="python -m megajax.checkpoint.inspect", description=__doc__, allow_abbrev=False)
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, training = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=store_path,
        help="a run's directory, its checkpoints/, or one checkpoint",
    )
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    parser.add_argument("--arrays", action="store_true", help="list the newest checkpoint's arrays: name, shape, bytes")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--sample",
        type=whole(0),
        metavar="N",
        help="show sample N of the training of this run's directory: tokens, text, document and file",
    )
    what.add_argument("--batch", type=whole(), metavar="N", help="show all samples of the batch of step N")
    what.add_argument(
        "--statistics", action="store_true", help="documents, tokens and tokens a word of each source of the training"
    )
    parser.add_argument(
        "--html", type=local_path, metavar="FILE", help="write the samples or statistics there, in colour"
    )
    parser.add_argument(
        "--picture", type=picture_file, metavar="FILE", help="of --statistics: draw them (.svg, .png, .pdf)"
    )
    add_trust(parser)
    return exit_code(lambda: _inspect(parser.parse_args(own), training))


def _inspect(options: argparse.Namespace, training: list[str] | None) -> int:
    of_data = options.sample is not None or options.batch is not None or options.statistics
    if (options.directory is None) == (training is None):
        raise ConfigError(
            "give a run's directory, or `--` and the options of a training" + " - not both" * bool(training)
        )
    if not of_data:
        for name, given in (("--", training is not None), ("--html", options.html)):
            if given:
                raise ConfigError(f"{name} is of --sample N, --batch N or --statistics: pass one of them")
    elif options.verify or options.arrays:
        raise ConfigError(f"--{'verify' if options.verify else 'arrays'} is of checkpoints: omit it, or show no data")
    if options.picture and not options.statistics:
        raise ConfigError("--picture is of --statistics: pass it, or --html for samples")
    start_devices("cpu")  # orbax asks jax for the process index, which starts a backend; no GPU is needed for that
    if of_data:
        show_data(options, training)
        return 0
    try:
        paths = _checkpoints(place(options.directory))
        sound = [_show(path, options.verify) for path in paths]
        for line in _arrays(paths[-1]) if options.arrays else []:
            print(line)
    except OSError as error:  # a directory that may not be read
        raise ConfigError(f"cannot read {error.filename or options.directory}: {error.strerror}") from error
    return 0 if all(sound) else 2


def _checkpoints(directory: Path) -> list[Path]:
    if is_complete(directory) if is_remote(directory) else (directory / "state").is_dir():
        return [directory]
    for parent in (directory / "checkpoints", directory):
        if steps := steps_of(parent):
            return [parent / NAME.format(step) for step in steps]
    raise ConfigError(f"there is no checkpoint in {directory}: give a run's directory, or a checkpoint's")


def _show(path: Path, verify: bool) -> bool:
    """Prints one checkpoint's lines; returns False if `verify` finds a damaged file."""
    meta = read_meta(path)
    model, parallel, train = (meta["config"][part] for part in ("model", "parallel", "train"))
    progress, tokenizer = meta["progress"], meta["tokenizer"]
    size = sum(files_below(path).values())
    try:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(meta["time"]))
    except (OverflowError, ValueError, OSError):
        saved = "at an unknown time"
    of_experts = ("experts", "experts_per_token", "shared_feedforward")
    of_experts += ("router_groups", "router_group_choices", "router_group_best")
    unused = [*of_experts] if not model.get("experts") else []
    if model.get("mixer", "attention") == "attention" and not any(
        "mixer=" in one for one in model.get("kind_fields", ())
    ):
        unused += [name for name in model if name.startswith("recurrent_")]
    used = {name: value for name, value in model.items() if type(value) is int and value and name not in unused}
    sizes = ", ".join(f"{name} {value}" for name, value in used.items())
    print(one_line(str(path)))
    print(
        f"  step {progress.step}, {counted(progress.samples, 'sample')}, {progress.skipped} skipped; "
        f"{format_size(size)}, saved {saved}"
    )
    print("  " + one_line(f"{model.get('name')}: {sizes}; tokenizer {tokenizer['name']} ({tokenizer['hash']})"))
    mesh = " x ".join(f"{axis} {parallel.get(axis)}" for axis in ("data", "pipe", "tensor"))
    written = f"{mesh}, {parallel.get('schedule')}, {train.get('precision')}; megajax {meta['megajax']}"
    print("  written on " + one_line(written))
    if not verify:
        return True
    found = checksums.problems(path)
    for problem in found:
        print("  DAMAGED: " + one_line(problem))
    if not found:
        print("  every file is as it was written")
    return not found


def _arrays(path: Path) -> list[str]:
    rows: list[tuple[str, Any]] = list(layout.named(arrays_in(path)).items())
    width = max((len(name) for name, _ in rows), default=0)
    lines = [
        f"  {name.ljust(width)}  {array.dtype}{list(array.shape)}  {math.prod(array.shape) * array.dtype.itemsize:,}"
        for name, array in rows
    ]
    total = sum(math.prod(array.shape) * array.dtype.itemsize for _, array in rows)
    return [*lines, f"  {counted(len(rows), 'array')}, {format_size(total)}"]


if __name__ == "__main__":
    sys.exit(main())

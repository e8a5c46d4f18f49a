"""Draws the loss of runs over their steps, from the files that `--log-jsonl` (or `--run-dir`) writes.

python -m experiments.gpt3 --log-jsonl first_run.jsonl
python -m benchmarks.loss_curve first_run.jsonl --out docs/images/first_run.svg --vocabulary 257

Needs matplotlib: pip install "megajax[plot]".
"""

import math
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from megajax.config.options import Parser
from megajax.schedules.arguments import whole
from megajax.schedules.errors import UserError, command
from megajax.schedules.paths import local_path
from megajax.schedules.pictures import COLOURS, SOFT, label_ends, picture, picture_file
from megajax.train.sinks import read_steps

WINDOW = 20  # steps averaged for the solid line; each step's own loss is drawn in light behind it


def read_losses(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """(steps, losses) of a log.jsonl; a loss that was not finite is NaN."""
    rows = read_steps(path)
    if not rows:
        raise ValueError(f"{path} has no step")
    return np.array([row["step"] for row in rows]), np.array([float(row["loss"]) for row in rows])


def smooth(losses: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """The mean of the last `window` finite losses at each step; of fewer at the start, where the loss falls fast."""
    averaged = []
    for stop in range(1, len(losses) + 1):
        span = losses[stop - max(1, min(window, stop // 4)) : stop]
        finite = span[np.isfinite(span)]
        averaged.append(finite.mean() if finite.size else np.nan)
    return np.array(averaged)


def draw(logs: Sequence[pathlib.Path], out: pathlib.Path, guess: int | None) -> None:
    """Writes the picture; the ending of `out` says the format (svg, png, pdf). `guess`: see `--vocabulary`."""
    with picture(out, 470, 240) as figure:
        axes, ends = figure.subplots(), []
        for log, colour in zip(logs, COLOURS, strict=False):
            steps, losses = read_losses(log)
            averaged = smooth(losses)
            axes.plot(steps, losses, color=colour, lw=0.7, alpha=0.35)
            axes.plot(steps, averaged, color=colour, label=f"{log.stem}: mean of {WINDOW} steps, and each step")
            ends.append((steps[-1], averaged[-1], f"{averaged[-1]:.2f}", colour))
        if guess:
            label = f"uniform guess, ln {guess} = {math.log(guess):.2f}"
            axes.axhline(math.log(guess), color=SOFT, ls="--", lw=0.9, label=label)
        axes.set(xlabel="step", ylabel="loss per token, nats")
        axes.set_xlim(0, max(end[0] for end in ends))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, ncols=2)
        label_ends(axes, [end for end in ends if math.isfinite(end[1])])


@command
def main(arguments: Sequence[str] | None) -> None:
    """Draws the logs."""
    parser = Parser(prog="python -m benchmarks.loss_curve", description=__doc__)
    parser.add_argument("logs", nargs="+", type=local_path, metavar="LOG.jsonl", help=f"up to {len(COLOURS)} logs")
    parser.add_argument("--out", type=picture_file, required=True, metavar="PICTURE", help="a .svg, .png or .pdf file")
    parser.add_argument("--vocabulary", type=whole(), metavar="TOKENS", help="also shows the loss of a uniform guess")
    options = parser.parse_args(arguments)
    if len(options.logs) > len(COLOURS):
        raise UserError(f"{len(options.logs)} logs; pass at most {len(COLOURS)}")
    try:
        draw([pathlib.Path(log) for log in options.logs], pathlib.Path(options.out), options.vocabulary)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot draw: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a log of --log-jsonl: {error}; pass the log.jsonl of a run") from error
    print(f"wrote {options.out}")


if __name__ == "__main__":
    sys.exit(main())

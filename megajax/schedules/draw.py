"""Draws a schedule.

python -m megajax.schedules.draw --schedule interleaved_1f1b --stages 4 --microbatches 8 --chunks 2 --out x.svg
python -m megajax.schedules.draw --schedule 1f1b --stages 4 --microbatches 8 --text
python -m megajax.schedules.draw --compare gpipe 1f1b zb_h1 --stages 4 --microbatches 8 --out compare.png
python -m megajax.schedules.draw --schedule mine.csv --save mine.json

A schedule is a name, or a .csv (in torch.distributed.pipelining's notation) or .json file.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megajax.config.parallel import SEVERAL_CHUNKS
from megajax.schedules.io import ENDINGS, load, save, to_json
from megajax.schedules.named import SCHEDULES, make_schedule
from megajax.schedules.schedule import Schedule, ScheduleError, show
from megajax.schedules.simulate import Costs, Simulation, simulate_event, simulate_lockstep


def as_json(schedule: Schedule, costs: Costs) -> dict:
    """A schedule and what it costs, as JSON values."""
    event, lockstep = simulate_event(schedule, costs), simulate_lockstep(schedule, costs)
    return {
        **to_json(schedule),
        "ticks": len(schedule.ticks),
        "simulated": {
            "ideal": event.ideal,
            "event": event.makespan,
            "lockstep": lockstep.makespan,
            "bubble": event.bubble,
            "peak_live": list(event.peak_live),
        },
    }


def as_text(schedule: Schedule, simulation: Simulation) -> str:
    """A table: a rank a row, a tick a column; B and b are the parts of a backward."""
    cells = [[" ".join(show(work, short=True) for work in row[rank]) or "." for row in schedule.ticks] for rank in
             range(schedule.stages)]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches, {schedule.chunks} chunks a rank: "
        f"bubble {simulation.bubble:.1%} of the ideal time; F3.1 is the forward of microbatch 3 through chunk 1"
    ]
    for rank, row in enumerate(cells):
        table = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"rank {rank}  {table}  {simulation.peak_live[rank]} in flight")
    return "\n".join(lines)


def as_trace(schedule: Schedule, simulation: Simulation) -> list[dict]:
    """Chrome trace events, one unit of time as one millisecond: drop the file on ui.perfetto.dev."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(schedule.stages)
    ]
    return names + [
        {
            "ph": "X",
            "name": show(span.work, short=True),
            "cat": schedule.does(span.work),
            "pid": 0,
            "tid": span.rank,
            "ts": 1000 * span.start,
            "dur": 1000 * (span.stop - span.start),
        }
        for span in simulation.spans
    ]


def _costs(text: str) -> Costs:
    try:
        values = [float(number) for number in text.split(",")]
        if len(values) not in (2, 4) or min(values) <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give F,B or F,B,I,W as numbers above 0, such as 1,2,1,1") from None
    return Costs(*values) if len(values) == 4 else Costs(*values, values[1] / 2, values[1] / 2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ScheduleError(f"{message.removeprefix('argument ')}; --help lists every option")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m megajax.schedules.draw", description=__doc__, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--schedule",
        default="interleaved_1f1b",
        metavar="NAME|FILE",
        help=f"one of {', '.join(SCHEDULES)}, or a file (default: %(default)s)",
    )
    what.add_argument("--compare", nargs="+", metavar="NAME|FILE", help="several under each other on one time axis")
    parser.add_argument("--stages", type=int, default=4, help="pipeline ranks (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--chunks", type=int, help="model chunks a rank (default: 2 where a schedule has several, else 1)"
    )
    parser.add_argument("--group-size", type=int, help="interleaved_1f1b: microbatches through a chunk in one go")
    parser.add_argument("--live-chunks", type=int, help="auto: most chunk activations alive on a rank at once")
    parser.add_argument(
        "--costs",
        type=_costs,
        default=Costs(),
        metavar="F,B,I,W",
        help="time of each op on a chunk; with --compare, on all chunks of a rank (default: 1,2,1,1)",
    )
    parser.add_argument("--latency", type=float, default=0.0, help="time of a send (default: %(default)s)")
    parser.add_argument("--lockstep", action="store_true", help="as one SPMD program runs it, tick by tick")
    parser.add_argument("--out", metavar="FILE", help="write a picture: .svg, .png or .pdf")
    parser.add_argument("--save", metavar="FILE", help="write the schedule, to be edited and trained: .csv or .json")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write orders and costs (to the terminal)")
    parser.add_argument(
        "--text", action="store_true", help="show a table on the terminal (done if nothing else is asked)"
    )
    return parser.parse_args(arguments)


def _make(name: str, options: argparse.Namespace, costs: Costs) -> Schedule:
    """The schedule called `name`, or that of the file; sizes and options that suit some only go to those."""
    if name.endswith(ENDINGS):
        return load(name)
    several = name in (*SEVERAL_CHUNKS, "forward_only")
    chunks = 2 if several else 1
    if options.chunks is not None and (several or not options.compare):
        chunks = options.chunks
    own = {}
    if options.group_size is not None and (name == "interleaved_1f1b" or not options.compare):
        own["group_size"] = options.group_size
    if name == "auto":
        own |= {"costs": costs.scaled(1 / chunks) if options.compare else costs}
    if options.live_chunks is not None and (name == "auto" or not options.compare):
        own["live_chunks"] = options.live_chunks
    return make_schedule(name, stages=options.stages, microbatches=options.microbatches, chunks=chunks, **own)


def _write(path: str, text: str) -> None:
    if path == "-":
        print(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def run(arguments: Sequence[str] | None = None) -> None:
    """Does what the command line asks.

    Raises:
      ScheduleError: an argument that cannot be.
      OSError: a file that cannot be written.
    """
    options = _parse(arguments)
    costs = dataclasses.replace(options.costs, latency=options.latency)
    if options.latency < 0:
        raise ScheduleError(f"latency is {options.latency:g}; it must be 0 or more")
    schedules = [_make(name, options, costs) for name in options.compare or [options.schedule]]
    simulate = simulate_lockstep if options.lockstep else simulate_event
    # Side by side, schedules with more chunks have smaller ones: costs are then those of all a rank's chunks together.
    scale = [1 / schedule.chunks if options.compare else 1 for schedule in schedules]
    simulations = [simulate(schedule, costs.scaled(factor)) for schedule, factor in zip(schedules, scale, strict=True)]
    if options.out:
        if options.out.rpartition(".")[2] not in ("svg", "png", "pdf"):
            raise ScheduleError(f"out is {options.out!r}; end it in .svg, .png or .pdf")
        from megajax.schedules.picture import draw

        draw(schedules, simulations, options.out)
    if options.json:
        values = [as_json(schedule, costs) for schedule in schedules]
        _write(options.json, json.dumps(values if options.compare else values[0]))
    if options.save:
        save(schedules[0], options.save)
    if options.trace:
        _write(options.trace, json.dumps(as_trace(schedules[0], simulations[0])))
    if options.text or not (options.out or options.save or options.json or options.trace):
        print("\n\n".join(as_text(*pair) for pair in zip(schedules, simulations, strict=True)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        run(arguments)
        return 0
    except ScheduleError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
    except OSError as error:
        print(f"error: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""Draws a schedule.

python -m megajax.schedules.draw --schedule interleaved_1f1b --pipe 4 --microbatches 8 --chunks 2 --out x.svg
python -m megajax.schedules.draw --schedule 1f1b --pipe 4 --microbatches 8 --text
python -m megajax.schedules.draw --compare gpipe 1f1b zb_h1 --pipe 4 --microbatches 8 --out compare.png
python -m megajax.schedules.draw --schedule mine.csv --save mine.json
python -m megajax.schedules.draw --import mine.py --schedule one_at_a_time

A schedule is a name, or a .csv (in torch.distributed.pipelining's notation) or .json file.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megajax.schedules.arguments import Parser, number, whole
from megajax.schedules.errors import exit_code, shown
from megajax.schedules.io import file_text, is_schedule_file, load
from megajax.schedules.paths import local_path, tell_replaced
from megajax.schedules.pictures import picture_file
from megajax.schedules.registry import drains, find, import_user_files, make_schedule, specs
from megajax.schedules.render import as_json, as_text, as_trace
from megajax.schedules.schedule import Schedule, ScheduleError
from megajax.schedules.simulate import Costs, Simulation, simulate_event, simulate_lockstep
from megajax.schedules.timeline import draw

# Costs and latency: sums over all operations are finite, and no operation is lost in them.
LEAST_TIME, MOST_TIME = 1e-6, 10**6
WORDS = {"type": local_path, "metavar": "FILE"}
# `megajax.config.foreign` has the names in other tools of the options of all other commands; schedules do not import it.
SYNONYMS = {
    "--pp": "--pipe",
    "--pp-size": "--pipe",
    "--ranks": "--pipe",
    "--num-stages": "--pipe",
    "--pipeline-parallel-size": "--pipe",
    "--pipeline-parallel-degree": "--pipe",
    "--pipeline-model-parallel-size": "--pipe",
    "--parallelism.pipeline-parallel-degree": "--pipe",
    "--num-microbatches": "--microbatches",
    "--num-pp-microbatches": "--microbatches",
    "--n-microbatches": "--microbatches",
    "--gradient-accumulation-steps": "--microbatches",
    "--vp": "--chunks",
    "--vpp": "--chunks",
    "--virtual-stages": "--chunks",
    "--num-virtual-stages-per-pipeline-rank": "--chunks",
    "--virtual-pipeline-model-parallel-size": "--chunks",
    "--microbatch-group-size-per-virtual-pipeline-stage": "--group-size",
    "--pipeline-parallel-schedule": "--schedule",
    "--pipeline-parallel-schedule-csv": "--schedule FILE.csv",
    "--schedules": "--compare",
    "--svg": "--out FILE.svg",
    "--output": "--out",
    "--plot": "--out",
    "--cost": "--costs",
}


def _costs(words: str) -> Costs:
    try:
        values = [number(LEAST_TIME, MOST_TIME)(word) for word in words.split(",")]
    except argparse.ArgumentTypeError:
        values = []
    if len(values) not in (2, 4):
        raise argparse.ArgumentTypeError(
            f"{shown(words)}: give F,B or F,B,I,W as numbers from {LEAST_TIME:g} to {MOST_TIME:g}, such as 1,2,1,1"
        )
    return Costs(*values) if len(values) == 4 else Costs(*values, values[1] / 2, values[1] / 2)


class _Parser(Parser):
    mistake = ScheduleError


def _parser() -> argparse.ArgumentParser:
    width = max(len(spec.name) for spec in specs())
    known = "\n".join(f"  {spec.name.ljust(width)}  {spec.notes}" for spec in specs())
    parser = _Parser(
        prog="python -m megajax.schedules.draw",
        description=__doc__,
        epilog=f"schedules:\n{known}".replace("%", "%%"),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.renamed, parser.synonyms = {"--stages": "--pipe"}, SYNONYMS
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--schedule",
        type=local_path,
        default="interleaved_1f1b",
        metavar="NAME|FILE",
        help="one of those below, or a file (default: %(default)s)",
    )
    which.add_argument(
        "--compare", nargs="+", type=local_path, metavar="NAME|FILE", help="several, on the same time axis"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        type=local_path,
        default=[],
        metavar="FILE.py",
        help="a Python file or module to import first, which registers schedules; may be repeated",
    )
    parser.add_argument("--pipe", type=whole(), default=4, help="pipeline ranks (default: %(default)s)")
    parser.add_argument("--microbatches", type=whole(), default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--chunks", type=whole(), help="model chunks on each rank (default: 2 if the schedule allows it, else 1)"
    )
    parser.add_argument("--group-size", type=whole(), help="interleaved_1f1b: consecutive microbatches through a chunk")
    parser.add_argument("--live-chunks", type=whole(), help="auto: most chunk activations held on a rank at once")
    parser.add_argument(
        "--costs",
        type=_costs,
        default=Costs(),
        metavar="F,B,I,W",
        help="time of each op on a chunk; with --compare, on all chunks of a rank (default: 1,2,1,1)",
    )
    parser.add_argument(
        "--latency", type=number(low=0, below=MOST_TIME), default=0.0, help="time of a send (default: %(default)s)"
    )
    parser.add_argument("--lockstep", action="store_true", help="time it tick by tick, as one SPMD program")
    parser.add_argument(
        "--out", type=picture_file, metavar="FILE", help="write a picture: .svg, .png or .pdf (needs megajax[plot])"
    )
    parser.add_argument("--save", **WORDS, help="write the schedule, to edit or train with: .csv or .json")
    parser.add_argument("--trace", **WORDS, help="write a trace for Perfetto")
    parser.add_argument("--json", nargs="?", const="-", **WORDS, help="write orders and costs (no FILE: print)")
    parser.add_argument("--text", action="store_true", help="print a table (the default if no other output is named)")
    return parser


def _make(name: str, options: argparse.Namespace, costs: Costs) -> Schedule:
    """A registered schedule, or one read from a file. With --compare, options apply to the schedules that have them."""
    if is_schedule_file(name):
        return load(name)
    spec = find(name)
    chunks = 1 if spec.chunks == "one" else 2
    if options.chunks is not None and (spec.chunks != "one" or not options.compare):
        chunks = options.chunks
    given = {}
    for option in ("group_size", "live_chunks"):
        value = getattr(options, option)
        if value is not None and (option in spec.options or not options.compare):
            given[option] = value
    if "costs" in spec.options:
        given["costs"] = costs.scaled(1 / chunks) if options.compare else costs
    return make_schedule(name, stages=options.pipe, microbatches=options.microbatches, chunks=chunks, **given)


def _simulate(name: str, schedule: Schedule, costs: Costs, *, lockstep: bool) -> Simulation:
    """Event by event unless `lockstep`; a schedule that never drains has a steady state only in lockstep."""
    return (simulate_lockstep if lockstep or not drains(name) else simulate_event)(schedule, costs)


def _unit(schedules: Sequence[Schedule], costs: Costs, compared: bool) -> str:
    """The unit of the time axis: how long each operation that is drawn takes."""
    ops = {schedule.does(work) for schedule in schedules for row in schedule.ticks for works in row for work in works}
    names = (("F", costs.forward), ("B", costs.backward), ("I", costs.input), ("W", costs.weight))
    taken = ", ".join(f"{op} = {time:g}" for op, time in names if op in ops)
    taken += f", a send = {costs.latency:g}" if costs.latency else ""
    several = any(schedule.chunks > 1 for schedule in schedules)
    return taken + (" (all chunks of a rank together)" if compared else " (a chunk)") * several


def _write(path: str, text: str) -> None:
    if path == "-":
        print(text)
        return
    tell_replaced(path)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ScheduleError: an argument is illegal.
      OSError: a file cannot be written.
    """
    imports = _Parser(add_help=False, allow_abbrev=False)
    imports.add_argument("--import", dest="imports", action="append", default=[], nargs="?")
    known, _ = imports.parse_known_args(arguments)
    import_user_files(path for path in known.imports if path)  # first, so that --help lists what they register
    options = _parser().parse_args(arguments)
    costs = dataclasses.replace(options.costs, latency=options.latency)
    names = options.compare or [options.schedule]
    schedules = [_make(name, options, costs) for name in names]
    # In a comparison, --costs are those of all chunks of a rank together, so more chunks are smaller ones.
    times = [costs.scaled(1 / schedule.chunks) if options.compare else costs for schedule in schedules]
    rows = list(zip(names, schedules, times, strict=True))
    simulations = [_simulate(*row, lockstep=options.lockstep) for row in rows]
    if options.out:
        draw(schedules, simulations, options.out, _unit(schedules, costs, bool(options.compare)))
    if options.json:
        values = [
            as_json(schedule, *(_simulate(name, schedule, costs, lockstep=lockstep) for lockstep in (False, True)))
            for name, schedule, _ in rows
        ]
        _write(options.json, json.dumps(values if options.compare else values[0]))
    if options.save:
        if not drains(names[0]):
            raise ScheduleError(f"{names[0]} is one step of a pipeline that never drains: it cannot be saved as orders")
        _write(options.save, file_text(schedules[0], options.save).removesuffix("\n"))
    if options.trace:
        _write(options.trace, json.dumps(as_trace(schedules[0], simulations[0])))
    if options.text or not (options.out or options.save or options.json or options.trace):
        print("\n\n".join(as_text(*pair) for pair in zip(schedules, simulations, strict=True)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""

    def command() -> None:
        try:
            run(arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ScheduleError(f"cannot write {error.filename}: {error.strerror}") from error

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())

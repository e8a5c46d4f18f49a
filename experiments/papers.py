"""The tables and figures of Megatron-LM's papers, with megajax's own program on the same GPUs beside the published figures.

python -m experiments.papers                                       all, by the memory and time models; seconds
python -m experiments.papers --only "2104 table 1" --compile       from compiled programs (megajax[dryrun]); minutes each
python -m experiments.papers --plot papers.svg                     draws them, with the published values

published: measured by the papers' authors. modelled: megajax's predicted time and memory. compiled: memory as XLA assigns
it, and the time of the compiled program's kernels at the roofline, with the schedule's bubble. megajax was run on no GPU.
Layouts, recomputation and GPUs are the papers'; attention is the best kernel that megajax has for the model and the GPU.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from benchmarks.published.rows import MODELS
from experiments.paper_runs import A100, LAYER_2205, Exhibit, Point, exhibits
from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.options import Parser
from megajax.estimate import model_costs
from megajax.estimate.auto import resolved
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.program_account import account_of
from megajax.estimate.program_blocks import Blocks
from megajax.estimate.step_time import step_time
from megajax.ops.attention_choice import cudnn_installed
from megajax.plan.compiler import compile_for
from megajax.plan.search import usable_bytes
from megajax.schedules.arguments import plain_text
from megajax.schedules.errors import exit_code
from megajax.schedules.pictures import SOFT, picture, picture_file, wrapped

PAPERS = {"1909": "1909.08053", "2104": "2104.04473", "2205": "2205.05198"}
BILLIONS = {"gpt3-175b": "175B", "megatron-529.6b": "530B"}


@dataclasses.dataclass(frozen=True)
class Result:
    """megajax's program of a point: seconds of a step, bytes at the peak of a GPU, and "modelled" or "compiled"."""

    point: Point
    run: RunConfig
    seconds: float
    peak: int
    source: str

    @property
    def fits(self) -> bool:
        return self.peak <= usable_bytes(self.point.gpu)

    @property
    def teraflops(self) -> float:
        """TFLOP/s per GPU, counted as in the paper."""
        return self.point.flops() / self.seconds / self.run.parallel.devices / 1e12

    def value(self, unit: str) -> float:
        """Throughput in an exhibit's unit."""
        return self.teraflops if "TFLOP" in unit else self.run.train.global_batch_size / self.seconds


Curve = tuple[str, Sequence[Result]]  # its label and its points


def modelled(point: Point) -> Result:
    """By the models; of several runs the fastest that fits, or the smallest."""
    found = []
    for run in point.runs:
        run = _resolved(run, point)
        peak = sum(bytes_per_device(run).values())
        found.append(Result(point, run, step_time(run, point.gpu).total, peak, "modelled"))
    return min(found, key=lambda one: (not one.fits, one.seconds if one.fits else one.peak))


def compiled(point: Point) -> Result:
    """By the compiled program of the run that `modelled` chose.

    Raises:
      ConfigError: the compiler is not installed.
      CompilerError: it failed.
    """
    run = modelled(point).run
    if run.parallel.attention == "cudnn" and not cudnn_installed():
        run = run.with_layout(attention="xla")
    found = compile_for(run, point.gpu)
    seconds = account_of(run, point.gpu, found["hlo"]).seconds
    return Result(point, run, seconds, found["memory"]["peak"], "compiled")


def _resolved(run: RunConfig, point: Point) -> RunConfig:
    return resolved(run.with_layout(attention="auto"), point.gpu)


def table(exhibit: Exhibit, results: Sequence[Result]) -> str:
    """A table or figure as text."""
    lines = [
        f"{exhibit.name}: {exhibit.title}; {exhibit.unit}",
        f"  {'':<44}{exhibit.axis.partition(',')[0]:>16}{'published':>11}{results[0].source:>10}{'ratio':>7}{'GB':>7}  fits",
    ]
    for one in results:
        published = one.point.published
        both = f"{published:>11.1f}" if published else f"{'drawn':>11}"
        value = one.value(exhibit.unit)
        ratio = f"{value / published:>7.2f}" if published else f"{'':>7}"
        lines.append(
            f"  {one.point.line:<44}{one.point.x:>16}{both}{value:>10.1f}{ratio}{one.peak / 1e9:>7.1f}"
            f"  {'yes' if one.fits else 'NO'}"
        )
    if exhibit.says:
        lines.append(f"  the paper: {exhibit.says}")
    if results[0].source == "compiled" and any(_unfused(one) for one in results):
        lines.append(
            "  compiled with XLA's attention, which stores the scores: pip install nvidia-cudnn-cu12 for cuDNN's"
        )
    return "\n".join([*lines, *_relative(exhibit, results)])


def _unfused(one: Result) -> bool:
    """Whether cuDNN's attention would run, but could not be compiled."""
    return one.run.parallel.attention != _resolved(one.run, one.point).parallel.attention


def _relative(exhibit: Exhibit, results: Sequence[Result]) -> list[str]:
    """Figure 5 of 1909.08053 is about ratios to one GPU."""
    if not exhibit.name.startswith("1909"):
        return []
    shares = [f"{one.teraflops / results[0].teraflops:.0%} on {one.point.x}" for one in results[1:]]
    return [f"  megajax, {results[0].source}: {', '.join(shares)}"]


def layer_table() -> str:
    """2205.05198 table 4: milliseconds of a layer of the 22B model on 8 A100s, published and modelled."""
    lines = ["2205 table 4: a layer of 22B, ms of forward and backward", f"  {'':<42}{'published':>18}{'modelled':>18}"]
    for (recompute, sequence_parallel), published in LAYER_2205.items():
        modes = {"recompute": recompute, "sequence_parallel": sequence_parallel}
        parallel = ParallelConfig(tensor=8, microbatch_size=4, attention="xla", **modes)  # its attention has dropout
        train = TrainConfig(global_batch_size=4, precision="fp16")
        block = Blocks(RunConfig(MODELS["22b"], parallel, train), A100)
        name = f"recompute {recompute}{', sequence parallel' if sequence_parallel else ''}"
        own = [1e3 * one.total for one in (block.forward, block.backward)]
        lines.append(f"  {name:<42}{published[0]:>9.1f}{published[1]:>9.1f}{own[0]:>9.2f}{own[1]:>9.2f}")
    return "\n".join(lines)


def memory_table() -> str:
    """2205.05198 figure 7: activation memory of a layer as a share of tensor parallelism alone, by the paper's table 2."""
    models = (MODELS["22b"], preset("gpt3-175b"), preset("megatron-529.6b"), preset("megatron-1008b"))
    lines = [
        "2205 figure 7: activations of a layer, % of tensor parallelism alone; the paper's formula and what megajax keeps",
        f"  {'':<18}{'sequence parallel':>22}{'selective':>22}{'both':>22}{'full':>22}",
    ]
    for model in models:
        scores = 5 * model.heads * model.sequence_length / model.hidden
        paper = (34 / 8 + scores / 8, 10 + 24 / 8, 34 / 8, 2.0)
        whole = 10 + 24 / 8 + scores / 8
        costs = model_costs(model)
        kept = [
            costs.kept_bytes(mode, samples=1, tensor=8, sequence_parallel=split)
            for mode, split in (
                ("none", False),
                ("none", True),
                ("selective", False),
                ("selective", True),
                ("full", False),
            )
        ]
        cells = "".join(
            f"{f'{formula / whole:.0%} and {own / kept[0]:.0%}':>22}"
            for formula, own in zip(paper, kept[1:], strict=True)
        )
        lines.append(f"  {model.name:<18}{cells}")
    return "\n".join(lines)


def plot(found: Sequence[tuple[Exhibit, Sequence[Result]]], path: str) -> None:
    """Draws the tables and figures, a panel each: megajax's curves, and the published values where the papers print them.

    Runs that do not fit are hollow.

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    panels = panels_of(found)
    if not panels:
        raise ConfigError("plot draws tables and figures with curves: pass --only with one of them, or omit --only.")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with picture(path, 280 * columns, 205 * rows + 30) as figure:
        from matplotlib.lines import Line2D

        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, (exhibit, curves) in zip(axes, panels, strict=False):
            _draw_panel(axis, exhibit, curves)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        ((_, results), *_) = panels[0][1]
        handles = [
            Line2D([], [], color=SOFT, marker="o", label=f"megajax, {results[0].source}"),
            Line2D([], [], color=SOFT, marker="o", markerfacecolor="white", ls="", label="would not fit"),
            Line2D([], [], color=SOFT, marker="x", ls="--", lw=1, label="as printed in the paper"),
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=3)


def panels_of(found: Sequence[tuple[Exhibit, Sequence[Result]]]) -> list[tuple[Exhibit, list[Curve]]]:
    """The panels with their curves. 2104.04473's table 2 is its figure 10, with ZeRO-3's curves beside PTD-P's."""
    panels: list[tuple[Exhibit, list[Curve]]] = []
    for exhibit, results in found:
        if exhibit.name == "2104 table 1":  # a row is a model
            curves = [("PTD-P, 1.7B to 1T", results)]
        elif exhibit.name == "2205 table 5":  # a row is a model with one of two ways of recomputation
            curves = _by(results, lambda one: one.point.line.partition(", ")[2])
        elif exhibit.name.startswith("2104 table 2"):
            method = exhibit.title.rpartition(" ")[2]
            curves = _by(results, lambda one, method=method: f"{BILLIONS[one.point.line]}, {method}")
        else:
            curves = _by(results, lambda one: one.point.line)
        if panels and exhibit.name == f"{panels[-1][0].name}, ZeRO-3":
            before, others = panels.pop()
            exhibit, curves = dataclasses.replace(before, title=f"{before.title} and ZeRO-3"), others + curves
        panels.append((exhibit, curves))
    return panels


def _by(results: Sequence[Result], label: Callable[[Result], str]) -> list[Curve]:
    groups: dict[str, list[Result]] = {}
    for one in results:
        groups.setdefault(label(one), []).append(one)
    return list(groups.items())


def _draw_panel(axis: Any, exhibit: Exhibit, curves: Sequence[Curve]) -> None:
    first = curves[0][1][0]
    is_relative, unit = first.point.relative is not None, exhibit.unit
    scale = 100 / first.value(unit) if is_relative else 1
    for label, results in curves:
        places, values = [one.point.x for one in results], [scale * one.value(unit) for one in results]
        (line,) = axis.plot(places, values, label=label)
        for one, value in zip(results, values, strict=True):
            face = line.get_color() if one.fits else "white"
            axis.plot(one.point.x, value, "o", color=line.get_color(), markerfacecolor=face)
        published = [one.point.relative if is_relative else one.point.published for one in results]
        if all(published):
            axis.plot(places, published, "x--", color=line.get_color(), lw=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks := _ticks({one.point.x for _, results in curves for one in results}), map(str, ticks))
    axis.minorticks_off()
    axis.set_ylim(0, 1.08 * axis.dataLim.ymax)
    axis.set_xlabel(exhibit.axis, fontsize=8)
    axis.set_ylabel(f"{unit}, % of one GPU's" if is_relative else unit, fontsize=8)
    axis.tick_params(labelsize=8)
    paper, _, name = exhibit.name.partition(" ")
    says = wrapped(f"The paper: {exhibit.says}", 215, 7) if exhibit.says and not is_relative else []
    title = wrapped(f"{name.capitalize()} of {PAPERS[paper]}: {exhibit.title}", 215, 8.5)
    axis.set_title("\n".join(title), fontsize=8.5, pad=6 + 9 * len(says))
    axis.annotate("\n".join(says), (0, 1), (0, 3), "axes fraction", "offset points", fontsize=7, color=SOFT)
    axis.legend(fontsize=7.5, handlelength=1.2)


def _ticks(places: Collection[int]) -> list[int]:
    """Where a logarithmic axis has numbers: at the places, without those so near to the one before that they would touch."""
    kept: list[int] = []
    apart = (max(places) / min(places)) ** (1 / 9)
    for place in sorted(places):
        if not kept or place >= kept[-1] * apart:
            kept.append(place)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit code."""
    return exit_code(lambda: _command(_parser().parse_args(arguments)))


def _command(args: argparse.Namespace) -> int:
    every = {one.name: one for one in exhibits()}
    own = {"2205 table 4": layer_table, "2205 figure 7": memory_table}
    for name in args.only or ():
        if name not in every | own:
            raise ConfigError(f"only = {name!r} is not one of them: pass --only with {', '.join(every | own)}.")
    found = []
    for name in args.only or (every | own):
        if name in own:
            print(own[name](), end="\n\n")
            continue
        results = [(compiled if args.compile else modelled)(point) for point in every[name].points]
        found.append((every[name], results))
        print(table(every[name], results), end="\n\n", flush=True)
    if args.plot:
        plot(found, args.plot)
        print(f"drawn: {args.plot}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", type=plain_text, metavar="NAME", help='such as "2104 figure 13"')
    parser.add_argument("--compile", action="store_true", help="compile each run's step instead of the models")
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE", help="draw the tables and figures (needs megajax[plot])"
    )
    return parser


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # no GPU is used
    sys.exit(main())

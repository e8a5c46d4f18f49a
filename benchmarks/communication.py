"""Bytes that a compiled training step sends, by mesh axis, and its FLOPs, compared with the papers' formulas.

python -m benchmarks.communication --model gpt3-175b --pipe 8 --tensor 8 --chunks 3 --global-batch-size 64
python -m benchmarks.communication --devices cpu --model tiny --data 2 --pipe 2 --tensor 2

Takes every option of a training run. Where XLA's CUDA compiler is installed (megajax[dryrun]) the step is compiled for
H100s, on a machine without any; with --devices cpu, or without the compiler, for CPU devices, for which XLA uses
all-reduces instead of reduce-scatters and sends bf16 as fp32. Nothing is run. --hlo FILE reads the text of a step that was
compiled earlier.

The bytes are read from the HLO, with the iterations of loops. Idle ranks send between stages too, in every tick, and there
are more ticks than microbatches; the formulas count microbatches.
"""

import pathlib
import sys
from collections.abc import Sequence

from benchmarks.tables import grouped
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import parse
from megajax.config.options import Parser
from megajax.schedules.errors import command
from megajax.schedules.paths import local_path

DEFAULTS = {"model": "tiny", "schedule": "interleaved_1f1b", "global_batch_size": 64}
ON_CPU, CPU = 8, "CPU devices"


@command
def main(arguments: Sequence[str] | None) -> None:
    """Prints the table."""
    own = Parser(add_help=False)
    own.add_argument("--hlo", default=None, type=local_path)
    args, rest = own.parse_known_args(arguments)
    print("\n".join(comparison(rest, args.hlo)))


def read_file(path: str) -> str:
    """The text of a compiled step."""
    try:
        return pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}: pass --hlo FILE, the text of a compiled step.") from None


def comparison(arguments: Sequence[str], hlo: str | None) -> list[str]:
    """The lines to print."""
    from megajax.estimate.communication import expected
    from megajax.estimate.hlo import loop_trip_counts, most_sent, read
    from megajax.pipeline.program import StepProgram

    request = parse(arguments, __doc__, DEFAULTS)
    on_cpu = request.devices is not None and request.devices.startswith("cpu")
    run = request.run(request.devices_needed or ON_CPU, "fp32" if on_cpu else "bf16")
    run.validate()
    program, source = (read_file(hlo), hlo) if hlo else compiled(run, request.devices)
    module = read(program, loop_trip_counts(run, on_cpu=on_cpu or source == CPU))
    shape = (run.parallel.replicas, run.parallel.pipe, run.parallel.tensor)
    axes = grouped(module.collectives, lambda collective: collective.axes(shape))
    lines = [f"{run.model.name} on {run.parallel.devices} devices, compiled for {source}; what a device sends per step"]
    # Replicas that split experts are neighbours on the data axis.
    formulas = grouped(expected(StepProgram.of(run)), lambda line: "data" if line.axis == "expert" else line.axis)
    for axis in ("tensor", "pipe", "data"):
        lines += ["", axis, *map(described, formulas.get(axis, []))]
        total = sum(line.bytes for line in formulas.get(axis, []))
        found = axes.get((axis,), [])
        sent = most_sent(found)
        ratio = f"{sent / total:.3f} of the formulas' {size(total).strip()}" if total else "and no formula"
        lines.append(f"{'':8} {size(sent)}  compiled: {ratio}")
        kinds = grouped(found, lambda collective: collective.kind)
        for kind, several in sorted(kinds.items(), key=lambda item: -most_sent(item[1])):
            hidden = sum(c.times for c in several if c.asynchronous and c.behind) / sum(c.times for c in several)
            number = sum(c.times for c in several)
            lines.append(
                f"{'':21} {size(most_sent(several)).strip()} by {number:,.0f} {kind}, {hidden:.0%} behind a matmul"
            )
    for names, several in axes.items():
        if len(names) > 1:
            together = " and ".join(names)
            lines += ["", *map(described, formulas.get(together, []))]
            lines.append(f"{'':8} {size(most_sent(several))}  over {together} at once")
    return lines + flops(run, module)


def described(line) -> str:
    """A line of the formulas."""
    return f"{'':8} {size(line.bytes)}  {line.what}: {line.formula}"


def flops(run: RunConfig, module) -> list[str]:
    """Compiled FLOPs of a device and the model's, and the bytes it copies."""
    from megajax.estimate.flops import flops_per_step, hardware_flops_per_step

    needed, of_model = (count(run) / run.parallel.devices for count in (hardware_flops_per_step, flops_per_step))
    bubbles = ", bubbles included, in which blocks with rings run too" if run.parallel.rings else ""
    return [
        "",
        "FLOPs of a device",
        f"{'':8} {of_model:9.3e}     of the model; with recomputation {needed:.3e}",
        f"{'':8} {module.flops():9.3e}     compiled: {module.flops() / needed:.3f} of the formula{bubbles}",
        "",
        f"{size(module.sliced)}  of slices are copied from larger arrays: a block's weights, each time it runs",
    ]


def compiled(run: RunConfig, devices: str | None) -> tuple[str, str]:
    """The text of the run's compiled step, and the devices it is compiled for."""
    from megajax.runtime.mesh import make_mesh, start_devices

    if devices is None:
        from megajax.estimate.gpus import GPUS
        from megajax.plan.compiler import compile_for, has_compiler

        if has_compiler():
            return compile_for(run, GPUS["h100-80gb"])["hlo"], "H100s"
    mesh = make_mesh(run.parallel, start_devices(f"cpu:{run.parallel.devices}"))
    return step_text(run, mesh), CPU


def step_text(run: RunConfig, mesh) -> str:
    """The compiled step as text, for the devices of the mesh."""
    from megajax.train.step import make_training

    training = make_training(run, mesh)
    return training.compile_train_step(*training.step_shapes()).as_text()


def size(count: float) -> str:
    """Bytes with a unit, in a column."""
    unit, factor = next((pair for pair in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= pair[1]), (" B", 1))
    return f"{count / factor:9.2f} {unit}"


if __name__ == "__main__":
    sys.exit(main())

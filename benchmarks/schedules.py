"""Bubbles of the pipeline schedules: simulated for many ranks, and measured on two CPU devices.

python -m benchmarks.schedules                 both; writes schedules.json and schedules.svg to benchmarks/results
python -m benchmarks.schedules --simulate      the simulated table and the plot only, in seconds; keeps measured rows on file

Measured: forwards and backwards of a GPT whose matmuls dominate, on p = 2 devices of one thread each. The bubble is
T(m) / (m t) - 1, where t is the time of a microbatch on the same two devices without a pipeline: each has half the layers
and its own batch, and t is the slope of that time between the two largest m. The measured bubble thus includes everything
that a pipeline adds: idle time, sends, embedding and head. Steps of all schedules and sizes are timed in turn, and the
fastest of each is used, so that a slow phase of the machine affects all of them.
"""

import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Sequence

from benchmarks.tables import print_table
from megajax.config.options import Parser
from megajax.pipeline.slots import slot_tables
from megajax.schedules.arguments import whole
from megajax.schedules.errors import command
from megajax.schedules.pictures import label_ends, picture, wrapped
from megajax.schedules.registry import make_schedule, microbatch_rule
from megajax.schedules.simulate import simulate_event, simulate_lockstep

KINDS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("looped_bfs", 2),
    ("zb_1p_interleaved", 2),
    ("zb_v", 2),
    ("dualpipe_v", 2),
]
MEASURED = [kind for kind in KINDS if kind[1] < 4]
STAGES = (2, 4, 8, 16)
MICROBATCHES = (2, 4, 8, 16)
TIMED_STAGES = 2
APART = "no pipeline"  # every device has its own model and batch


def simulated_rows(sizes: Sequence[int] = STAGES) -> list[dict]:
    """Bubble, memory and ticks for these numbers of ranks and m = 4p, with F, I and W of equal cost.

    in_flight: the most microbatches of which a rank holds activations. slots: those that the compiled program has room for,
    in microbatches too. In paired ticks a rank without a microbatch writes its outputs to a slot as well, so that gpipe and
    looped_bfs, whose ranks hold all of a step's at once, have a slot of a chunk more.
    """
    rows = []
    for stages in sizes:
        for name, chunks in KINDS:
            schedule = make_schedule(name, stages=stages, microbatches=4 * stages, chunks=chunks)
            simulation = simulate_event(schedule)
            rows.append(
                {
                    "schedule": name,
                    "chunks": chunks,
                    "stages": stages,
                    "microbatches": 4 * stages,
                    "bubble": simulation.bubble,
                    "lockstep_bubble": simulate_lockstep(schedule).bubble,
                    "in_flight": max(simulation.peak_live) / chunks,
                    "slots": slot_tables(schedule).stash_slots / chunks,
                    "ticks": len(schedule.ticks),
                }
            )
    return rows


def measured_rows(repeats: int) -> list[dict]:
    """Step times of every schedule at p = 2, with the measured and the simulated bubble."""
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    from megajax.runtime.mesh import start_devices

    devices = start_devices(f"cpu:{TIMED_STAGES}")
    cases = [
        (name, chunks, microbatches)
        for name, chunks in MEASURED
        for microbatches in MICROBATCHES
        if microbatches >= microbatch_rule(name, TIMED_STAGES).fewest
    ] + [(APART, 1, microbatches) for microbatches in MICROBATCHES[-2:]]
    steps = {}
    for case in cases:
        print(f"\rcompiling {len(steps) + 1} of {len(cases)}", end="", flush=True)
        steps[case] = _step(*case, devices)
    best = dict.fromkeys(cases, float("inf"))
    for repeat in range(repeats):
        print(f"\rtiming {repeat + 1} of {repeats}     ", end="", flush=True)
        for case, step in steps.items():
            start = time.perf_counter()
            step()
            best[case] = min(best[case], time.perf_counter() - start)
    print("\r" + " " * 40 + "\r", end="")
    low, high = MICROBATCHES[-2:]
    slope = (best.pop((APART, 1, high)) - best.pop((APART, 1, low))) / (high - low)
    rows = []
    for (name, chunks, microbatches), seconds in best.items():
        schedule = make_schedule(name, stages=TIMED_STAGES, microbatches=microbatches, chunks=chunks)
        rows.append(
            {
                "schedule": name,
                "chunks": chunks,
                "microbatches": microbatches,
                "milliseconds": 1000 * seconds,
                "of_gpipe": seconds / best["gpipe", 1, microbatches],
                "measured_bubble": seconds / (microbatches * slope) - 1,
                "simulated_bubble": simulate_lockstep(schedule).bubble,
            }
        )
    return rows


def _step(name: str, chunks: int, microbatches: int, devices):
    """A compiled and warmed-up forward and backward of the whole batch; calling it runs it once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from megajax.config import ModelConfig, ParallelConfig
    from megajax.models.gpt import GPT
    from megajax.models.interface import ModelContext
    from megajax.pipeline import layout
    from megajax.pipeline.executor import gradient_function
    from megajax.runtime.mesh import make_mesh
    from megajax.schedules.stages import StageLayers

    model = ModelConfig(layers=4, hidden=512, heads=4, vocabulary=128, sequence_length=128)
    parallel, samples = ParallelConfig(pipe=TIMED_STAGES), 1
    if name == APART:
        name, parallel, samples = "1f1b", ParallelConfig(data=TIMED_STAGES), TIMED_STAGES
        model = dataclasses.replace(model, layers=model.layers // TIMED_STAGES)
    schedule = make_schedule(name, stages=parallel.pipe, microbatches=microbatches, chunks=chunks)
    mesh = make_mesh(parallel, devices)
    shape = (microbatches, samples, model.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, shape, np.int32)
    batch = {
        "tokens": tokens[..., :-1],
        "labels": tokens[..., 1:],
        "weights": np.ones(tokens[..., 1:].shape, np.float32),
    }
    functions = GPT(model, ModelContext(recompute="none"))
    with jax.set_mesh(mesh):
        params = jax.jit(functions.init)(jax.random.key(0))
        where = StageLayers(model.layers, parallel.pipe, chunks, schedule.placement)
        blocks = layout.to_pipeline_layout(params["blocks"], where)
        params = {**params, "blocks": jax.device_put(blocks, NamedSharding(mesh, P(None, "pipe")))}
        run = jax.jit(gradient_function(functions, schedule, mesh))
        compiled = run.lower(params, batch, jnp.float32(1)).compile()
        arguments = jax.device_put((params, batch, jnp.float32(1)), compiled.input_shardings[0])
    step = lambda: jax.block_until_ready(compiled(*arguments))  # noqa: E731
    step()
    return step


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Bubble and memory over the number of ranks; schedules with equal values share a line."""
    stages = sorted({row["stages"] for row in rows})
    titles = {
        "lockstep_bubble": "Bubble, as a share of the ideal time",
        "in_flight": "Microbatches in flight on the rank that holds the most",
    }
    with picture(path, 470, 500) as figure:
        panels = figure.subplots(2, 1, sharex=True)
        panels[0].set_xscale("log", base=2)
        panels[0].set_xticks(stages, [str(count) for count in stages])
        panels[0].set_xlim(stages[0], stages[-1])
        panels[0].minorticks_off()
        panels[1].set_yscale("log", base=2)
        panels[1].set_yticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
        panels[1].minorticks_off()
        panels[1].set_xlabel("ranks p, with 4p microbatches")
        for panel, (value, title) in zip(panels, titles.items(), strict=True):
            ends = []
            for heights, names in sorted(lines_of(rows, value).items(), reverse=True):
                (line,) = panel.plot(stages, heights, marker="o", clip_on=False)
                ends.append((stages[-1], heights[-1], "\n".join(wrapped(", ".join(names), 130, 8)), line.get_color()))
            panel.set_title(title)
            panel.set_ylim(bottom=0 if value == "lockstep_bubble" else None)
            label_ends(panel, ends)


def lines_of(rows: list[dict], value: str) -> dict[tuple[float, ...], list[str]]:
    """The lines of a plot, as values over the number of ranks, each with the schedules that have these values."""
    lines: dict[tuple[float, ...], list[str]] = {}
    for name, chunks in KINDS:
        heights = tuple(row[value] for row in rows if (row["schedule"], row["chunks"]) == (name, chunks))
        lines.setdefault(heights, []).append(f"{name}\u00a0v={chunks}" if chunks > 1 else name)
    return lines


@command
def main(arguments: Sequence[str] | None) -> None:
    """Measures."""
    parser = Parser(description=__doc__)
    parser.renamed = {"--repeats": "--timed-steps"}
    parser.add_argument("--simulate", action="store_true", help="the simulated table and the plot only")
    parser.add_argument(
        "--timed-steps", type=whole(), default=7, help="steps timed for each size (default: %(default)s)"
    )
    parser.add_argument("--out", default="benchmarks/results", metavar="FOLDER", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "schedules.json"
    print("simulated, m = 4p, F = I = W")
    on_file = json.loads(file.read_text()) if file.exists() else {}
    results = on_file | {"command": "python -m benchmarks.schedules", "simulated": simulated_rows()}
    print_table(results["simulated"], ".3f")
    plot(results["simulated"], folder / "schedules.svg")
    if not options.simulate:
        print(f"\nmeasured on {TIMED_STAGES} CPU devices of one thread each, p = {TIMED_STAGES}")
        import jax

        results["measured"] = measured_rows(options.timed_steps)
        results["machine"] = {"jax": jax.__version__, "processor": platform.machine(), "cores": os.cpu_count()}
        print_table(results["measured"], ".3f")
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""What pipeline schedules cost: simulated for many ranks, and measured on two CPU devices against the simulation.

python -m benchmarks.schedules                 both; writes benchmarks/results/schedules.json
python -m benchmarks.schedules --simulate      the table alone, in a second

Measured: forwards and backwards of a GPT whose blocks dominate, on p = 2 devices of one thread each. The bubble is
T(m) / (m t) - 1, where t, the time of a microbatch without bubble, is the slope of T between the two largest m: what is the
same every step (start, sums at the end) would otherwise count as bubble.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

from megajax.pipeline import tables
from megajax.pipeline.schedules import make_schedule
from megajax.pipeline.simulate import simulate_event, simulate_lockstep

KINDS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("zb_h1", 1),
    ("zb_1p_interleaved", 2),
    ("zb_v", 2),
]
MEASURED = [kind for kind in KINDS if kind[1] < 4]
MICROBATCHES = (2, 4, 8, 16)


def simulated_rows() -> list[dict]:
    """Bubble, memory and ticks for p up to 16 and m = 4p, with F, I and W of equal cost."""
    rows = []
    for stages in (2, 4, 8, 16):
        for name, chunks in KINDS:
            schedule = make_schedule(name, stages=stages, microbatches=4 * stages, chunks=chunks)
            event, lockstep = simulate_event(schedule), simulate_lockstep(schedule)
            rows.append(
                {
                    "schedule": name,
                    "chunks": chunks,
                    "stages": stages,
                    "microbatches": 4 * stages,
                    "bubble": event.bubble,
                    "lockstep_bubble": lockstep.bubble,
                    "stash_in_stages": tables.build(schedule).stash_slots / chunks,
                    "ticks": len(schedule.ticks),
                }
            )
    return rows


def measured_rows(repeats: int) -> list[dict]:
    """Step times of every schedule at p = 2, and the bubble they show beside the simulated one."""
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    from megajax.mesh import start_devices

    devices = start_devices("cpu:2")
    rows = []
    for name, chunks in MEASURED:
        steps = {m: _step(name, chunks, m, devices) for m in MICROBATCHES}
        times: dict[int, list[float]] = {m: [] for m in MICROBATCHES}
        for _ in range(repeats):  # all sizes in turn, so that a slow spell of the machine falls on all
            for m, step in steps.items():
                start = time.perf_counter()
                step()
                times[m].append(time.perf_counter() - start)
        best = {m: min(values) for m, values in times.items()}
        slope = (best[16] - best[8]) / 8
        for m in MICROBATCHES:
            schedule = make_schedule(name, stages=2, microbatches=m, chunks=chunks)
            rows.append(
                {
                    "schedule": name,
                    "chunks": chunks,
                    "microbatches": m,
                    "seconds": best[m],
                    "median_seconds": statistics.median(times[m]),
                    "measured_bubble": best[m] / (m * slope) - 1,
                    "simulated_bubble": simulate_lockstep(schedule).bubble,
                }
            )
    return rows


def _step(name: str, chunks: int, microbatches: int, devices):
    """A compiled forward and backward of the whole batch, warmed up, to be called and timed."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from megajax.config import ModelConfig, ParallelConfig
    from megajax.mesh import make_mesh
    from megajax.models import gpt
    from megajax.pipeline import layout
    from megajax.pipeline.executor import gradient_function

    model = ModelConfig(layers=8, hidden=256, heads=4, vocabulary=128, sequence_length=128)
    schedule = make_schedule(name, stages=2, microbatches=microbatches, chunks=chunks)
    mesh = make_mesh(ParallelConfig(pipe=2), devices)
    tokens = np.random.default_rng(0).integers(
        0, model.vocabulary, (microbatches, 2, model.sequence_length + 1), np.int32
    )
    batch = {
        "tokens": tokens[..., :-1],
        "labels": tokens[..., 1:],
        "weights": np.ones(tokens[..., 1:].shape, np.float32),
    }
    functions = gpt.functions(model)
    with jax.set_mesh(mesh):
        params = jax.jit(gpt.init, static_argnums=0)(model, jax.random.key(0))
        blocks = layout.deal(params["blocks"], stages=2, chunks=chunks, placement=schedule.placement)
        params = {**params, "blocks": jax.device_put(blocks, NamedSharding(mesh, P(None, "pipe")))}
        run = jax.jit(gradient_function(functions, schedule, mesh, constrain=lambda x: x))
        compiled = run.lower(params, batch, jnp.float32(1)).compile()
        arguments = jax.device_put((params, batch, jnp.float32(1)), compiled.input_shardings[0])
    step = lambda: jax.block_until_ready(compiled(*arguments))  # noqa: E731
    step()
    return step


def _print(rows: list[dict]) -> None:
    def text(value):
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    names = list(rows[0])
    table = [names] + [[text(row[name]) for name in names] for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(names))]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="the simulated table alone")
    parser.add_argument("--repeats", type=int, default=7, help="steps timed for each size (default: %(default)s)")
    parser.add_argument("--out", default="benchmarks/results/schedules.json", help="(default: %(default)s)")
    options = parser.parse_args()
    print("simulated, m = 4p, F = I = W")
    results = {"command": "python -m benchmarks.schedules", "simulated": simulated_rows()}
    _print(results["simulated"])
    if options.simulate:
        return
    print("\nmeasured on 2 CPU devices of one thread each, p = 2")
    import jax

    results["measured"] = measured_rows(options.repeats)
    results["versions"] = {"jax": jax.__version__, "cores": os.cpu_count()}
    _print(results["measured"])
    pathlib.Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

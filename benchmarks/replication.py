"""The cost of --replicate-state: seconds for which training waits, and how much slower the steps meanwhile are.

    python -m benchmarks.replication                                    100 MB of state on one CPU device, every 5 steps
    python -m benchmarks.replication --devices gpu --megabytes 1000     1 GB on the GPUs

Steps are timed with and without replications, in turns, because the machine's speed varies; the median of each is taken.
"""

import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.checkpoints import MODELS, training_of
from megajax.config.options import Parser
from megajax.config.output import MEMORY_VARIABLE
from megajax.runtime.mesh import start_devices
from megajax.schedules.arguments import whole
from megajax.schedules.errors import command


def measure(megabytes: int, devices, directory: pathlib.Path, every: int, rounds: int) -> dict[str, float]:
    """Seconds of a step without replication, of the steps with it, and of waiting for one replication."""
    import jax

    from megajax.checkpoint.replicated import Progress, ReplicatedState

    training, batch = training_of(MODELS[megabytes], devices, 8)
    state, replicas = training.init_state(), ReplicatedState(directory, every, {})
    seconds: dict[str, list[float]] = {"without": [], "with": [], "waited": []}
    for number in range(2 * rounds + 2):
        replicated, start = number % 2, time.perf_counter()
        if replicated:
            replicas.save(training.state_layout, state, Progress(number))
            seconds["waited"].append(time.perf_counter() - start)
        for _ in range(every):
            state, metrics = training.train_step(state, batch)
            jax.block_until_ready(metrics)
        seconds["with" if replicated else "without"].append((time.perf_counter() - start) / every)
        replicas.wait()
    replicas.close(clear=True)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # The first round compiles.
    return {name: statistics.median(values[1:]) for name, values in seconds.items()} | {"bytes": size}


@command
def main(arguments: Sequence[str] | None) -> None:
    """Measures."""
    parser = Parser(description=__doc__)
    parser.add_argument("--megabytes", type=whole(), choices=MODELS, default=100, help="of state (default: 100)")
    parser.add_argument("--devices", default="cpu:1", help="devices that hold it (default: %(default)s)")
    parser.add_argument("--every", type=whole(), default=5, help="steps between two replications (default: 5)")
    parser.add_argument("--rounds", type=whole(), default=5, help="replications, after the first (default: 5)")
    options = parser.parse_args(arguments)
    devices = start_devices(options.devices)
    directory = pathlib.Path(tempfile.mkdtemp())
    os.environ.setdefault(MEMORY_VARIABLE, str(pathlib.Path("/dev/shm") / directory.name))
    try:
        found = measure(options.megabytes, devices, directory, options.every, options.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(pathlib.Path("/dev/shm") / directory.name, ignore_errors=True)
    interval = options.every * found["without"]
    print(f"{found['bytes'] / 1e6:.0f} MB of state, a step takes {found['without']:.3f} s")
    print(
        f"training waits {found['waited']:.3f} s for a replication: {found['waited'] / interval:.2%} of {options.every} "
        f"steps, {found['waited'] / 100 / found['without']:.2%} of 100 steps"
    )
    print(f"steps with a replication in the background, waiting included: {found['with'] / found['without'] - 1:+.1%}")


if __name__ == "__main__":
    sys.exit(main())

"""The cost of a checkpoint: seconds until it is on disk, seconds for which training waits, and seconds to read it.

    python -m benchmarks.checkpoints                          about 100 MB and 1 GB of state on one CPU device
    python -m benchmarks.checkpoints --devices cpu:4 --steps  on four, with training continuing during the saves

The fastest of several saves of each size is shown, and the shortest wait: a slow phase of the machine affects either. The
first save, which compiles the copies, is shown separately. "read" restores the newest and verifies its checksums; its files
may be in the system's memory. `experiments.failures` takes "waited" as --save, "save" as --write and "read" in --restart.
"""

import dataclasses
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

from megajax.config import ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.options import Parser
from megajax.runtime.mesh import make_mesh, start_devices
from megajax.schedules.arguments import whole
from megajax.schedules.errors import command
from megajax.schedules.paths import local_path

# Megabytes of state, about: 12 bytes a parameter, fp32 weights and the two moments of Adam.
MODELS = {
    100: ModelConfig(layers=4, hidden=384, heads=6, vocabulary=4096, sequence_length=64),
    1000: ModelConfig(layers=10, hidden=768, heads=12, vocabulary=16384, sequence_length=64),
}


def training_of(model: ModelConfig, devices, samples: int):
    """The training of a model in fp32, with a replica on each device, and a batch of so many samples for each."""
    from benchmarks.mfu_cases import batch_of
    from megajax.train.step import make_training

    train = TrainConfig(precision="fp32", global_batch_size=samples * len(devices), steps=10, warmup_steps=1)
    run = RunConfig(model, ParallelConfig(data=len(devices)), train)
    run.validate()
    training = make_training(run, make_mesh(run.parallel, devices))
    return training, batch_of(training)


def measure(model: ModelConfig, devices, directory: pathlib.Path, saves: int, steps: bool) -> dict:
    """Seconds of `saves` saves of a model's state, until it is on disk and until `save` returned; of reading the last."""
    import jax

    from megajax.checkpoint import reader
    from megajax.checkpoint.directory import NAME
    from megajax.checkpoint.manager import Checkpoints, Progress
    from megajax.checkpoint.metadata import run_meta

    training, batch = training_of(model, devices, 1)
    state = jax.block_until_ready(_busy(training.init_state()))
    if steps:
        state, _ = training.train_step(state, batch)  # compiles
    run, meta = training.run, run_meta(training.run, None)
    keep = Checkpoints(directory, OutputConfig(max_to_keep=1), meta)
    rows = []
    for step in range(1, saves + 1):
        begin = time.perf_counter()
        keep.save(training.state_layout, state, Progress(step=step))
        waited, taken_steps = time.perf_counter() - begin, 0
        while steps and not keep.poll():
            state, metrics = training.train_step(state, batch)
            jax.block_until_ready(metrics)
            taken_steps += 1
        keep.wait()
        assert not keep.failed
        rows.append((time.perf_counter() - begin, waited, taken_steps))
    keep.close()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    begin = time.perf_counter()
    jax.block_until_ready(reader.load(directory / NAME.format(saves), run, training.state_layout, meta["tokenizer"])[0])
    return {"bytes": size, "first": rows[0], "rest": rows[1:], "read": time.perf_counter() - begin}


def _busy(state):
    """A state with random moments: initial ones are zeros, which are written faster."""
    import jax

    def noisy(moment, number):
        return 1e-3 * jax.random.normal(jax.random.key(number), moment.shape)

    leaves, structure = jax.tree.flatten(state.optimizer_state)
    made = [
        jax.jit(noisy, static_argnums=1, out_shardings=leaf.sharding)(leaf, number) if leaf.ndim else leaf
        for number, leaf in enumerate(leaves)
    ]
    return dataclasses.replace(state, optimizer_state=jax.tree.unflatten(structure, made))


@command
def main(arguments: Sequence[str] | None) -> int:
    """Measures."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=whole(), nargs="+", choices=MODELS, default=list(MODELS), help="sizes of state"
    )
    parser.add_argument("--devices", default="cpu:1", help="devices that hold it (default: %(default)s)")
    parser.add_argument("--saves", type=whole(), default=5, help="of each size, after the first (default: %(default)s)")
    parser.add_argument("--steps", action="store_true", help="train during the saves")
    parser.add_argument(
        "--directory", type=local_path, help="where to write, and delete after it (default: the temporary directory)"
    )
    options = parser.parse_args(arguments)
    devices = start_devices(options.devices)
    print(f"{'state':>9} {'first save':>11} {'waited':>7} | {'save':>7} {'waited':>7} {'share':>6} {'read':>7}  steps")
    worst = 0.0
    for megabytes in options.megabytes:
        directory = pathlib.Path(tempfile.mkdtemp(dir=options.directory))
        try:
            found = measure(MODELS[megabytes], devices, directory, options.saves + 1, options.steps)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        taken, waited = (min(row[place] for row in found["rest"]) for place in (0, 1))
        steps = sum(row[2] for row in found["rest"]) / len(found["rest"]) if options.steps else "none"
        first, first_waited, _ = found["first"]
        print(
            f"{found['bytes'] / 1e6:>6.0f} MB {first:>9.2f} s {first_waited:>5.2f} s | {taken:>5.2f} s {waited:>5.3f} s "
            f"{waited / taken:>6.1%} {found['read']:>5.2f} s  {steps}",
            flush=True,
        )
        worst = max(worst, waited / taken)
    return int(worst >= 0.1)


if __name__ == "__main__":
    sys.exit(main())

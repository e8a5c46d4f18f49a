"""The command of an experiment: `main` parses the command line, starts processes and devices, trains, and samples a text.

Exit codes: 0; 1 for an unexpected error; 2 for a user's mistake, printed as one line; 3 when another process ended the run
or was not found at its start (runtime/watchdog.py), or copies of the state differ (train/replica_check.py); 130 after
Ctrl-C in a run that did not save. jax is imported only after the command line has been read, as its devices are chosen
before it starts.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from megajax.checkpoint.mirror import with_local_config
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import Experiment, Importer, Request, parse
from megajax.config.parallel import DEFAULT_CPU_DEVICES
from megajax.config.sample import SampleConfig
from megajax.runtime.heartbeat import VARIABLE, Heartbeat
from megajax.schedules.errors import exit_code
from megajax.schedules.paths import is_store

LAST_RUN_ENDS = 60.0  # seconds in which the processes that the launcher has lost end by themselves
# (trainer, what to continue) before the training -> (the trained state) -> the text.
Sampler = Callable[[Any, SampleConfig], Callable[[Any], str]]
# (trainer, the command line) before the training -> the `train.validation.Evaluation`s that run during it.
Evaluator = Callable[[Any, Request], Sequence[Any]]
MakeTrainer = Callable[[RunConfig, Request, Sequence[Any]], Any]  # (run, command line, devices) -> Trainer


def main(
    experiment: Experiment,
    arguments: Sequence[str] | None = None,
    sampler: Sampler | None = None,
    evaluator: Evaluator | None = None,
    make: MakeTrainer | None = None,
) -> int:
    """Runs an experiment; returns the process's exit code.

    Args:
      experiment: its default configuration.
      arguments: of the command line; None: the process's own.
      sampler: generates the text after the training; None: there is none.
      evaluator: makes the evaluations during it, besides the validation; None: there are none.
      make: makes the trainer, for a model or data of the experiment's; None: `Trainer` of the run's.
    """
    heartbeat = Heartbeat(os.environ)

    def run() -> int:
        request = parse(with_local_config(arguments), experiment)
        if request.dry_shapes:
            return print_shapes(request)
        if request.evaluate and evaluator is None:
            raise ConfigError(
                "--evaluate-every is not an option of this experiment, whose models write no text: omit it."
            )
        return train(request, heartbeat, experiment.importer, sampler, evaluator, make)

    return exit_code(run)


def train(
    request: Request,
    heartbeat: Heartbeat,
    importer: Importer | None = None,
    sampler: Sampler | None = None,
    evaluator: Evaluator | None = None,
    make: MakeTrainer | None = None,
) -> int:
    """Connects the processes and trains; an error of one process ends all. `importer`: of the experiment."""
    from megajax.checkpoint.early_lock import EarlyLock
    from megajax.runtime.distributed import is_first
    from megajax.runtime.preemption import ignore_signals, is_signal
    from megajax.runtime.processes import run_together
    from megajax.train.replica_check import ReplicasDiffer

    started = time.monotonic()
    run_dir = request.output.run_dir
    run_dir = run_dir if run_dir is None or is_store(run_dir) else os.path.abspath(run_dir)
    patience = LAST_RUN_ENDS if VARIABLE in os.environ else 0.0
    with EarlyLock(run_dir if is_first(request.launch) else None, patience) as lock:

        def work(count: int, watchdog: Any) -> None:
            lock.require()
            result = train_on_devices(request, count, watchdog, started, importer, sampler, evaluator, make)
            if is_signal(result.stopped):
                ignore_signals()
            else:
                heartbeat.finish()

        retried = (ReplicasDiffer,)
        return run_together(request.launch, work, heartbeat, retried, run=run_dir, identity=request.identity)


def train_on_devices(
    request: Request,
    process_count: int,
    watchdog,
    started: float,
    importer: Importer | None = None,
    sampler: Sampler | None = None,
    evaluator: Evaluator | None = None,
    make: MakeTrainer | None = None,
) -> Any:
    """Starts the devices, trains, returns the `Result`, and prints a sample of the model's text if the request has one."""
    from megajax.checkpoint.libraries import prepare_process
    from megajax.runtime.mesh import start_devices
    from megajax.runtime.processes import is_first_process
    from megajax.train.trainer import Trainer

    prepare_process()
    devices = start_devices(request.devices, -(-(request.devices_needed or DEFAULT_CPU_DEVICES) // process_count))
    run = request.run(len(devices), "fp32" if devices[0].platform == "cpu" else "bf16")
    trainer = make(run, request, devices) if make else Trainer(run, output=request, devices=devices)
    sample = sampler(trainer, request.sample) if sampler and request.sample else None
    evaluations = evaluator(trainer, request) if evaluator else ()
    result = trainer.fit(watchdog, started, importer.params if importer else None, evaluations)
    if sample and not result.stopped:
        watchdog.suspend(run.train.steps)
        text = sample(result.state)
        if is_first_process():
            print(f"\na sample, continuing {request.sample.prompt!r}:\n{text}")
    return result


def print_shapes(request: Request) -> int:
    """`--dry-shapes`: prints every parameter's shape, sharding and bytes; the mesh's devices are not needed."""
    from megajax.runtime.mesh import start_devices

    start_devices("cpu")
    run = request.run(request.devices_needed or DEFAULT_CPU_DEVICES, "bf16")
    run.validate()
    print(describe_shapes(run))
    return 0


def describe_shapes(run: RunConfig) -> str:
    """A table of all parameters (shape as stored, sharding, bytes on one device) and the bytes of a device's state.

    Stored shapes of blocks are [chunks, pipe, slots of a stage, ...]. Bytes are of the fp32 parameters; the gradient
    accumulators have the same shapes and shardings, and so have AdamW's two moments, of those that are not frozen.
    """
    import jax
    from jax.sharding import AbstractMesh, AxisType, NamedSharding

    from megajax.models.context import model_rules, model_shapes
    from megajax.pipeline.parameters import initial_params, parameter_specs
    from megajax.pipeline.program import StepProgram
    from megajax.pipeline.trained import only_trained, trained_mask
    from megajax.sharding.optimizer_state import state_specs
    from megajax.train.optimizer import make_optimizer
    from megajax.train.precision import cast_frozen

    parallel = run.parallel
    axes, sizes = zip(*parallel.mesh_sizes.items(), strict=True)
    mesh = AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
    model = model_shapes(run)
    trained = trained_mask(model, run.train.freeze)
    shapes = jax.eval_shape(
        lambda key: cast_frozen(initial_params(model, parallel, key), trained, model.fp32_mask(), run.train.precision),
        jax.random.key(0),
    )
    specs = parameter_specs(model, parallel, model_rules(run), trained).stored
    bytes_of = lambda shape, spec: math.prod(NamedSharding(mesh, spec).shard_shape(shape.shape)) * shape.dtype.itemsize  # noqa: E731
    own = lambda tree: only_trained(tree, trained)  # noqa: E731
    optimizer = make_optimizer(run.train, own(model.decay_mask()), own(model.logical_axes()))
    state = state_specs(optimizer.init, own(shapes), own(specs), lambda path: jax.tree_util.keystr(path))
    held = sum(jax.tree.leaves(jax.tree.map(bytes_of, jax.eval_shape(optimizer.init, own(shapes)), state)))
    gradients = sum(jax.tree.leaves(jax.tree.map(bytes_of, own(shapes), own(specs))))
    held += gradients if run.train.ema_decay is not None else 0  # the average is like them
    rows = [("parameter", "shape", "sharding", "bytes per device")]
    total = 0
    for (path, shape), spec in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(specs), strict=True):
        total += bytes_of(shape, spec)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rows.append((name, f"{shape.dtype}{list(shape.shape)}", str(tuple(spec)), f"{bytes_of(shape, spec):,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(row[column].ljust(width) for column, width in enumerate(widths)), row[3].rjust(18)])
        for row in rows
    ]
    named = "AdamW's moments" if run.train.optimizer == "adamw" else f"{run.train.optimizer}'s state"
    named += " and averaged weights" if run.train.ema_decay is not None else ""
    frozen = f", frozen ones {run.train.precision}" if trained else ""
    active = f" ({run.model.active_parameters:,} for a token)" if getattr(run.model, "experts", 0) else ""
    mesh_shown = (
        " x ".join(f"{axis} {size}" for axis, size in parallel.mesh_sizes.items()) + f" = {parallel.devices} devices"
    )
    return "\n".join(
        [
            f"{run.model.name}: {run.model.parameters:,} parameters{active} on {mesh_shown}",
            *StepProgram.of(run).layers.remarks,
            *lines,
            f"a device holds {total / 1e9:.3f} GB of parameters (fp32{frozen}), "
            f"{held / 1e9:.3f} GB of {named} and {gradients / 1e9:.3f} GB of gradients: "
            f"{(total + gradients + held) / 1e9:.3f} GB",
        ]
    )

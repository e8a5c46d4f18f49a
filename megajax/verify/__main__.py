"""The command `python -m megajax.verify`; `options.DESCRIPTION` says what it does."""

import os
import sys
from collections.abc import Sequence

from megajax.checkpoint.directory import choose
from megajax.config import ConfigError, RunConfig
from megajax.config.parallel import DEFAULT_CPU_DEVICES
from megajax.schedules.errors import exit_code
from megajax.verify import options
from megajax.verify.options import Options

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # excludes atomic additions, and autotuning by measured times


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 (equal), 1 (different) or 2 (a user's mistake)."""
    return exit_code(lambda: run(options.read(sys.argv[1:] if arguments is None else arguments)))


def run(given: Options) -> int:
    """Starts the devices and compares."""
    import jax

    from megajax.runtime.distributed import find_place
    from megajax.runtime.mesh import start_devices
    from megajax.runtime.xla_flags import require_flag

    request = given.layouts[0].request
    if request and find_place(request.launch, os.environ):
        raise ConfigError(
            "megajax.verify runs in one process, with all devices of one host: pass -- --launcher single, or omit "
            "--coordinator, --processes and --process-id."
        )
    if given.deterministic:
        require_flag(DETERMINISTIC, "--deterministic")
    needed = max(layout.devices_needed for layout in given.layouts) or DEFAULT_CPU_DEVICES
    devices = start_devices(request.devices if request else None, needed)
    runs = [layout.run(len(devices)) for layout in given.layouts]
    if len(runs) == 2:
        options.check_pair(*runs)
    in_tf32 = (
        runs[0].train.precision == "fp32" and devices[0].platform == "gpu"
    )  # by default GPUs multiply fp32 in TF32
    with jax.default_matmul_precision("highest" if in_tf32 else None):
        return compare(given, runs, devices)


def compare(given: Options, runs: Sequence[RunConfig], devices: Sequence) -> int:
    """Compares, or records; prints the result and returns the exit code."""
    from megajax.verify import record_file, report
    from megajax.verify.certify import LiveReference, RecordedReference, certify, record
    from megajax.verify.programs import differences, facts

    sides = [prepare(run, devices, given) for run in runs]
    replay, batches, start = sides[-1]
    check_length(given, replay.run, start.progress)
    if given.record:
        header = record_file.header_of(replay.training.program, given.a.words, start.progress.step)
        reference = LiveReference(replay, batches, start)
        record_file.save(given.record, record(reference, given.steps, start.progress, header))
        print(f"written: {given.record}, {given.steps} steps of {given.a.words or 'the default layout'}")
        return 0
    if given.against:
        stored = record_file.load(given.against)
        record_file.check(stored, replay.run, given.steps, start.progress, given.against)
        reference, shown = RecordedReference(stored), f"{stored.header['layout']} ({stored.describe()})"
        program = stored.header.get("program")
    else:
        reference, shown = LiveReference(*sides[0], exact=given.deterministic), given.a.words
        program = facts(sides[0][0].training.program)
    programs = differences(program, facts(replay.training.program)) if program else []
    layouts = shown, given.b.words
    if not given.json:
        print(report.header(layouts, programs), flush=True)
    verdict = certify(reference, replay, batches, given.steps, start)
    exact = reference.exact
    print(report.to_json(verdict, layouts, exact, programs) if given.json else report.text(verdict, exact))
    return 0 if verdict.difference is None else 1


def prepare(run: RunConfig, devices: Sequence, given: Options) -> tuple:
    """(Replay, batches, Start) of one layout.

    Raises:
      ConfigError: the run is not legal, or its data or the checkpoint cannot be read.
    """
    from megajax.checkpoint import reader
    from megajax.checkpoint.metadata import run_meta
    from megajax.data.source import open_data
    from megajax.verify.certify import Start
    from megajax.verify.replay import Replay

    replay, tokenizer, batches = Replay(run, devices), None, given.data
    if batches is None:
        opened = open_data(run)
        batches, tokenizer = opened.batches, opened.tokenizer
    if given.resume is None:
        return replay, batches, Start()
    try:
        path, _ = choose(given.resume, given.resume)
    except ConfigError:
        raise ConfigError(f"--resume {given.resume} is neither a checkpoint nor a directory with one.") from None
    meta = run_meta(run, tokenizer)["tokenizer"]
    state, progress, _ = reader.load(path, run, replay.training.state_layout, meta)
    return replay, batches, Start(state, progress)


def check_length(given: Options, run: RunConfig, progress) -> None:
    """Raises ConfigError if the run ends before the last step to compare."""
    left = run.total_samples - progress.samples
    if given.steps * run.train.global_batch_size > left and not run.train.batch_ramp:
        steps = progress.step + given.steps
        raise ConfigError(
            f"steps = {given.steps}, but the run has {left // run.train.global_batch_size} steps after step "
            f"{progress.step}: pass -- --steps {steps} or more."
        )


if __name__ == "__main__":
    sys.exit(main())

"""The cases of `--compile-only`: the programs of the others, compiled for a GPU that this machine does not have.

Kernels and rates compile their own (`programs.Programs`); here are training steps and generation. Nothing is run.
"""

import dataclasses
import importlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.gpu_day import steps
from benchmarks.gpu_day.cases import HERE, Case
from benchmarks.gpu_day.losses import BATCH, RATE
from benchmarks.gpu_day.outcomes import TARGET, NotAvailable
from benchmarks.gpu_day.programs import compiled, target
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import parse
from megajax.estimate.auto import resolved
from megajax.estimate.collective_order import check
from megajax.estimate.program_account import account_of
from megajax.ops.attention_choice import NO_TOKAMAX
from megajax.plan.compiler import CompilerError, compile_for, target_config
from megajax.runtime.compat_kernels import tokamax_installed
from megajax.runtime.mesh import make_mesh

# What compiles the programs of a function that runs them.
COMPILED = {
    "losses.compare": "command",
    "losses.generation": "generation",
    "losses.checkpoint": "checkpoint",
    "steps.megajax": "megajax",
    "steps.plain": "plain",
    "steps.torch": "torch",
}
DEADLINE, SECONDS = 600, 570.0  # of a case, and of its compiler
ONE_DEVICE = ("--data", "1", "--pipe", "1", "--tensor", "1")


def compiled_case(case: Case, gpu: str, count: int) -> Case:
    """The case that compiles the programs of `case` for `count` GPUs of this name."""
    name = case.function.removeprefix(f"{HERE}.")
    function = f"{HERE}.compiling.{COMPILED[name]}" if name in COMPILED else case.function
    environment = case.environment | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", TARGET: f"{gpu}:{count}"}
    changed = {"function": function, "environment": environment, "deadline": DEADLINE, "alone": False}
    return dataclasses.replace(case, part="compiled", **changed)


def command(experiment: str, model: Sequence[str], layout: Sequence[str], may_lack: bool, **_) -> dict[str, Any]:
    """The step of an experiment's command; the arguments are those of `losses.compare`."""
    words = [*model, *BATCH, *RATE, *layout]
    try:
        request = parse(words, importlib.import_module(f"experiments.{experiment}").EXPERIMENT)
        run = resolved(request.run(request.devices_needed or 1, "bf16"), target()[0])
        run.validate()
        return compiled([step(run, f"experiments.{experiment}", layout=" ".join(words))])
    except ConfigError as error:
        if not may_lack:
            raise
        raise NotAvailable(str(error)) from None


def checkpoint() -> dict[str, Any]:
    """The step that resumes; reading and writing files needs no program of its own."""
    return command("gpt3", ["--precision", "fp32"], ONE_DEVICE, False)


def megajax(name: str) -> dict[str, Any]:
    """A step of `steps.megajax`."""
    make = {"training": "benchmarks.gpu_day.steps.make_looped"} if name.endswith(steps.LOOP) else {}
    return compiled([step(steps.run_of(name, _device()), name, **make)])


def plain(name: str) -> dict[str, Any]:
    """The same in plain JAX."""
    run = steps.run_of(name, _device())
    return compiled([step(run, f"{name}, plain JAX", training="benchmarks.plain_step.PlainStep", training_flags=False)])


def torch(name: str) -> dict[str, Any]:
    raise NotAvailable("PyTorch compiles on a GPU only")


def step(run: RunConfig, label: str, layout: str = "", **options) -> dict[str, Any]:
    """A row of a compiled step; `options` as of `compile_for`. Raises NotAvailable without the kernels that it takes."""
    if run.parallel.attention == "tokamax" and not tokamax_installed():
        raise NotAvailable(NO_TOKAMAX)
    gpu, _ = target()
    row = {"label": f"{label} {layout}".strip(), "seconds": None, "peak_gigabytes": None, "problem": None}
    start = time.perf_counter()
    try:
        found = compile_for(run, gpu, SECONDS, **options)
    except CompilerError as error:
        return row | {"problem": str(error)[:300], "seconds": time.perf_counter() - start}
    order, account = check(found["hlo"]), account_of(run, gpu, found["hlo"])
    return row | {
        "seconds": found["seconds"],
        "peak_gigabytes": found["memory"]["peak"] / 1e9,
        "predicted_milliseconds": 1e3 * account.seconds,
        "problem": f"its collectives would deadlock: {order.faults[0]}"[:300] if order.faults else None,
    }


def generation() -> dict[str, Any]:
    """The programs that continue texts: one for prompts, one for new tokens."""
    from experiments.gpt3 import EXPERIMENT
    from megajax.config.sample import SampleConfig
    from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run

    run = parse(["--precision", "fp32", *ONE_DEVICE], EXPERIMENT).run(1, "fp32")
    run = decoding_run(run, run.parallel)
    mesh = make_mesh(run.parallel, [_device()])
    decoder = Decoder(run, mesh, DecodeSizes(4, 8, 64), SampleConfig(temperature=0.0), seed=0)
    weights, rows = jax.eval_shape(decoder.weights, decoder.params_layout.shapes["params"]), []
    start = time.perf_counter()
    decoder.compile(weights)
    seconds = time.perf_counter() - start
    for name in ("prefill", "decode"):
        analysis = decoder.compiled(name).memory_analysis()
        peak = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
        rows.append({"label": name, "seconds": seconds / 2, "peak_gigabytes": peak / 1e9, "problem": None})
    return compiled(rows)


def _device() -> jax.Device:
    """One of the GPUs that are compiled for."""
    from megajax.runtime.compat import topologies

    gpu, count = target()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(gpu), topology=f"1x1x{count}")
    return topology.devices[0]

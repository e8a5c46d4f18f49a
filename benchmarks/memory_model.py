"""The memory model compared with XLA's buffer assignment: a grid of runs, compiled for H100s without any GPU.

python -m benchmarks.memory_model              compiles the grid (about fifteen minutes on two cores) and writes
                                               benchmarks/results/memory_model.json
python -m benchmarks.memory_model --missing    compiles the runs that the file does not have yet
python -m benchmarks.memory_model --show       compares the model with the file; compiles nothing

Needs pip install "megajax[dryrun]", and for the runs with cuDNN's attention its library, nvidia-cudnn-cu12. A step is
compiled, not run.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.options import Parser
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.pipeline.program import StepProgram
from megajax.plan.compiler import compile_for, compiler_versions, run_from_json
from megajax.schedules.errors import exit_code

RESULTS = pathlib.Path(__file__).parent / "results" / "memory_model.json"
GPU = "h100-80gb"
MODEL_22B = ModelConfig(name="22b", layers=48, hidden=6144, heads=64, vocabulary=51200, sequence_length=2048)


def _run(model: str | ModelConfig, mesh: tuple[int, int, int], microbatches: int, **options) -> RunConfig:
    """A run on (data, pipe, tensor) = mesh; `options` are ParallelConfig's, or precision. Ends as in Megatron-LM."""
    train = {name: options.pop(name) for name in ("precision", "matmul_dtype") if name in options}
    options = {"attention": "xla", "vocab_parallel": "tensor"} | options
    parallel = ParallelConfig(**dict(zip(("data", "pipe", "tensor"), mesh, strict=True)), **options)
    batch = microbatches * parallel.microbatch_size * parallel.data
    model = preset(model) if isinstance(model, str) else model
    return RunConfig(model, parallel, TrainConfig(global_batch_size=batch, **({"precision": "bf16"} | train)))


def _fused(model: str, mesh: tuple[int, int, int], microbatches: int, **options) -> RunConfig:
    """The same with megajax's defaults on an H100: cuDNN's attention, and ends over all stages."""
    return _run(model, mesh, microbatches, **({"attention": "cudnn", "vocab_parallel": "pipe"} | options))


GRID = [
    # the papers' large runs: 2104.04473 table 1, 2205.05198 table 5, and GPT-3 on 1,024 GPUs
    _run("gpt3-175b", (1, 8, 8), 64, chunks=3),
    _run("gpt3-175b", (8, 16, 8), 192, chunks=3),
    _run("megatron-145.6b", (24, 8, 8), 48, chunks=2, microbatch_size=2, recompute="full"),
    _run("megatron-310.1b", (15, 16, 8), 144, chunks=2, recompute="full"),
    _run("megatron-529.6b", (9, 35, 8), 280, chunks=3, recompute="full"),
    _run("megatron-529.6b", (1, 35, 8), 280, chunks=3),
    _run("megatron-1008b", (6, 64, 8), 512, schedule="1f1b", recompute="full"),
    _run("megatron-1008b", (1, 64, 8), 512, schedule="1f1b"),
    _run(MODEL_22B, (2, 1, 8), 1, microbatch_size=4),
    _run("megatron-76.1b", (32, 4, 8), 28, chunks=3, microbatch_size=2, recompute="full"),
    _run("megatron-39.1b", (32, 2, 8), 12, schedule="1f1b", microbatch_size=4, recompute="full"),
    _run("megatron-18.4b", (32, 1, 8), 4, microbatch_size=8, recompute="full"),
    # smaller ones: every schedule, recompute mode, and kind of model
    _run("megatron-7.5b", (32, 1, 4), 4, microbatch_size=4),
    _run("megatron-1.7b", (32, 1, 1), 4, microbatch_size=4, recompute="full"),
    _run("llama2-7b", (4, 4, 2), 16, chunks=2),
    _run("gpt3-6.7b", (2, 4, 4), 16, schedule="zb_h1"),
    _run("gpt3-13b", (2, 4, 4), 16, schedule="zb_v", chunks=2),
    _run("gpt3-13b", (1, 4, 4), 16, schedule="zb_1p_interleaved", chunks=2),
    _run("gpt3-13b", (1, 4, 8), 16, schedule="gpipe", recompute="full"),
    _run("gpt3-6.7b", (1, 4, 2), 16, schedule="1f1b", recompute="none"),
    _run("gpt3-13b", (1, 2, 4), 16, schedule="eager_1f1b", sequence_parallel=False),
    _run("gpt2-xl", (2, 4, 1), 16, chunks=2, microbatch_size=2),
    _run("gpt3-2.7b", (1, 2, 2), 8, chunks=2, precision="fp16", microbatch_size=2),
    _run("gpt3-6.7b", (1, 4, 2), 16, chunks=2, recompute="none"),
    _run("gpt3-6.7b", (1, 2, 4), 8, schedule="1f1b", recompute="none", microbatch_size=2),
    _run("llama2-7b", (2, 2, 4), 8, schedule="eager_1f1b", microbatch_size=2),
    _run("gpt3-13b", (1, 4, 4), 16, schedule="zb_h1", recompute="full"),
    _run("gpt2-large", (2, 2, 2), 8, chunks=2, microbatch_size=4, recompute="none"),
    _run("gpt3-175b", (1, 16, 8), 64, schedule="zb_v", chunks=2),
    _run("gpt3-13b", (1, 4, 8), 8, chunks=2, schedule="zb_1p_interleaved", recompute="full", microbatch_size=2),
    _run("megatron-18.4b", (4, 8, 2), 32, chunks=5),
    # cuDNN's attention, which keeps no scores
    _run("gpt3-175b", (1, 8, 8), 64, chunks=3, attention="cudnn", vocab_parallel="pipe"),
    _run("gpt3-6.7b", (1, 4, 2), 16, schedule="1f1b", recompute="none", attention="cudnn"),
    _run("llama2-7b", (4, 4, 2), 16, chunks=2, attention="cudnn"),
    _run("megatron-18.4b", (32, 1, 8), 4, microbatch_size=8, recompute="full", attention="cudnn"),
    _run("gpt3-13b", (2, 4, 4), 16, schedule="zb_v", chunks=2, attention="cudnn"),
    _run("megatron-7.5b", (32, 1, 4), 4, microbatch_size=4, recompute="none", attention="cudnn"),
    # rotary positions and gated MLPs; chunks of one block; ZeRO-1, fp8 and what recompute none keeps
    _fused("llama3-8b", (8, 4, 2), 8, chunks=4, zero=1, recompute="full"),
    _fused("llama2-7b", (4, 2, 2), 16, chunks=4, zero=1, recompute="full"),
    _fused("llama3.1-70b", (1, 4, 8), 16, chunks=20),
    _fused("llama3-8b", (1, 8, 2), 16, chunks=4, microbatch_size=2),
    _fused("llama2-7b", (1, 8, 1), 16, chunks=4, microbatch_size=2),
    _fused("llama3-8b", (1, 4, 2), 32, schedule="1f1b", matmul_dtype="fp8"),
    _fused("gpt3-13b", (1, 2, 4), 64, chunks=2, matmul_dtype="fp8"),
    _fused("gpt3-13b", (1, 2, 4), 64, chunks=2, recompute="none"),
    _fused("gpt3-6.7b", (1, 4, 2), 32, schedule="1f1b", recompute="none", microbatch_size=2),
]

# Runs that no term of the model was read from.
HELD_OUT = [
    _run("llama2-7b", (1, 4, 2), 8, chunks=2, microbatch_size=2),
    _run("gpt3-6.7b", (2, 4, 4), 8, chunks=2, microbatch_size=2, recompute="none"),
    _run("gpt3-13b", (2, 4, 4), 16, schedule="1f1b", microbatch_size=4),
    _run("gpt2-large", (4, 2, 1), 8, schedule="1f1b", microbatch_size=2),
    _run("gpt3-6.7b", (1, 4, 4), 8, schedule="zb_v", chunks=2, recompute="none"),
    _run("megatron-145.6b", (2, 16, 8), 64, chunks=5, microbatch_size=2),
    _run("megatron-529.6b", (4, 15, 8), 60, schedule="eager_1f1b", recompute="full"),
    _run("megatron-145.6b", (2, 16, 8), 64, chunks=5, microbatch_size=2, attention="cudnn", vocab_parallel="pipe"),
    _run("llama2-7b", (1, 4, 2), 8, chunks=2, microbatch_size=2, attention="cudnn"),
    _run("gpt3-13b", (2, 4, 4), 16, schedule="1f1b", microbatch_size=4, attention="cudnn"),
    _fused("llama3-8b", (1, 2, 4), 16, schedule="eager_1f1b", recompute="none", microbatch_size=2),
    _fused("gpt3-13b", (2, 2, 8), 16, chunks=2, zero=1, recompute="none"),
    _fused("llama3-8b", (1, 4, 2), 16, schedule="gpipe", recompute="full"),
    _fused("gpt3-2.7b", (1, 4, 2), 16, schedule="zb_h1", recompute="none"),
]


def measure(known: Sequence[dict] = ()) -> dict:
    """Compiles the grid, except the runs in the rows of `known`; a row is the run, XLA's bytes and seconds."""
    found = {run_from_json(row["run"]): row for row in known}
    versions = compiler_versions()
    rows = []
    for run in GRID + HELD_OUT:
        run.validate()
        if run not in found:
            result = compile_for(run, find_gpu(GPU))
            found[run] = {"jax": versions["jax"]} | {key: result[key] for key in ("memory", "arguments", "seconds")}
            print(describe(run), f"{result['memory']['peak'] / 1e9:.2f} GB, {result['seconds']:.0f} s", flush=True)
        rows.append(found[run] | {"held_out": run in HELD_OUT, "run": dataclasses.asdict(run)})
    return {"command": "python -m benchmarks.memory_model", "gpu": GPU, "versions": versions, "rows": rows}


def describe(run: RunConfig) -> str:
    """A run as one line."""
    parallel = run.parallel
    return (
        f"{run.model.name:<16} d{parallel.data:<3}p{parallel.pipe:<3}t{parallel.tensor} v{parallel.chunks} "
        f"b{parallel.microbatch_size} m{run.microbatches:<4}{parallel.schedule:<18}{parallel.recompute:<10}"
        f"{parallel.attention:<6}"
    )


def modelled(row: dict) -> dict[str, int]:
    """The model's bytes of a row's program. Programs compiled with jax before 0.12 merge no ticks."""
    run = run_from_json(row["run"])
    return bytes_per_device(run, slots=StepProgram.of(run).schedule_slots if row["jax"] < "0.12" else None)


def show(results: dict) -> None:
    """Prints measured and predicted peaks."""
    errors = {False: [], True: []}
    for row in results["rows"]:
        run, peak, predicted = run_from_json(row["run"]), row["memory"]["peak"], sum(modelled(row).values())
        error = predicted / peak - 1
        errors[row["held_out"]].append(abs(error))
        print(
            f"{describe(run)}XLA {peak / 1e9:6.2f}  model {predicted / 1e9:6.2f} GB {error:+6.1%}"
            f"{' held out' if row['held_out'] else ''}"
        )
    for name, some in (("all", errors[False] + errors[True]), ("held out", errors[True])):
        print(summary(name, some))


def summary(name: str, errors: Sequence[float]) -> str:
    """A line with the mean and the largest of some relative errors."""
    within, mean = sum(error <= 0.05 for error in errors), sum(errors) / len(errors)
    return f"{name}: {within} of {len(errors)} within 5%; mean {mean:.1%}, worst {max(errors):.1%}"


def write(results: dict) -> None:
    """Writes the results, a row a line."""
    rows = ",\n".join(f" {json.dumps(row)}" for row in results["rows"])
    RESULTS.write_text(f"{json.dumps(results | {'rows': []})[:-2]}\n{rows}\n]}}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; returns the exit code."""
    return exit_code(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="compare the model with the existing results")
    parser.add_argument("--missing", action="store_true", help="compile only the runs that the results do not have yet")
    options = parser.parse_args(arguments)
    if not options.show:
        RESULTS.parent.mkdir(exist_ok=True)
        known = json.loads(RESULTS.read_text())["rows"] if options.missing else ()
        write(measure(known))
    show(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    sys.exit(main())

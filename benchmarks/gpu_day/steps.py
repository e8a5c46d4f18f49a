"""Training steps on one device: measured, predicted from their compiled programs, and those of other programs."""

import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_day.outcomes import NotAvailable, Slow
from benchmarks.gpu_day.programs import Programs
from benchmarks.gpu_day.values import is_slow
from benchmarks.mfu_cases import batch_of
from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset

ROUNDS = 5
LOOP = " loop"  # ends the names of steps with a loop over blocks
LISTED = 25  # kernels


def run_of(name: str, device) -> RunConfig:
    """The run of a name: models of the sizes that fit one GPU, with its fastest attention."""
    from megajax.estimate.auto import resolved_layout
    from megajax.estimate.gpus import gpu_of
    from megajax.models.context import attention_choice

    change = dataclasses.replace
    llama, mixtral, gpt2 = preset("llama3-8b"), preset("mixtral-8x7b"), preset("gpt2-xl")
    mamba, latent = preset("mamba2-2.7b"), preset("deepseek-v2-lite")
    gpt3 = preset("gpt3-6.7b")  # h = 4096
    model, samples, microbatches = {
        "tiny": (preset("tiny"), 2, 4),
        "gpt2-xl": (change(gpt2, dropout=0.0), 8, 8),
        "h4096": (change(gpt3, name="h4096", layers=8), 4, 8),
        "llama3-8b": (change(llama, name="llama3-8b, 8 layers", layers=8, sequence_length=4096), 2, 8),
        "llama3-8b loop": (change(llama, name="llama3-8b, 8 layers in a loop", layers=8, sequence_length=4096), 2, 8),
        "mamba2-2.7b": (change(mamba, name="mamba2-2.7b, 16 layers", layers=16, sequence_length=2048), 4, 8),
        "deepseek-v2-lite": (change(latent, name="deepseek-v2-lite, 4 layers", layers=4, sequence_length=4096), 2, 8),
        "mixtral": (change(mixtral, name="mixtral-8x7b, 2 layers", layers=2, sequence_length=4096), 2, 8),
    }[name]
    precision = "bf16" if device.platform == "gpu" else "fp32"
    train = TrainConfig(global_batch_size=samples * microbatches, precision=precision)
    run = RunConfig(model, ParallelConfig(microbatch_size=samples), train)
    run.validate()
    run = resolved_layout(run, gpu_of(device))
    return change(run, parallel=change(run.parallel, attention=attention_choice(run, device).name))


def megajax(name: str) -> dict[str, Any]:
    """megajax's step: times, memory, and times by class, each with what its compiled program predicts."""
    import jax
    import numpy as np

    device = Programs().device
    from megajax.estimate.gpus import gpu_of
    from megajax.estimate.program_account import account_arguments, account_of
    from megajax.estimate.roofline import seconds_by_name
    from megajax.runtime.mesh import make_mesh
    from megajax.train.step import make_training

    run = run_of(name, device)
    make = make_looped if name.endswith(LOOP) else make_training
    training = make(run, make_mesh(run.parallel, [device]))
    batch = jax.device_put(batch_of(training), training.batch_sharding)
    state = training.init_state()
    compiled = training.compile_train_step(*training.step_shapes())
    hold = np.int32(0)

    def step(state):
        return compiled(state, batch, hold)[0]

    rounds, dispatch, state = _timed(step, state)
    profiled, state = _profile(step, state)
    text, gpu, analysis = compiled.as_text(), gpu_of(device), compiled.memory_analysis()
    predicted = account_of(run, gpu, text) if device.platform == "gpu" else None
    by_class, kernels = None, []
    if predicted and profiled:
        kernels = _kernels(profiled, _kinds(text), seconds_by_name(text, *account_arguments(run, gpu)))
        by_class = _by_class(kernels, predicted.account.seconds)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    sizes = (getattr(analysis, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    row = _row(run, "megajax", rounds, device) | {
        "predicted_milliseconds": predicted and 1e3 * predicted.seconds,
        "dispatch_milliseconds": 1e3 * dispatch,
        "peak_gigabytes": peak and peak / 1e9,
        "predicted_peak_gigabytes": (sum(sizes) - analysis.alias_size_in_bytes) / 1e9,
        "by_class": by_class,
        # Those that lose most against their prediction.
        "slow_kernels": sorted(kernels, key=lambda one: one["predicted"] - one["measured"])[:LISTED],
    }
    return checked(row)


def make_looped(run: RunConfig, mesh):
    """`make_training` of a step that unrolls no blocks: one device runs the loop and the kernels of several stages."""
    from megajax.pipeline import program
    from megajax.train.step import make_training

    program.UNROLLED_BLOCKS = 0  # of this process, which makes no other step
    return make_training(run, mesh)


def checked(row: dict[str, Any]) -> dict[str, Any]:
    """The result with a row; raises Slow if it took much longer than predicted."""
    if is_slow(row):
        ratio = row["milliseconds"] / row["predicted_milliseconds"]
        raise Slow(f"a step takes {ratio:.1f} times what its compiled program predicts", {"rows": [row]})
    return {"rows": [row]}


def plain(name: str) -> dict[str, Any]:
    """The same model's step as one would write it by hand in JAX."""
    import jax
    import jax.numpy as jnp

    device = Programs().device
    if device.platform != "gpu":
        raise NotAvailable("the step in plain JAX uses cuDNN's attention, which needs an NVIDIA GPU")
    from benchmarks.plain_step import PlainStep
    from megajax.runtime.mesh import make_mesh

    run = run_of(name, device)
    training = PlainStep(run, make_mesh(run.parallel, [device]))
    _, shapes = training.step_shapes()
    draw = lambda shape: jax.random.randint(jax.random.key(0), shape.shape, 0, run.model.vocabulary, jnp.int32)  # noqa: E731
    batch = {key: draw(shape) for key, shape in shapes.items()}
    state = training.init_state()
    compiled = training.compile_train_step(*training.step_shapes())
    rounds, _, _ = _timed(lambda state: compiled(state, batch)[0], state)
    return {"rows": [_row(run, "plain JAX", rounds, device)]}


def torch(name: str) -> dict[str, Any]:
    """The same model's step in PyTorch, under torch.compile."""
    device = Programs().device
    from benchmarks.peers import PEERS, run_peer

    run = run_of(name, device)
    # The peer needs the GPU's memory; this process has used none of it.
    answer = run_peer(PEERS["PyTorch, torch.compile"], sys.executable, [run], device.platform, ROUNDS)[0]
    if "error" in answer:
        raise NotAvailable(answer["error"][:300])
    return {"rows": [_row(run, "torch.compile", answer["rounds"], device)]}


def _timed(step, state):
    """Seconds of each of ROUNDS steps, and of the dispatch of one, after two that warm up."""
    import jax

    rounds, dispatches = [], []
    for _ in range(ROUNDS + 2):
        start_ = time.perf_counter()
        state = step(state)
        dispatches.append(time.perf_counter() - start_)
        jax.block_until_ready(state)
        rounds.append(time.perf_counter() - start_)
    return rounds[2:], statistics.median(dispatches[2:]), state


def _row(run: RunConfig, implementation: str, rounds: list[float], device) -> dict[str, Any]:
    from megajax.estimate.flops import causal_flops_per_step, flops_per_step
    from megajax.estimate.gpus import published_peak

    seconds, flops = statistics.median(rounds), flops_per_step(run)
    peak = published_peak(device.device_kind, run.train.precision) if device.platform == "gpu" else None
    model = run.model
    tokens = run.train.global_batch_size * model.sequence_length
    return {
        "label": f"{model.name}, {run.microbatches} microbatches of {run.parallel.microbatch_size}",
        "implementation": implementation,
        "milliseconds": 1e3 * seconds,
        "rounds": [1e3 * one for one in rounds],
        "predicted_milliseconds": None,
        "tokens_per_second": tokens / seconds,
        "teraflops": flops / seconds / 1e12,
        "mfu": peak and flops / seconds / peak,
        "mfu_causal": peak and causal_flops_per_step(run) / seconds / peak,
        "peak_gigabytes": None,
        "predicted_peak_gigabytes": None,
        "by_class": None,
    }


def _profile(step, state) -> tuple[dict[str, list[float]], Any]:
    """(seconds, executions) of each kernel in one step by its name in the program, from a profile of a GPU."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state = step(state)
            jax.block_until_ready(state)
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0])) if files else None
        planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")] if data else []
        found: dict[str, list[float]] = {}
        for line in (line for plane in planes for line in plane.lines if line.name.startswith("Stream")):
            for event in line.events:
                one = found.setdefault(dict(event.stats).get("hlo_op", "none"), [0.0, 0])
                one[0] += event.duration_ns / 1e9
                one[1] += 1
    return found, state


def _kernels(
    profiled: Mapping[str, Sequence[float]], kinds: Mapping[str, tuple[str, str]], expected: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The kernels of a profile with their classes, and what they take in a step, measured and predicted, in milliseconds."""
    rows = []
    for name, (seconds, count) in profiled.items():
        kind, scheduled = kinds.get(name, ("other", name))
        predicted = count * expected.get(scheduled, 0.0)
        numbers = {"executions": count, "measured": 1e3 * seconds, "predicted": 1e3 * predicted}
        rows.append({"name": name, "kind": kind} | numbers)
    return rows


def _by_class(kernels: Sequence[Mapping[str, Any]], predicted: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Milliseconds by class of kernel, measured and predicted."""
    measured = Counter()
    for kernel in kernels:
        measured[kernel["kind"]] += kernel["measured"]
    names = dict.fromkeys((*predicted, *measured))
    return {name: {"measured": measured[name], "predicted": 1e3 * predicted[name]} for name in names}


def _kinds(text: str) -> dict[str, tuple[str, str]]:
    """The class of each kernel of a compiled program, and its name when XLA scheduled it, by its name."""
    from megajax.estimate.hlo_parser import computations, scheduling_name
    from megajax.estimate.kernels import kernel_of

    modules, found = computations(text)[0], {}
    for lines in modules.values():
        types = {line.name: line.type for line in lines}
        for line in lines:
            if (kernel := kernel_of(line, types, modules)) is not None:
                found[line.name] = kernel.kind, scheduling_name(line)
    return found

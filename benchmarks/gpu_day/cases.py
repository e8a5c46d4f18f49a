"""The cases of `python -m benchmarks.gpu_day`: what each runs, its deadline, and whether it needs the GPUs for itself."""

import dataclasses
import itertools
from collections.abc import Iterator

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset

HERE = "benchmarks.gpu_day"
STEPS = 30
MOST_JOBS = 6  # cases of small models that share the GPUs
# fp32 on a GPU is TF32 unless this is set: JAX's default, and not a difference of the program.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
# Largest difference between a loss and the CPU's of the same precision, over STEPS steps. On one CPU, losses in bf16 by two
# kernels of attention are 1e-4 apart, and 3e-3 from fp32's. The matmuls of fp8 are compared with bf16's. Where 16 bits round
# differently, tokens may go to other experts.
LIMITS = {"fp32": 2e-4, "tf32": 2e-3, "bf16": 2e-3, "fp16": 2e-3, "fp8": 5e-2, "experts": 5e-3}
LLAMA = "--norm rmsnorm --activation swiglu --positions rotary --kv-heads 2 --no-tied-embeddings"
# Options of experiments.gpt3 that change how a step is computed and not what.
SAME_LOSSES = (
    "--recompute none",
    "--recompute full",
    "--zero 3",
    "--schedule 1f1b",
    "--schedule gpipe",
    "--schedule zb_h1",
    "--microbatch-size 4",
    "--offload-activations",
)
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b:2", "looped_bfs:2", "zb_h1", "zb_h2", "zb_v:2")
SCHEDULES += ("zb_1p_interleaved:2", "dualpipe_v:2")


@dataclasses.dataclass(frozen=True)
class Case:
    """One case, which runs in a process of its own.

    Attributes:
      name: unique.
      part: losses, kernels, generation, checkpoint, rates or steps (see `page`).
      function: its full name; it returns the case's result.
      arguments: of the function, plain values.
      environment: variables of the process, besides its parent's.
      deadline: seconds after which the process is killed, and the case has hung.
      alone: whether it is timed, and so runs without other cases beside it.
    """

    name: str
    part: str
    function: str
    arguments: dict
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    deadline: float = 120.0
    alone: bool = False


def cases(gpus: int, tiny: bool) -> list[Case]:
    """All cases for this number of devices; `tiny`: of sizes that CPU devices run in a few minutes."""
    return [*_losses(gpus, tiny), *_programs(), *_kernels(tiny), *_steps(tiny), *_rates(tiny), *_peers(tiny)]


def _losses(gpus: int, tiny: bool) -> Iterator[Case]:
    """Runs of the experiments' commands: their losses must be those of one CPU device."""
    one = "--data 1 --pipe 1 --tensor 1"
    yield _loss_case("gpt fp32", "gpt3", "fp32", one, exact=True)
    yield _loss_case("gpt tf32, the default of JAX for fp32", "gpt3", "fp32", one, limit="tf32")
    for precision, attention in itertools.product(("bf16", "fp16"), ("xla", "tokamax", "cudnn")):
        options = f"{one} --attention {attention}"
        yield _loss_case(f"gpt {precision} {attention}", "gpt3", precision, options, may_lack=attention != "xla")
    if not tiny:
        for options in SAME_LOSSES:
            yield _loss_case(f"gpt fp32 {options}", "gpt3", "fp32", f"{one} {options}", exact=True)
        yield _loss_case("gpt bf16, matmuls in fp8", "gpt3", "bf16", f"{one} --matmul-dtype fp8", limit="fp8")
    same = {
        "documents": "--reset-attention-mask",
        "llama": LLAMA,
        "sliding window": f"{LLAMA} --sliding-window 32",
    }
    for name, options in same.items():
        yield _loss_case(f"{name} fp32", "gpt3", "fp32", one, options, exact=True)
        yield _loss_case(f"{name} bf16", "gpt3", "bf16", one, options)
    for name in ("moe", "bert"):
        yield _loss_case(f"{name} fp32", name, "fp32", one, exact=True)
        yield _loss_case(f"{name} bf16", name, "bf16", one, limit="experts" if name == "moe" else None)
    for mesh, schedule in itertools.product(_meshes(gpus), SCHEDULES):
        name, _, chunks = schedule.partition(":")
        sizes = dict(zip(("data", "pipe", "tensor"), mesh, strict=True)) | {"chunks": int(chunks or 1)}
        if _legal(ParallelConfig(**sizes, schedule=name, microbatch_size=2)):
            options = " ".join(f"--{field} {size}" for field, size in sizes.items()) + f" --schedule {name}"
            yield _loss_case(f"gpt fp32 {options}", "gpt3", "fp32", options, exact=True)


def _meshes(gpus: int) -> list[tuple[int, int, int]]:
    """(data, pipe, tensor) of all GPUs, with a pipeline."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    return [(gpus // p // t, p, t) for p in sizes for t in sizes if p > 1 and p * t in sizes and p <= 4 and t <= 4]


def _legal(parallel: ParallelConfig) -> bool:
    """Whether the tiny model can run so."""
    try:
        RunConfig(preset("tiny"), parallel, TrainConfig(global_batch_size=16)).validate()
    except ConfigError:
        return False
    return True


def _loss_case(name, experiment, precision, layout, model="", *, exact=False, limit=None, may_lack=False) -> Case:
    """A run of an experiment, and the same model on one CPU device, in the same precision."""
    arguments = {
        "experiment": experiment,
        "model": f"--precision {precision} {model}".split(),
        "layout": layout.split(),
        "steps": STEPS,
        "may_lack": may_lack,
        "limit": LIMITS[limit or precision],
    }
    return Case(f"losses: {name}", "losses", f"{HERE}.losses.compare", arguments, EXACT if exact else {})


def _programs() -> Iterator[Case]:
    """Generation, and a checkpoint that a CPU wrote."""
    yield Case("generation: greedy texts", "generation", f"{HERE}.losses.generation", {}, EXACT)
    yield Case("checkpoint: from a CPU, resumed", "checkpoint", f"{HERE}.losses.checkpoint", {}, EXACT)


def _kernels(tiny: bool) -> Iterator[Case]:
    """Each kernel against numpy in fp64."""
    kinds = {"attention": ("attention", "cudnn", "tokamax", "xla"), "grouped": ("grouped matmul", "pallas", "xla")}
    for function, (title, *names) in kinds.items():
        for name in names:
            arguments = {"name": name, "tiny": tiny}
            yield Case(f"kernels: {title} {name}", "kernels", f"{HERE}.kernels.{function}", arguments, EXACT)


def _rates(tiny: bool) -> Iterator[Case]:
    """Rates of matmuls, attention, grouped matmuls and memory, and of links if there are several GPUs."""
    for name in ("matmul", "attention", "grouped", "bandwidth"):
        yield Case(f"rates: {name}", "rates", f"{HERE}.rates.{name}", {"tiny": tiny}, deadline=100, alone=True)


def _steps(tiny: bool) -> Iterator[Case]:
    """Training steps, measured and predicted."""
    for name in ("tiny",) if tiny else ("h4096", "llama3-8b", "mixtral", "gpt2-xl"):
        yield Case(f"steps: {name}", "steps", f"{HERE}.steps.megajax", {"name": name}, deadline=150, alone=True)


def _peers(tiny: bool) -> Iterator[Case]:
    """The steps of other programs, of the same models."""
    for name in ("tiny",) if tiny else ("h4096", "gpt2-xl"):
        yield Case(
            f"steps: {name}, plain JAX", "steps", f"{HERE}.steps.plain", {"name": name}, deadline=100, alone=True
        )
        yield Case(f"steps: {name}, PyTorch", "steps", f"{HERE}.steps.torch", {"name": name}, deadline=150, alone=True)

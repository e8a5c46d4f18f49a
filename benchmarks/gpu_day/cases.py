"""The cases of `python -m benchmarks.gpu_day`: what each runs, its deadline, and whether it needs the GPUs for itself."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset

HERE = "benchmarks.gpu_day"
STEPS, TINY_STEPS = 30, 10
TINY_DEADLINE = 400  # seconds of a case: eight CPU devices may share one busy core
MOST_JOBS = 6  # cases of small models that share the GPUs
# fp32 on a GPU is TF32 unless this is set: JAX's default, and not a difference of the program.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
# Largest difference between a loss and the CPU's of the same precision, over STEPS steps. On one CPU, losses in bf16 by two
# kernels of attention are 1e-4 apart, and 3e-3 from fp32's. The matmuls of fp8 are compared with bf16's. Where 16 bits round
# differently, tokens may go to other experts.
LIMITS = {"fp32": 2e-4, "tf32": 2e-3, "bf16": 2e-3, "fp16": 2e-3, "fp8": 5e-2, "experts": 5e-3}
LLAMA = "--norm rmsnorm --activation swiglu --positions rotary --kv-heads 2 --no-tied-embeddings"
MIXER = "--norm rmsnorm --positions none --recurrent-heads 8 --recurrent-head-size 16 --recurrent-chunk 32"
MODELS = {
    "documents": "--reset-attention-mask",
    "llama": LLAMA,
    "sliding window": f"{LLAMA} --sliding-window 32",
    "sinks": f"{LLAMA} --sliding-window 32 --attention-sinks",
    "latent attention": "--norm rmsnorm --activation swiglu --positions rotary --no-tied-embeddings --no-qkv-biases"
    " --head-size 32 --kv-latent 48 --query-latent 64 --rotary-head-size 16 --value-head-size 32",
    "mamba2": f"{MIXER} --mixer mamba2 --recurrent-groups 2 --recurrent-state 16",
    "gated delta rule": f"{MIXER} --mixer gated_delta --recurrent-groups 4 --recurrent-state 32",
}
TINY_MODELS = ("documents", "llama", "sliding window")
ATTENTIONS = ("xla", "tokamax", "cudnn")  # values of --attention
OPTIONAL = ("cudnn", "tokamax")  # those that a machine may lack
STEPS_OF = ("h4096", "llama3-8b", "llama3-8b loop", "mixtral", "gpt2-xl", "mamba2-2.7b", "deepseek-v2-lite")
GROUPED = ("xla", "pallas")  # implementations of grouped matmuls
# Layouts of one device, which change how a step is computed and not what.
SAME_LOSSES = (
    *("--recompute none", "--recompute full", "--zero 3", "--schedule 1f1b", "--schedule gpipe", "--schedule zb_h1"),
    *("--microbatch-size 4", "--offload-activations"),
)
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b:2", "looped_bfs:2", "zb_h1", "zb_h2", "zb_v:2")
SCHEDULES += ("zb_1p_interleaved:2", "dualpipe_v:2")
# On several devices, besides every schedule on every mesh: the experiment, its model, and fields of the layout.
LAYOUTS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    *(("gpt3", "tiny", {"zero": level}) for level in (0, 1, 3)),
    *(("gpt3", "tiny", {"pipe": 2, "zero": 3, "recompute": mode}) for mode in ("none", "selective", "full")),
    ("gpt3", "tiny", {"context": 2}),
    ("gpt3", "tiny", {"tensor": 2, "tensor_overlap": "ring"}),
    *(("moe", "moe-tiny", {"expert": 2, "expert_dispatch": one}) for one in ("gather", "all_to_all")),
    ("moe", "moe-tiny", {"pipe": 2, "expert": 2, "expert_dispatch": "all_to_all", "schedule": "zb_h1"}),
)
# With --tiny: a schedule of each kind, and ZeRO.
TINY_LAYOUTS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("gpt3", "tiny", {"pipe": 2, "schedule": "1f1b"}),
    ("gpt3", "tiny", {"pipe": 2, "tensor": 2, "chunks": 2, "schedule": "zb_v"}),
    ("gpt3", "tiny", {"zero": 3}),
    ("moe", "moe-tiny", {"expert": 2, "expert_dispatch": "all_to_all"}),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One case, which runs in a process of its own.

    Attributes:
      name: unique.
      part: losses, kernels, generation, checkpoint, rates, steps or compiled (see `page`).
      function: its full name; it returns the case's result.
      arguments: of the function, plain values.
      environment: variables of the process, besides its parent's.
      deadline: seconds after which the process is killed, and the case has hung.
      alone: whether it is timed, and so runs without other cases beside it.
      one_device: whether its process sees one of the devices only.
    """

    name: str
    part: str
    function: str
    arguments: dict
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    deadline: float = 200.0
    alone: bool = False
    one_device: bool = False


def cases(gpus: int, tiny: bool) -> list[Case]:
    """All cases for this number of devices; `tiny`: fewer, of sizes that CPU devices run in a few minutes."""
    found = [*_losses(tiny), *_layouts(gpus, tiny), *_programs(tiny), *_timed(tiny)]
    return list(map(_tiny, found)) if tiny else found


def _tiny(case: Case) -> Case:
    """The case with fewer steps, and time for busy cores."""
    steps = {"steps": TINY_STEPS} if "steps" in case.arguments else {}
    return dataclasses.replace(case, arguments=case.arguments | steps, deadline=TINY_DEADLINE)


def _losses(tiny: bool) -> Iterator[Case]:
    """Runs of the experiments' commands on one device: their losses must be those of one CPU device."""
    yield _loss_case("gpt fp32", "gpt3", "fp32", exact=True)
    for precision, attention in itertools.product(("bf16",) if tiny else ("bf16", "fp16"), ATTENTIONS):
        name, may_lack = f"gpt {precision} {attention}", attention in OPTIONAL
        yield _loss_case(name, "gpt3", precision, f"--attention {attention}", may_lack=may_lack)
    for name in ("moe", "bert"):
        yield _loss_case(f"{name} fp32", name, "fp32", exact=True)
        if not tiny:
            yield _loss_case(f"{name} bf16", name, "bf16", limit="experts" if name == "moe" else None)
    for name, options in MODELS.items():
        if name in TINY_MODELS or not tiny:
            yield _loss_case(f"{name} fp32", "gpt3", "fp32", "", options, exact=True)
        if not tiny:
            yield _loss_case(f"{name} bf16", "gpt3", "bf16", "", options)
    if not tiny:
        yield _loss_case("gpt tf32, the default of JAX for fp32", "gpt3", "fp32", limit="tf32")
        for options in SAME_LOSSES:
            yield _loss_case(f"gpt fp32 {options}", "gpt3", "fp32", options, exact=True)
        # With XLA's attention blocks are in a loop, where kernels of gated MLPs and norms run.
        yield _loss_case("llama bf16 in a loop", "gpt3", "bf16", "--attention xla", LLAMA)
        for name in ("documents", "sliding window", "sinks"):
            yield _loss_case(f"{name} bf16 tokamax", "gpt3", "bf16", "--attention tokamax", MODELS[name], may_lack=True)
        yield _loss_case("gpt bf16, matmuls in fp8", "gpt3", "bf16", "--matmul-dtype fp8", limit="fp8")
        sent = "--expert-dispatch-dtype fp8"  # what is rounded up on one device may be rounded down on the other
        yield _loss_case("moe fp32, tokens in fp8", "moe", "fp32", "", sent, exact=True, limit="tf32")
        multiplied = "--expert-matmul-dtype fp8"  # on a CPU of rounded numbers
        yield _loss_case("moe fp32, experts in fp8", "moe", "fp32", "", multiplied, exact=True, limit="tf32")


def _layouts(gpus: int, tiny: bool) -> Iterator[Case]:
    """The same on all devices, if there are several."""
    every = [("gpt3", "tiny", {**mesh, **_schedule(one)}) for mesh, one in itertools.product(_meshes(gpus), SCHEDULES)]
    for experiment, model, fields in TINY_LAYOUTS if tiny else [*every, *LAYOUTS]:
        shared = fields.get("pipe", 1) * fields.get("tensor", 1) * fields.get("context", 1)
        layout = {"data": gpus // shared, "pipe": 1, "tensor": 1} | dict(fields)
        if gpus > 1 and gpus % shared == 0 and _legal(preset(model), ParallelConfig(**layout, microbatch_size=2)):
            words = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in layout.items())
            name = f"{'gpt' if experiment == 'gpt3' else experiment} fp32 {words}"
            yield dataclasses.replace(_loss_case(name, experiment, "fp32", words, exact=True), one_device=False)


def _meshes(gpus: int) -> list[dict[str, int]]:
    """Meshes of all GPUs with a pipeline."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    pairs = [(p, t) for p in sizes for t in sizes if p > 1 and p * t in sizes and p <= 4 and t <= 4]
    return [{"pipe": p, "tensor": t} for p, t in pairs]


def _schedule(words: str) -> dict[str, Any]:
    name, _, chunks = words.partition(":")
    return {"chunks": int(chunks or 1), "schedule": name}


def _legal(model: Any, parallel: ParallelConfig) -> bool:
    """Whether the small model can run so."""
    try:
        RunConfig(model, parallel, TrainConfig(global_batch_size=16)).validate()
    except ConfigError:
        return False
    return True


def _loss_case(name, experiment, precision, layout="", model="", *, exact=False, limit=None, may_lack=False) -> Case:
    """A run of an experiment on one device, and the same model on one CPU device, in the same precision."""
    arguments = {
        "experiment": experiment,
        "model": f"--precision {precision} {model}".split(),
        "layout": (layout if "--pipe" in layout else f"--data 1 --pipe 1 --tensor 1 {layout}").split(),
        "steps": STEPS,
        "may_lack": may_lack,
        "limit": LIMITS[limit or precision],
    }
    environment = EXACT if exact else {}
    return Case(f"losses: {name}", "losses", f"{HERE}.losses.compare", arguments, environment, one_device=True)


def _programs(tiny: bool) -> Iterator[Case]:
    """Generation, a checkpoint that a CPU wrote, and each kernel against numpy in fp64."""
    for part, title in {"generation": "greedy texts", "checkpoint": "from a CPU, resumed"}.items():
        yield Case(f"{part}: {title}", part, f"{HERE}.losses.{part}", {}, EXACT, one_device=True)
    for function, title, names in (("attention", "attention", ATTENTIONS), ("grouped", "grouped matmul", GROUPED)):
        for name in names:
            call, arguments = f"{HERE}.kernels.{function}", {"name": name, "tiny": tiny}
            yield Case(f"kernels: {title} {name}", "kernels", call, arguments, EXACT, one_device=True)
    for name in ("norms", "gated"):
        call = f"{HERE}.block_kernels.{name}"
        yield Case(f"kernels: {name}", "kernels", call, {"tiny": tiny}, EXACT, one_device=True)


def _timed(tiny: bool) -> Iterator[Case]:
    """Training steps measured and predicted; rates of kernels, memory and links; the same steps of other programs."""

    def case(part: str, title: str, function: str, deadline: float, **arguments) -> Case:
        return Case(f"{part}: {title}", part, f"{HERE}.{part}.{function}", arguments, deadline=deadline, alone=True)

    for name in ("tiny",) if tiny else STEPS_OF:
        yield case("steps", name, "megajax", 150, name=name)
    for name in ("matmul", "attention", "grouped", "blocks", "bandwidth"):
        yield case("rates", name, name, 200, tiny=tiny)
    for name in ("tiny",) if tiny else ("h4096", "gpt2-xl"):
        yield case("steps", f"{name}, plain JAX", "plain", 100, name=name)
        yield case("steps", f"{name}, PyTorch", "torch", 150, name=name)
    yield case("rates", "calibration", "calibration", 300, tiny=tiny)

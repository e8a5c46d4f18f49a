"""The layouts of a model on a cluster, with their memory and time: which fit, and which is fastest.

`search` is exhaustive: all combinations of the values that `layouts.FIELDS` declares and the question asks for. Layouts
that `RunConfig.validate` refuses are left out, memory is counted (`estimate/memory.py`), and layouts that fit are timed
(`estimate/step_time.py`). There are no heuristics: 2104.04473's takeaways must follow from the estimates, and `explain.py`
shows whether they do. The planner's commands find the same layouts without pricing all of them (`best.py`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, option
from megajax.estimate import model_costs
from megajax.estimate.auto import placements
from megajax.estimate.error_bars import comparison_bar
from megajax.estimate.expert_dispatch import with_expert_dispatch
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Gpu, with_attention
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.estimate.step_time import StepTime, step_time
from megajax.pipeline.program import StepProgram
from megajax.plan.layouts import Fields, Filter, layouts, passes, usual_filters
from megajax.schedules.registry import search_order

NEAREST = 64  # numbers of GPUs below and above that are tried where none is legal
# Share of the usable memory that predicted peaks leave free. The worst error of `benchmarks.memory_model --show` is 4.3%.
MEMORY_MARGIN = 0.05
DIVISORS = "a --global-batch-size with more divisors in common"
EIGHT_BITS = (8, 9)  # the least compute capability with such tensor cores
# The attributes of `Question` that hold the values to consider of a field, which is also an option of the command line.
CHOICES = {
    "microbatches": "microbatch_size",
    "schedules": "schedule",
    "recomputes": "recompute",
    "zero": "zero",
    "context": "context",
    "expert": "expert",
    "expert_tensor": "expert_tensor",
}


# Fields of which all declared values are considered, but for those that `layouts.usual_filters` narrows.
FOLLOWING = ("context_exchange", "pipe", "data", "expert_dispatch", "chunks", "pipeline_layout", "axis_order")


@dataclasses.dataclass(frozen=True)
class Question:
    """A model, a cluster, and the choices to search over.

    Attributes:
      model: configuration of any model with an estimate of its costs.
      global_batch: samples in a step.
      tensor_sizes: tensor degrees to consider; larger than a host is legal and slow.
      zero: levels of ZeRO to consider.
      context: degrees of context parallelism to consider; None: all that are declared.
      expert: degrees of expert parallelism to consider; None: all that divide the model's experts.
      expert_tensor: devices that split each expert's matrices, 1 or None, those of tensor; None: both.
      vocab_parallel: devices that share embedding and head, "pipe" or (as in Megatron-LM) "tensor"; "auto": the better one
        for each layout.
      attention: auto, xla, cudnn or tokamax, as for a run.
      fp8: whether to consider blocks' matmuls in 8 bits too; of a model with experts theirs, and what is sent to them.
      memory_margin: share of the usable memory that a layout must leave free to fit, since predictions have errors.
      optimizer, ema_decay: as of `TrainConfig`, for the memory and the time of the update.
      freeze: as `TrainConfig.freeze`.
      also: further fields of `layouts.FIELDS` to choose, e.g. "axis_order"; all their declared values are considered.
    """

    model: Any
    gpus: int
    gpu: Gpu
    global_batch: int
    precision: str = "bf16"
    schedules: Sequence[str] = dataclasses.field(default_factory=search_order)
    recomputes: Sequence[str] = ("none", "selective", "full")
    microbatches: Sequence[int] = (1, 2, 4, 8, 16)
    tensor_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    sequence_parallel: bool = True
    zero: Sequence[int] = (0,)
    context: Sequence[int] | None = (1,)
    expert: Sequence[int] | None = None
    expert_tensor: Sequence[int | None] | None = None
    vocab_parallel: str = "pipe"
    attention: str = "auto"
    fp8: bool = False
    memory_margin: float = MEMORY_MARGIN
    optimizer: str = "adamw"
    ema_decay: float | None = None
    freeze: tuple[str, ...] = ()
    also: Sequence[str] = ()

    @property
    def choices(self) -> Mapping[str, Sequence | None]:
        """The fields of a layout that are searched, each with the values to consider; None: all that are declared."""
        asked = {field: getattr(self, name) for name, field in CHOICES.items()}
        return {
            "tensor": self.tensor_sizes,
            **asked,
            **dict.fromkeys((*FOLLOWING, *self.also)),
        }

    @property
    def memory_limit(self) -> float:
        """Bytes that the predicted peak of a layout that fits may have."""
        return usable_bytes(self.gpu) * (1 - self.memory_margin)

    @property
    def resolved_attention(self) -> str:
        """The attention that runs on this GPU: "xla", "cudnn" or "tokamax"; raises as `with_attention`."""
        return with_attention(self.base, self.gpu).parallel.attention

    @property
    def base(self) -> RunConfig:
        """The run with the options that are not searched."""
        parallel = ParallelConfig(
            vocab_parallel=self.vocab_parallel, attention=self.attention, sequence_parallel=self.sequence_parallel
        )
        train = TrainConfig(
            global_batch_size=self.global_batch,
            precision=self.precision,
            optimizer=self.optimizer,
            ema_decay=self.ema_decay,
            freeze=self.freeze,
        )
        return RunConfig(self.model, parallel, train)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with its memory and time; `time` is None if it does not fit and was not timed."""

    question: Question
    run: RunConfig
    memory: dict[str, int]
    time: StepTime | None

    @property
    def peak(self) -> int:
        """Bytes at the peak on the device that holds most."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.time is not None

    @property
    def is_tight(self) -> bool:
        """Whether it might not fit after all, if its prediction is as wrong as the worst known one."""
        return self.peak > usable_bytes(self.question.gpu) * (1 - MEMORY_MARGIN)

    @property
    def mesh(self) -> tuple[int, int, int]:
        """(tensor, pipe, data)."""
        return self.run.parallel.tensor, self.run.parallel.pipe, self.run.parallel.data

    @property
    def teraflops(self) -> float:
        """Model TFLOP/s of a GPU."""
        return flops_per_step(self.run) / self.time.total / self.question.gpus / 1e12

    @property
    def utilisation(self) -> float:
        """MFU: model FLOPs over time over the published dense peak."""
        return self.teraflops * 1e12 / self.question.gpu.peak(self.question.precision)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all GPUs train on in a second."""
        return self.run.train.global_batch_size * model_costs(self.run.model).sequence_length / self.time.total

    def days(self, tokens: float) -> float:
        """Days to train on this number of tokens."""
        return tokens / self.tokens_per_second / 86400


def usable_bytes(gpu: Gpu) -> float:
    """Memory that a step may use."""
    return gpu.memory * USABLE_SHARE


class NoLayout(ConfigError):
    """No layout is legal; the message says what to change.

    `narrowed`: one would be, without an option that narrows the search.
    """

    def __init__(self, message: str, narrowed: bool):
        super().__init__(message)
        self.narrowed = narrowed


def search(question: Question) -> list[Candidate]:
    """All legal layouts, those that fit first, fastest first; then those that do not, smallest first.

    Raises:
      NoLayout: there is no legal layout at all.
    """
    question.gpu.peak(question.precision)  # raises if the GPU does not support it
    found = [fastest_placement(question, run) for run in _runs(question)]
    if not found:
        raise no_layout(question)
    return sorted(found, key=order)


def order(one: Candidate) -> tuple:
    """Sorts candidates: those that fit by time, of ties less memory first, then the simpler schedule; others by memory."""
    peak, schedule = one.peak, one.question.schedules.index(one.run.parallel.schedule)
    return one.time is None, one.time.total if one.time else peak, peak, schedule


def no_layout(question: Question) -> NoLayout:
    """Why no layout is legal, and what to pass instead: without a narrower choice, or for the nearest numbers of GPUs."""
    model, gpus, batch = question.model, question.gpus, question.global_batch
    text = f"no layout of {model.name} over {gpus} GPUs takes a global batch of {batch}"
    usual = Question(model, gpus, question.gpu, batch)
    for name, field in (CHOICES | {"precision": "precision"}).items():
        value, default = getattr(question, name), getattr(usual, name)
        if value != default and next(_runs(dataclasses.replace(question, **{name: default})), None):
            words = [value] if isinstance(value, str) else ["tensor" if one is None else str(one) for one in value]
            shown = f"{option(field)} {' '.join(words)}"
            return NoLayout(f"{text} with {shown}: omit {option(field)}, or pass it other values.", narrowed=True)
    counts = (gpus + sign * away for away in range(1, NEAREST + 1) for sign in (-1, 1))
    legal = (count for count in counts if count > 0 and next(_runs(dataclasses.replace(question, gpus=count)), None))
    near = " or ".join(map(str, sorted(itertools.islice(legal, 2))))
    remedy = f"--gpus {near}, or" if near else "a --gpus and"
    return NoLayout(f"{text}: pass {remedy} {DIVISORS}.", narrowed=False)


def fitting(question: Question) -> Iterable[RunConfig]:
    """The legal runs that fit, in no order, found one by one and not timed."""
    runs = (placed for run in _runs(question) for placed in placements(run))
    return (run for run in runs if sum(bytes_per_device(run).values()) <= question.memory_limit)


def fastest_placement(question: Question, run: RunConfig) -> Candidate:
    """The run with embedding and head where it is fastest, of those that fit; if neither does, where it is smallest.

    They take the least memory split over pipe and tensor: if that does not fit, the other placement does not either.
    """
    smallest, *others = placements(run)
    best = _evaluate(question, smallest)
    for placed in others if best.time else ():
        best = min(best, _evaluate(question, placed), key=lambda one: one.time.total if one.time else math.inf)
    return best


def _evaluate(question: Question, run: RunConfig) -> Candidate:
    """One layout; it is timed if it fits."""
    memory = bytes_per_device(run)
    time = step_time(run, question.gpu) if sum(memory.values()) <= question.memory_limit else None
    return Candidate(question, run, memory, time)


def _runs(question: Question) -> Iterator[RunConfig]:
    """Every legal run; `vocab_parallel` may be auto."""
    for base in bases(question):
        for fields in layouts(base, question.gpus, filters(question)):
            if (run := legal_run(question, base, fields)) is not None:
                yield run


def bases(question: Question) -> list[RunConfig]:
    """The run with the options that are not searched, with each type of the blocks' matmuls, or of what experts are sent.

    Raises:
      ConfigError: a kernel of attention, or matmuls in 8 bits, are asked for and not supported.
    """
    run, gpu = question.base, question.gpu
    with_attention(run, gpu)
    if not question.fp8:
        return [run]
    if (gpu.compute_capability or (0, 0)) < EIGHT_BITS:
        raise ConfigError(f"fp8, but {gpu.name} has no tensor cores for it: omit --fp8.")
    sent, multiplied = {"expert_dispatch_dtype": "fp8"}, {"expert_matmul_dtype": "fp8"}
    choices = [sent, multiplied, sent | multiplied] if getattr(run.model, "experts", 0) else [{"matmul_dtype": "fp8"}]
    eight = [dataclasses.replace(run, train=dataclasses.replace(run.train, **fields)) for fields in choices]
    for one in eight:
        one.train.validate()
    return [run, *eight]


def filters(question: Question) -> dict[str, Filter]:
    """For each field that varies, the filter of those values that the question asks for."""

    def asked(name: str, declared: Sequence, layout: Fields) -> Sequence:
        values = choices[name]
        return declared if values is None else [value for value in values if value in declared]

    choices = question.choices
    found: dict[str, Filter] = {name: functools.partial(asked, name) for name in choices}
    narrowed = usual_filters(question.gpu.host_size)
    return found | {name: one for name, one in narrowed.items() if name not in question.also}


def legal_run(question: Question, base: RunConfig, fields: Fields) -> RunConfig | None:
    """The run with these fields of its layout, with attention and dispatch resolved; None if it is not legal."""
    dispatch = {} if fields["expert"] > 1 else {"expert_dispatch": "gather"}
    if dispatch and base.train.expert_dispatch_dtype:  # nothing is sent
        return None
    run = base.with_layout(**fields | dispatch)
    if not passes(run.parallel.validate, run.validate_together):  # its model and training are legal by themselves
        return None
    if "context" in run.parallel.rings and not StepProgram.of(run).paired:  # see `pipeline.device_checks`
        return None
    attention = attention_of(base, question.gpu, run.parallel.attention, run.parallel.ring_ranks)
    return attention and with_expert_dispatch(run.with_layout(attention=attention), question.gpu)


@functools.lru_cache(maxsize=256)  # a search asks thousands of times
def attention_of(base: RunConfig, gpu: Gpu, requested: str, ranks: int) -> str | None:
    """The attention that runs, whose products are split between so many ranks; None if it is not supported."""
    try:
        return with_attention(
            base.with_layout(attention=requested, context=ranks, context_exchange="ring"), gpu
        ).parallel.attention
    except ConfigError:
        return None


def best_by(candidates: Iterable[Candidate], key) -> dict:
    """The first, so the best, candidate of each group; `key(candidate)` is the group."""
    groups: dict = {}
    for candidate in candidates:
        groups.setdefault(key(candidate), candidate)
    return groups


def is_tie(one: Candidate, fastest: Candidate) -> bool:
    """Whether `one` is slower than `fastest` by no more than comparisons of two layouts are off by."""
    bar = comparison_bar(one.run.parallel, fastest.run.parallel)
    return one.time.total <= (1 + bar) * fastest.time.total

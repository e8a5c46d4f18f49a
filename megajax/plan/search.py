"""Every layout of a model on a cluster, with its memory and time: which fit, and which is fastest.

The search is exhaustive: tensor, pipe and data sizes whose product is the number of GPUs, degrees of expert parallelism,
chunks, microbatch sizes, schedules, recompute modes, and levels of ZeRO. Layouts that `RunConfig.validate` refuses are
left out, memory is counted (`estimate/memory.py`), and layouts that fit are timed (`estimate/step_time.py`). There are no
heuristics: 2104.04473's takeaways must follow from the estimates, and `explain.py` shows whether they do.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.config.errors import divisors
from megajax.estimate import model_costs
from megajax.estimate.expert_time import with_expert_dispatch
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Gpu, with_attention
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.estimate.op_costs import MEGAJAX, Software
from megajax.estimate.step_time import StepTime, step_time
from megajax.estimate.vocabulary import placements
from megajax.schedules.registry import find, search_order

NEAREST = 64  # numbers of GPUs below and above that are tried where none is legal
# Share of the usable memory that predicted peaks leave free. The worst error of `benchmarks.compiled memory --show` is 4.3%.
MEMORY_MARGIN = 0.05
MOST_CHUNKS = 12  # of a rank; with more, the additional sends cost more than the smaller bubble gains


@dataclasses.dataclass(frozen=True)
class Question:
    """A model, a cluster, and the choices to search over.

    Attributes:
      model: configuration of any model with an estimate of its costs.
      gpus: number of GPUs.
      gpu: the kind of GPU.
      global_batch: samples in a step.
      tensor_sizes: tensor degrees to consider; larger than a host is legal and slow.
      zero: levels of ZeRO to consider.
      expert: degrees of expert parallelism to consider; None: all that divide the model's experts.
      vocab_parallel: devices that share embedding and head, "pipe" or (as in Megatron-LM) "tensor"; "auto": the better one
        for each layout.
      attention: auto, xla, cudnn or pallas, as for a run.
      memory_margin: share of the usable memory that a layout must leave free to fit, since predictions have errors.
    """

    model: Any
    gpus: int
    gpu: Gpu
    global_batch: int
    precision: str = "bf16"
    software: Software = MEGAJAX
    schedules: Sequence[str] = dataclasses.field(default_factory=search_order)
    recomputes: Sequence[str] = ("none", "selective", "full")
    microbatches: Sequence[int] = (1, 2, 4, 8, 16)
    tensor_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    sequence_parallel: bool = True
    zero: Sequence[int] = (0,)
    expert: Sequence[int] | None = None
    vocab_parallel: str = "pipe"
    attention: str = "auto"
    memory_margin: float = MEMORY_MARGIN

    @property
    def memory_limit(self) -> float:
        """Bytes that the predicted peak of a layout that fits may have."""
        return usable_bytes(self.gpu) * (1 - self.memory_margin)

    @property
    def resolved_attention(self) -> str:
        """The attention that runs on this GPU: "xla", "cudnn" or "pallas".

        Raises:
          ConfigError: a fused kernel is requested, which does not support this model on this GPU.
        """
        train = TrainConfig(global_batch_size=self.global_batch, precision=self.precision)
        run = RunConfig(self.model, ParallelConfig(attention=self.attention), train)
        return with_attention(run, self.gpu).parallel.attention


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
        return self.peak <= self.question.memory_limit

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

    def days(self, tokens: float) -> float:
        """Days to train on this number of tokens."""
        steps = tokens / (self.run.train.global_batch_size * model_costs(self.run.model).sequence_length)
        return steps * self.time.total / 86400


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
    found = [_fastest_placement(question, run) for run in _runs(question)]
    if not found:
        raise _no_layout(question)
    # Ties: less memory first, then the simpler schedule.
    order = question.schedules
    return sorted(
        found,
        key=lambda one: (
            not one.fits,
            one.time.total if one.time else one.peak,
            one.peak,
            order.index(one.run.parallel.schedule),
        ),
    )


def layouts_that_fit(question: Question) -> list[Candidate]:
    """The layouts of `search` that fit, fastest first; none if none is legal."""
    try:
        return [one for one in search(question) if one.fits]
    except NoLayout:
        return []


# Fields of `Question` that narrow the search, and the options that set them.
NARROWING = {
    "microbatches": "--microbatch-size",
    "schedules": "--schedule",
    "recomputes": "--recompute",
    "zero": "--zero",
    "expert": "--expert",
    "precision": "--precision",
}


def _no_layout(question: Question) -> NoLayout:
    """Why no layout is legal, and what to pass instead: without a narrower choice, or for the nearest numbers of GPUs."""
    text = (
        f"no layout of {question.model.name} over {question.gpus} GPUs takes a global batch of {question.global_batch}"
    )
    defaults = {field.name: field for field in dataclasses.fields(Question)}
    for name, option in NARROWING.items():
        field = defaults[name]
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if getattr(question, name) != usual and _has_layout(dataclasses.replace(question, **{name: usual})):
            value = getattr(question, name)
            shown = value if isinstance(value, str) else " ".join(map(str, value))
            return NoLayout(f"{text} with {option} {shown}: omit {option}, or pass it other values.", narrowed=True)
    counts = (question.gpus + sign * away for away in range(1, NEAREST + 1) for sign in (-1, 1))
    legal = (count for count in counts if count > 0 and _has_layout(dataclasses.replace(question, gpus=count)))
    near = sorted(itertools.islice(legal, 2))
    if near:
        text += f": pass --gpus {' or '.join(map(str, near))}, or a --global-batch-size with more divisors in common."
    else:
        text += ": pass a --gpus and a --global-batch-size with more divisors in common."
    return NoLayout(text, narrowed=False)


def _has_layout(question: Question) -> bool:
    """Whether there is any legal layout."""
    return next(iter(_runs(question)), None) is not None


def fitting(question: Question) -> Iterable[RunConfig]:
    """The legal runs that fit, in no order, found one by one and not timed."""
    runs = (placed for run in _runs(question) for placed in placements(run))
    return (run for run in runs if sum(bytes_per_device(run).values()) <= question.memory_limit)


def _fastest_placement(question: Question, run: RunConfig) -> Candidate:
    """The run with embedding and head where it is fastest, of those that fit; if neither does, where it is smallest.

    They take the least memory split over pipe and tensor: if that does not fit, the other placement does not either.
    """
    smallest, *others = placements(run)
    best = evaluate(question, smallest)
    for placed in others if best.time else ():
        found = evaluate(question, placed)
        best = found if found.time and found.time.total < best.time.total else best
    return best


def evaluate(question: Question, run: RunConfig) -> Candidate:
    """One layout; it is timed if it fits."""
    memory = bytes_per_device(run)
    time = step_time(run, question.gpu, question.software) if sum(memory.values()) <= question.memory_limit else None
    return Candidate(question, run, memory, time)


def _runs(question: Question) -> Iterable[RunConfig]:
    """Every legal run; `vocab_parallel` may be auto."""
    attention = question.resolved_attention
    model, train = question.model, TrainConfig(global_batch_size=question.global_batch, precision=question.precision)
    for tensor in question.tensor_sizes:
        alone = ParallelConfig(tensor=tensor, sequence_parallel=question.sequence_parallel)
        if question.gpus % tensor or not _is_legal(RunConfig(model, alone, train)):
            continue
        for pipe in _pipe_sizes(question.gpus // tensor, model.layers):
            data = question.gpus // tensor // pipe
            for samples in question.microbatches:
                if question.global_batch % (data * samples):
                    continue
                for schedule, chunks in _orders(question, pipe):
                    for recompute, zero, expert in itertools.product(
                        question.recomputes, question.zero, _expert_degrees(question, data)
                    ):
                        if zero and data == 1:
                            continue  # no replicas to shard over
                        parallel = ParallelConfig(
                            data=data,
                            pipe=pipe,
                            tensor=tensor,
                            chunks=chunks,
                            schedule=schedule,
                            microbatch_size=samples,
                            recompute=recompute,
                            zero=zero,
                            expert=expert,
                            expert_dispatch="auto" if expert > 1 else "gather",
                            vocab_parallel=question.vocab_parallel,
                            attention=attention,
                            sequence_parallel=question.sequence_parallel,
                        )
                        run = RunConfig(model, parallel, train)
                        if _is_legal_layout(run):
                            yield with_expert_dispatch(run, question.gpu)


def _orders(question: Question, pipe: int) -> Iterable[tuple[str, int]]:
    """(schedule, chunks) for this number of stages."""
    specs = [find(name) for name in question.schedules]
    if pipe == 1:  # without a pipeline all schedules are the same
        yield from ((spec.name, 1) for spec in [spec for spec in specs if spec.chunks != "two"][:1])
        return
    for spec in specs:
        choices = {"one": [1], "two": [2], "any": chunk_counts(pipe, question.model.layers)}[spec.chunks]
        yield from ((spec.name, chunks) for chunks in choices if chunks > 1 or not spec.one_chunk)


def _expert_degrees(question: Question, data: int) -> list[int]:
    """The degrees of expert parallelism to consider with this many replicas; 1 for a model without experts."""
    experts = model_costs(question.model).experts
    degrees = divisors(experts.count if experts else 1)
    return [size for size in degrees if data % size == 0 and (question.expert is None or size in question.expert)]


def _pipe_sizes(gpus: int, layers: int) -> list[int]:
    """The numbers of stages to consider: divisors of the GPUs, and the fewest for each size of the largest stage.

    With more stages of that size, of which some have an empty slot, a microbatch would take as long, and fewer replicas
    would share the batch.
    """
    return _fewest([pipe for pipe in divisors(gpus) if pipe <= layers], layers)


def chunk_counts(pipe: int, layers: int) -> list[int]:
    """The numbers of chunks to consider: the fewest for each size of the largest stage.

    More chunks of that size have the same bubble, and a rank more slots, of which some are empty.
    """
    return _fewest(range(1, min(layers // pipe, MOST_CHUNKS) + 1), layers, pipe)


def _fewest(counts: Iterable[int], layers: int, each: int = 1) -> list[int]:
    """For each size that the largest of `count * each` parts of the layers can have, the smallest count."""
    found: dict[int, int] = {}
    for count in counts:
        found.setdefault(-(-layers // (count * each)), count)
    return list(found.values())


def _is_legal(run: RunConfig) -> bool:
    try:
        run.validate()
    except ConfigError:
        return False
    return True


def _is_legal_layout(run: RunConfig) -> bool:
    """The same for a run whose model and training are known to be legal."""
    try:
        run.parallel.validate()
        run.validate_together()
    except ConfigError:
        return False
    return True


def best_by(candidates: Iterable[Candidate], key) -> dict:
    """The first, so the best, candidate of each group; `key(candidate)` is the group."""
    groups: dict = {}
    for candidate in candidates:
        groups.setdefault(key(candidate), candidate)
    return groups

"""Every layout of a model on a cluster, priced: which fit, and which is fastest.

The search is exhaustive: tensor, pipe and data sizes whose product is the number of GPUs, chunks, microbatch sizes,
schedules, recompute modes, and levels of ZeRO. What `RunConfig.validate` refuses is left out, memory is counted
(`estimate/memory.py`), and what fits is timed (`estimate/step_time.py`). No rule of thumb is in here: 2104.04473's takeaways
must come out of the prices, and `explain.py` shows whether they do.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from megajax.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.parallel import SEVERAL_CHUNKS
from megajax.config.errors import divisors
from megajax.estimate.attention import with_attention
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Card
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.estimate.software import MEGAJAX, Software
from megajax.estimate.step_time import StepTime, step_time

SCHEDULES = ("interleaved_1f1b", "1f1b", "eager_1f1b", "zb_h1", "zb_1p_interleaved", "zb_v", "gpipe")
ONE_STAGE = ("interleaved_1f1b",)  # without a pipeline all schedules are this one
MOST_CHUNKS = 12  # of a rank; more gains nothing that the sends do not cost


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be laid out on what.

    Attributes:
      tensor_sizes: tensor degrees to consider; larger than a host is legal and slow.
      zero: levels of ZeRO to consider.
      vocab_parallel: who shares embedding and head, "tensor" as in Megatron-LM.
      attention: auto, xla or cudnn, as a run has it.
    """

    model: ModelConfig
    gpus: int
    card: Card
    global_batch: int
    precision: str = "bf16"
    software: Software = MEGAJAX
    schedules: Sequence[str] = SCHEDULES
    recomputes: Sequence[str] = ("none", "selective", "full")
    microbatches: Sequence[int] = (1, 2, 4, 8, 16)
    tensor_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    sequence_parallel: bool = True
    zero: Sequence[int] = (0,)
    vocab_parallel: str = "pipe"
    attention: str = "auto"

    @property
    def settled_attention(self) -> str:
        """What auto comes to on this card: "xla" or "cudnn".

        Raises:
          ConfigError: cudnn was asked for, and the card has it not for this model.
        """
        train = TrainConfig(global_batch_size=self.global_batch, precision=self.precision)
        run = RunConfig(self.model, ParallelConfig(attention=self.attention), train)
        return with_attention(run, self.card).parallel.attention


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout and what it costs; `time` is None where it does not fit and was not timed."""

    question: Question
    run: RunConfig
    memory: dict[str, int]
    time: StepTime | None

    @property
    def peak(self) -> int:
        """Bytes on the device with most."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.peak <= usable_bytes(self.question.card)

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
        return self.teraflops * 1e12 / self.question.card.peak(self.question.precision)

    def days(self, tokens: float) -> float:
        """To train on so many tokens."""
        steps = tokens / (self.run.train.global_batch_size * self.run.model.sequence_length)
        return steps * self.time.total / 86400


def usable_bytes(card: Card) -> float:
    """Memory that a step may take."""
    return card.memory * USABLE_SHARE


def search(question: Question) -> list[Candidate]:
    """All legal layouts, those that fit first, fastest first; then those that do not, smallest first.

    Raises:
      ConfigError: there is no legal layout at all; the message says what to change.
    """
    question.card.peak(question.precision)
    found = [price(question, run) for run in _runs(question)]
    if not found:
        raise ConfigError(
            f"no layout of {question.model.name} over {question.gpus} GPUs takes a global batch of "
            f"{question.global_batch}: type a --gpus and a --global-batch with more divisors in common."
        )
    # Where two are equal, the one with less memory, then the simpler schedule.
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


def price(question: Question, run: RunConfig, *, timed: bool = False) -> Candidate:
    """One layout; it is timed if it fits, or anyway if `timed`."""
    memory = bytes_per_device(run)
    fits = sum(memory.values()) <= usable_bytes(question.card)
    time = step_time(run, question.card, question.software) if fits or timed else None
    return Candidate(question, run, memory, time)


def _runs(question: Question) -> Iterable[RunConfig]:
    """Every legal run."""
    attention = question.settled_attention
    model, train = question.model, TrainConfig(global_batch_size=question.global_batch, precision=question.precision)
    for tensor in question.tensor_sizes:
        if question.gpus % tensor or model.key_value_heads % tensor or model.feedforward_size % tensor:
            continue
        for pipe in divisors(question.gpus // tensor):
            if model.layers % pipe:
                continue
            data = question.gpus // tensor // pipe
            for samples in question.microbatches:
                if question.global_batch % (data * samples):
                    continue
                for schedule, chunks in _orders(question, pipe):
                    for recompute, zero in itertools.product(question.recomputes, question.zero):
                        if zero and data == 1:
                            continue  # nothing to split over
                        parallel = ParallelConfig(
                            data=data,
                            pipe=pipe,
                            tensor=tensor,
                            chunks=chunks,
                            schedule=schedule,
                            microbatch_size=samples,
                            recompute=recompute,
                            zero=zero,
                            vocab_parallel=question.vocab_parallel,
                            attention=attention,
                            sequence_parallel=question.sequence_parallel,
                        )
                        run = RunConfig(model, parallel, train)
                        if _is_legal(run):
                            yield run


def _orders(question: Question, pipe: int) -> Iterable[tuple[str, int]]:
    """(schedule, chunks) for so many stages."""
    if pipe == 1:
        yield from ((name, 1) for name in ONE_STAGE)
        return
    layers = question.model.layers // pipe
    for name in question.schedules:
        if name == "zb_v":
            choices = [2]
        elif name in SEVERAL_CHUNKS:
            choices = [n for n in range(2, min(layers, MOST_CHUNKS) + 1)]
        else:
            choices = [1]
        yield from ((name, chunks) for chunks in choices if layers % chunks == 0)


def _is_legal(run: RunConfig) -> bool:
    try:
        run.validate()
    except ConfigError:
        return False
    return True


def best_by(candidates: Iterable[Candidate], key) -> dict:
    """The first, so the best, of each group that `key(candidate)` names."""
    groups: dict = {}
    for candidate in candidates:
        groups.setdefault(key(candidate), candidate)
    return groups

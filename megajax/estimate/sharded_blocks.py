"""ZeRO-3's collectives of a block: which of its gathers and reduce-scatters no kernel overlaps.

Each array of a block is gathered by a collective of its own, in each pass, and its gradient scattered; all run one after
the other on one stream. XLA's GPU compiler starts and awaits them in the order below, read off scheduled programs (Llama 2
7B and GPT-3 1.3B on H100s and L40S, with full recomputation and without; `benchmarks.compiled` has others). What is exposed
follows from the sizes and the rates of kernels and links:

    forward     the first weight, which its matmul waits for; the others beside that matmul and attention
    backward    with full recomputation likewise, else the last weight first; and each gradient after its matmul: these come
                last, so that the scatter of the last one, and what the matmuls did not hide, is exposed
    biases      of the four collectives in flight (`xla_flags.collectives_in_flight`) the bias of queries, keys and values
                is one: the MLP's last weight is then gathered after the widest. Of a gated MLP the last weight's gradient
                is then computed while the backward waits for the weight, and scattered beside the rest; that of queries,
                keys and values comes last (Qwen2.5 1.5B on RTX 4090s)
    rings       sends of keys and values wait for the gathers that were started before them; the last one of a backward
                also for the scatter of the MLP's last gradient, whose matmul is put before it
    exchange    of the sequence for heads: all after the first weight's gather starts behind attention's output, and its
                exchange; in a backward arrays are exchanged beside the MLP's last gradient, whose scatter the exchange of
                attention's gradients waits for (Qwen2.5 1.5B on RTX 4090s)
    tensor      each pair of matmuls starts with what is gathered over the tensor group, then its weights, which wait for
                the pair before; the MLP's last gradient comes when all inputs' are computed, and the next one waits for its
                scatter (Qwen2.5 1.5B on RTX 4090s)
    merged      the backward of the MLP; attention of both passes, whose first weight is waited for; then the MLP's last
                gradient beside the gathers of the forward's MLP; of the others the widest first, or last where XLA has no
                table of collectives (Llama 3 8B on H100s, Qwen2.5 1.5B on RTX 4090s)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from megajax.estimate.communication import GATHER, GRADIENT, SCATTER
from megajax.estimate.kept import is_gated
from megajax.estimate.merged_ticks import HOPPER
from megajax.estimate.parameters import block_arrays, block_parameters
from megajax.estimate.program_kernels import Kernels
from megajax.estimate.rates import devices_here
from megajax.estimate.trained import trained_parameters

__all__ = ["Passes", "ShardedBlocks", "Timeline", "backward_exposed", "forward_exposed", "merged_exposed"]


class Timeline:
    """Kernels in order, and collectives beside them one at a time, as `roofline.account` has them.

    Attributes:
      exposed: seconds in which kernels waited.
    """

    def __init__(self):
        self.now = self.free = self.exposed = 0.0

    def run(self, seconds: float) -> None:
        """A kernel."""
        self.now += seconds

    def start(self, seconds: float) -> float:
        """A collective; returns when it ends."""
        self.free = max(self.now, self.free) + seconds
        return self.free

    def wait(self, end: float) -> None:
        self.exposed += max(0.0, end - self.now)
        self.now = max(self.now, end)


class Passes(NamedTuple):
    """Seconds of a block, of its matmuls in the order of the forward.

    Attributes:
      outputs, inputs, weights: of each matmul, and of those of its gradients.
      gathers, scatters: of each matmul's weight and of its gradient.
      other_gathers, other_scatters: of all other arrays, such as the scales of norms.
      attention: of its forward and of its backward.
      traffic: of a forward's other kernels.
      ring: of the forward's and of the backward's sends round a ring, and of the kernels beside them.
      exchange: of the exchanges before and behind attention, of a forward and of a backward.
      tensor: of a collective over the tensor group; 0 without.
      gated: whether the MLP is.
      biased: whether queries, keys and values have a bias.
      full: whether the backward has a forward first.
      hopper: whether XLA has a table of collectives for the GPU, by which it schedules.
    """

    outputs: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    gathers: Sequence[float]
    scatters: Sequence[float]
    other_gathers: float
    other_scatters: float
    attention: tuple[float, float]
    traffic: float
    ring: tuple[tuple[float, float], tuple[float, float]]
    exchange: tuple[tuple[float, float], tuple[float, float]]
    tensor: float
    gated: bool
    biased: bool
    full: bool
    hopper: bool

    @property
    def alone(self) -> "Passes":
        """Without gathers and scatters of weights."""
        none = [0.0] * len(self.gathers)
        return self._replace(gathers=none, scatters=none, other_gathers=0.0, other_scatters=0.0)


class ShardedBlocks(Kernels):
    """Gathers and reduce-scatters of a block's arrays over the replicas."""

    def over_replicas(self, kind: str, count: float, experts: bool = False) -> float:
        """Seconds of a gather of an array of so many parameters, or of a scatter of its gradient."""
        apart = self.parallel.expert_replicas if experts else 1
        size = self.replicas // apart
        sent = (size - 1) / size * count * (self.item if kind == GATHER else GRADIENT)
        here = devices_here(self.parallel, self.gpu.host_size, size, "data", apart)
        return self.rates.collective(kind, sent, size, here) if sent else 0.0

    def sharded(self, matrices: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """The fields of `Passes` about collectives; `matrices`: parameters of each, and those of experts."""
        trained = trained_parameters(self.program.run)
        share = trained.matrices if trained else 1.0
        dense = [own for own, experts in matrices if not experts]
        others = block_arrays(self.run)[0] - len(dense)
        rest = max(0.0, block_parameters(self.run)[0] - sum(dense)) / max(1, others)
        sent = {
            kind: [self.over_replicas(kind, own or experts, experts > 0) for own, experts in matrices]
            for kind in (GATHER, SCATTER)
        }
        return {
            "gathers": sent[GATHER],
            "scatters": [share * one for one in sent[SCATTER]],
            "other_gathers": others * self.over_replicas(GATHER, rest),
            "other_scatters": share * others * self.over_replicas(SCATTER, rest),
            "gated": is_gated(self.model),
            "biased": getattr(self.run.model, "has_qkv_biases", True),
            "full": self.parallel.recompute == "full",
            "hopper": (self.gpu.compute_capability or (0, 0)) >= HOPPER,
        }


def _attention(line: Timeline, one: Passes, backward: int) -> None:
    """Attention, which waits for sends round a ring, which wait for the collectives that were started before."""
    sends, beside = one.ring[backward]
    end = line.start(sends) if sends else line.now
    line.run(min(beside, one.attention[backward]))
    line.wait(end)
    line.run(max(0.0, one.attention[backward] - beside))


def _exchanged(line: Timeline, one: Passes) -> float:
    """Attention's forward between exchanges; returns when the second one ends."""
    line.wait(line.start(one.exchange[0][0]))
    line.run(one.attention[0])
    return line.start(one.exchange[0][1])


def _forward(line: Timeline, one: Passes, last_first: bool) -> None:
    """The first weight, then the second, the widest and the last, or these two the other way round."""
    line.wait(line.start(one.other_gathers / 2 + one.gathers[0]))
    order, exchanged = list(range(1, len(one.gathers))), sum(one.exchange[0]) > 0
    if last_first:
        order[1:] = order[:0:-1]
    if exchanged:
        line.run(one.outputs[0] + one.traffic / 2)
        end = _exchanged(line, one)
    ends = {number: line.start(one.gathers[number]) for number in order}
    others = line.start(one.other_gathers / 2)
    if exchanged:
        line.wait(end)
    else:
        line.run(one.outputs[0] + one.traffic / 2)
        _attention(line, one, 0)
    for number in sorted(ends):
        if number == len(ends) and number > 1:
            line.run(one.traffic / 2)
        line.wait(ends[number])
        line.run(one.outputs[number])
    line.wait(others)


def _tensor_forward(line: Timeline, one: Passes) -> None:
    """Pair by pair; all but the last scatter over the tensor group, which the stash may hide."""
    count = len(one.gathers)
    for first in range(0, count, 2):
        line.start(one.other_gathers / len(range(0, count, 2)))
        tokens, *ends = [line.start(seconds) for seconds in (one.tensor, *one.gathers[first : first + 2])]
        line.wait(tokens)
        line.wait(ends[0])
        line.run(one.outputs[first])
        if first == 0:
            _attention(line, one, 0)
        line.run(one.traffic / count)
        for number, end in enumerate(ends[1:], first + 1):
            line.wait(end)
            line.run(one.outputs[number])
        if first + 2 < count:
            line.wait(line.start(one.tensor))


def _tensor_backward(line: Timeline, one: Passes) -> None:
    """Inputs' gradients pair by pair from the last one, then the weights'."""
    count = len(one.gathers)
    pairs = range((count - 1) // 2 * 2, -1, -2)
    for first in pairs:
        tokens = line.start(one.tensor)
        pair = range(min(first + 2, count) - 1, first - 1, -1)
        ends = {number: line.start(one.gathers[number]) for number in pair}
        line.run(one.traffic / count)
        line.wait(tokens)
        for number in pair:
            if number == 0:
                _attention(line, one, 1)
            line.wait(ends[number])
            line.run(one.inputs[number] + one.traffic / count)
        scattered, others = line.start(one.tensor), line.start(one.other_gathers / len(pairs))
        if first:
            line.wait(others)
        else:
            line.run(one.weights[-1])
        line.wait(scattered)
    scattered, tokens = line.start(one.scatters[-1]), line.start(one.tensor)
    line.wait(scattered)
    for number in (*range(1, count - 1), 0) if count > 1 else ():
        line.run(one.weights[number])
        line.wait(tokens)  # what the matmul reads is gathered over the tensor group again
        line.start(one.scatters[number])
        tokens = line.start(one.tensor) if number == 1 else tokens
    line.wait(line.start(one.other_scatters))


def forward_exposed(one: Passes) -> float:
    """Seconds of a forward's gathers that nothing overlaps."""
    line = Timeline()
    if one.tensor:
        _tensor_forward(line, one)
    else:
        _forward(line, one, last_first=one.gated and not one.biased)
    return line.exposed


def backward_exposed(one: Passes) -> float:
    """Seconds of a backward's gathers and reduce-scatters that nothing overlaps."""
    line, count, ring, exchange = Timeline(), len(one.gathers), one.ring[1][0] > 0, one.exchange[1]
    apart = ring or sum(exchange) > 0
    early = one.gated and one.biased and not (one.full or one.hopper or apart) and count > 2  # the last gradient
    late = apart and not one.full
    if one.tensor and not one.full:
        _tensor_backward(line, one)
        return line.exposed
    if one.full:
        _forward(line, one._replace(exchange=((0.0, 0.0), (0.0, 0.0))), last_first=False)
        line.run(sum(one.inputs))
        _attention(line, one, 1)
    else:
        last = line.start(one.gathers[-1])
        ends = {number: line.start(one.gathers[number]) for number in range(1, count - 1)} if early else {}
        line.run(early * one.weights[-1] + one.traffic / 4)
        line.wait(last)
        if early:
            line.start(one.scatters[-1])
        order = (*range(count - 2, 0, -1), 0) if count > 1 else ()
        ends |= {number: line.start(one.gathers[number]) for number in order if number not in ends}
        others = line.start(one.other_gathers)
        line.run(one.inputs[-1] + one.traffic / 2)
        for number in range(count - 2, -1, -1):
            if number == 0 and sum(exchange):
                end = line.start(exchange[0])
                line.run(one.weights[-1])
                line.wait(end)
                line.start(one.scatters[-1])
                line.run(one.attention[1])
                line.wait(line.start(exchange[1]))
            elif number == 0:
                _attention(line, one, 1)
                if late:  # the last send round the ring waits for the scatter of the last gradient
                    line.run(one.weights[-1])
                    line.wait(line.start(one.scatters[-1]))
            line.wait(ends[number])
            line.run(one.inputs[number])
        line.wait(others)
    for number in (*range(1, count - 1), 0) if early or late else _gradients(count, one):
        line.run(one.weights[number])
        line.start(one.scatters[number])
    line.wait(line.start(one.other_scatters))
    return line.exposed


def _gradients(count: int, one: Passes) -> Sequence[int]:
    """In which order the weights' gradients are computed."""
    if one.hopper and not one.full:
        return [*range(count - 1, 1, -1), *range(min(2, count))]
    first = [number for number in (1, count - 1, 0) if number < count]
    return list(dict.fromkeys((*first, *range(2, count - 1))))


def merged_exposed(one: Passes) -> float:
    """Seconds of both passes' collectives that nothing overlaps, in one loop."""
    line, count = Timeline(), len(one.gathers)
    ends = {number: line.start(one.gathers[number]) for number in range(count - 1, 1, -1)}
    for number, end in ends.items():  # the backward's, of the MLP
        line.run(one.traffic / 4)
        line.wait(end)
        line.run(one.inputs[number])
    first = line.start(one.other_gathers + one.gathers[0])
    rest = line.start(one.other_gathers + one.gathers[0] + 2 * sum(one.gathers[1:2]))
    line.wait(first)
    line.run(one.outputs[0] + one.attention[0])
    line.wait(rest)
    line.run(sum(one.outputs[1:2]) + sum(one.inputs[1:2]) + one.attention[1])
    end = line.start(sum(one.gathers[2:]))  # the forward's, of the MLP
    line.run(one.inputs[0] + one.weights[-1])
    line.start(one.scatters[-1])
    line.wait(end)
    line.run(sum(one.outputs[2:]) + one.traffic)
    widest = [max(range(count - 1), key=one.scatters.__getitem__)] if count > 1 else []
    others = [number for number in range(count - 1) if number not in widest]
    for number in (*widest, *others) if one.hopper else (*others, *widest):
        line.run(one.weights[number])
        line.start(one.scatters[number])
    line.wait(line.start(one.other_scatters))
    return line.exposed

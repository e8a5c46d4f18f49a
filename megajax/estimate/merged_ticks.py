"""Which collectives of a merged tick's block XLA's GPU compiler overlaps with no matmul, read off scheduled programs.

A merged tick runs a block's forward and another one's backward together (`pipeline/stage.py`). Of their ten gathers and
scatters over `tensor`, or more, most run beside matmuls or attention of the other pass, which take longer. The others run
beside a few kernels that move memory, one collective after the other:

    gated MLPs            the backward's first gather beside the activation's gradient; the MLP's scatter; the forward's
                          gather behind it, beside a norm's gradient; and another two behind one matmul of the MLP
    others                the backward's first gather
    full recomputation    the second forward's collectives are in the order of its matmuls, and few overlap

This is where XLA is told the times of matmuls in place (`has_latencies`). By its own estimates another scatter, with a
gather behind it, overlaps no matmul. By times of all instructions (`has_all_latencies`) three collectives of a block with
a gated MLP, besides the first, have matmuls beside them that are too short. Why the compiler's scheduler orders them so is
its own; the lists are those of Llama 2 7B, 3 8B and 3.1 405B, GPT-3 6.7B, 13B and 175B. Without a pipeline:
`exposed_of_one_stage`.
"""

from typing import NamedTuple

from megajax.config import RunConfig
from megajax.estimate.expert_dispatch import by_all_to_all
from megajax.estimate.gpus import Gpu
from megajax.estimate.rates import in_a_host
from megajax.models.costs import ModelCosts

HOPPER = (9, 0)


def has_latencies(run: RunConfig, gpu: Gpu, costs: ModelCosts) -> bool:
    """Whether a step is compiled with the run's own times of instructions that XLA misprices (`latency_profile.py`).

    Where they were seen to help: for tensor groups within a host of Hopper or later GPUs, for which XLA has a table of
    collectives. On A100s, over hosts and with ZeRO-3 steps took 1 to 4% longer (`python -m benchmarks.compiled questions`,
    `python -m benchmarks.compiled time`). Experts' matmuls are kernels of another kind; with them it was not measured.
    `costs` are the model's.
    """
    parallel = run.parallel
    return (
        parallel.latency_estimates != "xla"
        and parallel.tensor > 1
        and in_a_host(parallel, gpu, parallel.tensor, "tensor")
        and (gpu.compute_capability or (0, 0)) >= HOPPER
        and parallel.zero < 3
        and not parallel.rings
        and costs.experts is None
    )


def has_all_latencies(run: RunConfig, gpu: Gpu, costs: ModelCosts) -> bool:
    """Whether a step is compiled twice, the second time with the times of all instructions of the first program.

    With `latency_estimates` roofline, by default where a tensor group spans hosts, and with `exchanges_timed`. Between hosts
    collectives take nearly as long as matmuls, and by its own times XLA's scheduler orders the same block well in one
    program and badly in another: of Llama 3.1 405B's on 8,192 H100s 2.0 ms of collectives are exposed with 8 stages, and 4.1
    ms with 16; by these times 2.1 ms with either (`python -m benchmarks.compiled questions --question 405b --best 3`).
    `costs` are the model's.
    """
    parallel = run.parallel
    spans_hosts = parallel.tensor > 1 and not in_a_host(parallel, gpu, parallel.tensor, "tensor")
    by_default = spans_hosts and parallel.zero < 3 and not parallel.rings and costs.experts is None
    by_default = parallel.latency_estimates == "model" and by_default
    return parallel.latency_estimates == "roofline" or by_default or exchanges_timed(run, costs)


def exchanges_timed(run: RunConfig, costs: ModelCosts) -> bool:
    """Whether XLA knows how long exchanges with experts take, of which one at a time is in flight then.

    With `latency_estimates` roofline, and by default where blocks that send tokens by all-to-all are recomputed: two layers
    of DeepSeek-V3 on 16 H100s take 1.157 s instead of 1.207. Where tokens are gathered (Qwen3-235B-A22B in groups of four) a
    step took 0.7% longer, with selective recomputation (Mixtral 8x7B) 0.3% less. `costs` are the model's.
    """
    parallel = run.parallel
    if costs.experts is None or parallel.expert == 1 or parallel.tensor > 1:
        return False
    merged = parallel.pipe > 1 and parallel.recompute == "full" and parallel.zero < 3 and not parallel.rings
    by_default = parallel.latency_estimates == "model" and merged and by_all_to_all(costs.experts, parallel)
    return parallel.latency_estimates == "roofline" or by_default


class ExposedPart(NamedTuple):
    """Collectives, one after the other, and the kernels that run beside them.

    Attributes:
      collectives: how many.
      residuals: passes of those kernels over the residual stream.
      widest: passes over the widest activation of the block.
      kernels: how many kernels.
      products: matmuls, each the place of its weight in a block and what it computes: "outputs", or the gradient of its
        "weights".
    """

    collectives: int
    residuals: int
    widest: float
    kernels: int
    products: tuple[tuple[int, str], ...] = ()


QKV, OUTPUT, UP, DOWN = 0, 1, -2, -1  # places of weights


def exposed_parts(gated: bool, full: bool, latencies: bool, over_hosts: bool = False) -> tuple[ExposedPart, ...]:
    """The parts of a block with attention and an MLP, gated or not, with full recomputation or not.

    `latencies`: see `has_latencies`; `over_hosts`: a tensor group spans hosts, see `has_all_latencies`.
    """
    if full:
        return ExposedPart(1, 2, 0, 2), ExposedPart(5 if gated else 4, 12, 0, 7)
    if not gated:
        first = ExposedPart(1, 2, 3, 4)
        return (first,) if latencies else (first, ExposedPart(2, 19, 0, 11))
    first, scatter, gather = ExposedPart(1, 0, 1.5, 1), ExposedPart(1, 2, 0, 1), ExposedPart(1, 7, 0, 3)
    if over_hosts:
        return (
            first,
            ExposedPart(1, 2, 0, 2, products=((QKV, "outputs"),)),
            ExposedPart(2, 2, 0, 2, products=((DOWN, "weights"),)),
        )
    if latencies:
        return first, scatter, gather, ExposedPart(2, 7, 0, 3, products=((DOWN, "outputs"),))
    return first, scatter, gather, ExposedPart(1, 3, 0, 1), gather


def exposed_of_one_stage(
    gated: bool, full: bool, latencies: bool, several: bool, short: bool
) -> tuple[ExposedPart, ...]:
    """The same without a pipeline, where the backward's first gather runs an iteration ahead (`pipeline.stage`).

    Of a gated MLP every collective has a matmul beside it, and small ones do not hide it. Where several are in flight the
    compiler's scheduler takes them to run at the same time, and puts two behind one matmul; they run one after the other.
    At the end of an iteration these are the forward's last scatter and the gather ahead, behind the gradient of the weight
    of queries, keys and values. It takes each matmul to be as long as their mean (`latency_profile.py`): where that is less
    than a collective it puts one more collective, and the matmuls before, in front of them.

    Args:
      gated, full, latencies: as for `exposed_parts`.
      several: whether several collectives may be in flight (`xla_flags.collectives_in_flight`).
      short: whether a matmul takes less time than a collective, on average.
    """
    if full or not (gated and latencies):
        return exposed_parts(gated, full, latencies)[1:]
    if not several:
        return tuple(
            ExposedPart(1, 0, 0, 0, products=(one,))
            for one in ((OUTPUT, "outputs"), (OUTPUT, "weights"), (QKV, "weights"))
        )
    output, last = ExposedPart(1, 2, 0, 4, products=((OUTPUT, "outputs"),)), (QKV, "weights")
    if short:
        return output, ExposedPart(3, 0, 0, 3, products=((OUTPUT, "weights"), (UP, "weights"), last))
    down = ExposedPart(2, 2, 0, 6, products=((DOWN, "weights"),))
    return output, down, ExposedPart(2, 0, 0, 2, products=(last,))

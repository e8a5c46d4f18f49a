"""Which pipeline schedule survives slow links: a pipeline over several sites, simulated event by event.

python -m experiments.slow_links
python -m experiments.slow_links --model llama3.1-70b --gpu h100-80gb --pipe 8 --microbatches 256 --latency 0 50 --gbps 10

Consecutive stages share a site. Operations take what the time model predicts for the GPU; an activation or gradient between
two sites waits for the link, is sent at its rate, and arrives after the latency and a random delay. Ranks are independent
processes, each of which waits for its own inputs only. megajax's program runs in lockstep, where every tick waits for the
slowest send: the last column is its efficiency at the largest latency.
"""

import argparse
import dataclasses
import heapq
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.options import Parser
from megajax.estimate import model_costs
from megajax.estimate.auto import resolved
from megajax.estimate.gpus import GPUS, Gpu, find_gpu
from megajax.estimate.kept import rows_of
from megajax.estimate.step_time import chunk_costs
from megajax.pipeline.program import StepProgram
from megajax.schedules.arguments import number, plain_text, whole
from megajax.schedules.errors import UserError, exit_code
from megajax.schedules.one_f_one_b import alternate, depth_first
from megajax.schedules.pictures import SOFT, label_ends, picture, picture_file, wrapped
from megajax.schedules.registry import make_schedule, specs
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, Schedule, ScheduleError, Work, pack
from megajax.schedules.simulate import Costs, Simulation, Span, run_together, simulate_lockstep, simulation_of

LATENCIES = (0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 50.0)  # milliseconds, one way; Europe to the US east coast is about 40
# With two chunks where they take them.
SCHEDULES = ("gpipe", "looped_bfs", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v")
SURVIVES = 0.9  # of the throughput without latency
MILLI, GIGABIT = 1e-3, 1e9 / 8


@dataclasses.dataclass(frozen=True)
class Sites:
    """Sites of a pipeline and the links between them.

    Attributes:
      count: sites, of p / count ranks each; larger ones first if that is not whole.
      latency: one way, from the last byte sent to its arrival.
      transfer: time that one activation, or its gradient, occupies the link; later ones wait.
      jitter: mean of the delay that is added to each message's latency, exponentially distributed. Messages of a link arrive
        in order, as over TCP.
      seed: of the delays.
    """

    count: int = 2
    latency: float = 0.0
    transfer: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def of(self, rank: int, stages: int) -> int:
        """The site of a rank."""
        return rank * self.count // stages


def simulate_sites(schedule: Schedule, costs: Costs, sites: Sites) -> Simulation:
    """Each rank runs its order, each operation as soon as its inputs have arrived; `costs.latency` is not used.

    Operations are taken in the order in which they end, so that messages enter a link in the order in which they are sent.

    Raises:
      ScheduleError: more sites than ranks, or the orders deadlock.
    """
    if not 1 <= sites.count <= schedule.stages:
        raise ScheduleError(f"{schedule.stages} stages cannot be on {sites.count} sites; each has at least one stage")
    queues = [
        [together for tick in schedule.ticks for together in run_together(schedule, tick[rank])]
        for rank in range(schedule.stages)
    ]
    place = [sites.of(rank, schedule.stages) for rank in range(schedule.stages)]
    random = np.random.default_rng(sites.seed)
    position, clock, waiting = [0] * schedule.stages, [0.0] * schedule.stages, set(range(schedule.stages))
    arrived: dict[tuple[str, int, int, int], float] = {}  # (result, stage, microbatch, at rank): when
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    last_arrival: dict[tuple[int, int], float] = defaultdict(float)
    ends: list[tuple[float, int, float]] = []  # (end, rank, start) of the operations that run
    spans: list[Span] = []

    def start_next(rank: int) -> None:
        """Starts the rank's next operation if the arrival of all its inputs is known."""
        if rank not in waiting or position[rank] == len(queues[rank]):
            return
        works = queues[rank][position[rank]]
        times = [
            arrived.get((result, stage, work.microbatch, rank))
            for work in works
            for result, stage in schedule.needs(work, schedule.stage(work.chunk, rank))
        ]
        if None not in times:
            end = start = max([clock[rank], *times])
            waiting.remove(rank)
            for work in works:
                end += costs.of(schedule, work)
            heapq.heappush(ends, (end, rank, start))

    def arrival(now: float, source: int, target: int) -> float:
        """When a message that is ready now arrives."""
        link = (place[source], place[target])
        if link[0] == link[1]:
            return now
        link_free[link] = max(link_free[link], now) + sites.transfer
        delay = random.exponential(sites.jitter) if sites.jitter else 0.0
        last_arrival[link] = max(last_arrival[link], link_free[link] + sites.latency + delay)
        return last_arrival[link]

    for rank in range(schedule.stages):
        start_next(rank)
    while ends:
        now, rank, start = heapq.heappop(ends)
        works = queues[rank][position[rank]]
        position[rank] += 1
        clock[rank] = now
        waiting.add(rank)
        for work in works:
            spans.append(Span(rank, work, start, start + costs.of(schedule, work)))
            start, stage = spans[-1].stop, schedule.stage(work.chunk, rank)
            for result in schedule.results(work):
                arrived[result, stage, work.microbatch, rank] = now
            for result, target in _sends(schedule, work, stage):
                if target != rank:
                    arrived[result, stage, work.microbatch, target] = arrival(now, rank, target)
                    start_next(target)
        start_next(rank)
    if any(position[rank] < len(queues[rank]) for rank in range(schedule.stages)):
        raise ScheduleError(f"{schedule.name}: the orders deadlock")
    return simulation_of(schedule, spans)


def _sends(schedule: Schedule, work: Work, stage: int) -> Iterator[tuple[str, int]]:
    """(result, rank that needs it) of each result that a piece of work completes for another stage."""
    for result in schedule.results(work):
        if result == FORWARD and stage < schedule.last_stage:
            yield result, schedule.home(stage + 1)[1]
        elif result == INPUT and stage:
            yield result, schedule.home(stage - 1)[1]


@dataclasses.dataclass(frozen=True)
class Row:
    """A schedule over the latencies.

    Attributes:
      schedule: its table.
      efficiencies: for each latency, the share of the time in which the busiest rank computes.
      lockstep: of megajax's program at the last latency, without jitter.
      live: most activations in flight on a rank, in stages.
    """

    schedule: Schedule
    efficiencies: tuple[float, ...]
    lockstep: float
    live: float


def activation_bytes(run: RunConfig) -> int:
    """Bytes of a microbatch's activation between two stages, of all replicas, in 16 bit."""
    return run.parallel.data * rows_of(model_costs(run.model), run.parallel) * model_costs(run.model).hidden * 2


def longer_1f1b(stages: int, microbatches: int, sites: Sites, latency: float, microbatch_time: float) -> Schedule:
    """1F1B with more warm-up forwards before each link, which hide its round trip of 2 (latency + transfer).

    Without them, two microbatches wait for each round trip: rank r before the link starts F(k + 2) after its
    B(k - p + r + 2), which the rank behind it starts after F(k). With n more, 2 + n do, and n microbatch times hide it.
    """
    sequence = depth_first(microbatches, microbatches, 1)
    more = math.ceil(2 * (latency + sites.transfer) / microbatch_time)
    links = [sites.count - 1 - sites.of(rank, stages) for rank in range(stages)]
    warmups = [min(stages - rank - 1 + more * links[rank], microbatches) for rank in range(stages)]
    orders = [alternate(count, sequence) for count in warmups]
    return pack(f"1f1b, {more} longer", orders, microbatches=microbatches, paired=False, parts={BACKWARD: 2})


def rows(run: RunConfig, gpu: Gpu, names: Sequence[str], latencies: Sequence[float], sites: Sites) -> list[Row]:
    """A row for each schedule, with two chunks where it takes them, and for 1F1B made for the largest latency.

    Args:
      run: without `auto` (`estimate.auto.resolved`).

    Raises:
      ConfigError: a schedule does not take the run's sizes, or does not train.
    """
    found = []
    for name in names:
        parallel = dataclasses.replace(run.parallel, schedule=name)
        spec = StepProgram.of(dataclasses.replace(run, parallel=parallel)).spec
        if not (spec.trains and spec.drains):
            legal = ", ".join(one.name for one in specs() if one.trains and one.drains)
            raise ConfigError(f"schedules = {name} is not one step of training that drains: pass --schedule {legal}.")
        parallel = dataclasses.replace(parallel, chunks=1 if spec.chunks == "one" else 2)
        one = dataclasses.replace(run, parallel=parallel)
        sizes = {"stages": parallel.pipe, "microbatches": run.microbatches, "chunks": parallel.chunks}
        try:
            one.validate()
            schedule = make_schedule(name, **sizes)
        except UserError as error:  # its remedy has options of a run, which are not these
            problem, remedy = str(error).partition(": pass ")[0], "other --microbatches, --pipe or --tensor"
            raise ConfigError(f"{problem}: pass {remedy}, or --schedule without {name}.") from error
        found.append(_row(schedule, chunk_costs(one, gpu), latencies, sites))
    costs = chunk_costs(run, gpu)
    made = longer_1f1b(run.parallel.pipe, run.microbatches, sites, latencies[-1], costs.forward + costs.backward)
    return [*found, _row(made, costs, latencies, sites)]


def _row(schedule: Schedule, costs: Costs, latencies: Sequence[float], sites: Sites) -> Row:
    simulations = [simulate_sites(schedule, costs, dataclasses.replace(sites, latency=time)) for time in latencies]
    together = simulate_lockstep(schedule, dataclasses.replace(costs, latency=latencies[-1] + sites.transfer))
    return Row(
        schedule,
        tuple(one.ideal / one.makespan for one in simulations),
        together.ideal / together.makespan,
        max(simulations[-1].peak_live) / schedule.chunks,
    )


def table(found: Sequence[Row], latencies: Sequence[float]) -> str:
    """Efficiency over latency as text, and which schedules keep most of it."""
    lines = [
        f"{'schedule':<20}{'v':>2}{'in flight':>11}"
        + "".join(f"{f'{time / MILLI:g} ms':>9}" for time in latencies)
        + f"{'lockstep':>10}"
    ]
    for row in found:
        values = "".join(f"{value:>9.1%}" for value in row.efficiencies)
        lines.append(f"{row.schedule.name:<20}{row.schedule.chunks:>2}{row.live:>11.1f}{values}{row.lockstep:>10.1%}")
    kept = {row.schedule.name: row.efficiencies[-1] / row.efficiencies[0] for row in found}
    survivors = [name for name, share in sorted(kept.items(), key=lambda item: -item[1]) if share >= SURVIVES]
    best = max(found, key=lambda row: row.efficiencies[-1])
    lines += [
        "efficiency: the share of a step in which a stage computes. in flight: most microbatches stashed on a stage.",
        f"at {latencies[-1] / MILLI:g} ms the fastest is {best.schedule.name}; "
        f"{SURVIVES:.0%} of their throughput at {latencies[0] / MILLI:g} ms keep: {', '.join(survivors) or 'none'}.",
    ]
    return "\n".join(lines)


def plot(found: Sequence[Row], latencies: Sequence[float], title: str, path: str) -> None:
    """Draws efficiency over latency.

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    with picture(path, 470, 300) as figure:
        axis, ends = figure.subplots(), []
        milliseconds = [time / MILLI for time in latencies]
        for row in found:
            values = [100 * value for value in row.efficiencies]
            made = row is found[-1]  # the schedule made for this link; dashed, as its line may cover another one
            (line,) = axis.plot(milliseconds, values, "--" if made else "o-", color="black" if made else None)
            ends.append((milliseconds[-1], values[-1], f"{row.schedule.name}, {row.live:.0f}", line.get_color()))
        axis.set_xlim(0, milliseconds[-1] or 1)
        axis.set_ylim(0, 100)
        axis.set_xlabel("latency of the link between sites, one way, ms")
        axis.set_ylabel("share of the step in which a stage computes, %")
        axis.set_title("\n".join(wrapped(title, 440, 9)), fontsize=9, pad=16)
        note = "schedule, microbatches in flight"
        axis.text(1.0, 1.02, note, transform=axis.transAxes, fontsize=8, color=SOFT)
        label_ends(axis, ends)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    return exit_code(lambda: _command(_parser().parse_args(arguments)))


def _command(args: argparse.Namespace) -> int:
    parallel = ParallelConfig(
        data=args.data,
        pipe=args.pipe,
        tensor=args.tensor,
        microbatch_size=args.microbatch_size,
        recompute=args.recompute,
        attention="auto",
    )
    train = TrainConfig(global_batch_size=args.data * args.microbatch_size * args.microbatches, precision="bf16")
    if args.sites > args.pipe:
        raise ConfigError(
            f"sites = {args.sites} must be at most pipe = {args.pipe}, since each has a stage: pass fewer --sites, or more "
            "--pipe."
        )
    gpu = find_gpu(args.gpu)
    run = resolved(RunConfig(preset(args.model), parallel, train), gpu)
    sent = activation_bytes(run)
    sites = Sites(args.sites, transfer=sent / (args.gbps * GIGABIT), jitter=args.jitter * MILLI, seed=args.seed)
    latencies = [time * MILLI for time in sorted(args.latency)]
    found = rows(run, gpu, args.schedule, latencies, sites)
    costs = chunk_costs(run, gpu)
    title = (
        f"{run.model.name}, {args.pipe} stages of {args.data} x {args.tensor} {args.gpu} on {args.sites} sites, "
        f"{args.microbatches} microbatches"
    )
    print(
        f"{title}\na stage takes {(costs.forward + costs.backward) / MILLI:.1f} ms for a microbatch;\nbetween sites "
        f"{sent / 1e6:.0f} MB take {sites.transfer / MILLI:.1f} ms at {args.gbps:g} Gb/s, then the latency and "
        f"{args.jitter:g} ms of jitter"
    )
    print(table(found, latencies))
    if args.plot:
        jitter = f", jitter {args.jitter:g} ms" if args.jitter else ""
        plot(found, latencies, f"{title}, {args.gbps:g} Gb/s{jitter}", args.plot)
        print(f"drawn: {args.plot}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.slow_links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.renamed = {"--schedules": "--schedule"}
    add = parser.add_argument
    add("--model", type=plain_text, default="gpt3-175b", metavar="NAME", help="preset (default: %(default)s)")
    add("--gpu", type=plain_text, default="h100-80gb", metavar="|".join(GPUS), help="(default: %(default)s)")
    add("--data", type=whole(), default=1, help="replicas; they share the links (default: %(default)s)")
    add("--pipe", type=whole(), default=16, help="stages, on all sites together (default: %(default)s)")
    add("--tensor", type=whole(), default=8, help="(default: %(default)s)")
    add("--microbatch-size", type=whole(), default=1, metavar="COUNT", help="samples (default: %(default)s)")
    add("--microbatches", type=whole(), default=128, metavar="COUNT", help="of a step (default: %(default)s)")
    add("--recompute", default="selective", choices=("none", "selective", "full"), help="(default: %(default)s)")
    add("--schedule", nargs="+", default=SCHEDULES, type=plain_text, metavar="NAME", help="(default: those that train)")
    add("--sites", type=whole(), default=2, metavar="COUNT", help="(default: %(default)s)")
    add(
        "--latency",
        nargs="+",
        type=number(low=0),
        default=LATENCIES,
        metavar="MS",
        help="of a link, one way (default: 0 to 50)",
    )
    add("--gbps", type=number(), default=100.0, metavar="RATE", help="of a link, each way (default: %(default)s)")
    add("--jitter", type=number(low=0), default=0.0, metavar="MS", help="mean random delay of a send (default: 0)")
    add("--seed", type=whole(low=0), default=0, help="of the delays (default: 0)")
    add("--plot", type=picture_file, metavar="FILE", help="draw efficiency over latency (needs megajax[plot])")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""What failures cost a long run: goodput, the best interval between saves, spare hosts, by the number of GPUs.

python -m experiments.failures
python -m experiments.failures --gpus 16384 --save 30 --restart 600 --spares 4 --jitter 0.01 --plot goodput.svg
python -m experiments.failures --slow-hosts 0.005 --slow-by 0.1

Failures are independent and memoryless. A job of n GPUs fails every M = m / n hours, m being the mean time between failures
of one GPU, with its share of host and network. By default m is what Llama 3's 54 days on 16,384 GPUs had: 419 unexpected
interruptions (2407.21783 section 3.3.4), of which 78% were of hardware, so that a host had to be replaced. A failure costs
the restart and the work since the last save. Goodput is the share of time in which the run makes progress that is kept.

`python -m benchmarks.checkpoints --directory DIR` measures a checkpoint's times on the file system of DIR: its "waited" is
--save, its "save" is --write, and its "read" is part of --restart.
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from statistics import NormalDist

from megajax.config.options import Parser
from megajax.schedules.arguments import number, whole
from megajax.schedules.errors import exit_code
from megajax.schedules.pictures import SOFT, label_ends, picture, picture_file

LLAMA3_GPU_HOURS, LLAMA3_INTERRUPTIONS, LLAMA3_HARDWARE = 54 * 24 * 16384, 419, 0.78
COUNTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 100_000)
HOUR, EULER = 3600.0, 0.5772156649
MOST_STALLED = 1e-3  # share of time that `spares_for` accepts


@dataclasses.dataclass(frozen=True)
class Failures:
    """How often GPUs fail, and what a failure and a save cost; times in seconds.

    Attributes:
      gpu_mtbf: mean time between failures of one GPU that stop the job.
      save: training stops for a save.
      restart: from a failure to the first new step: detection, start, compilation, reading the checkpoint.
      write: from the end of `save` to the time at which the checkpoint is complete, if it is written asynchronously. What is
        lost by a failure is counted from the last complete one.
      host_share: of failures, those after which a host is replaced.
      repair: until a replaced host is a spare one.
      jitter: standard deviation of a GPU's step time, as a share of it; every step waits for the slowest.
      slow_hosts: of hosts, those that are always slow: 0.5% took about 10% longer in MegaScale (2402.15627 section 6.3).
      slow_by: how much longer they take, as a share.
      host_size: GPUs of a host.
    """

    gpu_mtbf: float = LLAMA3_GPU_HOURS / LLAMA3_INTERRUPTIONS * HOUR
    save: float = 10.0
    restart: float = 600.0
    write: float = 0.0
    host_share: float = LLAMA3_HARDWARE
    repair: float = 24 * HOUR
    jitter: float = 0.0
    slow_hosts: float = 0.0
    slow_by: float = 0.1
    host_size: int = 8

    def job_mtbf(self, gpus: int) -> float:
        """Mean time between failures of a job on this many GPUs."""
        return self.gpu_mtbf / gpus

    def goodput(self, gpus: int, interval: float, spares: int | None = None) -> float:
        """The share of time in which progress is made that is kept, with a save after every `interval` of training.

        Daly's expected time for exponential failures, also during saves and restarts (FGCS 22, 2006, equation 20): with
        the work t between saves, the save d, the restart R and the mean time M, a period of t takes
        M exp(R / M) (exp((t + d) / M) - 1). A save counts only when it is written, which adds the write to R.
        `spares`: hosts at hand; None: enough.
        """
        mean, lost = self.job_mtbf(gpus), self.restart + self.write
        exponent = (lost + interval + self.save) / mean
        if exponent > 700:  # beyond the range of floats: no progress
            return 0.0
        period = mean * math.exp(lost / mean) * math.expm1((interval + self.save) / mean)
        stalled = 0.0 if spares is None else self.stalled(gpus, spares)
        return interval / period * (1 - stalled) / self.slowdown(gpus)

    def stalled(self, gpus: int, spares: int) -> float:
        """The share of time in which the job waits for a host, since all spares are being repaired.

        Hosts fail only while the job runs, so that at most `spares` + 1 are being repaired: Erlang's loss formula (1917) for
        as many servers, which holds for repairs of any distribution.
        """
        return next(itertools.islice(self._blocked(gpus), spares, None))

    def spares_for(self, gpus: int, most_stalled: float = MOST_STALLED) -> int:
        """The fewest spare hosts with which the job waits for at most this share of time."""
        return next(spares for spares, blocked in enumerate(self._blocked(gpus)) if blocked <= most_stalled)

    def _blocked(self, gpus: int) -> Iterator[float]:
        """`stalled` for 0, 1, 2, ... spare hosts, by the recursion of Erlang's formula."""
        load, blocked = self.host_share * self.repair / self.job_mtbf(gpus), 1.0
        for servers in itertools.count(1):
            blocked = load * blocked / (servers + load * blocked)
            yield blocked

    def slowdown(self, gpus: int) -> float:
        """The expected step time of a job, relative to a GPU's mean: each step waits for the slowest.

        A host that is always slow makes every step slow, if the job has one. Jitter is normally distributed; the largest of
        n such values has the mean of an extreme value distribution (Fisher and Tippett, 1928): b + 0.577 a with
        b = q(1 - 1 / n), a = q(1 - 1 / (n e)) - b, q being the normal quantile.
        """
        slow = 1 + self.slow_by * (1 - (1 - self.slow_hosts) ** math.ceil(gpus / self.host_size))
        if gpus < 2 or not self.jitter:
            return slow
        quantile = NormalDist().inv_cdf
        location = quantile(1 - 1 / gpus)
        scale = quantile(1 - 1 / (gpus * math.e)) - location
        return slow * (1 + self.jitter * (location + EULER * scale))


def young(save: float, mean: float) -> float:
    """The interval sqrt(2 d M), the first-order optimum (Young, Communications of the ACM 17, 1974)."""
    return math.sqrt(2 * save * mean)


def daly(save: float, mean: float) -> float:
    """Daly's higher-order optimum (FGCS 22, 2006, equation 37); M if a save takes 2 M or more."""
    if save >= 2 * mean:
        return mean
    part = save / (2 * mean)
    return math.sqrt(2 * save * mean) * (1 + math.sqrt(part) / 3 + part / 9) - save


def best_interval(save: float, mean: float) -> float:
    """The interval of the highest goodput: t = M (1 + W(-exp(-1 - d / M))), at which Daly's equation 20 is least.

    The derivative of (exp((t + d) / M) - 1) / t is 0 where (1 - t / M) exp((t + d) / M) = 1; W is Lambert's function.
    """
    from scipy.special import lambertw

    if save < 1e-9 * mean:  # where W is not accurate in floats, and Young's formula is
        return young(save, mean)
    return mean * (1 + float(lambertw(-math.exp(-1 - save / mean)).real))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    return exit_code(lambda: _command(_parser().parse_args(arguments)))


def _command(args: argparse.Namespace) -> int:
    mtbf = HOUR * args.gpu_mtbf if args.gpu_mtbf else Failures.gpu_mtbf
    failures = Failures(
        gpu_mtbf=mtbf,
        save=args.save,
        restart=args.restart,
        write=args.write,
        repair=HOUR * args.repair,
        jitter=args.jitter,
        slow_hosts=args.slow_hosts,
        slow_by=args.slow_by,
    )
    print(table(failures, args.gpus, args.spares, args.interval))
    if args.plot:
        plot(failures, args.plot)
        print(f"drawn: {args.plot}")
    return 0


def table(failures: Failures, counts: Sequence[int], spares: int | None, interval: float | None) -> str:
    """A row for each number of GPUs: the job's mean time between failures, the intervals, goodput and spare hosts."""
    lines = [
        f"one GPU fails every {failures.gpu_mtbf / HOUR:,.0f} hours; a save stops training for {failures.save:g} s, a "
        f"restart takes {failures.restart:g} s; hosts are back after {failures.repair / HOUR:g} h",
        f"{'GPUs':>8}{'fails every':>13}{'Young':>9}{'Daly':>9}{'best':>9}{'goodput':>9}{'restarts':>10}{'saves':>7}"
        f"{'lost':>7}{'slowest':>9}{'spares':>8}",
    ]
    for gpus in counts:
        mean = failures.job_mtbf(gpus)
        best = best_interval(failures.save, mean)
        used = interval or best
        spare = failures.spares_for(gpus) if spares is None else spares
        goodput = failures.goodput(gpus, used, spare)
        stalled, slowest = failures.stalled(gpus, spare), goodput * (failures.slowdown(gpus) - 1)
        saves = (goodput + slowest) * failures.save / used
        restarts = (1 - stalled) * -math.expm1(-failures.restart / mean)
        lost = max(0.0, 1 - goodput - saves - restarts - slowest - stalled)
        lines.append(
            f"{gpus:>8,}{_time(mean):>13}{_time(young(failures.save, mean)):>9}{_time(daly(failures.save, mean)):>9}"
            f"{_time(best):>9}{goodput:>9.1%}{restarts:>10.1%}{saves:>7.1%}{lost:>7.1%}{slowest:>9.1%}{spare:>8,}"
        )
    lines.append(
        "best: the interval between saves with the highest goodput"
        + (f"; goodput is that of --interval {interval:g}" if interval else "")
        + ".\nlost: work done again. slowest: waiting for the slowest GPU. spares: "
        + ("hosts with which the job waits for less than 0.1% of time" if spares is None else "hosts, as given")
    )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, size in (("d", 86400.0), ("h", HOUR), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def plot(failures: Failures, path: str) -> None:
    """Draws goodput over the number of GPUs at the best interval, for this restart time and others.

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    counts = [round(1000 * 100 ** (step / 40)) for step in range(41)]
    with picture(path, 470, 270) as figure:
        axis, ends = figure.subplots(), []
        for restart in sorted({60.0, 180.0, 600.0, 1800.0, failures.restart}):
            changed = dataclasses.replace(failures, restart=restart)
            values = [100 * changed.goodput(n, best_interval(changed.save, changed.job_mtbf(n))) for n in counts]
            (line,) = axis.plot(counts, values)
            ends.append((counts[-1], values[-1], _time(restart).replace(".0 ", " "), line.get_color()))
        axis.plot([16384], [90], "kx", markersize=6, label="Llama 3 on 16,384 GPUs: above 90% (2407.21783)", ls="")
        axis.set_xscale("log")
        ticks = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlim(counts[0], counts[-1])
        axis.set_ylim(0, 100)
        axis.set_xlabel("GPUs")
        axis.set_ylabel("goodput, % of the time")
        axis.set_title(
            f"A GPU fails every {failures.gpu_mtbf / HOUR:,.0f} h, a save stops for {failures.save:g} s", pad=22
        )
        axis.text(1.02, 1.03, "time of a restart", transform=axis.transAxes, fontsize=8, color=SOFT)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 0.99), borderaxespad=0, handletextpad=0.2)
        label_ends(axis, ends)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.failures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, defaults = parser.add_argument, Failures()
    add("--gpus", nargs="+", type=whole(below=10**7 + 1), default=COUNTS, metavar="COUNT", help="of the job")
    add(
        "--gpu-mtbf",
        type=number(),
        metavar="HOURS",
        help=f"between failures of one GPU (default: Llama 3's, {defaults.gpu_mtbf / HOUR:,.0f})",
    )
    add("--save", type=number(), default=defaults.save, metavar="SECONDS", help="that training stops (default: 10)")
    add("--restart", type=number(), default=defaults.restart, metavar="SECONDS", help="after a failure (default: 600)")
    add("--write", type=number(low=0), default=0.0, metavar="SECONDS", help="of an asynchronous save (default: 0)")
    add("--repair", type=number(), default=defaults.repair / HOUR, metavar="HOURS", help="of a host (default: 24)")
    add("--spares", type=whole(low=0, below=10**6), metavar="COUNT", help="hosts at hand (default: as many as needed)")
    add("--interval", type=number(), metavar="SECONDS", help="between saves (default: the best)")
    add(
        "--jitter",
        type=number(low=0, below=1),
        default=0.0,
        metavar="SHARE",
        help="standard deviation of a GPU's step time, relative to it (default: 0)",
    )
    add(
        "--slow-hosts",
        type=number(low=0, below=1),
        default=0.0,
        metavar="SHARE",
        help="of hosts that are always slow and not replaced (default: 0)",
    )
    add("--slow-by", type=number(), default=defaults.slow_by, metavar="SHARE", help="their delay (default: 0.1)")
    add("--plot", type=picture_file, metavar="FILE", help="draw goodput over GPUs (needs megajax[plot])")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Predicted against published throughput, row by row.

python -m benchmarks.published          the table, with errors of held-out sources by family of GPU and kind
python -m benchmarks.published --fit    finds the fitted constants again, from sources that are not held out

Of `megajax.estimate.rates` the products' shares of the peaks on H100s and Blackwell and the jitter are fitted to these rows
(`fit_rates`), those of `operations.Fitted` to the marked ones. No constant is fitted to a held-out source.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.published.model import published_time
from benchmarks.published.operations import FITTED, Fitted
from benchmarks.published.rows import ROWS, Row
from benchmarks.tables import grouped
from megajax.config import RunConfig
from megajax.config.options import Parser
from megajax.estimate import rates
from megajax.estimate.error_bars import EXPERTS, FAMILIES, KINDS, ErrorBar, bar_of, error_bar
from megajax.schedules.errors import command


@dataclasses.dataclass(frozen=True)
class Check:
    """A row and its prediction: TFLOP/s per GPU, and the candidate run that was used."""

    row: Row
    run: RunConfig
    teraflops: float

    @property
    def error(self) -> float:
        return self.teraflops / self.row.teraflops - 1


def check(row: Row, fitted: Fitted = FITTED) -> Check:
    """Predicts a row; of several candidate runs, the fastest."""
    of = lambda run: published_time(run, row.gpu, row.software, row.sharding, fitted)  # noqa: E731
    run, time = min(((run, of(run)) for run in row.runs), key=lambda pair: pair[1].total)
    return Check(row, run, row.flops() / time.total / run.parallel.devices / 1e12)


def fit() -> Fitted:
    """The constants that minimise the sum of squared errors over the rows marked `fitted`."""
    from scipy.optimize import minimize

    rows = [row for row in ROWS if row.fitted]
    squares = lambda values: sum(check(row, Fitted(*map(float, values))).error ** 2 for row in rows)  # noqa: E731
    return Fitted(*map(float, minimize(squares, (0.3, 0.5), method="Nelder-Mead").x))


def rows_to_fit() -> list[Row]:
    """Those that the rates are fitted to: of no held-out source, without experts, on H100s and Blackwell."""
    return [row for row in ROWS if not row.held_out and row.kind != EXPERTS and row.gpu.family != "a100"]


@contextlib.contextmanager
def _given(shares: Mapping[str, float], jitter: float) -> Iterator[None]:
    """Sets the constants that `fit_rates` finds."""
    before = dict(rates.MATMUL_SHARE), dict(rates.JITTER)
    rates.MATMUL_SHARE.update(shares)
    rates.JITTER.update(dict.fromkeys(shares, jitter))
    try:
        yield
    finally:
        rates.MATMUL_SHARE.update(before[0])
        rates.JITTER.update(before[1])


def fit_rates() -> tuple[dict[str, float], float]:
    """(products' shares of the peak by family of GPU, the jitter) by least squares over `rows_to_fit`.

    The jitter is that of the differences between runs of a source that differ in the number of GPUs, of which nothing else
    changes for a microbatch.
    """
    import numpy as np
    from scipy.optimize import least_squares, minimize_scalar

    rows = rows_to_fit()
    families = sorted({row.gpu.family for row in rows})
    waits = np.array([rates.waiting(row.gpu, row.runs[0].parallel.devices) for row in rows]) / rates.JITTER["h100"]
    series = list(grouped(range(len(rows)), lambda place: _series(rows[place])).values())

    def errors(shares: Sequence[float]) -> Any:
        with _given(dict(zip(families, shares, strict=True)), 0.0):
            return np.array([check(row).error for row in rows])

    shares, jitter = [rates.MATMUL_SHARE[family] for family in families], rates.JITTER["h100"]
    for _ in range(2):
        found = functools.partial(lambda jitter, x: (1 + errors(x)) / (1 + jitter * waits) - 1, jitter)
        shares = least_squares(found, shares, diff_step=0.01, xtol=1e-3, ftol=1e-4).x
        logarithms = np.log1p(errors(shares))

        def spread(size: float, logarithms: Any = logarithms) -> float:
            left = logarithms - np.log1p(size * waits)
            return sum(float(np.var(left[some])) * len(some) for some in series)

        jitter = float(minimize_scalar(spread, bounds=(0, 0.1), method="bounded").x)
    return dict(zip(families, map(float, shares), strict=True)), jitter


def _series(row: Row) -> tuple:
    """Equal for rows that differ in the number of replicas only."""
    run = row.runs[0]
    layout = run.parallel.tensor, run.parallel.pipe, run.parallel.context
    return row.source, row.gpu.family, run.model, layout, run.microbatches


def report(checks: Sequence[Check]) -> str:
    """The table as text."""
    lines = [
        f"{'table':<22}{'model':<17}{'t':>2}{'c':>3}{'p':>4}{'d':>5}{'b':>4}{'v':>4}{'GPUs':>6}"
        f"{'published':>11}{'predicted':>11}{'error':>8}"
    ]
    for one in checks:
        parallel = one.run.parallel
        mark = "  fitted" if one.row.fitted else "  held out" if one.row.held_out else ""
        lines.append(
            f"{one.row.table:<22}{one.run.model.name:<17}{parallel.tensor:>2}{parallel.context:>3}{parallel.pipe:>4}"
            f"{parallel.data:>5}{parallel.microbatch_size:>4}{parallel.chunks:>4}{parallel.devices:>6}"
            f"{one.row.teraflops:>11.1f}{one.teraflops:>11.1f}{one.error:>+8.1%}{mark}"
        )
    lines += [summary(name, some) for name, some in groups(checks).items()]
    one, two = coverage(checks)
    return "\n".join(
        [*lines, f"held out: {one:.0%} of the rows are within one bar of their kind, {two:.0%} within two"]
    )


def held_out(checks: Sequence[Check]) -> dict[tuple[str, str], list[Check]]:
    """The rows of held-out sources by (family of GPU, kind), and by ("", kind)."""
    found = {}
    for family in ("", *FAMILIES):
        for kind in KINDS:
            some = [one for one in checks if one.row.held_out and one.row.kind == kind]
            some = [one for one in some if family in ("", one.row.gpu.family)]
            if some:
                found[family, kind] = some
    return found


def bars(checks: Sequence[Check]) -> dict[tuple[str, str], ErrorBar]:
    """The error bars of held-out rows, as `error_bars.ERROR_BARS` has them."""
    sources = lambda some: len({one.row.source for one in some})  # noqa: E731
    return {key: error_bar([one.error for one in some], sources(some)) for key, some in held_out(checks).items()}


def coverage(checks: Sequence[Check]) -> tuple[float, float]:
    """Of the held-out rows, the parts that are within one error bar, and within two."""
    sizes = []
    for one in checks:
        if one.row.held_out:
            bar = bar_of(
                one.row.gpu.family,
                dataclasses.replace(one.run.parallel, zero=one.row.sharding.zero),
                one.row.kind == EXPERTS,
            )[1]
            sizes.append(one.error / bar.slower if one.error >= 0 else -one.error / bar.faster)
    return tuple(sum(size <= most for size in sizes) / len(sizes) for most in (1, 2))


def groups(checks: Sequence[Check]) -> dict[str, list[Check]]:
    """The rows by what they say: of sources that constants may be fitted to, and held-out ones by family and kind."""
    found = {"not held out": [one for one in checks if not one.row.held_out]}
    names = {key: ", ".join(filter(None, ("held out", key[1], FAMILIES.get(key[0])))) for key in held_out(checks)}
    return found | {names[key]: some for key, some in held_out(checks).items()}


def summary(name: str, checks: Sequence[Check]) -> str:
    """A group's errors in one line."""
    errors, sources = [one.error for one in checks], len({one.row.source for one in checks})
    mean = sum(map(abs, errors)) / len(errors)
    return (
        f"{name}: {len(errors)} rows of {sources} sources, mean absolute error {mean:.1%}, "
        f"bias {sum(errors) / len(errors):+.1%}, from {min(errors):+.1%} to {max(errors):+.1%}"
    )


@command
def main(arguments: Sequence[str] | None) -> None:
    """Prints the table, or the constants."""
    parser = Parser(prog="python -m benchmarks.published", description="predicted against published TFLOP/s per GPU")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    if parser.parse_args(arguments).fit:
        found = fit()
        print(f"gather_share {found.gather_share:.3f}; gather_overlap {found.gather_overlap:.3f}")
        shares, jitter = fit_rates()
        print("; ".join(f"{family} {share:.3f}" for family, share in shares.items()) + f"; jitter {jitter:.4f}")
        return
    print(report([check(row) for row in ROWS]))


if __name__ == "__main__":
    sys.exit(main())

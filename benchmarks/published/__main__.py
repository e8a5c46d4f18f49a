"""Predicted against published throughput, row by row.

python -m benchmarks.published          the table, with errors by kind, of fitted and of tested sources apart
python -m benchmarks.published --fit    finds the fitted constants again, from the marked rows only

The rates are those of `megajax.estimate.rates`, of which one, the memory's share, was chosen with all rows in view. A source
is fitted if a constant of `operations.Fitted` was fitted to any of its rows, which are marked.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence

from benchmarks.published.model import published_time
from benchmarks.published.operations import FITTED, Fitted
from benchmarks.published.rows import ROWS, Row
from benchmarks.tables import grouped
from megajax.config import RunConfig
from megajax.config.options import Parser
from megajax.estimate.error_bars import KINDS, ErrorBar
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


def is_tested(row: Row) -> bool:
    """Whether no constant was fitted to any row of the row's source."""
    return not any(other.fitted and other.source == row.source for other in ROWS)


def error_bar(checks: Sequence[Check]) -> ErrorBar:
    """Of rows of one kind: the rms error, and the spread within a source around the source's mean error."""
    errors = [[one.error for one in some] for some in grouped(checks, lambda one: one.row.source).values()]
    within = sum((error - sum(some) / len(some)) ** 2 for some in errors for error in some)
    spread = math.sqrt(within / (len(checks) - len(errors))) if len(checks) > len(errors) else math.nan
    return ErrorBar(math.sqrt(sum(one.error**2 for one in checks) / len(checks)), spread)


def report(checks: Sequence[Check]) -> str:
    """The table as text."""
    lines = [
        f"{'table':<22}{'model':<17}{'t':>2}{'c':>3}{'p':>4}{'d':>5}{'b':>4}{'v':>4}{'GPUs':>6}"
        f"{'published':>11}{'predicted':>11}{'error':>8}"
    ]
    for one in checks:
        parallel = one.run.parallel
        mark = "  fitted" if one.row.fitted else "" if is_tested(one.row) else "  fitted source"
        lines.append(
            f"{one.row.table:<22}{one.run.model.name:<17}{parallel.tensor:>2}{parallel.context:>3}{parallel.pipe:>4}"
            f"{parallel.data:>5}{parallel.microbatch_size:>4}{parallel.chunks:>4}{parallel.devices:>6}"
            f"{one.row.teraflops:>11.1f}{one.teraflops:>11.1f}{one.error:>+8.1%}{mark}"
        )
    lines += [summary(name, some) for name, some in groups(checks).items()]
    return "\n".join(lines)


def groups(checks: Sequence[Check]) -> dict[str, list[Check]]:
    """The rows by what they say: of fitted sources, of tested ones, and those by kind."""
    tested = [one for one in checks if is_tested(one.row)]
    found = {"fitted sources": [one for one in checks if not is_tested(one.row)], "tested sources": tested}
    return found | {f"tested, {kind}": [one for one in tested if one.row.kind == kind] for kind in KINDS}


def summary(name: str, checks: Sequence[Check]) -> str:
    """A group's errors in one line."""
    errors = [abs(one.error) for one in checks]
    bar = error_bar(checks)
    return (
        f"{name}: {len(errors)} rows, mean absolute error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}; "
        f"rms {bar.total:.1%}" + ("" if math.isnan(bar.within) else f", within a source {bar.within:.1%}")
    )


@command
def main(arguments: Sequence[str] | None) -> None:
    """Prints the table, or the constants."""
    parser = Parser(prog="python -m benchmarks.published", description="predicted against published TFLOP/s per GPU")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    if parser.parse_args(arguments).fit:
        found = fit()
        print(f"gather_share {found.gather_share:.3f}; gather_overlap {found.gather_overlap:.3f}")
        return
    print(report([check(row) for row in ROWS]))


if __name__ == "__main__":
    sys.exit(main())

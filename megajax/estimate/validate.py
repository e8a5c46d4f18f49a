"""Predicted against published throughput, row by row.

python -m megajax.estimate.validate          the table, with errors; rows that the constants are fitted on are marked
python -m megajax.estimate.validate --fit    finds the fitted constants again, from the marked rows only
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence

from megajax.config import RunConfig
from megajax.estimate.gpus import find_gpu
from megajax.estimate.op_costs import FITTED, Fitted
from megajax.estimate.published import ROWS, ZERO_3, Row
from megajax.estimate.step_time import StepTime, step_time
from megajax.schedules.arguments import CommandParser


@dataclasses.dataclass(frozen=True)
class Check:
    """A row and its prediction: TFLOP/s per GPU, and the candidate run that was used."""

    row: Row
    run: RunConfig
    time: StepTime
    teraflops: float

    @property
    def error(self) -> float:
        return self.teraflops / self.row.teraflops - 1


def check(row: Row, fitted: Fitted = FITTED) -> Check:
    """Predicts a row; of several candidate runs, the fastest."""
    of = lambda run: step_time(run, find_gpu(row.gpu), row.software, sharding=row.sharding, fitted=fitted)  # noqa: E731
    run, time = min(((run, of(run)) for run in row.runs), key=lambda pair: pair[1].total)
    return Check(row, run, time, row.flops() / time.total / run.parallel.devices / 1e12)


def fit() -> Fitted:
    """The constants that minimise the sum of squared errors over the rows marked `fitted`.

    First those that all runs depend on; then, with these fixed, those of ZeRO-3, on its rows.
    """
    whole = _least(
        lambda a100, h100, memory: dataclasses.replace(
            FITTED, matmul_share={"a100": a100, "h100": h100, "h200": h100}, memory_share=memory
        ),
        (0.8, 0.7, 0.8),
        [row for row in ROWS if row.fitted and row.table != ZERO_3],
    )
    return _least(
        lambda share, overlap: dataclasses.replace(whole, gather_share=share, gather_overlap=overlap),
        (0.3, 0.5),
        [row for row in ROWS if row.fitted and row.table == ZERO_3],
    )


def _least(constants: Callable[..., Fitted], start: Sequence[float], rows: Sequence[Row]) -> Fitted:
    """`constants` of the numbers that predict `rows` best, by a search from `start`."""
    from scipy.optimize import minimize

    squares = lambda values: sum(check(row, constants(*map(float, values))).error ** 2 for row in rows)  # noqa: E731
    return constants(*map(float, minimize(squares, start, method="Nelder-Mead").x))


def report(checks: Sequence[Check]) -> str:
    """The table as text."""
    lines = [
        f"{'table':<22}{'model':<16}{'t':>2}{'p':>4}{'d':>5}{'b':>4}{'v':>4}{'GPUs':>6}"
        f"{'published':>11}{'predicted':>11}{'error':>8}"
    ]
    for one in checks:
        parallel = one.run.parallel
        lines.append(
            f"{one.row.table:<22}{one.run.model.name:<16}{parallel.tensor:>2}{parallel.pipe:>4}{parallel.data:>5}"
            f"{parallel.microbatch_size:>4}{parallel.chunks:>4}{parallel.devices:>6}{one.row.teraflops:>11.1f}"
            f"{one.teraflops:>11.1f}{one.error:>+8.1%}{'  fitted' if one.row.fitted else ''}"
        )
    for name, some in (
        ("all rows", checks),
        ("rows not fitted on", [one for one in checks if not one.row.fitted]),
    ):
        errors = [abs(one.error) for one in some]
        lines.append(
            f"{name}: {len(errors)}, mean absolute error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m megajax.estimate.validate", description="predicted against published TFLOP/s per GPU"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    if parser.parse_args(arguments).fit:
        found = fit()
        shares = ", ".join(f"{chip} {share:.3f}" for chip, share in found.matmul_share.items())
        print(f"matmul_share {shares}; memory_share {found.memory_share:.3f}")
        print(f"gather_share {found.gather_share:.3f}; gather_overlap {found.gather_overlap:.3f}")
        return 0
    print(report([check(row) for row in ROWS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

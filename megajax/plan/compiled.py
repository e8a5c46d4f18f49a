"""The planner's best rows, compiled for their GPU and ranked by the compiled programs: `megajax plan --compile COUNT`.

Each is compiled as the dry run compiles it, which takes a minute or more on two cores and needs no GPU, and its time is the
account of its kernels with the bubble, and with the waiting for the slowest GPU that the time model predicts.
"""

import dataclasses
from collections.abc import Callable, Sequence

from megajax.estimate.program_account import account_of
from megajax.estimate.rates import waiting
from megajax.plan.compiler import CompilerError, compile_for
from megajax.plan.search import Candidate, usable_bytes

__all__ = ["Compiled", "compile_rows", "compiled_table", "ranked"]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A layout beside its compiled program.

    Attributes:
      place: of its row among the predicted ones, from 1.
      seconds: of a step, as above; None if it was not compiled.
      peak: bytes of the fullest GPU.
      problem: why it was not compiled; "".
    """

    place: int
    candidate: Candidate
    seconds: float | None = None
    peak: int = 0
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.seconds is not None and self.peak <= usable_bytes(self.candidate.question.gpu)


def compile_rows(
    rows: Sequence[Candidate], timeout: float = 900, tell: Callable[[str], None] = lambda line: None
) -> list[Compiled]:
    """The rows with their compiled programs, in the same order; `tell` is called with a line before each compilation.

    Raises:
      ConfigError: the compiler is not installed, or the GPU is not NVIDIA's.
    """
    found = []
    for place, one in enumerate(rows, 1):
        tell(f"compiling {place} of {len(rows)}")
        gpu = one.question.gpu
        try:
            result = compile_for(one.run, gpu, timeout=timeout)
        except CompilerError as error:
            found.append(Compiled(place, one, problem=str(error)))
            continue
        account = account_of(one.run, gpu, result["hlo"])
        seconds = account.seconds * (1 + waiting(gpu, one.run.parallel.devices))
        found.append(Compiled(place, one, seconds, result["memory"]["peak"]))
    return found


def ranked(found: Sequence[Compiled]) -> list[Compiled]:
    """Those that compiled and fit first, the fastest first; then the others in their order."""
    return sorted(found, key=lambda one: (not one.fits, one.seconds if one.fits else one.place))


def compiled_table(found: Sequence[Compiled]) -> str:
    """A line for each, in the order of `ranked`."""
    lines = [f"{'compiled':<10}{'t':>4}{'p':>4}{'d':>5}{'step s':>10}{'predicted':>11}{'GB':>8}{'predicted':>11}"]
    for one in ranked(found):
        tensor, pipe, data = one.candidate.mesh
        head = f"row {one.place:<6}{tensor:>4}{pipe:>4}{data:>5}"
        if one.seconds is None:
            lines.append(f"{head}  not compiled: {one.problem}")
            continue
        times = f"{one.seconds:>10.2f}{one.candidate.time.total:>11.2f}"
        sizes = f"{one.peak / 1e9:>8.1f}{one.candidate.peak / 1e9:>11.1f}"
        lines.append(f"{head}{times}{sizes}{'' if one.fits else '  does not fit'}")
    return "\n".join(lines)

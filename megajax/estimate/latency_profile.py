"""Times of a step's instructions for XLA's latency hiding scheduler, which by them decides what overlaps a collective.

XLA looks an instruction up by its name and uses its own model for the others, which is wrong about two kinds of them. A
matmul that reads its weight, or adds its gradient, in the stacked arrays is a fusion, for which it expects 0.01 us; and an
asynchronous slice of a small array (a norm's weight, a bias) has 5,000 us (jaxlib 0.12.0.1). Both have names of their own,
`dynamic_slice_fusion.7` and `fusion-start.7`, so that a run has a profile before its step is compiled (`profile_of_run`). A
compiled program has the times of all its instructions, for a second compilation (`profile_of_program`).
"""

from collections.abc import Mapping

from megajax.config import ConfigError, RunConfig
from megajax.estimate.gpus import Gpu
from megajax.estimate.kept import rows_of
from megajax.estimate.program_account import account_arguments
from megajax.estimate.rates import rates_of
from megajax.estimate.roofline import seconds_by_name
from megajax.models.costs import ModelCosts

IN_PLACE_MATMUL, SLICE = "dynamic_slice_fusion", "fusion-start"
MOST_NAMES = 4096  # numbers that the names have; GPT-3 175B's step, with 18 loops over blocks, has 216 and 234


def profile_of_run(run: RunConfig, gpu: Gpu, costs: ModelCosts) -> bytes:
    """The times of a run's matmuls in place, each the mean of a block's, and of slices; `costs` are the model's.

    Returns:
      A ProfiledInstructionsProto as text, names and microseconds; empty if the model has no matmuls, or the GPU no
      published rate for the run's precision.
    """
    sizes = [one.on_device(run.parallel.tensor) for one in costs.matmuls]
    rows = rows_of(costs, run.parallel)
    try:
        rates = rates_of(gpu, run.train.precision)
    except ConfigError:
        return b""
    if not sizes:
        return b""
    seconds = (rates.product(2 * rows * inputs * outputs, 2 * rows * outputs, 0.0) for inputs, outputs in sizes)
    mean = sum(seconds) / len(sizes)
    kinds = ((IN_PLACE_MATMUL, mean), (SLICE, rates.gap))
    endings = ["", *(f".{number}" for number in range(1, MOST_NAMES))]
    return _profile({kind + ending: seconds for kind, seconds in kinds for ending in endings})


def profile_of_program(run: RunConfig, gpu: Gpu, hlo: str) -> bytes:
    """How long each kernel, loop and collective of a run's compiled step takes: a ProfiledInstructionsProto as text."""
    return _profile(seconds_by_name(hlo, *account_arguments(run, gpu)))


def _profile(seconds: Mapping[str, float]) -> bytes:
    lines = (f'costs {{ name: "{name}" cost_us: {1e6 * value:.3f} }}\n' for name, value in seconds.items())
    return "".join(lines).encode()

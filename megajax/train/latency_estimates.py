"""How XLA is told, on GPUs, how long a training step's instructions take; by that it decides what overlaps a collective.

XLA's own model of them is wrong about those that work in place (`estimate/latency_profile.py`). By default a step is
compiled with times that follow from the run. It can be compiled twice instead, the second time with the times that the
account of the first program finds (`estimate/program_account.py`) for all of its instructions, whose names are the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from megajax.estimate.gpus import gpu_of
from megajax.estimate.latency_profile import profile_of_program, profile_of_run
from megajax.estimate.merged_ticks import exchanges_timed, has_all_latencies, has_latencies
from megajax.models.interface import PipelineModel
from megajax.pipeline.program import StepProgram
from megajax.runtime.compat import PROFILE_OPTION, updates_in_place
from megajax.runtime.xla_flags import step_options

__all__ = ["ProfiledJit", "compiler_options", "knows_matmuls", "latency_options", "with_latencies"]


# XLA warns of each instruction that a profile does not have.
NO_WARNINGS = {"xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF"}


def knows_matmuls(program: StepProgram, device: jax.Device, model: PipelineModel) -> bool:
    """Whether XLA knows how long the step's matmuls take: it is told, or they are mostly experts', in kernels of their own.

    Arguments as for `latency_options`.
    """
    if not updates_in_place(device):
        return False
    costs = model.costs()
    return costs.experts is not None or has_latencies(program.run, gpu_of(device), costs)


def compiler_options(program: StepProgram, device: jax.Device, model: PipelineModel) -> dict[str, Any]:
    """All of XLA's options of a run's step; arguments as for `latency_options`."""
    if not updates_in_place(device):
        return {}
    of_run = step_options(program.run.parallel, device, exchanges_timed(program.run, model.costs()))
    return of_run | latency_options(program, device, model)


def latency_options(program: StepProgram, device: jax.Device, model: PipelineModel) -> dict[str, bytes | str]:
    """XLA's options for a step that is compiled once; none where it works by its own estimates.

    Args:
      program: the step's.
      device: one of the run's.
      model: the run's.
    """
    if not updates_in_place(device):
        return {}
    run, gpu, costs = program.run, gpu_of(device), model.costs()
    profile = profile_of_run(run, gpu, costs) if has_latencies(run, gpu, costs) else b""
    return {PROFILE_OPTION: profile, **NO_WARNINGS} if profile else {}


def with_latencies(function: Any, program: StepProgram, device: jax.Device, model: PipelineModel) -> Any:
    """The program's jitted step, compiled twice if `has_all_latencies`; other arguments as for `latency_options`."""
    if device.platform != "gpu" or not has_all_latencies(program.run, gpu_of(device), model.costs()):
        return function
    return ProfiledJit(function, functools.partial(profile_of_program, program.run, gpu_of(device)))


class ProfiledJit:
    """A jitted function; its programs, one for each set of shapes, are compiled with a profile of a first compilation."""

    def __init__(self, function: Any, profile: Callable[[str], bytes]):
        """`profile`: the optimized program's text -> a ProfiledInstructionsProto, binary or as text."""
        self._function, self._profile, self._programs = function, profile, {}

    def lower(self, *arguments) -> "ProfiledJit.Lowered":
        """As of a jitted function; arguments may be jax.ShapeDtypeStruct."""
        return self.Lowered(self._function.lower(*arguments), self._profile)

    def __call__(self, *arguments):
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in self._programs:
            self._programs[shapes] = self.lower(*arguments).compile()
        return self._programs[shapes](*arguments)

    class Lowered:
        """What `lower` returns."""

        def __init__(self, lowered: jax.stages.Lowered, profile: Callable[[str], bytes]):
            self._lowered, self._profile = lowered, profile

        def compile(self) -> jax.stages.Compiled:
            """The program of the second compilation."""
            first = self._lowered.compile().as_text()
            return self._lowered.compile({PROFILE_OPTION: self._profile(first)})

"""A training step that is compiled twice, the second time with estimates of how long each of its instructions takes.

By these times XLA's latency hiding scheduler decides which kernels overlap a collective. Its own model has times for matmuls
and collectives, but hardly any for a fusion that contains a matmul, which is what one becomes that works in place, so it may
leave a collective without a matmul and put several beside the next one. The roofline's times
(`estimate/program_account.py`) are known once a program is compiled, by the names of its instructions, which are the same
in the second compilation.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from megajax.config import RunConfig
from megajax.estimate.gpus import gpu_of
from megajax.estimate.program_account import latency_profile
from megajax.runtime.compat import compile_with_profile

__all__ = ["TwoPasses", "with_latencies"]


def with_latencies(function: Any, run: RunConfig, device: jax.Device) -> Any:
    """The jitted step `function` of a run, compiled as its `latency_estimates` says; `device` is one of the run's."""
    if run.parallel.latency_estimates == "xla" or device.platform != "gpu":
        return function
    return TwoPasses(function, functools.partial(latency_profile, run, gpu_of(device)))


class TwoPasses:
    """A jitted function; its programs, one for each set of shapes, are compiled with a profile of a first compilation."""

    def __init__(self, function: Any, profile: Callable[[str], bytes]):
        """`profile`: the optimized program's text -> a ProfiledInstructionsProto, binary or as text."""
        self._function, self._profile, self._programs = function, profile, {}

    def lower(self, *arguments) -> "TwoPasses.Lowered":
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
            return compile_with_profile(self._lowered, self._profile(first))

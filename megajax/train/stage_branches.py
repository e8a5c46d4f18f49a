"""Refuses a step that would hang: a model of one's own that moves elements along an axis that tensor splits.

Whether an operation becomes a collective permute is known of the compiled program only, so the check is between the
compilation and the first run of a program. The models that come with megajax have none, and are not checked.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.config import ConfigError, ParallelConfig
from megajax.estimate.branch_permutes import StagePermute, stage_permutes

__all__ = ["with_check"]


def with_check(function: Any, model: type, parallel: ParallelConfig, mesh: Mesh, static: tuple[int, ...] = ()) -> Any:
    """The jitted function, whose compiled programs are checked before they run.

    Not where nothing can hang: without tensor or pipeline parallelism, for a model of megajax's own, and where blocks run
    on all stages at once (`ParallelConfig.rings`), in which permutes are legal.

    Args:
      function: jitted.
      model: the model's class.
      parallel: the run's.
      mesh: the run's.
      static: its static arguments.
    """
    if parallel.tensor == 1 or parallel.pipe == 1 or parallel.rings or _is_built_in(model):
        return function
    places = np.indices(mesh.devices.shape)[mesh.axis_names.index("pipe")].reshape(-1).tolist()
    return Checked(function, lambda text: check(text, places, model), static)


def _is_built_in(model: type) -> bool:
    """Whether all functions of a model are megajax's."""
    parts = [model, getattr(model, "block_module", model), getattr(model, "shared_module", model)]
    return all(part.__module__.startswith("megajax.") for part in parts)


def check(text: str, stages: list[int], model: type) -> None:
    """Raises ConfigError if only some stages reach a collective permute of this compiled program."""
    if not (found := stage_permutes(text, stages)):
        return
    # The forward pass is traced from the line that its backward comes from too.
    first = next((one for one in found if one.source), found[0])
    more = len({one.source for one in found}) - 1
    raise ConfigError(_message(first, model) + (f" ({more} more such lines)" if more else ""))


def _message(permute: StagePermute, model: type) -> str:
    where = f" ({permute.source})" if permute.source else ""
    return (
        f"{permute.operation} in {permute.part} of {model.__name__}{where} is along an axis that is sharded over tensor: it "
        "would send data in work that only one pipeline stage does, and the run would hang. Gather its operand and its "
        "result, context.whole(f(context.whole(x))), or do not shard that axis"
    )


class Checked:
    """A jitted function; its programs, one for each set of shapes, are checked when they are compiled."""

    def __init__(self, function: Any, check: Callable[[str], None], static: tuple[int, ...] = ()):
        """`check`: of the optimized program's text; it raises an error."""
        self._function, self._check, self._static, self._programs = function, check, static, {}

    def lower(self, *arguments) -> "Checked.Lowered":
        """As of a jitted function; arguments may be jax.ShapeDtypeStruct."""
        return self.Lowered(self._function.lower(*arguments), self._check)

    def __call__(self, *arguments):
        traced = [argument for place, argument in enumerate(arguments) if place not in self._static]
        leaves, tree = jax.tree.flatten(traced)
        types = tuple((np.shape(leaf), str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in leaves)
        key = tree, types, tuple(arguments[place] for place in self._static if place < len(arguments))
        if key not in self._programs:
            self._programs[key] = self.lower(*arguments).compile()
        return self._programs[key](*traced)

    class Lowered:
        """What `lower` returns."""

        def __init__(self, lowered: Any, check: Callable[[str], None]):
            self._lowered, self._check = lowered, check

        def compile(self) -> jax.stages.Compiled:
            """The checked program."""
            compiled = self._lowered.compile()
            self._check(compiled.as_text())
            return compiled

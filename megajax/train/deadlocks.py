"""Refuses a program of a model of one's own whose collectives would deadlock, before it runs.

What becomes a collective, and which ranks reach it, is known of the compiled program only, so all ranks are followed through
it (`estimate.collective_order`) between its compilation and its first run. The usual fault is an operation that moves
elements along an axis that tensor splits. The programs of the models that come with megajax are followed by the tests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.config import ConfigError, ParallelConfig
from megajax.estimate.branch_permutes import StagePermute, stage_permutes
from megajax.estimate.collective_order import check
from megajax.runtime.compat import compiled_text

__all__ = ["with_check"]


def with_check(function: Any, model: type, parallel: ParallelConfig, mesh: Mesh, static: tuple[int, ...] = ()) -> Any:
    """The jitted function, whose compiled programs are checked before they run.

    Not on one device, and not for a model of megajax's own.

    Args:
      function: jitted.
      model: the model's class.
      parallel: the run's.
      mesh: the run's.
      static: its static arguments.
    """
    if parallel.devices == 1 or _is_built_in(model):
        return function
    places = np.indices(mesh.devices.shape)[mesh.axis_names.index("pipe")].reshape(-1).tolist()
    return Checked(function, lambda text: refuse(text, places, model), static)


def _is_built_in(model: type) -> bool:
    """Whether all functions of a model are megajax's."""
    parts = [model, getattr(model, "block_module", model), getattr(model, "shared_module", model)]
    return all(part.__module__.startswith("megajax.") for part in parts)


def refuse(text: str, stages: Sequence[int], model: type) -> None:
    """Raises ConfigError if the collectives of this compiled program would deadlock.

    `stages`: of each device, in the order of the mesh's devices. What cannot be told (`Verdict.unknown`) is not refused,
    except for permutes that only some stages reach.
    """
    order = check(text)
    if order.consistent:
        return
    if found := stage_permutes(text, stages):
        # The forward pass is traced from the line that its backward comes from too.
        first = next((one for one in found if one.source), found[0])
        more = len({one.source for one in found}) - 1
        raise ConfigError(_message(first, model) + (f" ({more} more such lines)" if more else ""))
    if order.faults:
        raise ConfigError(
            f"the program of {model.__name__} would hang; {order}\nAll members of a collective's group must reach it, in "
            "the same order: take it out of branches and loops that depend on the rank or on a rank's own data."
        )


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
        """`check`: of the optimized program's text, with all elements of its constants; it raises an error."""
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
            self._check(compiled_text(compiled))
            return compiled

"""Which axis of an array lies on which axis of the mesh. One table; change it to change the parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import PartitionSpec

from megajax.runtime.compat import manual_axes

__all__ = ["AxisRules", "only", "without"]


@dataclass(frozen=True)
class AxisRules:
    """Logical axis name -> mesh axis.

    Attributes:
      sequence_parallel: whether the residual stream is split along its sequence over tensor (2205.05198 section 4.2).
      vocabulary_over_pipe: whether the token tables and the logits are split over pipe and tensor, or over tensor alone.
    """

    sequence_parallel: bool = True
    vocabulary_over_pipe: bool = False

    def mesh_axis(self, name: str | None) -> str | tuple[str, ...] | None:
        """The mesh axis (or axes) of a logical axis, None for one that every device holds whole.

        Raises:
          KeyError: for a name that is not in the table.
        """
        if name is None:
            return None
        return {
            # Parameters. Megatron's column- then row-parallel pair (1909.08053 section 3): one sum at the end of each.
            "layers": None,  # the pipeline lays layers out itself, see megajax.pipeline
            "hidden": None,  # what the pairs contract over or sum into
            "groups": "tensor",  # a group of heads and its key and value head: attention needs nothing of another group
            "heads": "tensor",  # the same split, seen by the output projection
            "feedforward": "tensor",  # the activation is elementwise
            # The largest matrix. The loss needs sums over it, not the logits themselves; over pipe too, so that no stage
            # has more of it than another.
            "vocabulary": ("pipe", "tensor") if self.vocabulary_over_pipe else "tensor",
            "positions": None,  # small, and read by all
            # Activations.
            "batch": "data",  # replicas see different samples
            "sequence": "tensor" if self.sequence_parallel else None,  # where nothing mixes tokens: norm, dropout, add
            "whole_sequence": None,  # in the matmul pairs, where heads or feedforward have the tensor axis
        }[name]

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these axes: ("hidden", "feedforward") -> P(None, "tensor")."""
        return PartitionSpec(*(self.mesh_axis(name) for name in axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Tells XLA's partitioner how x lies, and so its gradient; needs `jax.set_mesh` or `jax.shard_map` around it.

        Mesh axes that the surrounding `shard_map` is manual over are left out: there x is a device's own part already.
        """
        return lax.with_sharding_constraint(x, without(self.spec(axes), manual_axes()))


def without(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The partition with some mesh axes left out: (P(("pipe", "tensor")), ("pipe",)) -> P("tensor")."""
    return _kept(spec, lambda name: name not in axes)


def only(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The partition with all other mesh axes left out: (P("data", "tensor"), ("tensor",)) -> P(None, "tensor")."""
    return _kept(spec, lambda name: name in axes)


def _kept(spec: PartitionSpec, keep: Callable[[str], bool]) -> PartitionSpec:
    def left(entry):
        names = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name and keep(name))
        return names if len(names) > 1 else names[0] if names else None

    return PartitionSpec(*(left(entry) for entry in spec))

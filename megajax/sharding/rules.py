"""Sharding rules: a table from logical axis names to mesh axes. Replace entries to change the parallelism."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from megajax.config import ConfigError, near
from megajax.runtime.compat import manual_axes

__all__ = ["DEFAULT_TABLE", "AxisRules", "MeshAxes", "default_rules", "only", "without"]

MeshAxes = str | tuple[str, ...] | None

DEFAULT_TABLE: Mapping[str, MeshAxes] = {
    # Parameters. Megatron's column- then row-parallel pair (1909.08053 section 3): one sum at the end of each.
    "layers": None,  # sharded over pipe by megajax.pipeline.layout
    "hidden": None,  # the axis that the pairs contract over or sum into
    "head_elements": "tensor",  # of weights of queries, keys and values with fewer groups than a tensor group has ranks
    "groups": "tensor",  # a group of heads and its key and value head: attention needs no data of another group
    "heads": "tensor",  # the same split, seen by the output projection
    "feedforward": "tensor",  # the activation is elementwise
    "experts": None,  # every replica has all experts; with expert parallelism "expert", or ("expert", "tensor")
    "expert_feedforward": "tensor",  # of each expert; None where "experts" has tensor
    "vocabulary": "tensor",  # the largest matrix; the loss needs sums over it, not the logits themselves
    "positions": None,  # small, and read by all
    # Activations.
    "batch": "data",  # replicas have different samples; with expert parallelism ("data", "expert")
    "sequence": "tensor",  # where nothing mixes tokens: norm, dropout, addition (2205.05198 section 4.2)
    "whole_sequence": None,  # inside the matmul pairs, where heads or feedforward are split over tensor
}
BATCH = "data", "expert"  # with expert parallelism


@dataclass(frozen=True, eq=False)
class AxisRules:
    """A table of rules, and the shardings that follow from it.

    Attributes:
      table: logical axis name -> mesh axis, several mesh axes (outermost first), or None for replicated.
    """

    table: Mapping[str, MeshAxes]

    def replace(self, **entries: MeshAxes) -> "AxisRules":
        """The rules with some entries replaced or added: `rules.replace(hidden="tensor", experts=None)`."""
        return AxisRules({**self.table, **entries})

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream is split along its sequence over tensor (2205.05198 section 4.2)."""
        return "tensor" in self.mesh_axes("sequence")

    @property
    def vocabulary_over_pipe(self) -> bool:
        """Whether the token tables and the logits are split over pipe too, so that all stages hold equal shares."""
        return "pipe" in self.mesh_axes("vocabulary")

    @property
    def expert_parallel(self) -> bool:
        """Whether replicas split the experts of a layer, on a mesh that has an axis `expert`."""
        return "expert" in self.mesh_axes("experts") and self.mesh_axis("batch") == BATCH

    @property
    def experts_over_tensor(self) -> bool:
        """Whether each tensor rank has whole experts of its own (2504.14960 section 3)."""
        return "tensor" in self.mesh_axes("experts")

    def shares(self, name: str, mesh_sizes: Mapping[str, int]) -> int:
        """Devices that a logical axis is split over, on a mesh with these sizes by mesh axis."""
        shares = 1
        for axis in self.mesh_axes(name):
            shares *= mesh_sizes[axis]
        return shares

    def mesh_axis(self, name: str | None) -> MeshAxes:
        """The mesh axis (or axes) of a logical axis; None for a replicated one.

        Raises:
          ConfigError: the table has no such name.
        """
        if name is None:
            return None
        if name not in self.table:
            raise ConfigError(
                f"logical axis {name!r} has no sharding rule: {near(name, self.table)} "
                f"Add it to the rules: Trainer(run, rules=default_rules().replace({name}=None))."
            )
        return self.table[name]

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        """`mesh_axis` as a tuple: empty for a replicated axis."""
        entry = self.mesh_axis(name)
        return entry if isinstance(entry, tuple) else (entry,) if entry else ()

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these axes: ("hidden", "feedforward") -> P(None, "tensor")."""
        return PartitionSpec(*(self.mesh_axis(name) for name in axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrains the sharding of x, and of its gradient; needs `jax.set_mesh` or `jax.shard_map` around it.

        Mesh axes that the surrounding `shard_map` is manual over are left out: there x is a device's own shard already.
        """
        return lax.with_sharding_constraint(x, without(self.spec(axes), manual_axes()))

    def constrain_tree(self, tree: Any, axes: Any) -> Any:
        """`constrain` of each array of a pytree; `axes` has a tuple of names in the place of each."""
        return jax.tree.map(lambda x, own: self.constrain(x, *own), tree, axes)


def default_rules(
    *,
    sequence_parallel: bool = True,
    vocabulary_over_pipe: bool = False,
    expert_parallel: bool = False,
    experts_over_tensor: bool = False,
) -> AxisRules:
    """The rules of `--sequence-parallel`, `--vocab-parallel`, `--expert` and `--expert-tensor`; see `AxisRules`."""
    experts = (*(["expert"] if expert_parallel else []), *(["tensor"] if experts_over_tensor else []))
    return AxisRules(
        {
            **DEFAULT_TABLE,
            "experts": experts if len(experts) > 1 else experts[0] if experts else None,
            "expert_feedforward": None if experts_over_tensor else "tensor",
            "batch": BATCH if expert_parallel else "data",
            "vocabulary": ("pipe", "tensor") if vocabulary_over_pipe else "tensor",
            "sequence": "tensor" if sequence_parallel else None,
        }
    )


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

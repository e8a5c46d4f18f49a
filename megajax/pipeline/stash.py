"""The stash: a buffer for the values that forwards save for their backwards, in device or host memory.

A buffer is a pytree of arrays [slots, blocks per chunk, ...]. A slot holds the values of one chunk on one microbatch,
from the forward (or I) that writes them until the backward (or W) that reads them last; `slots.py` assigns the slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from megajax.runtime import compat

Tree = Any
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def empty_stash(slots: int, blocks: int, shapes: Tree, *, on_host: bool = False) -> Tree:
    """A buffer of zeros.

    Args:
      slots: how many chunk activations it holds.
      blocks: blocks in a chunk.
      shapes: pytree of arrays or ShapeDtypeStruct, the values of one block: leaves [...] give [slots, blocks, ...].
      on_host: allocates the buffer in host memory (`--offload-activations`).
    """

    def empty(leaf):
        shape = (slots, blocks, *leaf.shape)
        if not on_host:
            return jnp.zeros(shape, leaf.dtype)
        # A scalar is broadcast in host memory: XLA then allocates the buffer there and transfers nothing from the
        # device.
        return jnp.broadcast_to(jax.device_put(jnp.zeros([1] * len(shape), leaf.dtype), HOST), shape)

    return jax.tree.map(empty, shapes)


def in_order(x: jax.Array) -> jax.Array:
    """x with the last axis innermost in memory, whatever computes it or takes it.

    Before jaxlib 0.12 XLA's CPU compiler, which chooses another layout for the loops, would copy the stash in each tick.
    """
    if compat.jaxlib_version() < (0, 12):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@dataclasses.dataclass(frozen=True)
class TickStash:
    """What a forward saves for the backward of its own tick: the values themselves. It has the methods of StashRef.

    Attributes:
      buffer: a tuple with the values of each block.
    """

    buffer: tuple[Tree, ...]

    def write(self, block: int, values: Tree) -> tuple[Tree, ...]:
        """`buffer` with the values of one block."""
        return (*self.buffer[:block], values, *self.buffer[block + 1 :])

    def read(self, block: int, zero=0) -> Tree:
        """The values of one block."""
        return self.buffer[block]

    def stacks(self, block: int, zero=0) -> list:
        """None of the values is in a stack."""
        return []


@dataclasses.dataclass(frozen=True)
class StashRef:
    """One slot of a stash.

    Attributes:
      buffer: pytree of [slots, blocks per chunk, ...], as `empty_stash` makes it.
      slot: int32 scalar.
      on_host: whether the buffer is in host memory. Each block's values are then transferred separately.
      mirrored: of which leaves, by number, the buffer has the last block first.
    """

    buffer: Tree
    slot: Any
    on_host: bool = False
    mirrored: frozenset[int] = frozenset()

    @property
    def fixed(self) -> bool:
        """Whether the slot is known when the program is compiled, as the only one."""
        return jax.tree.leaves(self.buffer)[0].shape[0] == 1

    def place(self, leaf: int, whole: jax.Array, block):
        """Where a block is in the array of a leaf, [slots, blocks per chunk, ...]."""
        return whole.shape[1] - 1 - block if leaf in self.mirrored else block

    def write(self, block, values: Tree) -> Tree:
        """The buffer with one block's values [...] in this slot; XLA updates it in place."""
        leaves, structure = jax.tree.flatten(self.buffer)
        both = enumerate(zip(leaves, jax.tree.leaves(values), strict=True))
        return structure.unflatten(
            self.write_array(whole, self.place(i, whole, block), new) for i, (whole, new) in both
        )

    def write_array(self, whole: jax.Array, place, new: jax.Array) -> jax.Array:
        """As `write`, for one array of the buffer, at a block's `place`."""
        new = in_order(new[None, None]) if not self.on_host else jax.device_put(new[None, None], HOST)
        return lax.dynamic_update_slice(whole, new, (self.slot, place, *[0] * (new.ndim - 2)))

    def read(self, block, zero=0) -> Tree:
        """One block's values [...], in device memory; `zero` as in `loops.counted_loop`."""
        leaves, structure = jax.tree.flatten(self.buffer)
        return structure.unflatten(
            self.read_array(whole, self.place(leaf, whole, block), zero) for leaf, whole in enumerate(leaves)
        )

    def stacks(self, block, zero=0) -> list[tuple[jax.Array, jax.Array]]:
        """For each array of `read`, the stack [slots * blocks, ...] and the place in it that it is read from."""
        leaves = enumerate(jax.tree.leaves(self.buffer))
        return [self.stack(whole, self.place(leaf, whole, block), zero) for leaf, whole in leaves]

    def stack(self, whole: jax.Array, place, zero=0) -> tuple[jax.Array, jax.Array]:
        """As `stacks`, for one array of the buffer, at a block's `place`."""
        return whole.reshape(-1, *whole.shape[2:]), (self.slot + zero) * whole.shape[1] + place

    def read_array(self, whole: jax.Array, place, zero=0) -> jax.Array:
        """As `read`, for one array of the buffer, at a block's `place`."""
        start = (self.slot + zero, place, *[0] * (whole.ndim - 2))
        value = lax.dynamic_slice(whole, start, (1, 1, *whole.shape[2:]))
        if self.on_host:
            return jax.device_put(value, DEVICE)[0, 0]
        # Else a matmul or a collective that takes the value transposed makes XLA's GPU compiler store the whole stash so,
        # copied before each loop over blocks: for one value instead (GPT-2 large with plain attention: 16.5 GB, not 23.2).
        return in_order(value)[0, 0]


@dataclasses.dataclass(frozen=True)
class SlotApart:
    """One slot of a stash of which each slot is a buffer of its own. It has the methods of StashRef.

    Of two slots some arrays may be shared: while a forward writes blocks 0, 1, ... of one, a backward has read them, last
    block first, of the other. So the second slot has its last block first in these.

    Attributes:
      buffer: a tuple with the buffer of each slot, pytrees of [1, blocks per chunk, ...]; the second one has None for the
        arrays that it shares.
      slot: int; or an int32 scalar, of which `ChunkWork.at_slot` makes an int.
    """

    buffer: tuple[Tree, ...]
    slot: Any

    @property
    def shared(self) -> frozenset[int]:
        """Which leaves the slots share, by number."""
        return frozenset(number for number, leaf in enumerate(_leaves(self.buffer[-1])) if leaf is None)

    @property
    def own(self) -> StashRef:
        """The slot's buffer."""
        if self.slot == 0 or not self.shared:
            return StashRef(self.buffer[self.slot], 0)
        first, structure = jax.tree.flatten(self.buffer[0])
        leaves = [a if b is None else b for a, b in zip(first, _leaves(self.buffer[self.slot]), strict=True)]
        return StashRef(structure.unflatten(leaves), 0, mirrored=self.shared)

    def replaced(self, own: Tree) -> tuple[Tree, ...]:
        """`buffer` with another buffer of this slot."""
        buffer = (*self.buffer[: self.slot], own, *self.buffer[self.slot + 1 :])
        if self.slot == 0 or not self.shared:
            return buffer
        leaves, structure = jax.tree.flatten(own)
        pairs = list(enumerate(zip(jax.tree.leaves(buffer[0]), leaves, strict=True)))
        first = structure.unflatten(new if number in self.shared else old for number, (old, new) in pairs)
        return first, structure.unflatten(None if number in self.shared else new for number, (_, new) in pairs)

    def write_leaf(self, leaf: int, block: int, value: jax.Array) -> tuple[Tree, ...]:
        """`buffer` with the value of one block for one leaf, by number."""
        leaves, structure = jax.tree.flatten((own := self.own).buffer)
        leaves[leaf] = own.write_array(leaves[leaf], own.place(leaf, leaves[leaf], block), value)
        return self.replaced(structure.unflatten(leaves))

    def read_leaf(self, leaf: int, block: int) -> jax.Array:
        """The value of one block for one leaf, by number."""
        whole = jax.tree.leaves((own := self.own).buffer)[leaf]
        return own.read_array(whole, own.place(leaf, whole, block))

    def after(self, values: Tree) -> tuple[Tree, ...]:
        """`buffer`, with the shared arrays in a form that XLA cannot write to before the values are computed."""
        leaves, structure = jax.tree.flatten(self.buffer[0])
        places = sorted(self.shared)
        _, later = lax.optimization_barrier((values, [leaves[place] for place in places]))
        for place, whole in zip(places, later, strict=True):
            leaves[place] = whole
        return structure.unflatten(leaves), *self.buffer[1:]

    def write(self, block, values: Tree) -> tuple[Tree, ...]:
        """`buffer` with one block's values [...] in this slot."""
        return self.replaced(self.own.write(block, values))

    def read(self, block, zero=0) -> Tree:
        """One block's values [...]; `zero` as in `loops.counted_loop`."""
        return self.own.read(block, zero)

    def stacks(self, block, zero=0) -> list[tuple[jax.Array, jax.Array]]:
        """As of StashRef."""
        return self.own.stacks(block, zero)


def with_shared(buffers: tuple[Tree, Tree], shared: frozenset[int]) -> tuple[Tree, Tree]:
    """The buffer of a `SlotApart` of two slots that share some leaves, by number."""
    leaves, structure = jax.tree.flatten(buffers[1])
    return buffers[0], structure.unflatten(None if leaf in shared else a for leaf, a in enumerate(leaves))


def _leaves(tree: Tree) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)

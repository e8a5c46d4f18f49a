"""The stash: a buffer for the values that forwards save for their backwards, in device or host memory.

A buffer is a pytree of arrays [slots, blocks per chunk, ...]. A slot holds the values of one chunk on one microbatch,
from the forward (or I) that writes them until the backward (or W) that reads them last; `slots.py` assigns the slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
    """

    buffer: Tree
    slot: Any
    on_host: bool = False

    @property
    def fixed(self) -> bool:
        """Whether the slot is known when the program is compiled, as the only one."""
        return jax.tree.leaves(self.buffer)[0].shape[0] == 1

    def write(self, block, values: Tree) -> Tree:
        """The buffer with one block's values [...] in this slot; XLA updates it in place."""
        return jax.tree.map(lambda whole, new: self.write_array(whole, block, new), self.buffer, values)

    def write_array(self, whole: jax.Array, block, new: jax.Array) -> jax.Array:
        """As `write`, for one array of the buffer."""
        new = new[None, None] if not self.on_host else jax.device_put(new[None, None], HOST)
        return lax.dynamic_update_slice(whole, new, (self.slot, block, *[0] * (new.ndim - 2)))

    def read(self, block, zero=0) -> Tree:
        """One block's values [...], in device memory; `zero` as in `loops.counted_loop`."""
        return jax.tree.map(lambda whole: self.read_array(whole, block, zero), self.buffer)

    def stacks(self, block, zero=0) -> list[tuple[jax.Array, jax.Array]]:
        """For each array of `read`, the stack [slots * blocks, ...] and the place in it that it is read from."""
        return [self.stack(whole, block, zero) for whole in jax.tree.leaves(self.buffer)]

    def stack(self, whole: jax.Array, block, zero=0) -> tuple[jax.Array, jax.Array]:
        """As `stacks`, for one array of the buffer."""
        return whole.reshape(-1, *whole.shape[2:]), (self.slot + zero) * whole.shape[1] + block

    def read_array(self, whole: jax.Array, block, zero=0) -> jax.Array:
        """As `read`, for one array of the buffer."""
        start = (self.slot + zero, block, *[0] * (whole.ndim - 2))
        value = lax.dynamic_slice(whole, start, (1, 1, *whole.shape[2:]))
        return (jax.device_put(value, DEVICE) if self.on_host else value)[0, 0]


@dataclasses.dataclass(frozen=True)
class SlotApart:
    """One slot of a stash of which each slot is a buffer of its own. It has the methods of StashRef.

    Attributes:
      buffer: a tuple with the buffer of each slot, pytrees of [1, blocks per chunk, ...].
      slot: int; or an int32 scalar, of which `ChunkWork.at_slot` makes an int.
    """

    buffer: tuple[Tree, ...]
    slot: Any

    @property
    def own(self) -> StashRef:
        """The slot's buffer."""
        return StashRef(self.buffer[self.slot], 0)

    def replaced(self, own: Tree) -> tuple[Tree, ...]:
        """`buffer` with another buffer of this slot."""
        return (*self.buffer[: self.slot], own, *self.buffer[self.slot + 1 :])

    def write(self, block, values: Tree) -> tuple[Tree, ...]:
        """`buffer` with one block's values [...] in this slot."""
        return self.replaced(self.own.write(block, values))

    def read(self, block, zero=0) -> Tree:
        """One block's values [...]; `zero` as in `loops.counted_loop`."""
        return self.own.read(block, zero)

    def stacks(self, block, zero=0) -> list[tuple[jax.Array, jax.Array]]:
        """As of StashRef."""
        return self.own.stacks(block, zero)

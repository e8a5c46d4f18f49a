"""Hashes of configurations that are computed once.

The hash of a frozen dataclass is that of all its fields, each time that it is asked for. The planner looks up what a model
costs hundreds of thousands of times, by the model's configuration.
"""

from typing import TypeVar

__all__ = ["HashSlot", "hashed_once"]


class HashSlot:
    """Base class of those that `hashed_once` decorates: a place for the hash, outside an object's `vars`."""

    __slots__ = ("_hash",)


Class = TypeVar("Class", bound=HashSlot)


def hashed_once(cls: type[Class]) -> type[Class]:
    """Class decorator of a frozen dataclass: an object computes its hash when it is first asked for.

    A pickled or copied object leaves it behind, since hashes of strings differ between processes.
    """
    of_fields = cls.__hash__

    def hash_once(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", of_fields(self))
            return self._hash

    cls.__hash__, cls.__getstate__ = hash_once, lambda self: dict(self.__dict__)
    return cls

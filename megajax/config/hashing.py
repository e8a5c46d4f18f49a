"""Hashes of configurations that are computed once.

The hash of a frozen dataclass is that of all its fields, each time that it is asked for. The planner looks up what a model
costs hundreds of thousands of times, by the model's configuration.
"""

__all__ = ["hashed_once"]

HASH = "_hash"


def hashed_once(cls: type) -> type:
    """Class decorator of a frozen dataclass: an object computes its hash when it is first asked for.

    A pickled object leaves it behind, since hashes of strings differ between processes.
    """
    of_fields = cls.__hash__

    def hash_once(self) -> int:
        found = self.__dict__.get(HASH)
        if found is None:
            found = of_fields(self)
            object.__setattr__(self, HASH, found)
        return found

    def state(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != HASH}

    cls.__hash__, cls.__getstate__ = hash_once, state
    return cls

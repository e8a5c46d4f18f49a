"""The state of a user's source of samples: where its functions are, and its form in a checkpoint.

    Samples(data, data_state=(get, set))       the user's functions
    data.state_dict, data.load_state_dict      datasets.IterableDataset, torchdata's StatefulDataLoader
    iterator.get_state, iterator.set_state     grain's iterators

A state is stored as text. It may have dictionaries, lists, tuples, numbers, texts, bytes, and arrays of NumPy and torch; a
pickle, which may run any program when it is read, is never written or read.
"""

import base64
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megajax.config import ConfigError

__all__ = ["StateFunctions", "decode", "encode", "state_functions"]

KIND = "__kind__"  # the key of what JSON has no form for
NAMES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class StateFunctions:
    """Returns and sets the state of a source, or of its iterator."""

    def __init__(self, get: Callable[[], Any] | None, put: Callable[[Any], Any] | None, given: bool = False):
        """The functions of the source; None: those of its iterators, see `bind`. `given`: they are the user's."""
        self._of_source = (get, put) if get else None
        self._get, self._given = get, given

    def bind(self, iterator: Iterator[Any]) -> None:
        """The iterator that is read from now on."""
        if self._of_source is None:
            self._get = getattr(iterator, _methods(iterator)[0])

    def get(self) -> Any:
        """The state of the source as it is now."""
        return self._get()

    def before(self, name: str, first: bool) -> str | None:
        """The state before the next item, as text; None before the first item of a source that does not know it then."""
        if first and self._of_source and not self._given:
            return None
        return encode(self.get(), name)

    def restored(self, state: str | None, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iterator that continues from a state, which `encode` made; `make` returns new ones."""
        if state is None:
            return make()
        value = decode(state, "data")
        if self._of_source:
            self._of_source[1](value)
            return make()
        iterator = make()
        getattr(iterator, _methods(iterator)[1])(value)
        self.bind(iterator)
        return iterator


def state_functions(data: Any, given: tuple[Callable, Callable] | None) -> StateFunctions | None:
    """The functions of a source; None if it has none.

    Raises:
      ConfigError: `given` is not two functions.
    """
    if given is not None:
        if not isinstance(given, tuple | list) or len(given) != 2 or not all(map(callable, given)):
            raise ConfigError(
                "data_state is two functions, (get, set): get() returns the state, set(state) restores it"
            )
        return StateFunctions(*given, given=True)
    if names := _methods(data):
        return StateFunctions(*(getattr(data, name) for name in names))
    # Making an iterator of grain's reads nothing.
    if type(data).__module__.partition(".")[0] == "grain" and _methods(iter(data)):
        return StateFunctions(None, None)
    return None


def encode(state: Any, name: str) -> str:
    """The text of a state.

    Raises:
      ConfigError: it holds something else; `name`: of the source.
    """
    return json.dumps(_plain(state, name))


def decode(text: str, name: str) -> Any:
    """The state of a text that `encode` made.

    Raises:
      ConfigError: the text is none.
    """
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"the state of {name} in the checkpoint cannot be read: resume from an earlier one") from None


def _methods(owner: Any) -> tuple[str, str] | None:
    return next((names for names in NAMES if all(callable(getattr(owner, name, None)) for name in names)), None)


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != KIND for key in value):
            return {key: _plain(inner, name) for key, inner in value.items()}
        return {KIND: "dict", "items": [[_plain(key, name), _plain(inner, name)] for key, inner in value.items()]}
    if isinstance(value, list):
        return [_plain(inner, name) for inner in value]
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": [_plain(inner, name) for inner in value]}
    if isinstance(value, bytes):
        return {KIND: "bytes", "data": base64.b64encode(value).decode()}
    kind = "torch" if type(value).__module__ == "torch" and hasattr(value, "detach") else "array"
    array = value.detach().cpu().numpy() if kind == "torch" else value
    if isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "biuf":
        array = np.asarray(array)
        data = base64.b64encode(array.tobytes()).decode()
        return {KIND: kind, "dtype": array.dtype.str, "shape": list(array.shape), "data": data}
    raise ConfigError(
        f"the state of {name} has a {type(value).__name__}, which is not stored in a checkpoint: pass "
        "Samples(data, data_state=(get, set)), with a state of numbers, texts, lists and dictionaries"
    )


def _value(found: Any) -> Any:
    if isinstance(found, list):
        return [_value(inner) for inner in found]
    if not isinstance(found, dict):
        return found
    kind = found.get(KIND)
    if kind is None:
        return {key: _value(inner) for key, inner in found.items()}
    if kind == "dict":
        return {_value(key): _value(inner) for key, inner in found["items"]}
    if kind == "tuple":
        return tuple(_value(inner) for inner in found["items"])
    data = base64.b64decode(found["data"])
    if kind == "bytes":
        return data
    array = np.frombuffer(data, np.dtype(found["dtype"])).reshape(found["shape"]).copy()
    return sys.modules["torch"].from_numpy(array) if kind == "torch" and "torch" in sys.modules else array

"""Changes of orbax, tensorstore and Python's hooks for the whole process. A command makes them; `Checkpoints` makes none.

* A failed write is reported by `Checkpoints` in one line. The libraries also print a traceback for each array whose write
  ends after the save has failed, when nothing waits for its error.
* tensorstore 0.1.72 to 0.1.86 never frees the lists and dictionaries that `Spec.to_json` and
  `experimental_collect_matching_metrics` return. orbax calls both in each save: about 14 kB, and 0.5 kB an array, a save.
"""

import logging
import pathlib
import sys
import warnings
from typing import Any

import tensorstore

from megajax.checkpoint.writer import TEMPORARY

ORBAX = "orbax"  # the package's folder


def prepare_process() -> None:
    """Silences the tracebacks of failed writes, and stops the loss of memory in each save."""
    silence_tracebacks()
    stop_leaks()


def silence_tracebacks() -> None:
    """Silences the libraries' messages about a failed write, which `Checkpoints` reports in one line."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_other_message)
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _ignore_closed_loop


def _is_other_message(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else ""
    if (
        error and ORBAX in pathlib.Path(record.pathname).parts
    ):  # of a thread; `Checkpoints` gets the error as its result
        return False
    text = f"{record.getMessage()} {error}"
    return TEMPORARY not in text and "exception was never retrieved" not in text


def _ignore_closed_loop(problem) -> None:
    if str(problem.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(problem)


def stop_leaks() -> None:
    """Replaces the leaking calls in orbax; does nothing in a version of orbax that has other names for them."""
    from orbax.checkpoint._src.serialization import tensorstore_utils as orbax_utils

    if getattr(orbax_utils, "ts", None) is tensorstore and hasattr(orbax_utils, "get_tensorstore_raw_bytes"):
        orbax_utils.get_tensorstore_raw_bytes = _no_metric
        orbax_utils.ts = _Module(tensorstore, KvStore=_Module(tensorstore.KvStore, Spec=_spec))


class _Module:
    """A module or class with some of its attributes replaced."""

    def __init__(self, original: Any, **replaced: Any):
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _FileSpec:
    """The specification of a directory; `to_json` returns the JSON it was constructed with."""

    def __init__(self, json: dict[str, str]):
        self._json = json

    def to_json(self) -> dict[str, str]:
        return dict(self._json)


def _spec(json: Any) -> Any:
    """`tensorstore.KvStore.Spec` for its only use in orbax, `Spec(json).to_json()`."""
    is_file = isinstance(json, dict) and set(json) == {"driver", "path"} and json["driver"] == "file"
    return _FileSpec(json) if is_file else tensorstore.KvStore.Spec(json)


def _no_metric(*arguments: Any) -> int:
    """The bytes that tensorstore has written, which orbax sends to jax.monitoring: 0 sends nothing."""
    return 0

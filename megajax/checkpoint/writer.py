"""Writes one checkpoint: beside the training, by all processes together, whole or not at all.

All of it runs in a thread of its own: making directories, compressing, writing, summing, naming. So nothing in it may be a
collective of devices: those are the main thread's, which has a step's under way, and two threads' would come in another
order on another process, and hang. The processes meet at jax's coordination service instead, and bring along what went
wrong: a disk that is full for one of them fails the save on all of them, at once. (orbax's own Checkpointer begins on the
main thread, and where one process fails the others wait for it for minutes. So only its handlers are used.)
"""

import logging
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from megajax.checkpoint import checksums
from megajax.runtime.distributed import gather_problems

TEMPORARY = ".unfinished"  # ends the name of a checkpoint that is not whole yet


def write(path: pathlib.Path, arrays: Any, meta: Mapping[str, Any], name: str) -> None:
    """Writes a checkpoint to `path`, which is there when all of it is on the disk, and not before.

    Args:
      arrays: the nested arrays; each process writes what its devices hold.
      meta: what is stored beside them, as JSON.
      name: of this attempt, the same on all processes and never used before.

    Raises:
      Exception: whatever a file system, a library or another process makes of a failed write.
    """
    is_first = jax.process_index() == 0
    part = path.with_name(path.name + TEMPORARY)
    state, about = (epath.Path(part / name) for name in ("state", "meta"))  # orbax's kind of path
    handler = ocp.PyTreeCheckpointHandler()

    def make():
        if is_first:
            shutil.rmtree(part, ignore_errors=True)
            state.mkdir(parents=True)
            about.mkdir()

    def write_own():
        handler.save(state, args=ocp.args.PyTreeSave(arrays))
        checksums.write_own(part, jax.process_index())

    def give_name():
        if is_first:
            handler.finalize(state)
            ocp.JsonCheckpointHandler().save(about, args=ocp.args.JsonSave(meta))
            checksums.write_rest(part)
            part.rename(path)

    for work in (make, write_own, give_name):
        _together(f"{name}/{work.__name__}", work)


def _together(name: str, work: Callable[[], None]) -> None:
    """Does this process's part, waits for the others', and raises if one of them has failed."""
    own = None
    try:
        work()
    except Exception as error:
        own = error
    problems = gather_problems(name, reason_of(own) if own else None)
    if own:
        raise own
    for process, problem in problems.items():
        raise OSError(f"process {process}: {problem}")


def hush() -> None:
    """Silences what libraries say of a failed write, for each of its arrays: `reason_of` says it in one line.

    The rest of a write's arrays come to an end after it has failed, when there is nobody to tell.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_echo)
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unless_late


def _is_no_echo(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else ""
    text = f"{record.getMessage()} {error}"
    return TEMPORARY not in text and "exception was never retrieved" not in text


def _unless_late(problem) -> None:
    if str(problem.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(problem)


def reason_of(error: BaseException) -> str:
    """The end of a library's message, where what happened stands, on one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    text = re.split(r" \[(?:tensorstore_spec|os_error_code)=", text)[0].rsplit('": ', 1)[-1]
    return text if len(text) <= 300 else "..." + text[-300:]

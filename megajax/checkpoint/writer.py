"""Writes one checkpoint: asynchronously, by all processes together, and atomically.

On a disk its directory has a temporary name until it is complete. In an object store its objects have their names at once,
and the one that makes it a checkpoint (`directory.COMMITTED`) is written last.

All of it runs in the writer's thread: directories, compression, files, checksums, the final name. So it contains no device
collective: the main thread has those of a training step in flight, and with two threads their order could differ between
processes, which deadlocks. The processes synchronise through jax's coordination service instead, and exchange their errors
there: a disk that is full on one host fails the save on all of them at once.

Of orbax only the handlers are used, which write and read arrays. Its `CheckpointManager` (tried: orbax-checkpoint 0.12.8
with asynchronous saving, `max_to_keep`, `keep_period`, `step_prefix` and `cleanup_tmp_directories`) names, retains and
deletes checkpoints as this package does, and blocks training for as short a time. It was not taken, because

* with two processes, one of which cannot write, both wait for `timeout_secs` (measured: 60.6 s at 60; the default is 1,200)
  and then report "Barrier timed out" instead of the file system's error. Here both report the
  error when the write fails (tests/runtime/test_distributed.py). A short timeout would fail large saves that are slow;
* the directory of the save that failed stays until the next start and keeps the disk full;
* restoring does not notice every damaged file (checksums.py).
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from megajax.checkpoint import checksums, durable, object_store
from megajax.checkpoint.directory import COMMITTED, PROBE
from megajax.checkpoint.object_store import Path, is_remote
from megajax.checkpoint.store_drivers import orbax_path
from megajax.runtime.exchange import gather_problems

TEMPORARY = ".unfinished"  # suffix of the directory of a checkpoint that is not complete


def write(
    path: Path,
    arrays: Any,
    meta: Mapping[str, Any],
    name: str,
    handler: ocp.PyTreeCheckpointHandler | None = None,
    guard: Callable[[], None] = lambda: None,
    copy_logs: Callable[[], None] = lambda: None,
) -> None:
    """Writes a checkpoint; `path` exists, or is complete, only when all of it is stored, also after a power loss.

    Args:
      path: the checkpoint's directory.
      arrays: nested dictionaries of arrays; each process writes its devices' shards.
      meta: stored beside them, as JSON.
      name: of this attempt: the same on all processes, and unique in the run.
      handler: orbax's for these arrays; None: the one for jax's arrays.
      guard: process 0 calls it before it deletes or completes anything in an object store; it may raise.
      copy_logs: each process calls it before the checkpoint is complete; it may raise.

    Raises:
      Exception: the error of the file system, of a library or of another process.
    """
    is_first = jax.process_index() == 0
    remote = is_remote(path)
    unfinished = path if remote else path.with_name(path.name + TEMPORARY)
    state, about = (epath.Path(orbax_path(unfinished / part)) for part in ("state", "meta"))  # orbax's path type
    handler = handler or ocp.PyTreeCheckpointHandler()

    def make_directories():
        if is_first and remote:
            guard()
            object_store.write(path.parent / PROBE, b"")  # s3fs would make a bucket that has vanished
            object_store.remove_tree(unfinished)
        elif is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            state.mkdir(parents=True)
            about.mkdir()

    def write_own():
        handler.save(state, args=ocp.args.PyTreeSave(arrays))
        own = checksums.write_own(unfinished, jax.process_index())
        copy_logs()
        if not remote:
            durable.sync_files(own)  # by the host that wrote them: others cannot force its cache to the disk

    def finish():
        if is_first:
            handler.finalize(state)
            ocp.JsonCheckpointHandler().save(about, args=ocp.args.JsonSave(meta))
            checksums.write_rest(unfinished)
            if remote:
                guard()
                object_store.write(path / COMMITTED, json.dumps({"attempt": name}).encode())
                return
            durable.sync_tree(unfinished)
            unfinished.rename(path)
            durable.sync(path.parent)

    for work in (make_directories, write_own, finish):
        on_all_processes(f"{name}/{work.__name__}", work)


def on_all_processes(name: str, work: Callable[[], None]) -> None:
    """Does this process's part, waits for the others, and raises if any of them has failed."""
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


def reason_of(error: BaseException) -> str:
    """The end of a library's message, which names the cause, on one line of at most 300 characters."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    text = re.split(r" \[(?:tensorstore_spec|os_error_code)=", text)[0].rsplit('": ', 1)[-1]
    return text if len(text) <= 300 else "..." + text[-300:]

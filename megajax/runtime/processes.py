"""The work of a command that runs in several processes: an error, or Ctrl-C, in one of them ends all."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Mapping

from megajax.config import LaunchConfig
from megajax.runtime import distributed
from megajax.runtime.compat import coordination_service
from megajax.runtime.gloo_output import without_gloo_lines
from megajax.runtime.heartbeat import Heartbeat
from megajax.runtime.watchdog import USER_ERROR, Watchdog, is_peer_error
from megajax.schedules.errors import UserError

__all__ = ["is_first_process", "run_together"]


def run_together(
    launch: LaunchConfig,
    work: Callable[[int, Watchdog], None],
    heartbeat: Heartbeat | None = None,
    retried: tuple[type[Exception], ...] = (),
    run: str | None = None,
    identity: Mapping[str, str] | None = None,
) -> int:
    """Connects the processes, runs the work in each, and returns this one's exit code: 0, or 3 if a new start may succeed.

    Where there are several, an error ends all of them without returning: each prints it as one line, and exits with 2
    after a user's mistake, else with 3. The process of the error exits with 1 if it was not expected, 130 after Ctrl-C.

    Args:
      launch: how the processes find each other, and their timeouts.
      work: (number of processes, watchdog), called in each process before jax has started its devices.
      heartbeat: the launcher's, which is told of each step.
      retried: errors after which a new start may succeed, printed as one line.
      run, identity: the run directory, and what must be the same in all processes (`distributed.start`).

    Raises:
      UserError, KeyboardInterrupt, Exception: of the work, in a run of one process.
    """
    try:
        count = distributed.start(launch, run, identity)
    except distributed.StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return distributed.EXIT_PEER
    watchdog = Watchdog(launch.peer_timeout, lambda text: print(text, file=sys.stderr), heartbeat)
    try:
        with without_gloo_lines() if count > 1 else contextlib.nullcontext():
            work(count, watchdog)
        watchdog.close()
        return 0
    except UserError as error:
        if is_peer_error(error):  # a checkpoint that could not be read or saved because a process died
            watchdog.peer_lost(error)
        watchdog.fail(str(error), code=USER_ERROR)
        raise
    except retried as error:
        watchdog.fail(str(error), code=distributed.EXIT_PEER)
        print(f"error: {error}", file=sys.stderr)
        return distributed.EXIT_PEER
    except KeyboardInterrupt:
        watchdog.fail("stopped by Ctrl-C", code=130)
        raise
    except Exception as error:
        if count > 1 and not watchdog.peer_lost(error):
            traceback.print_exc()
            watchdog.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", code=1)
        raise


def is_first_process() -> bool:
    """Whether this process prints and writes for all. Unlike `jax.process_index`, it does not start the devices."""
    return coordination_service().process_id == 0

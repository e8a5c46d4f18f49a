"""Texts that the processes of a run exchange through jax's coordination service; no device takes part.

In a run of one process there is no service: what it puts is what it reads.
"""

import contextlib
import json
from collections.abc import Callable, Mapping

from megajax.config import ConfigError
from megajax.runtime.compat import coordination_service

PREFIX = "megajax/exchange/"
TIMEOUT = 3600  # seconds. Long, because the watchdog ends the job when a process dies.
POLL = 1000  # milliseconds
MOST_SHOWN = 3  # differences in a message


def exchange(name: str, text: str) -> dict[int, str]:
    """A barrier that every process enters with a text and leaves with all texts, by process.

    Args:
      name: of the barrier; not to be used again before all processes have left it.

    Raises:
      RuntimeError: not all processes arrived within an hour.
    """
    joined = coordination_service()
    if joined.client is None:
        return {0: text}
    put(name, text)
    joined.client.wait_at_barrier(PREFIX + name, 1000 * TIMEOUT)
    return _texts(joined.client, name)


def gather_problems(name: str, problem: str | None = None) -> dict[int, str]:
    """As `exchange`, for a problem of this process, or None; returns the problems alone, by process.

    It may be called from any thread.
    """
    return {process: text for process, text in exchange(name, problem or "").items() if text}


def broadcast(name: str, text: Callable[[], str]) -> str:
    """The text of process 0, in all processes. They wait for it without a time limit: a person may be typing it.

    Args:
      name: of the text, not used before.
      text: called in process 0 alone.
    """
    joined = coordination_service()
    if joined.process_id == 0:
        own = text()
        if joined.client is not None:
            joined.client.key_value_set(f"{PREFIX}{name}", own)
        return own
    while True:
        try:
            return joined.client.blocking_key_value_get(f"{PREFIX}{name}", POLL)
        except Exception as error:  # Python handles Ctrl-C between two calls
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def require_same(name: str, values: Mapping[str, str]) -> None:
    """Compares this process's values with those of process 0; every process calls it, with the same keys.

    Args:
      name: of the comparison, not used before.
      values: what must not differ, by its name for the message.

    Raises:
      ConfigError: a value differs.
    """
    expected = json.loads(broadcast(name, lambda: json.dumps(values)))
    own = coordination_service().process_id
    different = [
        f"{key} is {value} in process {own}, and {expected[key]} in process 0"
        for key, value in values.items()
        if value != expected[key]
    ]
    if different:
        more = f"; and {len(different) - MOST_SHOWN} more" if len(different) > MOST_SHOWN else ""
        raise ConfigError(f"{'; '.join(different[:MOST_SHOWN])}{more}: run the same command in every process.")


def put(name: str, text: str) -> None:
    """Publishes this process's text, in place of an earlier one of the same name; waits for nobody.

    Raises:
      RuntimeError: the service does not answer.
    """
    joined = coordination_service()
    if joined.client is not None:
        joined.client.key_value_set(f"{PREFIX}{name}/{joined.process_id}", text, allow_overwrite=True)


def read(name: str) -> dict[int, str]:
    """The texts that have been put under a name so far, by process; none if the service does not answer."""
    client = coordination_service().client
    with contextlib.suppress(Exception):  # not found, or process 0 is gone, which is the watchdog's business
        return _texts(client, name) if client is not None else {}
    return {}


def _texts(client, name: str) -> dict[int, str]:
    found = client.key_value_dir_get(f"{PREFIX}{name}/")
    return {int(key.rsplit("/", 1)[1]): value for key, value in found}

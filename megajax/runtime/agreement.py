"""Something that one process of a run asks for, and that all of them do after the same step.

Several processes agree through jax's coordination service, in a separate thread, so a step costs neither a collective nor
a transfer to the host. A process that has a request publishes it. Every process's thread sees it within a second,
publishes the step that its main thread has reached, and waits at a barrier for the others; while it does, the main thread
does not start another step. It is done after the step that follows the latest of these: no process has started it, and
all of them will.
"""

import contextlib
import threading
from collections.abc import Callable

from megajax.runtime.compat import coordination_service

INTERVAL = 1.0  # seconds between two reads of the coordination service


class Agreement:
    """Requests of one kind; used as `with Agreement(...) as agreement`."""

    def __init__(self, name: str, own: Callable[[], str | None], repeats: Callable[[str], bool]):
        """Starts without a request.

        Args:
          name: of the kind of request, for the coordination service.
          own: this process's request, as a text for people; None: there is none. The thread calls it, or `after` in a run
            of one process.
          repeats: whether others may follow a request; the run ends at one that none follows.
        """
        self._name, self._own, self._repeats = f"megajax/{name}", own, repeats
        joined = coordination_service()  # jax.process_count() would start the devices
        self._client, self._id, self._count = joined.client, joined.process_id, joined.num_processes
        self._agreeing = threading.Lock()  # held by the thread while the processes agree on the step
        self._reached, self._last, self._agreed = 0, None, None
        self._round = 0  # requests that have been agreed on and done
        self._closed = threading.Event()

    def __enter__(self) -> "Agreement":
        if self._count > 1:
            threading.Thread(target=self.poll, daemon=True, name=self._name).start()
        return self

    def __exit__(self, *exception) -> None:
        self._closed.set()

    def after(self, step: int) -> str | None:
        """The request that all processes grant after `step`; None: there is none.

        Every process calls it once for each step, after the step's dispatch and before that of the next.
        """
        if self._count == 1:
            return self._own()
        with self._agreeing:
            self._reached = step
            if self._last is None or step < self._last:
                return None
            if self._repeats(self._agreed):
                self._last, self._round = None, self._round + 1
            return self._agreed

    def poll(self) -> None:
        """The thread: publishes this process's request, looks for any process's, and agrees on the step."""
        published = -1  # the round whose request is this process's
        while not self._closed.wait(INTERVAL):
            with self._agreeing:
                waits, number = self._last is not None, self._round
            if waits:  # the step has not been reached
                continue
            with contextlib.suppress(Exception):  # not found, or process 0 is gone, which is the watchdog's business
                request = f"{self._name}/request/{number}"
                if published < number and (text := self._own()):
                    self._client.key_value_set(request, text, allow_overwrite=True)
                    published = number
                self._client.key_value_try_get(request)
                self._agree(request, number)
                if not self._repeats(self._agreed):
                    return

    def _agree(self, request: str, number: int) -> None:
        reached = f"{self._name}/reached/{number}"
        with self._agreeing:
            self._client.key_value_set(f"{reached}/{self._id}", str(self._reached), allow_overwrite=True)
            self._client.wait_at_barrier(reached, 1000 * 3600)
            # A process publishes its request before it arrives at the barrier: all read the same one here.
            self._agreed = self._client.key_value_try_get(request)
            self._last = 1 + max(int(step) for _, step in self._client.key_value_dir_get(f"{reached}/"))

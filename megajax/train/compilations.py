"""The programs that this process compiles: how many, and when the last one was ready."""

import time

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax.monitoring's event of a compiled program


class CompilationCounter:
    """Counts the programs that this process compiles; used as `with CompilationCounter() as compilations`.

    Attributes:
      count: programs so far.
      last: `time.perf_counter()` at the end of the last compilation.
    """

    def __init__(self):
        self.count, self.last = 0, 0.0

    def __enter__(self) -> "CompilationCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **details) -> None:
        if event == COMPILED:
            self.count, self.last = self.count + 1, time.perf_counter()

"""Traces of a few steps, with the names of the schedule's operations (pipeline/executor.py) on what the devices do."""

import pathlib

import jax


class Profile:
    """Writes a jax.profiler trace of steps START to STOP - 1; open it with TensorBoard, XProf or Perfetto."""

    def __init__(self, steps: str, directory: str | pathlib.Path):
        """`steps` is "START:STOP"; each process writes a directory of its own."""
        self.start, self.stop = map(int, steps.split(":"))
        self.directory = pathlib.Path(directory) / f"process_{jax.process_index()}"
        self.running = False

    def before(self, step: int) -> None:
        """Starts the trace, if this step is to be the first in it."""
        if self.start <= step < self.stop and not self.running:
            jax.profiler.start_trace(str(self.directory))
            self.running = True

    def after(self, step: int) -> str | None:
        """Ends the trace, if this step was the last in it; says where it is."""
        if self.running and step + 1 >= self.stop:
            return self.close()
        return None

    def close(self) -> str | None:
        """Ends the trace, if there is one: a run may stop inside it."""
        if not self.running:
            return None
        self.running = False
        jax.profiler.stop_trace()
        return f"profile   steps {self.start} to {self.stop - 1} in {self.directory}"

"""Runs a command in a subprocess; `Run` is `python -m experiments.gpt3` with a model that compiles in seconds."""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
    "--layers 2 --hidden 16 --heads 2 --sequence-length 16 --global-batch-size 4 --microbatch-size 2 "
    "--new-tokens 0 --validation-batches 0 --log-every 10"
)
# Gloo's threads interleave their lines "[Gloo] Rank 3 is connected to 3 peer ranks. Expected number ... is : 3", so a line
# may consist of the last number only.
NOISE = ("cudart_stub", "absl::InitializeLog", "[Gloo]", "peer ranks", "is : ")


class Command:
    """A running command; its output is in files of the directory."""

    def __init__(
        self, directory: pathlib.Path, words: Sequence[str], name: str, typed: str | None = None, **environment
    ):
        """Starts `python -m` with the words.

        Args:
          directory: of its output.
          words: the module and its options.
          name: of its files.
          typed: the lines of its standard input; None: it stays open and empty.
          environment: variables.
        """
        inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
        inherited |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiled faster
        self.files = [directory / f"{name}.{end}" for end in ("out", "err")]
        with open(self.files[0], "w") as out, open(self.files[1], "w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env=inherited | environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
            )
        if typed is not None:
            self.process.stdin.write(typed.encode())
            self.process.stdin.close()

    @property
    def out(self) -> str:
        """Standard output, without gloo's messages about its connections."""
        return self._quiet(0)

    @property
    def err(self) -> str:
        """Standard error, without jax's messages about missing GPUs."""
        return self._quiet(1)

    def _quiet(self, index: int) -> str:
        lines = self.files[index].read_text().splitlines()
        return "\n".join(line for line in lines if not (line.isdigit() or any(noise in line for noise in NOISE)))

    def wait(self, seconds: float = 240) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.out}\n{self.err}") from None

    def until(self, condition, seconds: float = 240) -> None:
        """Waits until `condition()`, or the process has ended."""
        deadline = time.monotonic() + seconds
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < deadline, f"{self.out}\n{self.err}"
            time.sleep(0.005)


class Run(Command):
    """A training."""

    def __init__(self, directory: pathlib.Path, words: str, name: str = "run", **environment: str):
        """Starts it on a short text with the options `words`, and otherwise those of SMALL."""
        text = directory / "text.txt"
        text.write_text("All the world's a stage, and all the men and women merely players. " * 100)
        command = ["experiments.gpt3", "--text", str(text), *SMALL.split(), *words.split()]
        super().__init__(directory, command, name, **environment)


def rows(directory: pathlib.Path) -> list[dict]:
    """The records of the run's steps; the last line may be truncated."""
    found = []
    for line in (directory / "log.jsonl").read_text().splitlines() if (directory / "log.jsonl").exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return [record for record in found if "step" in record]

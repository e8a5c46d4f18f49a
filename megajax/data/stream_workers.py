"""Processes that tokenize blocks for a stream; `main` is what they run.

They are started as programs of their own, not as multiprocessing's: those would run the user's main module again, and import
jax. A thread of the pool writes a block to its process and reads the ids. The process ends when its input ends.
"""

import concurrent.futures
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from typing import BinaryIO, NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.data.blocks import BadLine, Block
from megajax.data.recipe import Recipe
from megajax.data.tokenize_blocks import encode_block

__all__ = ["Ids", "Workers"]


class Ids(NamedTuple):
    """The ids of a block's documents, one after another, each with its end of document; and lines that are no documents."""

    tokens: np.ndarray
    bad: list[BadLine]


class Workers:
    """A pool of processes with one recipe; without any, blocks are encoded where they are submitted."""

    def __init__(self, recipe: Recipe, count: int):
        """Starts `count` processes."""
        self.recipe, self.count = recipe, count
        self._idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "stream") if count else None
        for _ in range(count):
            command = [sys.executable, "-c", "from megajax.data.stream_workers import main; main()"]
            path = os.pathsep.join(path or os.getcwd() for path in sys.path)
            environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            _send(process.stdin, recipe)
            self._processes.append(process)
            self._idle.put(process)

    def submit(self, block: Block) -> "concurrent.futures.Future[Ids]":
        """The ids of a block, in the future; a ConfigError if the tokenizer cannot encode it."""
        if self._threads:
            return self._threads.submit(self._encode, block)
        done: concurrent.futures.Future[Ids] = concurrent.futures.Future()
        try:
            done.set_result(encode(block, self.recipe))
        except ConfigError as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Ends the processes; blocks that wait are not encoded."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
        self._processes = []

    def _encode(self, block: Block) -> Ids:
        process = self._idle.get()
        try:
            _send(process.stdin, block)
            found = pickle.load(process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            raise ConfigError(
                f"a process that tokenizes the stream ended (exit code {process.poll()}) at {block.path}, line "
                f"{block.first_line}, perhaps out of memory: pass fewer --stream-workers, or split very long documents"
            ) from None
        finally:
            self._idle.put(process)
        if isinstance(found, ConfigError):
            raise found
        return found


def encode(block: Block, recipe: Recipe) -> Ids:
    """The ids of a block's documents."""
    result = encode_block(block, recipe)
    return Ids(result.encoded[0].tokens, result.bad)


def _send(pipe: BinaryIO, value: object) -> None:
    pickle.dump(value, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def main() -> None:
    """Reads a recipe, then blocks, and writes the ids of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no result
    with contextlib.suppress(EOFError, BrokenPipeError):
        recipe = pickle.load(sys.stdin.buffer)
        while True:
            block = pickle.load(sys.stdin.buffer)
            try:
                _send(results, encode(block, recipe))
            except ConfigError as error:
                _send(results, ConfigError(str(error)))

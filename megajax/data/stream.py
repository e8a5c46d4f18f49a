"""Samples of texts that are tokenized during the training (--stream): windows of several sources, mixed and shuffled.

Sample m before the shuffle comes from the source with the largest deficit: the sum of its weights over the samples before,
less the samples drawn from it. Samples are shuffled in groups of `shuffle_samples`: group g is read whole, and its order
is a function of (seed, g). So sample n of the run is a function of the sources, the seed and n, whatever the processes,
workers, batch sizes and layouts; and to start at any sample it is enough to know where the sources were at the start of
its group. That is the state that a checkpoint stores. A thread reads one group ahead.
"""

import collections
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.data.loader import Loader
from megajax.data.ramp import RampedLoader
from megajax.data.recipe import Recipe
from megajax.data.sources import Wanted
from megajax.data.stream_source import Position, StreamSource
from megajax.data.stream_workers import Workers
from megajax.schedules.errors import counted

__all__ = ["StreamLoader", "StreamSamples", "parse_stream", "parse_weights"]

UNSHUFFLED = 64  # samples of a group whose order is kept
STATES = 64  # groups whose states are known, at least
Weights = Sequence[tuple[int, Sequence[float]]]  # from a number of samples on, the weights of the sources


def parse_stream(words: Sequence[str], wanted: Wanted, seed: int) -> tuple[list[StreamSource], list[float]]:
    """The sources of --stream and their weights: WEIGHT SOURCE ... WEIGHT SOURCE ..., or one source of all words.

    Raises:
      ConfigError: a weight is wrong, or a source cannot be read.
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return [StreamSource(tuple(words), wanted, seed, 0)], [1.0]
    weights, files = [], []
    for word, number in zip(words, numbers, strict=True):
        if number is not None:
            weights.append(number)
            files.append([])
        elif not files:
            raise ConfigError(
                f"--stream {word} ...: it has no weight, and others have; give each source its weight before it"
            )
        else:
            files[-1].append(word)
    if not all(files):
        raise ConfigError(
            f"--stream: the weight {weights[files.index([])]:g} has no source after it: WEIGHT SOURCE ..."
        )
    if not all(0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise ConfigError(f"--stream: the weights {shown} must be numbers of at least 0, and one above 0")
    return [StreamSource(tuple(one), wanted, seed, place) for place, one in enumerate(files)], weights


def parse_weights(words: Sequence[str], sources: int) -> list[tuple[int, list[float]]]:
    """--stream-weights SAMPLES:WEIGHT,WEIGHT ...

    Raises:
      ConfigError: one is not of this form, has another number of weights, or the samples do not grow.
    """
    found: list[tuple[int, list[float]]] = []
    for word in words:
        samples, _, rest = word.partition(":")
        weights = [_number(part) for part in rest.split(",")]
        problem = "give SAMPLES:WEIGHT,WEIGHT,..., such as 1000000:0.5,0.5"
        if samples.isdecimal() and len(samples) < 16 and None not in weights:
            if len(weights) != sources:
                problem = f"it has {counted(len(weights), 'weight')} for {counted(sources, 'source')}"
            elif not all(0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
                problem = "weights must be numbers of at least 0, and one above 0"
            elif found and int(samples) <= found[-1][0]:
                problem = "the numbers of samples must grow"
            else:
                found.append((int(samples), weights))
                continue
        raise ConfigError(f"--stream-weights {word}: {problem}")
    return found


class StreamSamples:
    """The samples of a stream; `window` is asked for neighbouring samples, growing.

    Attributes:
      sequence_length: inputs of a sample.
      streams: the sources.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        weights: Weights,
        sequence_length: int,
        seed: int,
        recipe: Recipe,
        workers: int = 0,
        shuffle_samples: int = 0,
        kept: int = 1024,
    ):
        """Starts nothing.

        Args:
          sources: see above.
          weights: see above; the first are from sample 0 on.
          sequence_length: inputs of a sample.
          seed: of the order.
          recipe: how documents are tokenized.
          workers: processes that tokenize; 0: none, a thread does.
          shuffle_samples: samples of a group; 0: the order is kept.
          kept: samples before the newest one that may be asked for again.
        """
        self.streams, self.sequence_length, self.seed = list(sources), sequence_length, seed
        self.weights = [(start, np.array(one, np.float64) / sum(one)) for start, one in weights]
        self.shuffles, self.size = bool(shuffle_samples), shuffle_samples or UNSHUFFLED
        self.kept, self._recipe, self._worker_count = kept, recipe, workers
        self._workers: Workers | None = None
        self._change = threading.Condition()
        self._groups: dict[int, list[tuple[np.ndarray, str]]] = {}
        self._states: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._wanted = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def window(self, index: int) -> np.ndarray:
        """Tokens of sample `index` >= 0, int32 [sequence_length + 1]: inputs are [:-1], labels [1:]."""
        return self._sample(index)[0]

    def describe_token(self, index: int, position: int) -> str:
        """The id of a token of sample `index`, and the block that the sample starts in."""
        tokens, place = self._sample(index)
        return f"sample {index} of the stream ({place}): token id {tokens[position]}"

    def sources(self, index: int) -> list[str]:
        """The block that sample `index` starts in."""
        return [self._sample(index)[1]]

    def describe(self) -> list[str]:
        """A line for each source."""
        by = counted(self._worker_count, "worker") if self._worker_count else "a thread"
        shuffled = f"shuffled in groups of {self.size:,}" if self.shuffles else "in their order"
        how = f"tokenized by {by}, {shuffled}"
        return [
            f"stream of {source.name}: {weight:.1%} of the samples, {counted(len(source.paths), 'file')}, {how}"
            for source, weight in zip(self.streams, self.weights[0][1], strict=True)
        ]

    def state(self, consumed_samples: int) -> str | None:
        """What a checkpoint after that many samples stores."""
        return self._states.get(consumed_samples // self.size)

    def progress(self, consumed_samples: int) -> list[str]:
        """A line for the log: the tokens of so many samples, and where each source is; none if that is not known."""
        if (state := self.state(consumed_samples)) is None:
            return []
        places = [Position(*one) for one in json.loads(state)["positions"]]
        at = "; ".join(
            f"{source.name}: epoch {place.epoch}, file {place.file + 1} of {len(source.paths)}, line {place.line:,}"
            for source, place in zip(self.streams, places, strict=True)
        )
        return [f"stream    {consumed_samples * self.sequence_length:,} tokens drawn; {at}"]

    def restore(self, consumed_samples: int, stored: str | None) -> list[str]:
        """Continues after that many samples; returns messages.

        Raises:
          ConfigError: the stream was another one.
        """
        if stored is None:
            return [f"warning: the checkpoint has no state of --stream: {consumed_samples:,} samples are read again"]
        try:
            found = json.loads(stored)
            was = (found["length"], found["size"], found["shuffles"], len(found["positions"]), found["files"])
            group = int(found["group"])
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                "the checkpoint's state of the data is not one of --stream: pass the data that it had"
            ) from None
        now = (self.sequence_length, self.size, self.shuffles, len(self.streams), self._files)
        names = ("--sequence-length", "--shuffle-samples", "--shuffle-samples", "sources:", "files in its sources:")
        for name, old, new in zip(names, was, now, strict=True):
            if old != new:
                raise ConfigError(f"the checkpoint's stream had {name} {old}, and this run has {new}: pass the same")
        if group != consumed_samples // self.size:
            raise ConfigError("the checkpoint's state of --stream is not of its sample: resume from an earlier one")
        self.close()
        self._states[group] = stored
        self._wanted = group
        places = zip(self.streams, found["positions"], strict=True)
        at = ", ".join(f"{source.name}: epoch {place[0]}, {place[4] or 'its start'}" for source, place in places)
        return [f"resume    the stream continues at sample {consumed_samples:,} ({at})"]

    def close(self) -> None:
        """Ends the thread and the processes; `window` starts them again."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
        if self._workers:
            self._workers.close()
        if self._thread:
            self._thread.join()
        self._thread = self._workers = self._error = None
        self._groups.clear()

    def _sample(self, index: int) -> tuple[np.ndarray, str]:
        group, place = divmod(index, self.size)
        with self._change:
            if group not in self._groups and (self._thread is None or not self._wanted <= group):
                self._start(group)
            self._wanted = max(self._wanted, group)
            self._change.notify_all()
            while group not in self._groups and self._error is None:
                self._change.wait()
            if group not in self._groups:
                raise self._error
            for old in [one for one in self._groups if (one + 1) * self.size <= index - self.kept]:
                del self._groups[old]
            return self._groups[group][place]

    def _start(self, group: int) -> None:
        """Reads from the newest known state that is not after a group; the caller holds the condition."""
        if self._thread is not None:
            self._change.release()
            try:
                self.close()
            finally:
                self._change.acquire()
        known = max((one for one in self._states if one <= group), default=None)
        state = json.loads(self._states[known]) if known is not None else None
        self._stop, self._wanted = threading.Event(), known or 0
        self._workers = Workers(self._recipe, self._worker_count)
        arguments = (state, self._stop, self._workers)
        self._thread = threading.Thread(target=self._read, args=arguments, name="stream", daemon=True)
        self._thread.start()

    def _read(self, state: Mapping[str, Any] | None, stop: threading.Event, workers: Workers) -> None:
        """In the thread: makes groups, one ahead of the newest that is wanted."""
        try:
            group = state["group"] if state else 0
            positions = [Position(*one) for one in state["positions"]] if state else [Position()] * len(self.streams)
            deficits = np.array(state["deficits"] if state else [0.0] * len(self.streams))
            ahead = -(-2 * self._worker_count // len(self.streams))
            windows = [
                source.windows(position, self.sequence_length, workers, ahead)
                for source, position in zip(self.streams, positions, strict=True)
            ]
            with self._change:
                self._remember(group, positions, deficits)
            while not stop.is_set():
                with self._change:
                    while group > self._wanted + 1 and not stop.is_set():
                        self._change.wait()
                samples = []
                for number in range(group * self.size, (group + 1) * self.size):
                    if stop.is_set():
                        return
                    deficits += next(weights for start, weights in reversed(self.weights) if start <= number)
                    drawn = int(deficits.argmax())
                    deficits[drawn] -= 1
                    window = next(windows[drawn])
                    positions[drawn] = window.after
                    samples.append((window.tokens, window.place))
                with self._change:
                    if stop.is_set():
                        return
                    if (group + 1) * self.size > self._wanted * self.size - self.kept:
                        self._groups[group] = [samples[place] for place in self._order(group)]
                    group += 1
                    self._remember(group, positions, deficits)
                    self._change.notify_all()
        except BaseException as error:
            with self._change:
                if not stop.is_set():
                    self._error = error
                    self._change.notify_all()

    @property
    def _files(self) -> list[int]:
        return [len(source.paths) for source in self.streams]

    def _order(self, group: int) -> np.ndarray:
        if not self.shuffles:
            return np.arange(self.size)
        return np.random.Generator(np.random.Philox(key=[self.seed, group])).permutation(self.size)

    def _remember(self, group: int, positions: Sequence[Position], deficits: np.ndarray) -> None:
        state = {"group": group, "positions": positions, "deficits": deficits.tolist()}
        state |= {"length": self.sequence_length, "size": self.size, "shuffles": self.shuffles, "files": self._files}
        self._states[group] = json.dumps(state)
        while len(self._states) > STATES + 2 * self.kept // self.size:
            self._states.popitem(last=False)


class StreamLoader(RampedLoader):
    """The batches of a stream; with the state that checkpoints store."""

    def __init__(self, loader: Loader, run: RunConfig):
        """`loader`: of `StreamSamples`."""
        super().__init__(loader, run)
        self.state, self.restore, self.close = self.samples.state, self.samples.restore, self.samples.close
        self.progress = self.samples.progress


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None

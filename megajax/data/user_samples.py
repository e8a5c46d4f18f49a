"""Samples of the user's as the batches of a run: from a list, a dataset, a DataLoader, a generator, whatever gives them.

Two kinds of sources. One with `len` and an index (a list, `torch.utils.data.Dataset`, `datasets.Dataset`,
`grain.MapDataset`) has no state: sample n of the run is its item n. Any other is iterated (a generator, a function that
returns an iterator, `torch.utils.data.DataLoader`, `datasets.IterableDataset`, `grain.IterDataset`); its state, if it has
one, is saved in every checkpoint: see `source_state.py`. An item is a dictionary of arrays: one sample, or several with a
leading axis.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.config.batch_ramp import batch_size
from megajax.data.source_state import decode, encode, state_functions
from megajax.schedules.errors import counted

__all__ = ["Samples", "UserSamples", "gives_batches"]

KEPT = 4  # batches that may be asked for again, and boundaries whose state may be saved: more than Prefetch reads ahead
Rows = dict[str, np.ndarray]


def gives_batches(data: Any) -> bool:
    """Whether an object has `batch(consumed_samples)`, and not the method `batch` of datasets and grain."""
    method = getattr(data, "batch", None)
    if not callable(method):
        return False
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        return True
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return True
    return names[:1] != ["batch_size"]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples for `Trainer(data=...)`, with how they are read. A source without settings is passed as it is.

    Attributes:
      data: the source, see above.
      epochs: times that it is read; None: as often as the run needs.
      data_state: (get, set): `get()` returns the state of a source that is iterated, which checkpoints store, and
        `set(state)` restores it before an iterator is made; None: the source's own, if it has one.
    """

    data: Any
    _: dataclasses.KW_ONLY
    epochs: int | None = 1
    data_state: tuple[Callable[[], Any], Callable[[Any], Any]] | None = None


class UserSamples:
    """Batches of a user's samples, in the order in which the source gives them.

    Attributes:
      description: a line for the log.
      length: samples of a source with an index; None: not known.
      batches_of_an_epoch: of such a source, for validation; it has no such attribute if the length is not known.
    """

    def __init__(self, samples: Samples, run: RunConfig, shapes: Mapping[str, Any], name: str = "data"):
        """Reads the first item of a source with an index; nothing of others.

        Args:
          samples: the source.
          run: for the sizes of batches.
          shapes: of the model's arrays, of one sample, by name (`PipelineModel.batch_shapes`).
          name: for messages; of another one than "data", the length is not compared with the run's.

        Raises:
          ConfigError: it gives no samples, or fewer than the run needs.
        """
        data, epochs, state = samples.data, samples.epochs, samples.data_state
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise ConfigError(f"Samples(epochs={epochs!r}) must be a whole number of at least 1, or None")
        if isinstance(data, Mapping | str | bytes):
            raise ConfigError(
                f"{name} is a {type(data).__name__}: pass samples (a list, dataset, DataLoader or generator of dictionaries "
                "of arrays), or an object with batch(consumed_samples)"
            )
        self.data, self.run, self.shapes, self.epochs, self.name = data, run, shapes, epochs, name
        self.length: int | None = None
        self._recent: collections.OrderedDict[int, Rows] = collections.OrderedDict()
        self._states: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._state, self._given = None, state
        self._iterator: Iterator[Any] | None = None
        self._position = self._epoch = self._in_epoch = self._used = 0
        self._chunk: Rows | None = None
        self._before: str | None = None  # the source's state before the chunk
        self._several = True  # whether items may have several samples: a batch may then end inside of one
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            self._index()
        elif not hasattr(data, "__iter__") and not callable(data):
            raise ConfigError(
                f"{name} is a {type(data).__name__}, which gives no samples: pass something to iterate or to index, "
                "or an object with batch(consumed_samples)"
            )
        else:
            self._state = state_functions(data, state)
        self.description = self._describe()

    def batch(self, consumed_samples: int) -> Rows:
        """The batch that starts with that sample: arrays [microbatches, samples, ...], and their numbers as "sample".

        Raises:
          ConfigError: the data ended, or an item is not a dictionary of arrays of the model's shapes.
        """
        if consumed_samples in self._recent:
            return self._recent[consumed_samples]
        size = batch_size(self.run.train, consumed_samples)
        each = self.run.parallel.microbatch_size * self.run.parallel.data
        if self.length is not None:
            numbers = [number % self.length for number in range(consumed_samples, consumed_samples + size)]
            chunks = [self._rows(self.data[number], f"{self.name}[{number}]") for number in numbers]
        else:
            self._seek(consumed_samples)
            chunks = self._draw(size)
            self._remember()
        batch = {
            key: array.reshape(size // each, each, *array.shape[1:]) for key, array in self._joined(chunks).items()
        }
        if "sample" in self.shapes and "sample" not in batch:
            batch["sample"] = np.arange(consumed_samples, consumed_samples + size, dtype=np.uint32).reshape(-1, each)
        _keep(self._recent, consumed_samples, batch)
        return batch

    def state(self, consumed_samples: int) -> str | None:
        """What a checkpoint after that many samples stores; None for a source without a state."""
        return self._states.get(consumed_samples)

    def restore(self, consumed_samples: int, stored: str | None) -> list[str]:
        """Continues after that many samples of the run; returns messages.

        Without a state the source is read from its beginning, and that many samples are dropped.
        """
        if self.length is not None or not consumed_samples:
            return []
        kind = type(self.data).__name__
        if stored is None:
            return [
                f"warning: {self.name} has no state in the checkpoint: {counted(consumed_samples, 'sample')} of {kind} are "
                "read again and dropped"
            ]
        if self._state is None:
            raise ConfigError(
                f"the checkpoint has a state of {self.name}, and this {kind} has no function to set it: pass the same data, "
                "or data=Samples(data, data_state=(get, set))"
            )
        found = decode(stored, self.name)
        self._epoch, self._in_epoch = int(found["epoch"]), int(found["in_epoch"])
        self._position = consumed_samples
        self._iterator = self._state.restored(found["source"], self._iter)
        if found["used"]:
            self._fetch()
            self._used = int(found["used"])
        self._states.clear()
        return [f"resume    {self.name} continues from its state in the checkpoint"]

    def _index(self) -> None:
        """Finds out whether the items are samples; a list of batches is iterated."""
        length = len(self.data)
        if not length:
            raise ConfigError(f"{self.name} has no samples: pass data with at least one")
        item, place = self.data[0], f"{self.name}[0]"
        if self._leading(self._arrays(item, place), place):
            self._state = state_functions(self.data, self._given)
            return
        self.length, needed = length, self.run.total_samples
        self.batches_of_an_epoch = max(1, length // self.run.train.global_batch_size)
        if self.name == "data" and self.epochs is not None and needed > length * self.epochs:
            raise ConfigError(self._ended(length * self.epochs))

    def _describe(self) -> str:
        kind = type(self.data).__name__
        if self.length is not None:
            return (
                f"{counted(self.length, 'sample')} of {kind}, {self.run.total_samples / self.length:.3g} epochs of them"
            )
        state = "its state is saved" if self._state else "no state: a resumed run reads it from the beginning"
        return f"samples of {kind}, in its order ({state})"

    def _iter(self) -> Iterator[Any]:
        """A new iterator, of the present epoch: datasets' shuffle in another order in each."""
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self._epoch)
        return iter(self.data() if callable(self.data) and not hasattr(self.data, "__iter__") else self.data)

    @property
    def _repeats(self) -> bool:
        """Whether the source can be read again."""
        return self._iterator is not self.data and not inspect.isgenerator(self.data)

    def _seek(self, consumed_samples: int) -> None:
        """Goes to that sample, by reading."""
        if consumed_samples < self._position:
            if not self._repeats:
                raise ConfigError(
                    f"{self.name} is an iterator, which is read once, and sample {consumed_samples} is needed again: pass a "
                    "list, a dataset, or a function that returns an iterator"
                )
            self._iterator, self._chunk = None, None
            self._position = self._epoch = self._in_epoch = self._used = 0
        if consumed_samples > self._position:
            self._draw(consumed_samples - self._position)
            self._states.clear()

    def _draw(self, count: int) -> list[Rows]:
        """The next samples, in pieces."""
        pieces = []
        while count:
            if self._chunk is None:
                self._fetch()
            total = len(next(iter(self._chunk.values())))
            taken = min(count, total - self._used)
            pieces.append({key: array[self._used : self._used + taken] for key, array in self._chunk.items()})
            count, self._used = count - taken, self._used + taken
            self._position, self._in_epoch = self._position + taken, self._in_epoch + taken
            if self._used == total:
                self._chunk, self._used = None, 0
        return pieces

    def _fetch(self) -> None:
        """Reads the next item, of the next epoch if one has ended."""
        while True:
            if self._iterator is None:
                self._iterator = self._iter()
                if self._state:
                    self._state.bind(self._iterator)
            if self._state and self._several:
                self._before = self._state.before(self.name, self._in_epoch == 0)
            item = next(self._iterator, _END)
            if item is not _END:
                break
            if not self._in_epoch:
                raise ConfigError(f"{self.name} gave no samples: pass data with at least one")
            if self.epochs is not None and self._epoch + 1 >= self.epochs:
                raise ConfigError(self._ended(self._position))
            if not self._repeats:
                raise ConfigError(
                    f"{self._ended(self._position)}; an iterator is read once: pass a list, a dataset, or a function that "
                    "returns an iterator"
                )
            self._iterator, self._epoch, self._in_epoch = None, self._epoch + 1, 0
        self._chunk = self._rows(item, f"{self.name}: the item after {counted(self._position, 'sample')}")
        self._several = len(next(iter(self._chunk.values()))) > 1

    def _remember(self) -> None:
        """Encodes the state after the samples drawn so far."""
        if not self._state:
            return
        source = self._before if self._used else encode(self._state.get(), self.name)
        place = {"epoch": self._epoch, "in_epoch": self._in_epoch, "used": self._used}
        _keep(self._states, self._position, encode(place | {"source": source}, self.name))

    def _ended(self, samples: int) -> str:
        epochs = f", {counted(self._epoch + 1, 'epoch')} of it" if self._epoch else ""
        remedy = "pass data=Samples(data, epochs=None) to read it as often as needed, more data, or fewer steps"
        needed = f"{self.run.total_samples:,}"
        return f"{self.name} ended after {counted(samples, 'sample')}{epochs}, and the run needs {needed}: {remedy}"

    def _rows(self, item: Any, place: str) -> Rows:
        """An item's samples: arrays [samples, ...]."""
        arrays = self._arrays(item, place)
        axes = self._leading(arrays, place)
        rows = {key: array.reshape(-1, *array.shape[axes:]) for key, array in arrays.items()}
        counts = {key: len(array) for key, array in rows.items()}
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{key} {count}" for key, count in counts.items())
            raise ConfigError(f"{place} has arrays of different numbers of samples ({shown}): give all the same")
        if not next(iter(counts.values())):
            raise ConfigError(f"{place} has no samples: give at least one")
        for key, array in rows.items():
            wanted = self.shapes.get(key)
            if wanted is not None and array.shape[1:] != tuple(wanted.shape):
                raise ConfigError(
                    f"{place} has {key!r} of shape {_shown(array.shape[1:])} a sample; the model takes "
                    f"{_shown(wanted.shape)}"
                )
        return rows

    def _arrays(self, item: Any, place: str) -> Rows:
        if not isinstance(item, Mapping):
            names = ", ".join(self.shapes)
            raise ConfigError(
                f"{place} is a {type(item).__name__}: give dictionaries of arrays by their names (the model reads {names})"
            )
        return {str(key): _array(value, f"{place}[{key!r}]") for key, value in item.items()}

    def _leading(self, arrays: Rows, place: str) -> int:
        """The axes before those of a sample: 0 for one sample, 1 for several, 2 for [microbatches, samples]."""
        known = {key: array.ndim - len(self.shapes[key].shape) for key, array in arrays.items() if key in self.shapes}
        if not known:
            raise ConfigError(
                f"{place} has {', '.join(arrays) or 'nothing'}, and the model reads {', '.join(self.shapes)}: rename them"
            )
        axes = collections.Counter(known.values()).most_common(1)[0][0]
        wrong = [key for key, found in known.items() if found != axes or not 0 <= found <= 2]
        if wrong:
            key = wrong[0]
            raise ConfigError(
                f"{place} has {key!r} of shape {_shown(arrays[key].shape)}; a sample of the model's has "
                f"{_shown(self.shapes[key].shape)}: give one sample, or several with a leading axis"
            )
        return axes

    def _joined(self, chunks: list[Rows]) -> Rows:
        """The samples of several pieces."""
        first = chunks[0]
        for chunk in chunks:
            if chunk.keys() != first.keys():
                missing = sorted(chunk.keys() ^ first.keys())
                raise ConfigError(
                    f"{self.name}: some samples have {missing[0]!r}, others do not: give all the same arrays"
                )
            for key, array in chunk.items():
                if array.shape[1:] != first[key].shape[1:]:
                    raise ConfigError(
                        f"{self.name}: samples of a batch have {key!r} of shapes {_shown(first[key].shape[1:])} and "
                        f"{_shown(array.shape[1:])}: pad or cut them to one"
                    )
        return {key: np.concatenate([chunk[key] for chunk in chunks]) for key in first}


_END = object()


def _keep(table: collections.OrderedDict, key: int, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > KEPT:
        table.popitem(last=False)


def _array(value: Any, place: str) -> np.ndarray:
    """Lists, tensors of torch and arrays of jax as NumPy's."""
    try:
        if hasattr(value, "detach"):  # of torch
            value = value.detach().cpu()
            value = value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
        array = np.asarray(value)
    except Exception as error:  # of several libraries
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"{place} is no array ({text}): give numbers of one shape") from None
    if array.dtype.kind not in "biufV" or array.dtype.names:
        what = {"U": "text", "S": "bytes", "O": "objects", "M": "dates"}.get(array.dtype.kind, str(array.dtype))
        raise ConfigError(f"{place} holds {what}: give arrays of numbers only, and remove what the model does not read")
    return array


def _shown(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"

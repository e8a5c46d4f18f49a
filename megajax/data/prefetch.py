"""Prefetching: a thread reads the next batches and copies them to the devices while a step runs."""

import concurrent.futures
import time
from collections.abc import Mapping

import jax

from megajax.data.loader import Loader

AHEAD = 2  # batches: one on the devices before its step starts, one being read


class Prefetch:
    """Prefetches a loader's batches. Each process reads only the samples of its own devices.

    `batch(consumed_samples)` is called as the loader's. The batch after the previous one is already prefetched; for any
    other one, as after a restart, prefetching starts again there. So there is no state to save.

    Attributes:
      waited: total seconds that `batch` has waited.
    """

    def __init__(self, loader: Loader, sharding: jax.sharding.Sharding, ahead: int = AHEAD):
        """`sharding` is that of a batch's arrays, whose first two axes are (microbatches, samples)."""
        self.loader, self.sharding, self.ahead, self.waited = loader, sharding, ahead, 0.0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prefetch")
        self._ready: dict[int, concurrent.futures.Future] = {}

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def batch(self, consumed_samples: int) -> Mapping[str, jax.Array]:
        """`Loader.batch` as arrays on the devices; starts reading the next batches.

        Raises:
          ConfigError: see `Loader.rows`. Errors of prefetched batches are raised when they are requested.
        """
        start = time.perf_counter()
        wanted = [consumed_samples]
        for _ in range(self.ahead):
            wanted.append(wanted[-1] + self.loader.at(wanted[-1]).global_batch_size)
        for number in [number for number in self._ready if number not in wanted]:
            self._ready.pop(number).cancel()
        for number in wanted:
            if number not in self._ready:
                self._ready[number] = self._thread.submit(place_batch, self.loader.at(number), number, self.sharding)
        batch = self._ready.pop(consumed_samples).result()
        self.waited += time.perf_counter() - start
        return batch

    def progress(self, consumed_samples: int) -> list[str]:
        """Lines for the log about the data after so many samples; none for data whose samples are numbered."""
        progress = getattr(self.loader, "progress", None)
        return progress(consumed_samples) if progress else []

    def close(self) -> None:
        """Stops prefetching."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def place_batch(loader: Loader, consumed_samples: int, sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """One batch on the devices. The samples of devices in the same pipeline or tensor group are read once."""
    if not hasattr(loader, "rows"):  # the user's data, which gives whole batches only
        batch = loader.batch(consumed_samples)
        place = lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)  # noqa: E731
        return {name: place(array) for name, array in batch.items()}
    numbers = loader.numbers(consumed_samples)
    parts = {}
    for index in sharding.addressable_devices_indices_map(numbers.shape).values():
        if _key(index) not in parts:
            part = numbers[index]
            rows = loader.rows(part.reshape(-1))
            parts[_key(index)] = {name: array.reshape(*part.shape, *array.shape[1:]) for name, array in rows.items()}
    return {
        name: jax.make_array_from_callback(
            (*numbers.shape, *array.shape[2:]), sharding, lambda index, name=name: parts[_key(index[:2])][name]
        )
        for name, array in next(iter(parts.values())).items()
    }


def _key(index: tuple[slice, ...]) -> tuple:
    return tuple((part.start, part.stop) for part in index)

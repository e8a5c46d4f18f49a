"""The ids in a batch: which are legal (`PipelineModel.id_bounds`), and labels that do not count. On the host, in NumPy.

On the devices an id outside its table is no error: a lookup gives zeros, NaN or the last row, and a label no likelihood.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.ops.vocabulary import IGNORED_LABEL

__all__ = ["Ids", "checked_ids"]

Batch = Mapping[str, Any]


class Ids(NamedTuple):
    """The legal values of an integer array of a batch: 0 to `count` - 1.

    Attributes:
      count: see above.
      weights: the name of the array of loss weights, of the same shape, if these ids are labels. A label of IGNORED_LABEL
        (-100, as in torch) is then legal too, and gets weight 0.
    """

    count: int
    weights: str | None = None


def checked_ids(batch: Batch, bounds: Mapping[str, Ids]) -> Batch:
    """A batch with the weights of ignored labels at 0.

    Args:
      batch: arrays [microbatches, samples, ...]. Arrays that it does not have, that hold no integers, or that are on the
        devices already, are not checked.
      bounds: the legal ids of arrays, by name.

    Raises:
      ConfigError: an id is outside its range; one line with the first one's sample and position.
    """
    changed = {}
    for name, ids in bounds.items():
        array = batch.get(name)
        if not isinstance(array, np.ndarray) or not array.size or array.dtype.kind not in "iu":
            continue
        if array.min() >= 0 and array.max() < ids.count:
            continue
        ignored = array == IGNORED_LABEL if ids.weights else np.zeros(array.shape, bool)
        wrong = ((array < 0) | (array >= ids.count)) & ~ignored
        if wrong.any():
            raise ConfigError(_message(batch, name, ids, tuple(np.argwhere(wrong)[0].tolist())))
        if ids.weights in batch:
            weights = np.asarray(changed.get(ids.weights, batch[ids.weights]))
            if weights.shape == array.shape:
                changed[ids.weights] = np.where(ignored, weights.dtype.type(0), weights)
    return {**batch, **changed} if changed else batch


def _message(batch: Batch, name: str, ids: Ids, place: tuple[int, ...]) -> str:
    """About the id at this place of an array."""
    words = [f"{word} {index}" for word, index in zip(("microbatch", "sample"), place, strict=False)]
    if len(place) > 1 and "sample" in batch:
        words[1] += f" (sample {np.asarray(batch['sample'])[place[:2]]} of the run)"
    if len(place) > 2:
        words.append(f"position {', '.join(map(str, place[2:]))}")
    also = f", and {IGNORED_LABEL} for labels that do not count" if ids.weights else ""
    return (
        f"the batch's {name!r} has {np.asarray(batch[name])[place]} at {', '.join(words)} (counted from 0): the model has "
        f"ids 0 to {ids.count - 1}{also}"
    )

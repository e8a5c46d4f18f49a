"""Whether stored arrays have the shapes that a run needs."""

from collections.abc import Mapping

from megajax.config import RunConfig, near, padded_vocabulary

# A leaf of this name only carries measurements out of a step (`models/moe.py`): it is zero, and its size may differ.
MEASUREMENTS = "router/losses"
NO_AVERAGE = "has no averaged weights: its run was without --ema-decay; omit --ema"


def shape_problem(name: str, stored: Mapping[str, tuple[int, ...]], shape: tuple[int, ...], run: RunConfig) -> str:
    """Why the stored array is not the one that is needed; empty if it is.

    The padding of the vocabulary depends on the mesh, and so may differ.

    Args:
      name: of the array.
      stored: the shapes of all stored arrays, by name.
      shape: in canonical layer order, as the run needs it.
      run: the run that resumes.
    """
    if name not in stored and name.startswith("optimizer_state/"):
        return f"has no {name}: it was saved with another optimizer; pass that --optimizer, or Trainer(optimizer=...)"
    if name not in stored and name.startswith("ema/"):
        return NO_AVERAGE
    if name not in stored:
        return f"has no {name}: {near(name, stored)}"
    found, vocabulary = tuple(stored[name]), getattr(run.model, "vocabulary", None)
    if name.endswith(MEASUREMENTS) and len(found) == len(shape) and found[:-1] == shape[:-1]:
        return ""
    padded = vocabulary and padded_vocabulary(vocabulary, run.parallel.vocabulary_shares)
    fits = len(found) == len(shape) and all(
        had == have or (padded and have == padded and min(had, have) >= vocabulary)
        for had, have in zip(found, shape, strict=True)
    )
    return "" if fits else f"{name} has shape {found}, this run's {tuple(shape)}"

"""All processes of a run have the same configuration and data, or none of them trains.

Processes that are started with other options train on in silence, with gradients that mean nothing. So they compare them
at the start, before anything is compiled.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from megajax.config import ConfigError, OutputConfig, RunConfig, option
from megajax.config.cli import OWN
from megajax.data.loader import Loader
from megajax.data.tokenizers import Tokenizer, tokenizer_hash
from megajax.runtime.compat import coordination_service
from megajax.runtime.exchange import gather_problems, require_same

COMPARED = 64  # samples of a data set, evenly spaced
_comparisons = itertools.count()  # a name of jax's service is used once in a process's life


def require_same_run(
    run: RunConfig,
    output: OutputConfig,
    loaders: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    kinds: Mapping[str, str],
) -> None:
    """Compares this process with process 0. All processes of the run must call it; alone, it does nothing.

    Args:
      run, output: the configuration.
      loaders: by name, the run's `Loader`s; batches of the user's are not read.
      tokenizer: None: there is none.
      kinds: see `own_classes`.

    Raises:
      ConfigError: a process differs; all of them raise it.
    """
    if coordination_service().client is None:
        return
    values = configuration(run, output) | dict(kinds)
    values |= {f"the {name} data (their fingerprint)": fingerprint(one) for name, one in loaders.items()}
    values |= {"the tokenizer's hash": tokenizer_hash(tokenizer)} if tokenizer else {}
    _require_same(values)


def require_same_batch(batch: Mapping[str, np.ndarray]) -> None:
    """As `require_same_run`, of the first batch of a user's source: one that shuffles without a seed differs."""
    if coordination_service().client is not None:
        _require_same({"the first batch of the data (its checksum)": f"{_checksum(batch):08x}"})


def _require_same(values: Mapping[str, str]) -> None:
    name, problem = f"train/same run/{next(_comparisons)}", None
    try:
        require_same(name, values)
    except ConfigError as error:
        problem = str(error)
    if problems := gather_problems(f"{name}/problems", problem):
        raise ConfigError(problems[min(problems)])


def own_classes(model: type | None, data: Any, optimizer: Any = None, schedule: Any = None) -> dict[str, str]:
    """What is a user's own, by the names of classes and functions, for `require_same_run`; None: there is none."""
    kinds = {"the model's class": model, "the batches' class": None if data is None else type(data)}
    for name, own in (("optimizer", optimizer), ("schedule", schedule)):
        named = own if hasattr(own, "__qualname__") else type(own)
        kinds |= {f"the {name}'s function": None if own is None else named}
    return {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items() if kind}


def configuration(run: RunConfig, output: OutputConfig) -> dict[str, str]:
    """All fields of the configuration by their options, without those that may differ between processes."""
    parts = (*run.parts.values(), output)
    fields = {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
    values = {option(name): str(value) for name, value in fields.items() if name not in OWN}
    return values | {"the model": type(run.model).__name__}


def fingerprint(loader: Loader) -> str:
    """The number of samples, and a checksum of some of them; of a text's tokens in memory, of all."""
    samples = loader.samples
    count = int(samples.count)
    rows = loader.rows(np.unique(np.linspace(0, count - 1, COMPARED).astype(np.int64)))
    found = _checksum(rows)
    tokens = getattr(samples, "tokens", None)
    if isinstance(tokens, np.ndarray):
        found = zlib.crc32(np.ascontiguousarray(tokens), found)
    return f"{count} samples, {found:08x}"


def _checksum(rows: Mapping[str, np.ndarray]) -> int:
    found = 0
    for name in sorted(rows):
        found = zlib.crc32(np.ascontiguousarray(rows[name]), zlib.crc32(name.encode(), found))
    return found

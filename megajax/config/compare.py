"""Differences between configurations: a run's from the defaults, and a resumed run's from the checkpoint's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megajax.config.errors import option
from megajax.config.run import RunConfig

# Fields of the data that may differ without any effect on the samples. The tokenizer is compared by its hash.
NO_EFFECT = ("data_cache", "tokenizer", "end_of_document")


def differences(run: RunConfig, default: RunConfig) -> list[str]:
    """One line for each section in which `run` differs from `default`: "train: --steps 100 --learning-rate 0.001"."""
    lines = []
    for section in ("model", "parallel", "train", "data"):
        now, usual = getattr(run, section), getattr(default, section)
        names = [field.name for field in dataclasses.fields(now)]
        changed = [name for name in names if getattr(now, name) != getattr(usual, name, dataclasses.MISSING)]
        if changed:
            lines.append(f"{section}: " + " ".join(_words(name, getattr(now, name)) for name in changed))
    return lines


def data_differences(was: Mapping[str, Any] | None, run: RunConfig) -> list[str]:
    """Differences between a checkpoint's data options and a resumed run's: "text was None, is 'a.txt'".

    Other data is legal, and the caller reports it: the run continues at the same number of consumed samples.

    Args:
        was: the section "data" of the checkpoint's configuration; None if it was written before there was one.
    """
    if was is None:
        return []
    now = dataclasses.asdict(run.data)
    plain = lambda value: tuple(value) if isinstance(value, list) else value  # noqa: E731
    return [
        f"{name} was {was.get(name)!r}, is {now[name]!r}"
        for name in now
        if name not in NO_EFFECT and plain(was.get(name)) != plain(now[name])
    ]


def _words(name: str, value: Any) -> str:
    """An option and its value, as passed on the command line."""
    if isinstance(value, bool):
        return option(name) if value else "--no-" + option(name)[2:]
    if isinstance(value, tuple):
        return f"{option(name)} {','.join(map(str, value)) or 'none'}"
    return f"{option(name)} {'none' if value is None else value}"

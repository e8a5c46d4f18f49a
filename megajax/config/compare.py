"""Differences between configurations: a run's from the defaults, and a resumed run's from the checkpoint's."""

import dataclasses
import shlex
from collections.abc import Container, Mapping, Sequence
from typing import Any

from megajax.config.errors import option
from megajax.config.model import ModelConfig
from megajax.config.output import OutputConfig
from megajax.config.parallel import ParallelConfig
from megajax.config.presets import PRESETS
from megajax.config.run import RunConfig
from megajax.config.stored_paths import absolute_paths
from megajax.config.train import TrainConfig

OF_EXPERTS = (
    "expert",
    "expert_tensor",
    "expert_dispatch",
)  # of the layout; without experts in the model they have no effect
# Fields of the data that may differ without any effect on the samples. The tokenizer is compared by its hash.
NO_EFFECT = ("data_cache", "tokenizer", "end_of_document", "verify_data", "stream_workers")


def changed_options(
    run: RunConfig,
    output: OutputConfig,
    default: RunConfig,
    default_output: OutputConfig,
    names: Container[str] | None = None,
) -> str:
    """The options, as passed on the command line, whose values differ from the defaults: "--pipe 4 --steps 100".

    Fields of a user's own model, which have no options, are written as "width=64".

    Args:
        run, output: the configuration.
        default, default_output: that of the defaults.
        names: the fields to compare; None: all.
    """
    pairs = zip([*run.parts.values(), output], [*default.parts.values(), default_output], strict=True)
    words = []
    for now, usual in pairs:
        for field in dataclasses.fields(now):
            value = getattr(now, field.name)
            compared = field.name in names if names is not None else field.name != "name"
            if field.name in OF_EXPERTS and not getattr(run.model, "experts", 0):
                continue
            if compared and value != getattr(usual, field.name, dataclasses.MISSING):
                words.append(_words(field, value))
    return " ".join(words)


def library_defaults(run: RunConfig) -> RunConfig:
    """The defaults of a run that no command line made: the preset of the model's name, and the dataclasses' defaults."""
    model = PRESETS.get(run.model.name, run.model) if isinstance(run.model, ModelConfig) else run.model
    return RunConfig(model, ParallelConfig(), TrainConfig())


def stored_differences(
    was: Mapping[str, Any], now: Any, leave_out: Sequence[str] = (), ignore_unknown: bool = False
) -> list[str]:
    """What differs between a stored section of a configuration and a dataclass: "steps was 10, is 20".

    Args:
        was: the section, by field name; JSON's lists equal tuples. A field that it does not have was added to megajax
            after the section was stored, so it had its default value.
        now: the dataclass.
        leave_out: fields that are not compared.
        ignore_unknown: whether stored fields that the dataclass does not have are left out too.
    """
    missing = dataclasses.MISSING
    defaults = {
        field.name: field.default if field.default_factory is missing else field.default_factory()
        for field in dataclasses.fields(now)
    }
    current = dataclasses.asdict(now)
    names = list(current) if ignore_unknown else list(dict.fromkeys([*was, *current]))
    found = []
    for name in names:
        before, after = was.get(name, defaults.get(name)), current.get(name)
        same = absolute_paths({name: _plain(before)}) == absolute_paths({name: _plain(after)})
        if name not in leave_out and not same:
            shown = "not stored" if before is missing else before
            found.append(f"{name} was {shown}, is {after}")
    return found


def data_differences(was: Mapping[str, Any] | None, run: RunConfig) -> list[str]:
    """What differs between a checkpoint's data options and a resumed run's: "text was None, is a.txt".

    Other data is legal, and the caller reports it: the run continues at the same number of consumed samples.

    Args:
        was: the section "data" of the checkpoint's configuration; None if it was written before there was one.
        run: the run that resumes.
    """
    return [] if was is None else stored_differences(was, run.data, NO_EFFECT, ignore_unknown=True)


def _plain(value: Any) -> Any:
    """JSON has lists only; a tuple equals the list of its elements."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _words(field: dataclasses.Field, value: Any) -> str:
    """An option and its value, as passed on the command line."""
    if not field.metadata:
        return f"{field.name}={value!r}"
    name = option(field.name)
    if isinstance(value, bool):
        return name if value else "--no-" + name[2:]
    if isinstance(value, tuple):
        if value and field.metadata["list_style"] == "repeat":
            return " ".join(f"{name} {shlex.quote(word)}" for word in value)
        separator = " " if field.metadata["list_style"] == "words" else ","
        return f"{name} {separator.join(map(str, value)) or 'none'}"
    return f"{name} {'none' if value is None else value}"

"""The JSON stored beside a checkpoint's arrays: progress, configuration and tokenizer.

Format 2 is written. Format 1 (megajax before the options --nonfinite, --matmul-dtype and --offload-activations) is read:
`parse` renames its fields. `differences` compares a checkpoint's configuration with that of the run that resumes from it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import megajax
from megajax.config import ConfigError, ModelConfig, RunConfig
from megajax.config.compare import data_differences, stored_differences
from megajax.config.same_parameters import changed_parameters
from megajax.config.stored_paths import absolute_paths
from megajax.data.tokenizers import Tokenizer, tokenizer_hash
from megajax.schedules.arguments import INT32
from megajax.schedules.errors import shown

FORMAT = 2
MOST_LEVELS = 10  # of nested objects and lists; the configuration of a run has 4
LATEST = 2**33  # seconds since 1970: the year 2242

# Other values of these fields are not reported: they do not change what the arrays mean.
FREE_MODEL_FIELDS = ("name", "init_deviation")
REPORTED = {"parallel": "resharded", "train": "training options differ"}
NO_TOKENIZER = {"name": "none", "hash": ""}

REQUIRED = {
    "format": int,
    "megajax": str,
    "time": float,
    "progress": dict,
    "config": dict,
    "tokenizer": dict,
}
REQUIRED_PARTS = {
    "progress": {"step": int, "samples": int, "skipped": int, "nonfinite": int},
    "config": {"model": dict, "parallel": dict, "train": dict},
    "tokenizer": {"name": str, "hash": str},
}

# Format 1: (section, old name) -> (new name, old value -> new value).
RENAMED = {
    ("parallel", "offload"): ("offload_activations", {"none": False, "stash": True}),
    ("train", "block_matmuls"): ("matmul_dtype", {"precision": None, "fp8": "fp8"}),
    ("train", "bad_step"): ("nonfinite", {}),
    ("train", "bad_steps_limit"): ("nonfinite_limit", {}),
}


@dataclasses.dataclass(frozen=True)
class Progress:
    """The position of a run: the part of its state that is not in the arrays.

    Attributes:
      step: steps taken, skipped ones included.
      samples: samples consumed, those of skipped steps included. This is the whole state of the data loader.
      skipped: steps whose update was skipped.
      nonfinite: steps whose loss was not finite.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    nonfinite: int = 0


def parse(raw: Any) -> dict[str, Any]:
    """Metadata of any format up to FORMAT, with the fields of FORMAT; `progress` becomes a `Progress`.

    Args:
      raw: the decoded JSON.

    Raises:
      ConfigError: the metadata is of a newer format.
      ValueError: it is not a megajax checkpoint's metadata; the message names the first field that is wrong.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"its metadata is a JSON {type(raw).__name__}, not an object")
    if _is_deeper(raw, MOST_LEVELS):
        raise ValueError(f"its metadata has more than {MOST_LEVELS} levels")
    version = raw.get("format")
    if type(version) is int and version > FORMAT:
        writer = raw.get("megajax", "unknown")
        raise ConfigError(
            f"checkpoint format {version} was written by a newer megajax ({writer}) and this one reads formats up to "
            f"{FORMAT}: install megajax {writer}"
        )
    meta = _from_format_1(raw) if version == 1 and version is not True else dict(raw)
    _check_fields(meta, REQUIRED, "")
    if meta["format"] < 1 or not 0 <= meta["time"] < LATEST:
        raise ValueError(f"format {meta['format']} or time {meta['time']} in its metadata is out of range")
    for section, fields in REQUIRED_PARTS.items():
        _check_fields(meta[section], fields, f"{section}.")
    for name in REQUIRED_PARTS["progress"]:
        if not 0 <= meta["progress"][name] < INT32:
            raise ValueError(f"progress.{name} = {shown(meta['progress'][name])} in its metadata is out of range")
    if not isinstance(meta["config"].get("data"), dict | None):
        raise ValueError(f"config.data = {shown(meta['config']['data'])} in its metadata is not an object")
    return meta | {"progress": Progress(**{name: meta["progress"][name] for name in REQUIRED_PARTS["progress"]})}


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value is nested more deeply than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)


def _check_fields(table: Mapping[str, Any], fields: Mapping[str, type], prefix: str) -> None:
    for name, kind in fields.items():
        if name not in table:
            raise ValueError(f"its metadata has no {prefix}{name}")
        number = kind is float and isinstance(table[name], int)
        if (not isinstance(table[name], kind) and not number) or isinstance(table[name], bool):
            found = type(table[name]).__name__
            raise ValueError(f"{prefix}{name} in its metadata is a {found}, not a {kind.__name__}")


def _from_format_1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the fields of format 1. Values that format 1 does not write are left to `_check_fields`."""
    meta = dict(raw)
    if isinstance(meta.get("progress"), dict):
        progress = dict(meta["progress"])
        if "bad" in progress:
            progress["nonfinite"] = progress.pop("bad")
        meta["progress"] = progress
    if isinstance(meta.get("config"), dict):
        config = {name: dict(part) if isinstance(part, dict) else part for name, part in meta["config"].items()}
        for (section, old), (new, values) in RENAMED.items():
            part = config.get(section)
            if isinstance(part, dict) and old in part:
                value = part.pop(old)
                part[new] = values.get(value, value) if isinstance(value, str) else value
        meta["config"] = config
    return meta


def differences(meta: Mapping[str, Any], run: RunConfig, tokenizer: Mapping[str, Any]) -> list[str]:
    """Compares a checkpoint with the run that resumes from it.

    Args:
      meta: as `parse` returns it.
      run: the configuration of the run that resumes.
      tokenizer: name and hash of its tokenizer.

    Returns:
      One line for each section that differs and may: model, mesh and schedule, training options, data.

    Raises:
      ConfigError: the model's parameters or the tokenizer differ; the message names every field through which they do.
    """
    was = meta["config"]
    differing = stored_differences(was["model"], run.model, leave_out=FREE_MODEL_FIELDS)
    # For a model of the user's the shapes of the arrays decide (`shapes.py`).
    if differing and isinstance(run.model, ModelConfig):
        names = [line.partition(" ")[0] for line in differing]
        others = changed_parameters(was["model"], run.model, names)
        shown = [line for line, name in zip(differing, names, strict=True) if name in others]
        if shown:
            raise ConfigError(
                f"is of another model ({was['model'].get('name')}): " + ", ".join(shown) + "; pass the options it was "
                "trained with, or another --run-dir"
            )
    stored = meta["tokenizer"]
    if stored["hash"] != tokenizer["hash"]:
        raise ConfigError(
            f"was trained with tokenizer {stored['name']} (hash {stored['hash']}), and this run's is {tokenizer['name']} "
            f"(hash {tokenizer['hash']}): pass --tokenizer {stored['name']}, or the same tokenizer files"
        )
    found = {"the same parameters are used otherwise": differing}
    found |= {
        title: stored_differences(was[section], getattr(run, section), ignore_unknown=True)
        for section, title in REPORTED.items()
    }
    found["data differ"] = data_differences(was.get("data"), run)  # format 1 has no such section
    return [f"resume    {title}: " + ", ".join(lines) for title, lines in found.items() if lines]


def run_meta(run: RunConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What every checkpoint of a run stores beside its progress, as JSON: version, configuration, tokenizer.

    Args:
      run: the run's configuration.
      tokenizer: of its text; None if the run reads batches of the user's.
    """
    config = absolute_paths(dataclasses.asdict(run))
    return {
        "megajax": megajax.__version__,
        "config": {name: absolute_paths(part) if isinstance(part, dict) else part for name, part in config.items()},
        "tokenizer": {"name": tokenizer.name, "hash": tokenizer_hash(tokenizer)} if tokenizer else NO_TOKENIZER,
    }

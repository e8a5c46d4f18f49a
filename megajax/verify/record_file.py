"""The file of `--record`: the reference's records of some steps, for `--against` with another version or machine.

A numpy .npz archive: arrays by path ("step/0/gradient/blocks/attention/qkv/kernel"), and "header", JSON.
"""

import dataclasses
import io
import json
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import megajax
from megajax.checkpoint.metadata import Progress
from megajax.config import ConfigError, RunConfig
from megajax.config.compare import stored_differences
from megajax.pipeline.program import StepProgram
from megajax.schedules.paths import tell_replaced
from megajax.verify.programs import facts
from megajax.verify.replay import StepRecord

FORMAT = 1
# Options that do not change what a step computes.
FREE = ("validation_every", "validation_batches", "log_every", "spike_deviations", "nonfinite", "nonfinite_limit")
COMPARED = ("model", "train", "data")


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the second layout is compared with.

    Attributes:
      header: "megajax", "jax" and "layout" (texts), "config" (of the run), "first" (number of the step before the first),
        and "program" (`programs.facts`), which older files have not.
      start: sketches of the state before the first step, by name.
      steps: the records.
      tolerances: by step, then by key (`compare.tolerances_of`).
    """

    header: dict[str, Any]
    start: dict[str, np.ndarray]
    steps: Sequence[StepRecord]
    tolerances: Sequence[dict[str, float]]

    def describe(self) -> str:
        """The versions and steps."""
        first, count = self.header["first"], len(self.steps)
        versions = f"megajax {self.header['megajax']}, jax {self.header['jax']}"
        return f"{versions}, steps {first + 1} to {first + count}"


def header_of(program: StepProgram, layout: str, first: int) -> dict[str, Any]:
    """The header of a record of a run's program, whose options of the layout were `layout`."""
    config = {name: dataclasses.asdict(getattr(program.run, name)) for name in COMPARED}
    versions = {"megajax": megajax.__version__, "jax": jax.__version__}
    of_run = {"layout": layout, "config": config, "first": first, "program": facts(program)}
    return {"format": FORMAT, **versions, **of_run}


def save(path: str, reference: Reference) -> None:
    """Writes the file.

    Raises:
      ConfigError: it cannot be written.
    """
    arrays: dict[str, np.ndarray] = {f"start/{name}": array for name, array in reference.start.items()}
    steps = []
    for number, record in enumerate(reference.steps):
        plain = {name: getattr(record, name) for name in ("samples", "metrics", "group")}
        steps.append(plain | {"replicas": list(record.replicas), "tolerances": reference.tolerances[number]})
        flat = {"losses": record.losses}
        flat |= {f"batch/{name}": array for name, array in record.batch.items()}
        flat |= {f"blocks/{name}": array for name, array in record.blocks.items()}
        flat |= {f"{kind}/{name}": array for kind, named in record.tensors.items() for name, array in named.items()}
        arrays |= {f"step/{number}/{name}": array for name, array in flat.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=json.dumps(reference.header | {"steps": steps}), **arrays)
    try:
        tell_replaced(path)
        pathlib.Path(path).write_bytes(buffer.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; pass --record with a writable path") from error


def load(path: str) -> Reference:
    """Reads the file.

    Raises:
      ConfigError: it cannot be read, or was not written by `save`.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(str(arrays.pop("header")))
        steps = header.pop("steps")
        if header["format"] != FORMAT:
            raise ConfigError(
                f"{path} was written by megajax {header['megajax']} in format {header['format']}, and this one reads format "
                f"{FORMAT}: write it again with --record of a version that has this format"
            )
        records = [_step(step, _below(arrays, f"step/{number}/")) for number, step in enumerate(steps)]
        return Reference(header, _below(arrays, "start/"), records, [step["tolerances"] for step in steps])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; pass --against FILE of --record") from error
    except (EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not a file of --record: {error}; pass --against FILE of --record") from error


def _step(plain: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> StepRecord:
    kinds = ("gradient", "update", "optimizer_state")
    return StepRecord(
        batch=_below(arrays, "batch/"),
        samples=plain["samples"],
        losses=arrays["losses"],
        metrics=plain["metrics"],
        blocks=_below(arrays, "blocks/"),
        group=plain["group"],
        tensors={kind: _below(arrays, f"{kind}/") for kind in kinds},
        replicas=plain["replicas"],
    )


def _below(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def check(reference: Reference, run: RunConfig, steps: int, progress: Progress, path: str) -> None:
    """Raises ConfigError if the run is not the one that was recorded but for its layout, or has other steps."""
    differing = [
        line
        for name in COMPARED
        for line in stored_differences(
            reference.header["config"][name], getattr(run, name), ("name", *FREE), ignore_unknown=True
        )
    ]
    if differing:
        raise ConfigError(
            f"{path} is of another run: {', '.join(differing)}; pass the options after -- with which it was recorded."
        )
    first, count = reference.header["first"], len(reference.steps)
    if first != progress.step:
        raise ConfigError(
            f"{path} starts after step {first}, and this run after step {progress.step}: pass the same --resume."
        )
    if steps > count:
        raise ConfigError(f"{path} has {count} steps: pass --steps {count} or less.")

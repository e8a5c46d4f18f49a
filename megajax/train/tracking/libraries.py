"""Weights & Biases, MLflow and trackio: what of them a run uses. Each class imports its library when it is made.

The id of a run is in RUN_DIR/tracker.json, by library; a resumed run continues the run of that id. Where the libraries
store runs, under which account and whether online is theirs to say, by their own environment variables.
"""

import json
import os
import pathlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from megajax.train.sinks import scalars

PROJECT = "megajax"
Record = Mapping[str, Any]


class Library(Protocol):
    """A run in a tracker; made from a request (`tracker.request_of`), it creates the run or finds it again.

    Attributes:
      place: where a person finds the run.
    """

    place: str

    def log(self, records: Sequence[Record]) -> None:
        """Logs records of steps, each under the number of its step."""

    def artifact(self, path: str) -> None:
        """Logs a directory, or a file, under its name."""

    def end(self, state: str, reason: str | None) -> None:
        """Ends the run, and waits until all is stored. `state` is "finished", "stopped" (by `reason`) or "failed"."""


def kept_id(request: Mapping[str, Any]) -> str | None:
    """The id of the run that is continued; None: a new one is made."""
    try:
        return (
            json.loads(pathlib.Path(request["id_file"]).read_text())[request["library"]] if request["resumes"] else None
        )
    except (OSError, ValueError, TypeError, KeyError):  # there is no directory, or no such run yet
        return None


def keep_id(request: Mapping[str, Any], run: str) -> None:
    """Writes the id of the run into the run directory, atomically."""
    if request["id_file"] is None:
        return
    path = pathlib.Path(request["id_file"])
    try:
        ids = json.loads(path.read_text())
    except (OSError, ValueError):
        ids = {}
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({**ids, request["library"]: run}) + "\n")
    os.replace(new, path)


def values_of(record: Record) -> dict[str, float]:
    """The numbers of a record but its step; a list has a name for each value, and what is None is left out."""
    return {name: value for name, value in scalars(record) if name != "step" and value is not None}


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, as ("train.steps", 100)."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class Wandb:
    """Weights & Biases. The configuration by sections; metrics by step; the exit code of a run that failed is 1."""

    def __init__(self, request: Mapping[str, Any]):
        """Calls wandb.init."""
        import wandb

        self._wandb, known = wandb, kept_id(request)
        identity = known or uuid.uuid4().hex[:12]
        keep_id(request, identity)  # first: a run that is killed here is continued
        self._run = wandb.init(
            project=request["project"] or os.environ.get("WANDB_PROJECT", PROJECT),
            name=request["name"],
            id=identity,
            resume="allow" if known else None,
            dir=request["directory"],
            config=request["config"],
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        # Steps that a resumed run repeats come before the run's own step, under which wandb would drop them in silence.
        self._run.define_metric("*", step_metric="step")
        self.place = self._run.url or f"offline, in {self._run.dir}"

    def log(self, records: Sequence[Record]) -> None:
        """See `Library`."""
        for record in records:
            step = record["step"]
            self._run.log({"step": step, **values_of(record)}, step=step if step >= self._run.step else None)

    def artifact(self, path: str) -> None:
        """See `Library`. The files are not copied before they are sent."""
        name = pathlib.Path(path).name
        artifact = self._wandb.Artifact(f"{self._run.id}-{name}", type="checkpoint")
        if os.path.isdir(path):
            artifact.add_dir(path, policy="immutable", skip_cache=True)
        else:
            artifact.add_file(path, policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)

    def end(self, state: str, reason: str | None) -> None:
        """See `Library`."""
        self._run.summary.update({"state": state, "reason": reason})
        self._run.finish(exit_code=int(state == "failed"))


class MLflow:
    """MLflow: an experiment for a project, the configuration as parameters, FINISHED, KILLED or FAILED at the end."""

    STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, request: Mapping[str, Any]):
        """Creates the run, or sets the one that is continued to RUNNING."""
        from mlflow import MlflowClient, entities

        self._entities, self._client = entities, MlflowClient()
        given = [(name, str(value)) for name, value in flat(request["config"])]
        if known := kept_id(request):
            self._id = known
            run = self._client.get_run(known)
            self._client.update_run(known, status="RUNNING")
            # A parameter cannot change: what differs in this session is a tag.
            tags = [
                (f"after_step_{request['after']}.{name}", value)
                for name, value in given
                if run.data.params.get(name, "")[:6000] != value[:6000]
            ]
        else:
            run = self._client.create_run(self._experiment(request), run_name=request["name"])
            self._id, tags = run.info.run_id, []
            keep_id(request, self._id)
            for start in range(0, len(given), 100):  # the most that MLflow takes at once
                params = [entities.Param(name, value[:6000]) for name, value in given[start : start + 100]]
                self._client.log_batch(self._id, params=params)
        for name, value in tags:
            self._client.set_tag(self._id, name, value[:5000])
        self.place = f"run {self._id} of {self._client.tracking_uri}"

    def _experiment(self, request: Mapping[str, Any]) -> str:
        name = request["project"] or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def log(self, records: Sequence[Record]) -> None:
        """See `Library`."""
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(name, float(value), now, int(record["step"]))
            for record in records
            for name, value in values_of(record).items()
        ]
        for start in range(0, len(metrics), 1000):  # the most that MLflow takes at once
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def artifact(self, path: str) -> None:
        """See `Library`."""
        if os.path.isdir(path):
            self._client.log_artifacts(self._id, path, pathlib.Path(path).name)
        else:
            self._client.log_artifact(self._id, path)

    def end(self, state: str, reason: str | None) -> None:
        """See `Library`."""
        if reason:
            self._client.set_tag(self._id, "reason", reason)
        self._client.set_terminated(self._id, self.STATES[state])


class Trackio:
    """trackio. A run's name is its identity, so it ends in six random digits; its end is an alert."""

    def __init__(self, request: Mapping[str, Any]):
        """Calls trackio.init."""
        import trackio

        self._trackio, known = trackio, kept_id(request)
        identity = known or f"{request['name']}-{uuid.uuid4().hex[:6]}"
        keep_id(request, identity)
        project = request["project"] or os.environ.get("TRACKIO_PROJECT", PROJECT)
        config = {name: value for name, value in flat(request["config"]) if not name.startswith("_")}
        self._run = trackio.init(project=project, name=identity, config=config, resume="allow", embed=False)
        self.place = f"run {identity} of project {project}"

    def log(self, records: Sequence[Record]) -> None:
        """See `Library`."""
        for record in records:
            self._trackio.log(values_of(record), step=int(record["step"]))

    def artifact(self, path: str) -> None:
        """See `Library`."""
        self._trackio.log_artifact(path, name=pathlib.Path(path).name, type="checkpoint")

    def end(self, state: str, reason: str | None) -> None:
        """See `Library`."""
        level = self._trackio.AlertLevel.ERROR if state == "failed" else self._trackio.AlertLevel.INFO
        self._trackio.alert(f"run {state}", reason or "", level=level)
        self._trackio.finish()


LIBRARIES = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}

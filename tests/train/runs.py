"""Whole runs of the loop in this process, with a tiny model, random tokens and a run directory."""

import dataclasses
import io
import pathlib

import numpy as np
from rich.console import Console

from megajax.checkpoint.manager import Progress
from megajax.config import OutputConfig, RunConfig
from megajax.data.loader import Loader, TokenSamples
from megajax.data.ramp import RampedLoader
from megajax.estimate.gpus import Peak
from megajax.train.loop import TrainerHooks, train
from megajax.train.run_directory import RunDirectory
from megajax.train.sinks import read_steps
from megajax.train.step import Training, TrainState
from tests import small

MODEL = small.MODEL
DROPPING = dataclasses.replace(MODEL, dropout=0.1)
TOKENS = np.random.default_rng(5).integers(0, MODEL.vocabulary, 16 * 200 + 1)


class Letters:
    """A tokenizer with the vocabulary of the tiny model."""

    name, vocabulary, end_of_document = "letters", MODEL.vocabulary, 0

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) % self.vocabulary for letter in text], np.int32)

    def decode(self, ids) -> str:
        return "".join(chr(48 + int(token)) for token in ids)


@dataclasses.dataclass
class Result:
    """What a run returned and wrote."""

    state: TrainState
    text: str
    rows: list[dict]

    @property
    def losses(self) -> np.ndarray:
        return np.array([float(row["loss"]) for row in self.rows])


def make_run(mesh=(2, 2, 2), steps: int = 40, train=None, **kwargs) -> RunConfig:
    """As `small.make_run`, without validation."""
    settings = {"steps": steps, "warmup_steps": 4, "validation_batches": 0, "log_every": 1} | (train or {})
    return small.make_run(mesh, model=kwargs.pop("model", MODEL), train=settings, **kwargs)


def assert_losses_fall_alike(option: str, value: str, mesh, more: dict | None = None, **kwargs) -> None:
    """Of 40 steps on one batch, with a value of an option of the training and `more`, or without: 2% apart at most."""
    losses: dict[str | None, list[float]] = {}
    for given in (None, value):
        run = make_run(mesh, train={option: given, **(given and more or {})}, **kwargs)
        training = small.training_of(run)
        state, batch, losses[given] = training.init_state(), small.make_batch(run), []
        for _ in range(40):
            state, metrics = training.train_step(state, batch)
            losses[given].append(float(metrics["loss"]))
    assert losses[None][-1] < losses[None][0] - 1
    assert losses[value] != losses[None]
    np.testing.assert_allclose(losses[value], losses[None], rtol=0.02)


def loader_of(run: RunConfig) -> Loader:
    """Full batches of the random tokens."""
    samples = TokenSamples(TOKENS, run.model.sequence_length, run.train.seed)
    return Loader(samples, run.train.global_batch_size, run.microbatches)


def go(
    run: RunConfig,
    directory: pathlib.Path,
    *,
    training: Training | None = None,
    stop=None,
    loader=None,
    tokenizer=None,
    checks=None,
    **output,
) -> Result:
    """Runs as `Trainer.fit` does, from step 0 or as `resume` selects, to the end or a stop."""
    training = training or small.training_of(run)
    files = RunDirectory(run, OutputConfig(run_dir=str(directory), **output), tokenizer or Letters())
    batches = loader or RampedLoader(loader_of(run), run)
    validation = Loader(TokenSamples(TOKENS, run.model.sequence_length, None), small.BATCH, run.microbatches)
    resume, text = files.resume(training), io.StringIO()
    log = files.open_log(resume[1] if resume else Progress())
    log.console = Console(file=text, width=300)
    with log:
        for line in files.messages:
            log.message(line)
        hooks = TrainerHooks(files.checkpoints, stop, files.profiler, checks=checks, replicas=files.replicas)
        peak = Peak(1e12, "published")
        state, _ = train(training, batches, {"validation": validation}, log, peak, resume=resume, hooks=hooks)
        for line in files.close():
            log.message(line)
    rows = read_steps(directory / "log.jsonl")
    return Result(state, text.getvalue(), rows)


class StopAfter:
    """A `Preemption` that stops after a number of steps of this process."""

    def __init__(self, steps: int):
        self.steps, self.reason = steps, None

    def after(self, step: int) -> str | None:
        self.steps -= 1
        self.reason = "the test says so" if self.steps == 0 else None
        return self.reason


__all__ = ["DROPPING", "MODEL", "TOKENS", "Letters", "Progress", "Result", "StopAfter", "go", "loader_of", "make_run"]

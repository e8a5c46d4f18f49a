"""Where the weights of `python -m megajax.generate` come from.

A `WeightSource` gives the configuration and the tokenizer before any device is started, and loads the weights onto a
decoder's mesh. Another format is another class with these three members, chosen in `open_source`.
"""

import dataclasses
import pathlib
from typing import Any, Protocol

from megajax.checkpoint.directory import NAME, complete_steps
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import Request, parse
from megajax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_hash
from megajax.generate.decoder import Decoder

__all__ = ["RunDirectorySource", "WeightSource", "open_source"]

Tree = Any


class WeightSource(Protocol):
    """Interface of a source of weights.

    Attributes:
      tokenizer: the model's.
    """

    tokenizer: Tokenizer

    def run(self, precision: str) -> RunConfig:
        """The configuration: its model, the precision to compute in, and what the model reads of the rest."""

    def load(self, decoder: Decoder) -> Tree:
        """The weights, as `Decoder.weights` returns them."""


def open_source(run_dir: str, step: int | None) -> WeightSource:
    """The source that the command line names.

    Args:
      run_dir: a run's directory.
      step: of the checkpoint; None: the newest.

    Raises:
      ConfigError: there is none.
    """
    return RunDirectorySource(run_dir, step)


class RunDirectorySource:
    """A checkpoint in the directory of a training run; its config.toml says which model it is of.

    Attributes:
      path: of the checkpoint.
      request: the training's command line.
      tokenizer: the training's.
    """

    def __init__(self, run_dir: str, step: int | None):
        """Reads the configuration and finds the checkpoint.

        Raises:
          ConfigError: the directory has no configuration or no such checkpoint, or its tokenizer cannot be loaded.
        """
        directory = pathlib.Path(run_dir).absolute()
        config, steps = directory / "config.toml", complete_steps(directory / "checkpoints")
        if not config.is_file():
            problem = "has no config.toml" if directory.is_dir() else "is not a directory"
            raise ConfigError(f"{directory} {problem}: give --run-dir the directory of a training run.")
        if not steps or (step is not None and step not in steps):
            there = f"there are those of steps {', '.join(map(str, steps[-5:]))}" if steps else "there is none"
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            remedy = "pass another --step" if steps else "train with --save-every, or give another --run-dir"
            raise ConfigError(f"no {wanted} in {directory / 'checkpoints'}: {there}; {remedy}.")
        self.path = directory / "checkpoints" / NAME.format(steps[-1] if step is None else step)
        self.request: Request = parse(["--config", str(config)], "", {"model": "tiny"})  # the file has all fields
        data = self.run("fp32").data
        self.tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)

    def run(self, precision: str) -> RunConfig:
        """The training's configuration."""
        found = self.request.run(self.request.devices_needed or 1, precision)
        return dataclasses.replace(found, train=dataclasses.replace(found.train, precision=precision))

    def load(self, decoder: Decoder) -> Tree:
        """Reads the parameters, in the type to compute with; the optimizer's state is not read."""
        from megajax.checkpoint import reader

        meta = {"name": self.tokenizer.name, "hash": tokenizer_hash(self.tokenizer)}
        state = reader.load(self.path, decoder.run, decoder.params_layout, meta)[0]
        return decoder.weights(state.pop("params"))

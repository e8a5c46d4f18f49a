"""Where the weights of `python -m megajax.generate` come from.

A `WeightSource` gives the configuration and the tokenizer before any device is started, and loads the weights onto a
decoder's mesh. Another format is another class with these three members, chosen in `open_source`.
"""

import dataclasses
import pathlib
from typing import Any, Protocol

from megajax.checkpoint.directory import NAME, complete_steps
from megajax.config import ConfigError, DataConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.cli import Request, parse
from megajax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_hash
from megajax.generate.decoder import Decoder
from megajax.generate.options import Options
from megajax.interop.hugging_face_config import read_config, tokenizer_options
from megajax.runtime.exchange import broadcast

__all__ = ["HuggingFaceSource", "RunDirectorySource", "WeightSource", "open_source"]

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


def open_source(options: Options) -> WeightSource:
    """The source that the command line names.

    Raises:
      ConfigError: there is none.
    """
    return HuggingFaceSource(options.hf) if options.hf else RunDirectorySource(options.run_dir, options.step)


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
        if step is None and steps:  # a training may write another one meanwhile
            step = int(broadcast("generate/step", lambda: str(steps[-1])))
        if step not in steps:
            there = f"there are those of steps {', '.join(map(str, steps[-5:]))}" if steps else "there is none"
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            remedy = "pass another --step" if steps else "train with --save-every, or give another --run-dir"
            raise ConfigError(f"no {wanted} in {directory / 'checkpoints'}: {there}; {remedy}.")
        self.path = directory / "checkpoints" / NAME.format(step)
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


class HuggingFaceSource:
    """A directory of Hugging Face: config.json, safetensors and a tokenizer.

    Attributes:
      path: the directory.
      family: model_type.
      model: its configuration.
      tokenizer: its own.
    """

    def __init__(self, directory: str):
        """Reads the configuration and the tokenizer.

        Raises:
          ConfigError: the directory is damaged, of a model that megajax does not have, or without a tokenizer.
        """
        self.path = pathlib.Path(directory)
        family, self.model = read_config(self.path)
        self.family, self._data = family.name, tokenizer_options(self.path)
        if not self._data:
            raise ConfigError(
                f"{self.path} has neither tokenizer.json nor tokenizer.model: copy the model's own into it, or import it "
                "with --tokenizer (python -m megajax.interop.hugging_face import) and pass --run-dir."
            )
        self.tokenizer = load_tokenizer(self._data["tokenizer"], self._data.get("end_of_document"))

    def run(self, precision: str) -> RunConfig:
        """A run of the model; its training options have no meaning."""
        train = TrainConfig(precision=precision, global_batch_size=1, steps=1)
        return RunConfig(self.model, ParallelConfig(schedule="1f1b"), train, DataConfig(**self._data))

    def load(self, decoder: Decoder) -> Tree:
        """Reads what the decoder's devices hold, tensor by tensor."""
        from megajax.interop.hugging_face_weights import load_params

        target = decoder.params_layout
        target = dataclasses.replace(target, shapes=target.shapes["params"], shardings=target.shardings["params"])
        return decoder.weights(load_params(self.path, self.family, decoder.run.model, target))

"""Where the weights of the commands that run a trained model come from: megajax.generate and megajax.evaluate.

A `WeightSource` gives the configuration and the tokenizer before any device is started, and loads the weights onto the
mesh of a `WeightTarget`. Another format is another class with these members, chosen in `open_source`.
"""

import dataclasses
import hashlib
import pathlib
from typing import Any, Protocol

import jax

from megajax.checkpoint.directory import NAME, steps_of
from megajax.checkpoint.layout import StateLayout, name_of, named
from megajax.checkpoint.mirror import local_files
from megajax.checkpoint.object_store import place
from megajax.checkpoint.run_files import MODEL
from megajax.checkpoint.shapes import NO_AVERAGE
from megajax.config import ConfigError, DataConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.cli import Request, parse
from megajax.config.lora import base_model
from megajax.data.hub import local_directory
from megajax.data.source import tokenizer_of_model
from megajax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_hash
from megajax.interop.hugging_face.config import read_config, tokenizer_options
from megajax.pipeline.trained import merge, split
from megajax.runtime.exchange import broadcast

__all__ = ["HuggingFaceSource", "RunDirectorySource", "WeightSource", "WeightTarget", "files_stamp", "open_source"]

Tree = Any


class WeightTarget(Protocol):
    """Interface of programs that weights are loaded for: `generate.decoder.Decoder`, `evaluate.scorer.Scorer`.

    Attributes:
      run: the configuration.
      params_layout: of {"params": ...} in the type to compute with.
    """

    run: RunConfig

    @property
    def params_layout(self) -> StateLayout:
        """See above."""

    def weights(self, params: Tree) -> Tree:
        """What the programs take, from parameters in `params_layout` of any float type; `params` may be used up."""


class WeightSource(Protocol):
    """Interface of a source of weights.

    Attributes:
      path: of the weights.
      tokenizer: the model's.
      hugging_face: the directory with the model's other files of Hugging Face, such as its generation settings; None: the
        model has none.
    """

    path: pathlib.Path
    tokenizer: Tokenizer
    hugging_face: pathlib.Path | None

    def run(self, precision: str) -> RunConfig:
        """The configuration: its model, the precision to compute in, and what the model reads of the rest."""

    def load(self, target: WeightTarget) -> Tree:
        """The weights, as the target's `weights` returns them."""


def open_source(
    run_dir: str | None, hf: str | None, step: int | None, trust: bool = False, ema: bool = False
) -> WeightSource:
    """The source that a command line names (`source_options.py`).

    Raises:
      ConfigError: there is none.
    """
    return HuggingFaceSource(hf) if hf else RunDirectorySource(run_dir, step, trust, ema)


def files_stamp(directory: pathlib.Path) -> str:
    """Sixteen hex digits of the names, sizes and times of all files in a directory: whether it was changed since."""
    stamp = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            status = path.stat()
            stamp.update(f"{path.relative_to(directory)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return stamp.hexdigest()[:16]


class RunDirectorySource:
    """A checkpoint in the directory of a training run; its config.toml says which model it is of.

    Attributes:
      path: of the checkpoint.
      request: the training's command line.
      tokenizer: the training's.
      hugging_face: what a run that began with a model of Hugging Face keeps of it.
    """

    def __init__(self, run_dir: str, step: int | None, trust: bool = False, ema: bool = False):
        """Reads the configuration and finds the checkpoint.

        `trust`: imports the files that the configuration names, whoever has written it; `ema`: loads the averages of
        the weights that were trained.

        Raises:
          ConfigError: the directory has no configuration or no such checkpoint, or its tokenizer cannot be loaded.
        """
        directory, self._averaged = place(run_dir), ema
        files, steps = local_files(directory), steps_of(directory / "checkpoints")
        config = files / "config.toml"
        if not config.is_file():
            problem = "has no config.toml" if files.is_dir() else "is not a directory"
            model = f", or pass --init-from {run_dir}" if (files / "config.json").is_file() else ""
            raise ConfigError(f"{directory} {problem}: give --run-dir the directory of a training run{model}.")
        if step is None and steps:  # a training may write another one meanwhile
            step = int(broadcast("weights/step", lambda: str(steps[-1])))
        if step not in steps:
            there = f"there are those of steps {', '.join(map(str, steps[-5:]))}" if steps else "there is none"
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            remedy = "pass another --step" if steps else "train with --save-every, or give another --run-dir"
            raise ConfigError(f"no {wanted} in {directory / 'checkpoints'}: {there}; {remedy}.")
        self.path = directory / "checkpoints" / NAME.format(step)
        self.hugging_face = files / MODEL if (files / MODEL).is_dir() else None
        words = ["--config", str(config), *(["--trust"] if trust else [])]
        self.request: Request = parse(words, "", {"model": "tiny"})  # the file has all fields
        run = self.run("fp32")
        self.tokenizer = tokenizer_of_model(run, load_tokenizer(run.data.tokenizer, run.data.end_of_document))

    def run(self, precision: str) -> RunConfig:
        """The training's configuration."""
        found = self.request.run(self.request.devices_needed or 1, precision)
        return dataclasses.replace(found, train=dataclasses.replace(found.train, precision=precision))

    def load(self, target: WeightTarget) -> Tree:
        """Reads the parameters, in the type to compute with; the optimizer's state is not read."""
        from megajax.checkpoint import reader

        meta = {"name": self.tokenizer.name, "hash": tokenizer_hash(self.tokenizer)}
        layout = target.params_layout
        stored = named(reader.arrays_in(self.path)).keys()
        rest, found = (layout.shapes["params"], layout.shardings["params"]), {}
        for part in ("ema", "params") if self._averaged else ("params",):
            has = lambda path, _, part=part: f"{part}/{name_of(path)}" in stored  # noqa: E731
            mask = jax.tree_util.tree_map_with_path(has, rest[0])
            found[part], rest = zip(*(split(tree, mask) for tree in rest), strict=True)
        if self._averaged and not jax.tree.leaves(found["ema"][0]):
            raise ConfigError(f"checkpoint {self.path} {NO_AVERAGE}.")
        source = self.run(target.run.train.precision).train.init_from  # a target may have no options of training
        is_apart = source is not None and bool(jax.tree.leaves(rest[0]))
        if not is_apart:  # the reader names what is missing
            found["params"] = tuple(map(merge, found["params"], rest))
        shapes, shardings = ({part: trees[kind] for part, trees in found.items()} for kind in (0, 1))
        layout = dataclasses.replace(layout, shapes=shapes, shardings=shardings)
        state = reader.load(self.path, target.run, layout, meta)[0]
        params = merge(state.pop("ema", {}), state.pop("params"))
        if is_apart:  # a run that trained adapters: the checkpoint has these, and not the model that they are for
            whole = dataclasses.replace(layout, shapes=rest[0], shardings=rest[1])
            params = merge(params, _base_params(source, base_model(target.run.model), whole))
        return target.weights(params)


def _base_params(source: str, model: Any, layout: StateLayout) -> Tree:
    """The weights in `layout` of the model that a run has started from."""
    from megajax.interop.hugging_face.weights import load_params

    path = pathlib.Path(local_directory(source, "--init-from"))
    return load_params(path, read_config(path)[0].name, model, layout)


class HuggingFaceSource:
    """A directory of Hugging Face: config.json, safetensors and a tokenizer.

    Attributes:
      path: the directory.
      family: model_type.
      model: its configuration.
      tokenizer: its own.
      hugging_face: the directory.
    """

    def __init__(self, directory: str):
        """Reads the configuration and the tokenizer.

        Raises:
          ConfigError: the directory is damaged, of a model that megajax does not have, or without a tokenizer.
        """
        self.path = self.hugging_face = pathlib.Path(local_directory(directory, "--init-from"))
        family, self.model = read_config(self.path)
        self.family, self._data = family.name, tokenizer_options(self.path)
        if not self._data:
            raise ConfigError(
                f"{self.path} has no tokenizer, such as tokenizer.json: copy the model's own into it, or import it "
                "with --tokenizer (python -m megajax.interop.hugging_face import) and pass --run-dir."
            )
        self.tokenizer = tokenizer_of_model(self.run("fp32"), load_tokenizer(self._data["tokenizer"]))

    def run(self, precision: str) -> RunConfig:
        """A run of the model; its training options have no meaning."""
        train = TrainConfig(precision=precision, global_batch_size=1, steps=1)
        return RunConfig(self.model, ParallelConfig(schedule="1f1b"), train, DataConfig(**self._data))

    def load(self, target: WeightTarget) -> Tree:
        """Reads what the target's devices hold, tensor by tensor."""
        from megajax.interop.hugging_face.weights import load_params

        layout = target.params_layout
        layout = dataclasses.replace(layout, shapes=layout.shapes["params"], shardings=layout.shardings["params"])
        return target.weights(load_params(self.path, self.family, target.run.model, layout))

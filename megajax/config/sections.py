"""The dataclasses that have the options of the training command, listed once.

`--help`, saved configurations, the table of commands' options, and the fields that are paths are derived from the list.
"""

import dataclasses
from typing import NamedTuple

from megajax.config.bert import BertConfig
from megajax.config.data import DataConfig
from megajax.config.evaluate import EvaluateConfig
from megajax.config.launch import LaunchConfig
from megajax.config.model import ModelConfig
from megajax.config.output import OutputConfig
from megajax.config.parallel import ParallelConfig
from megajax.config.run import PARTS
from megajax.config.sample import SampleConfig
from megajax.config.train import TrainConfig

__all__ = ["GROUPS", "OTHERS", "PLAIN", "SAVED", "Group", "option_names"]


def option_names(config: type) -> list[str]:
    """The fields of a dataclass that are options; the name of a model is its preset's, so it has none."""
    is_model = issubclass(config, ModelConfig)
    return [field.name for field in dataclasses.fields(config) if not (is_model and field.name == "name")]


class Group(NamedTuple):
    """Options that are the fields of a dataclass.

    Attributes:
      config: the dataclass.
      saved: the section of a saved configuration that has them; None: they are not saved.
      title: what `--help` prints above them.
    """

    config: type
    saved: str | None
    title: str

    @property
    def names(self) -> list[str]:
        """The fields; of BERT's, which are the model's and more, the others."""
        names = option_names(self.config)
        return [name for name in names if name not in option_names(ModelConfig)] if self.config is BertConfig else names


# In the order of --help. Those of "options" are no part of the run's configuration.
GROUPS = (
    Group(SampleConfig, "options", "text generated after the training"),
    Group(EvaluateConfig, "options", "a task evaluated during the training"),
    Group(DataConfig, "data", "data"),
    Group(ParallelConfig, "parallel", "layout"),
    Group(TrainConfig, "train", "training"),
    Group(ModelConfig, "model", "model (default: the preset's)"),
    Group(BertConfig, "model", "BERT, more of the model"),
    Group(OutputConfig, "output", "files, and when the run stops"),
    Group(LaunchConfig, None, "several processes"),
)
PLAIN = ("model", "imports", "devices", "dry_shapes")  # saved in "options" too; they are in no dataclass


def _saved(section: str) -> tuple[str, ...]:
    names = [name for group in GROUPS if group.saved == section for name in group.names]
    return (*PLAIN, *names) if section == "options" else tuple(names)


SAVED = {section: _saved(section) for section in (*PARTS, "output", "options")}  # the names in a saved configuration
OTHERS = SAVED["options"]

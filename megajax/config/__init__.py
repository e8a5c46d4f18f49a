"""The configuration of a run as plain data: one dataclass a file, each with its own validation. No jax here."""

from megajax.config.bert import BertConfig
from megajax.config.data import DataConfig
from megajax.config.errors import ConfigError, near, option
from megajax.config.launch import LaunchConfig
from megajax.config.model import ModelConfig, padded_vocabulary
from megajax.config.output import OutputConfig
from megajax.config.parallel import ParallelConfig
from megajax.config.presets import PRESETS, preset
from megajax.config.run import RunConfig
from megajax.config.train import TrainConfig

__all__ = [
    "PRESETS",
    "BertConfig",
    "ConfigError",
    "DataConfig",
    "LaunchConfig",
    "ModelConfig",
    "OutputConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "near",
    "option",
    "padded_vocabulary",
    "preset",
]

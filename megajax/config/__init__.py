"""What a run is, as plain data: one dataclass a file, each with its own validation. Nothing here imports jax."""

from megajax.config.errors import ConfigError, near, option
from megajax.config.run import (
    PRESETS,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    padded_vocabulary,
    preset,
    setting,
)

__all__ = [
    "PRESETS",
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
    "setting",
]

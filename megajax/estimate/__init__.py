"""Estimates of a run's FLOPs, memory, communication and time, and counts from compiled programs (hlo)."""

import functools
from typing import Any

from megajax.config import ConfigError
from megajax.models.costs import ModelCosts
from megajax.models.interface import model_class

__all__ = ["check_one_kind", "model_costs"]


@functools.lru_cache(maxsize=256)  # a search uses the same model thousands of times
def model_costs(model: Any) -> ModelCosts:
    """The costs of the model with this configuration, as its class gives them (`PipelineModel.costs`)."""
    return model_class(model)(model).costs()


def check_one_kind(costs: ModelCosts) -> None:
    """Checks that the time and memory of a model with these costs can be predicted: its layers are of one kind.

    Raises:
      ConfigError: they are of several.
    """
    if costs.kinds:
        raise ConfigError(
            "time and memory are not modelled for a model with dense and sparse layers: omit --dense-layers and "
            "--moe-layer-freq, or pass --dry-shapes to the experiment, which prints the bytes of its arrays."
        )

"""Estimates of a run's FLOPs, memory, communication and time, and counts from compiled programs (hlo)."""

import functools
from typing import Any

from megajax.models.costs import ModelCosts
from megajax.models.interface import model_class


@functools.lru_cache(maxsize=256)  # a search uses the same model thousands of times
def model_costs(model: Any) -> ModelCosts:
    """The costs of the model with this configuration, as its class gives them (`PipelineModel.costs`)."""
    return model_class(model)(model).costs()

"""What a run costs on paper (FLOPs, memory, communication, time), and what a compiled program does (hlo)."""

import functools
from typing import Any

from megajax.config import ModelConfig
from megajax.models.costs import ModelCosts, transformer_costs

__all__ = ["model_costs"]


@functools.lru_cache(maxsize=256)  # a search asks for the same model thousands of times
def model_costs(model: Any) -> ModelCosts:
    """The costs of the model with this configuration, as its class gives them (`PipelineModel.costs`)."""
    if isinstance(model, ModelConfig):
        return transformer_costs(model)
    from megajax.models.interface import model_class

    return model_class(model)(model).costs()

"""The costs of any model, found by tracing its block: for models that give no formulas of their own."""

from megajax.models.costs import ModelCosts

__all__ = ["traced_costs"]


def traced_costs(model) -> ModelCosts:
    """FLOPs of the block's matmuls, bytes its backward keeps, and parameters, all without running anything."""
    raise NotImplementedError

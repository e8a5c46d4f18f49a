"""Plain numbers about a model, which the estimates read."""

import dataclasses

__all__ = ["ModelCosts"]


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """Placeholder until the estimates' own version is merged."""

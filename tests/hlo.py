"""Reads collectives out of a compiled program's text (HLO)."""

from megajax.cost.program import Collective, collectives

__all__ = ["Collective", "collectives"]

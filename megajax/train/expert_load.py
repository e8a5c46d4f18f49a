"""How evenly the experts of each layer are used, from the measurements of a step (`megajax.models.moe`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["describe_load", "load_record"]


def load_record(metrics: Mapping[str, Any]) -> dict[str, float | list[float | None]]:
    """The fields of a step's record about experts; empty for a model without experts.

    Args:
      metrics: of `Training.train_step`, with "expert_load" [layers, experts], choices of each expert in the global batch,
        and "router_losses" [layers, 2]; with `expert_capacity` also "dropped_choices" [layers]. Of a layer without experts
        they are NaN.

    Returns:
      balance_loss (mean over layers; 1 if all experts are used equally), router_z_loss (mean), expert_entropy (mean over
      layers of the load's entropy, as a fraction of log(experts), its largest value) and worst_expert_share (the largest
      part of a layer's choices that one expert has); then all but router_z_loss for each layer, as lists, with None for a
      layer without experts. With `expert_capacity` also dropped_choices (of all layers), dropped_share (of all choices), and
      the latter for each layer.
    """
    if "expert_load" not in metrics:
        return {}
    load, losses = (np.asarray(metrics[name], np.float64) for name in ("expert_load", "router_losses"))
    has_experts = ~np.isnan(load).any(-1)
    load, losses = load[has_experts], losses[has_experts]
    with np.errstate(invalid="ignore"):  # no sample with weights: NaN
        share = load / load.sum(-1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(-1) / np.log(load.shape[-1])
    layers = {"balance_loss": losses[:, 0], "expert_entropy": entropy, "worst_expert_share": share.max(-1)}
    dropped = {}
    if "dropped_choices" in metrics:
        counts = np.asarray(metrics["dropped_choices"], np.float64)[has_experts]
        with np.errstate(invalid="ignore"):
            layers["dropped_share"] = counts / load.sum(-1)
            dropped = {"dropped_choices": int(counts.sum()), "dropped_share": float(counts.sum() / load.sum())}
    return {
        "balance_loss": float(losses[:, 0].mean()),
        "router_z_loss": float(losses[:, 1].mean()),
        "expert_entropy": float(entropy.mean()),
        "worst_expert_share": float(share.max()),
        **dropped,
        **{f"layer_{name}": _of_all_layers(values, has_experts) for name, values in layers.items()},
    }


def _of_all_layers(values: np.ndarray, has_experts: np.ndarray) -> list[float | None]:
    """The values of layers with experts, and None for the others."""
    own = iter(values.tolist())
    return [next(own) if one else None for one in has_experts]


def describe_load(record: Mapping[str, Any]) -> list[str]:
    """The parts of a plain line about experts; none without them."""
    if "balance_loss" not in record:
        return []
    dropped = [f"dropped choices {record['dropped_share']:.1%}"] if "dropped_share" in record else []
    return [
        f"balance loss {record['balance_loss']:.3f}",
        f"expert entropy {record['expert_entropy']:.3f}",
        f"worst expert share {record['worst_expert_share']:.1%}",
        *dropped,
    ]

"""Floating-point operations: what a model's step must compute (model FLOPs), and what the program computes (hardware).

Counted as the papers count (2104.04473 appendix, 2205.05198 appendix A): matmuls only, a multiply-add is two operations,
the backward costs twice the forward. *Model* FLOPs leave recomputation out: they are the same for every layout, and
divided by time and peak they give MFU. *Hardware* FLOPs include it, and give HFU.

Attention is counted in full: the half of the scores that the causal mask hides is included, as in the papers and in
Megatron-LM, and so is what a sliding window hides. Fused causal attention computes neither: up to a third less for long
sequences. Two MFUs are comparable only if they count attention in the same way; `causal_flops_per_step` counts the other.
"""

import dataclasses

from megajax.config import RunConfig
from megajax.estimate import model_costs
from megajax.estimate.trained import trained_parameters
from megajax.models.costs import ModelCosts


def forward_flops(model: ModelCosts) -> dict[str, int]:
    """Operations of one sample's forward, by matmul.

    A sample is model.sequence_length tokens. The vocabulary is unpadded: padding is not part of the model.

    Returns:
        Operations over all layers of each of `model.matmuls`, by name, of "attention_scores" (QK^T) and "attention_values"
        (times V), and of the head, "logits" and those of `model.head`.
    """
    tokens, flops = model.sequence_length, {}
    for layers, kind in model.layers_of_kinds:
        multiply_adds_per_layer = {one.name: tokens * one.inputs * one.outputs for one in kind.matmuls}
        if kind.attention:
            pairs, size = tokens * tokens * kind.attention.heads, kind.attention.head_size
            values = pairs * (kind.attention.value_size or size)
            multiply_adds_per_layer |= {"attention_scores": pairs * size, "attention_values": values}
        for name, count in multiply_adds_per_layer.items():
            flops[name] = flops.get(name, 0) + 2 * layers * count
    flops |= {one.name: 2 * tokens * one.inputs * one.outputs for one in model.head}
    flops["logits"] = 2 * tokens * model.hidden * model.vocabulary
    if model.further:  # its blocks, projections and logits
        for name, count in forward_flops(dataclasses.replace(model.further, vocabulary=0)).items():
            several = model.further.layers if name in {one.name for one in model.further.head} else 1
            flops[name] = flops.get(name, 0) + several * count
        flops["logits"] *= 1 + model.further.layers
    return flops


def flops_per_step(run: RunConfig) -> int:
    """Model FLOPs of one optimizer step, over all devices; of frozen weights without their gradients' matmuls."""
    model = model_costs(run.model)
    forward, trained = forward_flops(model), trained_parameters(run)
    frozen = 0.0
    if trained:
        matrices = {one.name for _, kind in model.layers_of_kinds for one in kind.matmuls}
        frozen = (1 - trained.matrices) * sum(forward[name] for name in matrices) + (1 - trained.tables) * forward[
            "logits"
        ]
    return round(3 * sum(forward.values()) - frozen) * run.train.global_batch_size


def causal_flops_per_step(run: RunConfig) -> int:
    """`flops_per_step` without the half of attention's scores that a causal mask hides, if there is one."""
    model = model_costs(run.model)
    causal = any(kind.attention and kind.attention.causal for _, kind in model.layers_of_kinds)
    forward = forward_flops(model)
    hidden = (forward["attention_scores"] + forward["attention_values"]) // 2 if causal else 0
    return flops_per_step(run) - 3 * hidden * run.train.global_batch_size


def hardware_flops_per_step(run: RunConfig) -> int:
    """Model FLOPs and those of the matmuls that the run's recompute mode does twice (`models/remat.py`)."""
    model = model_costs(run.model)
    forward = forward_flops(model)
    modes = {one.name: one.recomputed for _, kind in model.layers_of_kinds for one in kind.matmuls}
    if model.attention:
        modes["attention_scores"] = model.attention.scores_recomputed
        modes["attention_values"] = model.attention.values_recomputed
    again = sum(forward[name] for name, several in modes.items() if run.parallel.recompute in several)
    return flops_per_step(run) + again * run.train.global_batch_size

"""Floating-point operations: what a model's step must compute (model FLOPs), and what the program computes (hardware).

Counted as the papers count (2104.04473 appendix, 2205.05198 appendix A): matmuls only, a multiply-add is two operations,
the backward costs twice the forward. *Model* FLOPs leave recomputation out: they are the same for every layout, and
divided by time and peak they give MFU. *Hardware* FLOPs include it, and give HFU.

Attention is counted in "full" by default: the half of the scores that the causal mask hides is included, as in the papers
and in Megatron-LM, and so is what a sliding window hides. "half" leaves both out, which is what fused causal attention
computes: up to a third less for long sequences. Without a causal mask (BERT) nothing is hidden, and both count the same.
Two MFUs are comparable only if they count attention in the same way.
"""

from megajax.config import ModelConfig, RunConfig
from megajax.estimate import model_costs
from megajax.models.costs import ModelCosts

ATTENTION = ("full", "half")
SECONDS_A_DAY = 86400


def forward_flops(model: ModelCosts, attention: str = "full") -> dict[str, int]:
    """Operations of one sample's forward, by matmul.

    A sample is model.sequence_length tokens. The vocabulary is unpadded: padding is not part of the model.

    Args:
        attention: "full" counts all scores, "half" those of keys before their query and inside the sliding window.

    Returns:
        Operations over all layers of each of `model.matmuls`, by name, of "attention_scores" (QK^T) and "attention_values"
        (times V), and of the head, "logits" and those of `model.head`.
    """
    if attention not in ATTENTION:
        raise ValueError(f"attention = {attention!r}; it is counted in {' or '.join(ATTENTION)}")
    tokens, flops = model.sequence_length, {}
    for layers, kind in model.layers_of_kinds:
        multiply_adds_per_layer = {one.name: tokens * one.inputs * one.outputs for one in kind.matmuls}
        if kind.attention:
            pairs = tokens * tokens if attention == "full" else kind.attention.pairs(tokens)
            product = int(pairs * kind.attention.heads * kind.attention.head_size)
            multiply_adds_per_layer |= {"attention_scores": product, "attention_values": product}
        for name, count in multiply_adds_per_layer.items():
            flops[name] = flops.get(name, 0) + 2 * layers * count
    flops |= {one.name: 2 * tokens * one.inputs * one.outputs for one in model.head}
    return flops | {"logits": 2 * tokens * model.hidden * model.vocabulary}


def flops_per_token(model: ModelCosts, attention: str = "full") -> float:
    """Model FLOPs of one token's forward and backward: for a GPT 72lh^2 (1 + s/(6h) + V/(12lh)), 2205.05198 eq. 8."""
    return 3 * sum(forward_flops(model, attention).values()) / model.sequence_length


def flops_per_step(run: RunConfig, attention: str = "full") -> int:
    """Model FLOPs of one optimizer step, over all devices."""
    return 3 * sum(forward_flops(model_costs(run.model), attention).values()) * run.train.global_batch_size


def hardware_flops_per_step(run: RunConfig, attention: str = "full") -> int:
    """Model FLOPs and those of the matmuls that the run's recompute mode does twice (`models/remat.py`)."""
    model = model_costs(run.model)
    forward = forward_flops(model, attention)
    modes = {one.name: one.recomputed for _, kind in model.layers_of_kinds for one in kind.matmuls}
    if model.attention:
        modes["attention_scores"] = model.attention.scores_recomputed
        modes["attention_values"] = model.attention.values_recomputed
    again = sum(forward[name] for name, several in modes.items() if run.parallel.recompute in several)
    return flops_per_step(run, attention) + again * run.train.global_batch_size


def equation_2_parameters(layers: int, hidden: int, vocabulary: int, sequence_length: int) -> int:
    """Parameters of a GPT by 2104.04473 equation 2: 12lh^2 (1 + 13/(12h) + (V+s)/(12lh)), in whole numbers.

    The final layer norm's 2h are not included; `ModelConfig.parameters` includes them.
    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence_length) * hidden


def equation_3_flops(model: ModelConfig, batch: int) -> float:
    """FLOPs of a step by 2104.04473 equation 3, which counts a second forward of the blocks (full recomputation).

    96 B s l h^2 (1 + s/(6h) + V/(16lh)). The paper's TFLOP/s and its table 2's days are this over time.
    """
    layers, hidden, tokens = model.layers, model.hidden, model.sequence_length
    relative = 1 + tokens / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    return 96 * batch * tokens * layers * hidden**2 * relative


def equation_4_days(parameters: float, tokens: float, gpus: int, flops_per_gpu: float) -> float:
    """Days to train on `tokens` tokens by 2104.04473 equation 4, 8TP/(nX), which counts recomputation too."""
    return 8 * tokens * parameters / (gpus * flops_per_gpu) / SECONDS_A_DAY


def training_days(model: ModelConfig, tokens: float, gpus: int, flops_per_gpu: float) -> float:
    """Days to train on `tokens` tokens at `flops_per_gpu` FLOP/s, counted as in equation 3: table 2's last column."""
    return equation_3_flops(model, 1) * tokens / model.sequence_length / (gpus * flops_per_gpu) / SECONDS_A_DAY


def hardware_flops_2205(model: ModelConfig, batch: int) -> float:
    """2205.05198 appendix A, selective recomputation: 72 B L s h^2 (1 + s/(3h) + v/(12hL)); its HFU is this over time.

    The paper's model FLOPs have s/(6h), and are `flops_per_step`. (Recomputing both products of attention would add a
    third of its share, s/(4.5h) in all; the paper prints s/(3h).)
    """
    layers, hidden, tokens = model.layers, model.hidden, model.sequence_length
    relative = 1 + tokens / (3 * hidden) + model.vocabulary / (12 * hidden * layers)
    return 72 * batch * layers * tokens * hidden**2 * relative

"""Floating-point operations of a model: what a step must compute, whatever the layout and the recomputation.

Counted as the papers count (2104.04473 appendix, 2205.05198 appendix A): matrix multiplications only, a multiply-add is
two operations, the backward costs twice the forward, and attention is counted in full: the half that the causal mask
hides is counted too. Recomputation is not counted: these are *model* FLOPs, and model FLOPs over time over peak is MFU.
(2104.04473 equation 3 does count a second forward of the blocks; times 4 for the blocks and 3 for the logits in place
of 3 for both turns these numbers into that one.)
"""

from megajax.config import ModelConfig, RunConfig


def forward_flops(model: ModelConfig) -> dict[str, int]:
    """Operations of one sample's forward, by matrix multiplication.

    A sample is model.sequence_length tokens. The vocabulary is the unpadded one: padding is no work of the model.

    Returns:
        Operations over all layers of "query_key_value", "attention_scores" (QK^T), "attention_values" (times V),
        "attention_output", "mlp_in" (both matrices, if swiglu), "mlp_out", and of the head, "logits".
    """
    tokens, hidden, inner = model.sequence_length, model.hidden, model.feedforward_size
    query_key_value = hidden + 2 * model.key_value_heads * model.head_size
    into_mlp = 2 if model.activation == "swiglu" else 1
    multiply_adds_per_layer = {
        "query_key_value": tokens * hidden * query_key_value,
        "attention_scores": tokens * tokens * hidden,
        "attention_values": tokens * tokens * hidden,
        "attention_output": tokens * hidden * hidden,
        "mlp_in": tokens * hidden * inner * into_mlp,
        "mlp_out": tokens * inner * hidden,
    }
    flops = {name: 2 * model.layers * count for name, count in multiply_adds_per_layer.items()}
    return flops | {"logits": 2 * tokens * hidden * model.vocabulary}


def flops_per_token(model: ModelConfig) -> float:
    """Model FLOPs of one token's forward and backward: for a GPT 72lh^2 (1 + s/(6h) + V/(12lh)), 2205.05198 eq. 8."""
    return 3 * sum(forward_flops(model).values()) / model.sequence_length


def flops_per_step(run: RunConfig) -> int:
    """Model FLOPs of one optimizer step, over all devices."""
    return 3 * sum(forward_flops(run.model).values()) * run.train.global_batch_size


def equation_2_parameters(layers: int, hidden: int, vocabulary: int, sequence_length: int) -> int:
    """Parameters of a GPT by 2104.04473 equation 2: 12lh^2 (1 + 13/(12h) + (V+s)/(12lh)), in whole numbers.

    It leaves the final layer norm's 2h out; `ModelConfig.parameters` counts them.
    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence_length) * hidden

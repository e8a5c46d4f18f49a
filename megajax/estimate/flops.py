"""Floating-point operations: what a model's step must compute (model FLOPs), and what a program does compute (hardware).

Counted as the papers count (2104.04473 appendix, 2205.05198 appendix A): matrix multiplications only, a multiply-add is
two operations, the backward costs twice the forward. *Model* FLOPs leave recomputation out: they are the same whatever
the layout, and over time and peak they are MFU. *Hardware* FLOPs count it, and give HFU.

Attention is counted in "full" unless asked otherwise: the half of the square that the causal mask hides is counted too,
as the papers and Megatron-LM do. "half" leaves it out, which is what a fused causal attention has to do: up to a third
less for long sequences, so two MFUs compare only if they count alike.
"""

from megajax.config import ModelConfig, RunConfig

ATTENTION = ("full", "half")
SECONDS_A_DAY = 86400


def forward_flops(model: ModelConfig, attention: str = "full") -> dict[str, int]:
    """Operations of one sample's forward, by matrix multiplication.

    A sample is model.sequence_length tokens. The vocabulary is the unpadded one: padding is no work of the model.

    Args:
        attention: "full" counts the square of the scores, "half" the half of it below the diagonal.

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
    if attention not in ATTENTION:
        raise ValueError(f"attention = {attention!r}; it is counted in {' or '.join(ATTENTION)}")
    if attention == "half":
        for name in ("attention_scores", "attention_values"):
            multiply_adds_per_layer[name] //= 2
    flops = {name: 2 * model.layers * count for name, count in multiply_adds_per_layer.items()}
    return flops | {"logits": 2 * tokens * hidden * model.vocabulary}


def flops_per_token(model: ModelConfig, attention: str = "full") -> float:
    """Model FLOPs of one token's forward and backward: for a GPT 72lh^2 (1 + s/(6h) + V/(12lh)), 2205.05198 eq. 8."""
    return 3 * sum(forward_flops(model, attention).values()) / model.sequence_length


def flops_per_step(run: RunConfig, attention: str = "full") -> int:
    """Model FLOPs of one optimizer step, over all devices."""
    return 3 * sum(forward_flops(run.model, attention).values()) * run.train.global_batch_size


def hardware_flops_per_step(run: RunConfig, attention: str = "full") -> int:
    """Model FLOPs and the matmuls that the run's recompute mode does twice (see `models/recompute.py`)."""
    forward = forward_flops(run.model, attention)
    again = {
        "none": (),
        "selective": ("attention_scores",),
        "full": ("query_key_value", "attention_scores", "attention_values", "attention_output", "mlp_in"),
    }[run.parallel.recompute]
    return flops_per_step(run, attention) + sum(forward[name] for name in again) * run.train.global_batch_size


def equation_2_parameters(layers: int, hidden: int, vocabulary: int, sequence_length: int) -> int:
    """Parameters of a GPT by 2104.04473 equation 2: 12lh^2 (1 + 13/(12h) + (V+s)/(12lh)), in whole numbers.

    It leaves the final layer norm's 2h out; `ModelConfig.parameters` counts them.
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
    """Days to train on `tokens` tokens where a GPU does `flops_per_gpu` as equation 3 counts them: table 2's last column."""
    return equation_3_flops(model, 1) * tokens / model.sequence_length / (gpus * flops_per_gpu) / SECONDS_A_DAY


def hardware_flops_2205(model: ModelConfig, batch: int) -> float:
    """2205.05198 appendix A, selective recomputation: 72 B L s h^2 (1 + s/(3h) + v/(12hL)); its HFU is this over time.

    Model FLOPs, there, have s/(6h), and are `flops_per_step`. (Recomputing both products of attention would add a
    third of its share, s/(4.5h) in all; the paper prints s/(3h).)
    """
    layers, hidden, tokens = model.layers, model.hidden, model.sequence_length
    relative = 1 + tokens / (3 * hidden) + model.vocabulary / (12 * hidden * layers)
    return 72 * batch * layers * tokens * hidden**2 * relative

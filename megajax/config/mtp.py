"""Multi-token prediction (2412.19437 section 2.2): the rules of its fields, and the model that its blocks are of."""

import dataclasses
from typing import Any

from megajax.config.errors import ConfigError
from megajax.config.layer_pattern import NO_PATTERN, variant_numbers, variants

__all__ = ["check_mtp", "mtp_block", "mtp_parameters"]


def mtp_block(model: Any) -> Any:
    """The `ModelConfig` of a model all of whose layers are as the last one, which the modules' blocks are like."""
    last = variants(model)[variant_numbers(model)[-1]]
    last = last.of_kind((last.layer_kinds or (None,))[-1])
    return dataclasses.replace(last, layer_pattern=NO_PATTERN, kind_fields=(), mtp_num_layers=0)


def mtp_parameters(model: Any, block: int) -> int:
    """Parameters of all modules, of `block` in the block of one: three norms and a projection of 2 hidden besides."""
    return model.mtp_num_layers * (block + 3 * model.norm_parameters + 2 * model.hidden**2)


def check_mtp(model: Any) -> None:
    """Raises ConfigError if a `ModelConfig` whose other fields are legal cannot predict further tokens."""
    problems = {
        "predicts tokens that follow, and BERT attends to them": not model.causal,
        "needs a block with a mixer and an MLP, and layers of this model have one of the two": "none" in model.mixers,
        f"trains modules, and lora = {model.lora} adapters alone": model.lora,
        f"must be below sequence_length = {model.sequence_length}": model.mtp_num_layers >= model.sequence_length,
    }
    for problem, found in problems.items() if model.mtp_num_layers else ():
        if found:
            raise ConfigError(f"mtp_num_layers = {model.mtp_num_layers} {problem}: pass --mtp-num-layers 0.")

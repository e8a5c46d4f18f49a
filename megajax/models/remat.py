"""Recompute modes: the values that a block saves for its backward; the others are computed again (2205.05198).

The block names its values with `checkpoint_name`; a mode is a list of saved names. In elements, for batch b,
sequence s, width h, feedforward f, a heads in g groups of head size d, tensor t (t or 1 for "sequence", see `Value`):

    name                 shape              split over      none  selective  full
    (the block's input)  [b, s, h]          sequence        kept    kept     kept     as the VJP's argument
    attention_input      [b, s, h]          sequence        kept                      gathered again, as in the paper
    qkv                  [b, s, g, a/g+2, d]  tensor        kept    kept
    probabilities        [b, g, a/g, s, s]  tensor          kept
    context              [b, s, a, d]       tensor          kept    kept
    attention_statistics [b, a, s]          tensor          kept    kept              fp32; of fused attention only
    residual             [b, s, h]          sequence        kept    kept              after attention
    feedforward_input    [b, s, h]          sequence        kept                      gathered again
    up                   [b, s, f] or [b, s, 2, f]  tensor  kept    kept              before the activation
    activation           [b, s, f]          tensor          kept
    the dropout masks    as what they mask  as that         kept                      1 byte; else drawn again

none recomputes no matmul, selective one (queries times keys), full five of the six (not the down projection).
For a GPT without dropout "selective" is 20 sbh bytes, less than the paper's 34 sbh (its table 2):
norms and the activation are cheap to recompute from `residual` and `up`, and a mask is drawn again from its key.
Fused attention has no probabilities; with context and statistics its backward needs no forward again, but under full.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax

from megajax.config import ConfigError, ModelConfig, near

__all__ = ["MODES", "Value", "bytes_per_layer", "checkpointed", "grouped", "kept_values"]

SELECTIVE = ("qkv", "context", "attention_statistics", "residual", "up")
NONE = (*SELECTIVE, "attention_input", "probabilities", "feedforward_input", "activation")
MASKS = ("probabilities_mask", "attention_mask", "feedforward_mask")  # drawn only where the model has dropout
MODES = {"none": NONE + MASKS, "selective": SELECTIVE, "full": ()}


@dataclass(frozen=True)
class Value:
    """A named value of a block.

    Attributes:
      name: as given to `checkpoint_name`; "input" is the block's own input.
      elements: of one sample, on all of a tensor group.
      split: the axis that is shared out over tensor: "tensor" (heads or feedforward: always) or "sequence" (with
        sequence parallelism, otherwise every rank holds all of it).
      mask: True for a dropout mask, 1 byte an element whatever the precision.
      fused: True for a value that only fused attention has, False for one that it has not; None for all others.
      itemsize: bytes of an element whatever the precision; None: the precision's.
    """

    name: str
    elements: int
    split: str
    mask: bool = False
    fused: bool | None = None
    itemsize: int | None = None


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"recompute = {mode!r} is not known: {near(mode, MODES)} Pass --recompute {'|'.join(MODES)}.")


def checkpointed(block: Callable, mode: str, names: Mapping[str, tuple[str, ...]] | None = None) -> Callable:
    """A block, (weights, x, microbatch, layer) -> x, whose VJP saves what `mode` says.

    Forward and backward of a block are in different loops, where XLA cannot merge what is computed twice: no barriers
    are needed (`prevent_cse`).

    Args:
      block: the function.
      mode: none, selective or full.
      names: mode -> the names of the values to save; None: "none" saves everything, "selective" the results of matmuls
        with weights, "full" the arguments alone.

    Raises:
      ConfigError: for a mode that is not none, selective or full.
    """
    _check_mode(mode)
    policies = jax.checkpoint_policies
    if names is not None:
        policy = policies.save_only_these_names(*names[mode])
    elif mode == "none":
        return block
    else:
        policy = policies.dots_with_no_batch_dims_saveable if mode == "selective" else policies.nothing_saveable
    return jax.checkpoint(block, policy=policy, prevent_cse=False)


def kept_values(
    config: ModelConfig, mode: str, sequence: int | None = None, fused_attention: bool = False
) -> tuple[Value, ...]:
    """What one block keeps for its backward under `mode`, its input first, for samples of `sequence` tokens."""
    sequence = config.sequence_length if sequence is None else sequence
    residual = sequence * config.hidden
    scores = config.heads * sequence * sequence
    feedforward = sequence * config.feedforward_size
    gates = 2 if config.activation == "swiglu" else 1
    values = (
        Value("input", residual, "sequence"),
        Value("attention_input", residual, "sequence"),
        Value("qkv", sequence * (config.heads + 2 * config.key_value_heads) * config.head_size, "tensor"),
        Value("probabilities", scores, "tensor", fused=False),
        Value("probabilities_mask", scores, "tensor", mask=True, fused=False, itemsize=1),
        Value("context", residual, "tensor"),
        Value("attention_statistics", config.heads * sequence, "tensor", fused=True, itemsize=4),
        Value("attention_mask", residual, "sequence", mask=True, itemsize=1),
        Value("residual", residual, "sequence"),
        Value("feedforward_input", residual, "sequence"),
        Value("up", gates * feedforward, "tensor"),
        Value("activation", feedforward, "tensor"),
        Value("feedforward_mask", residual, "sequence", mask=True, itemsize=1),
    )
    kept = ("input", *MODES[mode])
    there = (value for value in values if value.fused in (None, fused_attention))
    return tuple(value for value in there if value.name in kept and not (value.mask and config.dropout == 0))


def bytes_per_layer(
    config: ModelConfig,
    mode: str,
    *,
    samples: int,
    sequence: int | None = None,
    tensor: int = 1,
    sequence_parallel: bool = True,
    itemsize: int = 2,
    fused_attention: bool = False,
) -> int:
    """Bytes one device keeps of one block for one microbatch; compare 2205.05198 table 2.

    Args:
      config: the model.
      mode: none, selective or full.
      samples: in the microbatch.
      sequence: tokens of a sample, the model's sequence_length if not given.
      tensor: devices that share the block.
      sequence_parallel: whether they also share the residual stream's sequence.
      itemsize: bytes of an activation, 2 for bf16 and fp16.
      fused_attention: whether attention is cuDNN's, or a ring's.
    """
    total = 0
    for value in kept_values(config, mode, sequence, fused_attention):
        parts = tensor if value.split == "tensor" or sequence_parallel else 1
        total += samples * value.elements * (value.itemsize or itemsize) // parts
    return total


def grouped(block: Callable, size: int) -> Callable:
    """`size` blocks as one that saves only its input: checkpoints every c layers, 2104.04473 section 3.5.

    Args:
      block: (weights of one block, x, microbatch, layer) -> x, saving all that its backward needs.
      size: blocks.

    Returns:
      (weights [size, ...], x, microbatch, number of the group) -> x.
    """

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    def group(weights, x, microbatch, number):
        for index in range(size):  # not a scan: splitting a backward into I and W needs a flat jaxpr
            own = jax.tree.map(lambda leaf: leaf[index], weights)  # noqa: B023
            x = block(own, x, microbatch, number * size + index)
        return x

    return group

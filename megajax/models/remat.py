"""What a block keeps from its forward to its backward, value by value; the rest is computed again (2205.05198).

The block names its values with `checkpoint_name`; a mode is the list of the names it keeps. In elements, for batch b,
sequence s, width h, feedforward f, a heads in g groups of head size d, tensor t (t or 1 for "sequence", see
`models/costs.py`):

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
norms and the activation are cheap to compute again from `residual` and `up`, and a mask is drawn again from its key.
Fused attention has no probabilities; with context and statistics its backward needs no forward again, but under full.
"""

from collections.abc import Callable
from functools import partial

import jax

from megajax.config import ConfigError, near

__all__ = ["MODES", "grouped", "kept_names", "policy"]

SELECTIVE = ("qkv", "context", "attention_statistics", "residual", "up")
NONE = (*SELECTIVE, "attention_input", "probabilities", "feedforward_input", "activation")
MASKS = ("probabilities_mask", "attention_mask", "feedforward_mask")  # drawn only where the model has dropout
MODES = {"none": NONE + MASKS, "selective": SELECTIVE, "full": ()}


def kept_names(mode: str) -> tuple[str, ...]:
    """Names of the values that `mode` keeps.

    Raises:
      ConfigError: for a mode that is not none, selective or full.
    """
    if mode not in MODES:
        raise ConfigError(f"recompute = {mode!r} is not known: {near(mode, MODES)} Type --recompute {'|'.join(MODES)}.")
    return MODES[mode]


def policy(mode: str) -> Callable[..., bool]:
    """The `jax.checkpoint` policy of `mode`."""
    return jax.checkpoint_policies.save_only_these_names(*kept_names(mode))


def grouped(block: Callable, size: int) -> Callable:
    """`size` blocks as one, of which the input alone is kept: 2104.04473 section 3.5's checkpoints every c layers.

    Args:
      block: (weights of one block, x, microbatch, layer) -> x, keeping all that its backward needs.
      size: blocks.

    Returns:
      (weights [size, ...], x, microbatch, number of the group) -> x.
    """

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    def group(weights, x, microbatch, number):
        for index in range(size):  # not a scan: a backward is split into I and W by taking apart a flat list
            own = jax.tree.map(lambda leaf: leaf[index], weights)  # noqa: B023
            x = block(own, x, microbatch, number * size + index)
        return x

    return group

"""Recompute modes: the values that a block saves for its backward; the others are computed again (2205.05198).

The block names its values with `checkpoint_name`; a mode is a list of saved names. In elements, for batch b,
sequence s, width h, feedforward f, a heads in g groups of head size d, tensor t (t or 1 for "sequence", see
`models/costs.py`):

    name                 shape              split over      none  selective  full
    (the block's input)  [b, s, h]          sequence        kept    kept     kept     as the VJP's argument
    attention_input      [b, s, h]          sequence        kept                      gathered again, as in the paper
    qkv                  [b, s, g, a/g+2, d]  tensor        kept    kept
    latents              [b, s, q + r + e]  sequence        kept    kept              of latent attention, before norms
    expanded             [b, s, a, d], [b, s, a, d - e + v]  tensor  kept             of it, queries; keys and values
    probabilities        [b, g, a/g, s, s]  tensor          kept
    context              [b, s, a, d]       tensor          kept    kept
    attention_statistics [b, a, s]          tensor          kept    kept              fp32; of fused attention only
    residual             [b, s, h]          sequence        kept    kept              after attention
    feedforward_input    [b, s, h]          sequence        kept                      gathered again
    attention_output     [b, s, h]          sequence        kept    kept              before the norm of a result
    feedforward_output   [b, s, h]          sequence        kept    kept              likewise
    up                   [b, s, f] or [b, s, 2, f]  tensor  kept    kept              before the activation
    activation           [b, s, f]          tensor          kept
    router               [b, s, E]          replicated      kept    kept              fp32; the scores of E experts
    dispatched           [b s k, h]         replicated      kept                      the k copies of each token, by expert
    output_residual      [b, s, h]          sequence        kept    kept              before the last norm, with post_norm
    the dropout masks    as what they mask  as that         kept                      1 byte; else drawn again

With experts, `up` and `activation` have k rows for each token. With expert parallelism these rows, and `dispatched`, are
those of all N replicas of a group that may be here: min(k, E/N) for each of their tokens.
none recomputes no matmul, selective one (queries times keys), full five of the six (not the down projection).
For a GPT without dropout "selective" is 20 sbh bytes, less than the paper's 34 sbh (its table 2):
norms and the activation are cheap to recompute from `residual` and `up`, and a mask is drawn again from its key.
Fused attention has no probabilities; with context and statistics its backward needs no forward again, but under full.

On GPUs a step without pipeline and tensor parallelism may run its blocks without loops (`pipeline.options.unrolls`). XLA
then keeps what "selective" would compute again, as "none" does.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax

from megajax.config import ConfigError, near
from megajax.ops.gated_down import KEPT

__all__ = ["MODES", "checkpointed", "grouped"]

SELECTIVE = ("qkv", "context", "attention_statistics", "residual", "router", "up", "output_residual")
SELECTIVE += ("attention_output", "feedforward_output", "latents")
NONE = (*SELECTIVE, "expanded", "attention_input", "probabilities", "feedforward_input", "dispatched", "activation")
MASKS = ("probabilities_mask", "attention_mask", "feedforward_mask")  # drawn only where the model has dropout
MODES = {"none": NONE + MASKS, "selective": SELECTIVE, "full": ()}


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"recompute = {mode!r} is not known: {near(mode, MODES)} Pass --recompute {'|'.join(MODES)}.")


def checkpointed(block: Callable, mode: str, names: Mapping[str, tuple[str, ...]] | None = None) -> Callable:
    """A block, (weights, x, microbatch, layer) -> x, whose VJP saves what `mode` says.

    Forward and backward of a block are in different loops, where XLA cannot merge what is computed twice: no barriers
    are needed (`prevent_cse`). Without loops it merges, and `pipeline.options.unrolls` allows that.

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
        policy = policies.save_only_these_names(*names[mode], KEPT)  # named where it is kept, in the memory of others
    elif mode == "none":
        return block
    else:
        policy = policies.dots_with_no_batch_dims_saveable if mode == "selective" else policies.nothing_saveable
    return jax.checkpoint(block, policy=policy, prevent_cse=False)


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

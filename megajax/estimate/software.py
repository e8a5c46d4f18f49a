"""What a training program does that a layout does not say: ours, and those that measured the published tables."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Software:
    """A training program, as far as its speed depends on it.

    Attributes:
      name: as printed.
      fused_attention: scores are never written to memory (2205.14135), and those the mask hides are not computed; also where
        a run says so (`estimate/attention.py`).
      tensor_overlap: share of the tensor-parallel communication hidden behind matmuls.
      data_overlap: the gradient sum runs behind the last microbatch's backward.
      send_overlap: pipeline sends run behind the next chunk.
      scatter_gather: a tensor group sends each element once (2104.04473 section 4.1), without sequence parallelism too.
      lockstep: ranks go from tick to tick together.
      gradient_bytes: of an element of the gradient as it is summed over replicas.
      logit_bytes: memory traffic of the loss for each logit, forwards and backwards.
      dropout: blocks draw and apply masks.
      gathers_again: all-gathers of a block's backward beyond the two pairs', where the sequence is split: what a matmul
        was given is gathered once more for its weights' gradient (2205.05198 section 4.2.2 hides these).
      gathered_pieces: collectives that ZeRO-3 gathers a block's weights in.
      gathers_ahead: ZeRO-3's gathers and scatters run beside the blocks, as far and as fast as `Fitted` says.
      copies_stash: XLA transposes some of the stash once a chunk (`estimate/memory.py`, `stash_copies`).
    """

    name: str
    fused_attention: bool = False
    tensor_overlap: float = 0.0
    data_overlap: bool = False
    send_overlap: bool = False
    scatter_gather: bool = False
    lockstep: bool = False
    gradient_bytes: int = 4
    logit_bytes: int = 10
    dropout: bool = False
    gathers_again: int = 0
    gathered_pieces: int = 12  # each tensor on its own: four matrices, four biases, two norms of two each
    gathers_ahead: bool = False
    copies_stash: bool = False


# 10 bytes a logit: read in 16 bit for the maximum, the sum and the label, again in the backward, and the gradient written.
# Two gathers more and the copies are what the step compiled for H100s has (`python -m megajax.plan.dryrun` counts).
MEGAJAX = Software("megajax", lockstep=True, gathers_again=2, copies_stash=True)

# 52 bytes a logit: the passes of Megatron-LM's vocab_parallel_cross_entropy, counted in tensor_parallel/cross_entropy.py:
# to fp32, maximum, subtract, exponential, sum, divide; backwards copy, scale, to 16 bit. Gradients are summed in the type
# of the weights for fp16 (accumulate_allreduce_grads_in_fp32 is set for bf16 only, arguments.py of v2.5).
MEGATRON_2021 = Software("Megatron-LM, 2021", gradient_bytes=2, logit_bytes=52, dropout=True, scatter_gather=True)
# DeepSpeed, which 2104.04473 ran for ZeRO-3. By its defaults (deepspeed/runtime/zero/constants.py) stage 3 overlaps its
# communication, and tensors of under 100,000 elements stay whole on every GPU: all of a block's here but the four matrices.
DEEPSPEED_2021 = dataclasses.replace(MEGATRON_2021, name="DeepSpeed, 2021", gathered_pieces=4, gathers_ahead=True)
# Table 1's models on one pipeline stage ran under torch's DDP, which overlaps (examples/sc21/run_table_1.sh).
MEGATRON_2021_DDP = dataclasses.replace(MEGATRON_2021, data_overlap=True)
# Transformer Engine's attention; overlap of all three kinds of communication is what the README says was on. How much of
# the tensor-parallel communication it hides is printed nowhere: half is assumed.
MEGATRON_2024 = Software(
    "Megatron-Core r0.8",
    fused_attention=True,
    tensor_overlap=0.5,
    data_overlap=True,
    send_overlap=True,
    scatter_gather=True,
    logit_bytes=52,
    dropout=True,
)

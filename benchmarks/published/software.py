"""Training programs that published throughputs were measured with: what of their speed a layout does not determine."""

import dataclasses

__all__ = [
    "AUTOMODEL",
    "DEEPSPEED_2021",
    "FLASH_1_SHARE",
    "FSDP_PURE",
    "GPT_NEOX",
    "JAX_FSDP",
    "MEGATRON_2021",
    "MEGATRON_2021_DDP",
    "MEGATRON_2022",
    "MEGATRON_2023",
    "MEGATRON_2024",
    "MEGATRON_DEEPSPEED",
    "MEGATRON_MOE",
    "META_2024",
    "MPT_FSDP",
    "NEMO_2024",
    "Software",
]

# The first FlashAttention's share of the matmul peak: 25 to 40% on A100 (2307.08691, abstract), of which this is the middle.
FLASH_1_SHARE = 0.325


@dataclasses.dataclass(frozen=True)
class Software:
    """Properties of a training program that determine its speed.

    Attributes:
      name: as printed.
      fused_attention: scores are never written to memory (2205.14135), and masked ones are not computed. A run may also
        select this (`gpus.is_fused`).
      attention_share: fused attention's fraction of the matmul peak; None: that of the GPU's best kernels.
      tensor_overlap: fraction of the tensor-parallel communication that overlaps matmuls.
      data_overlap: the gradient reduction overlaps the last microbatch's backward.
      send_overlap: with several chunks a rank, pipeline sends overlap the next chunk, except while the pipeline fills and
        drains: there an operation waits for what the rank before it has just computed.
      scatter_gather: a tensor group sends each element once (2104.04473 section 4.1), without sequence parallelism too.
      context_overlap: sends round the rings of context parallelism overlap attention.
      gradient_bytes: bytes of a gradient element in the reduction over data-parallel replicas.
      accumulation_bytes: memory traffic, for each parameter and microbatch, of the kernels that add gradients to their sum,
        or with ZeRO-3 copy and scale them before they are scattered; 0 where the matmul that computes a gradient adds it.
      buffer_bytes: memory traffic, for each parameter and step, of setting the sums to zero, checking and scaling them.
      logit_bytes: memory traffic of the loss for each logit, forward and backward.
      dropout: blocks draw and apply masks.
      gathered_pieces: collectives in which ZeRO-3 gathers a block's weights.
      gathers_ahead: ZeRO-3's gathers and scatters overlap the blocks' compute, with the constants of `Fitted`.
      gathers_hidden: they overlap all of it, at the rate of nccl-tests: of `gathers_ahead` and this at most one.
      gathers_for_recompute: with full recompute, ZeRO-3 gathers a block for its second forward and for its backward;
        otherwise once for both.
    """

    name: str
    fused_attention: bool = False
    attention_share: float | None = None
    tensor_overlap: float = 0.0
    data_overlap: bool = False
    send_overlap: bool = False
    scatter_gather: bool = False
    context_overlap: bool = False
    gradient_bytes: int = 4
    accumulation_bytes: int = 0
    buffer_bytes: int = 0
    logit_bytes: int = 10
    dropout: bool = False
    gathered_pieces: int = 12  # one for each tensor: four matrices, four biases, two norms of two tensors each
    gathers_ahead: bool = False
    gathers_hidden: bool = False
    gathers_for_recompute: bool = True


# 52 bytes a logit: the passes of Megatron-LM's vocab_parallel_cross_entropy, counted in tensor_parallel/cross_entropy.py:
# to fp32, maximum, subtract, exponential, sum, divide; in the backward copy, scale, to 16 bit. Gradients are reduced in the
# type of the weights for fp16 (accumulate_allreduce_grads_in_fp32 is set for bf16 only, arguments.py of v2.5). A hook adds
# each microbatch's to a buffer: both read and the sum written, 6 bytes of fp16. The buffer is set to zero and divided by the
# number of replicas, which are three passes over it (model/distributed.py of v2.5).
MEGATRON_2021 = Software(
    "Megatron-LM, 2021",
    gradient_bytes=2,
    accumulation_bytes=6,
    buffer_bytes=6,
    logit_bytes=52,
    dropout=True,
    scatter_gather=True,
)
# From February 2022 the matmuls of bf16 add gradients to the fp32 sum in place (gradient_accumulation_fusion, the default).
MEGATRON_2022 = dataclasses.replace(
    MEGATRON_2021, name="Megatron-LM, 2022", gradient_bytes=4, accumulation_bytes=0, buffer_bytes=12
)
# DeepSpeed, which 2104.04473 ran for ZeRO-3. By its defaults (deepspeed/runtime/zero/constants.py) stage 3 overlaps its
# communication, and every GPU keeps whole tensors of under 100,000 elements: all of a block except the four matrices. A
# gradient is copied into a bucket and divided, in fp16 (zero/stage3.py of v0.3.16).
DEEPSPEED_2021 = dataclasses.replace(
    MEGATRON_2021,
    name="DeepSpeed, 2021",
    accumulation_bytes=8,
    buffer_bytes=0,
    gathered_pieces=4,
    gathers_ahead=True,
)
# Table 1's models on one pipeline stage ran under torch's DDP, which overlaps (examples/sc21/run_table_1.sh).
MEGATRON_2021_DDP = dataclasses.replace(MEGATRON_2021, data_overlap=True)
# Transformer Engine's attention, and overlap of all three kinds of communication, as the README says. The fraction of the
# tensor-parallel communication that overlaps is not published: half is assumed. The fp32 buffer of gradients is set to zero,
# its norm is checked for NaN, and it is scaled: four passes (core/distributed/param_and_grad_buffer.py).
MEGATRON_2024 = Software(
    "Megatron-Core r0.8",
    fused_attention=True,
    tensor_overlap=0.5,
    data_overlap=True,
    send_overlap=True,
    scatter_gather=True,
    buffer_bytes=16,
    logit_bytes=52,
    dropout=True,
)

# As Megatron-Core; the recipes' models train without dropout.
NEMO_2024 = dataclasses.replace(MEGATRON_2024, name="NeMo 24.09", dropout=False, context_overlap=True)
# MT-NLG and BLOOM in bf16. DeepSpeed's pipeline converts a microbatch's gradients to fp32 (2 bytes read, 4 written) and adds
# them to the sum (8 read, 4 written: bf16_optimizer.py of v0.6.3), which is set to zero and divided, in three passes.
MEGATRON_DEEPSPEED = dataclasses.replace(
    MEGATRON_2021, name="Megatron-DeepSpeed", gradient_bytes=4, accumulation_bytes=18, buffer_bytes=12
)
GPT_NEOX = dataclasses.replace(MEGATRON_2021, name="GPT-NeoX", dropout=False)  # fp16
# The commit that the paper names, 285068c8 of January 2023, which added the first FlashAttention.
MEGATRON_2023 = dataclasses.replace(MEGATRON_2022, name="Megatron-LM, 2023", attention_share=FLASH_1_SHARE)
# Meta's trainer (2407.21783 section 3.3.2) gathers the keys and values of context ranks before attention, and autograd's
# kernels sum gradients in fp32. The paper says that sends and FSDP's collectives overlap, not those of tensor parallelism.
META_2024 = dataclasses.replace(
    NEMO_2024, name="Meta, 2024", context_overlap=False, tensor_overlap=0.0, accumulation_bytes=10, buffer_bytes=4
)
# PyTorch's FSDP gathers a block as one array, the next one ahead, and for the backward once, recomputation included.
FSDP = Software(
    "PyTorch FSDP", fused_attention=True, gathered_pieces=1, gathers_hidden=True, gathers_for_recompute=False
)
# In 2023, with the first FlashAttention, it joined a block's gradients in one array (4 bytes of traffic a parameter),
# divided it by a part of the number of replicas and scattered it (torch/distributed/fsdp/_runtime_utils.py). Composer's
# DEFAULT policy does so in fp32 (6 bytes to convert, 8 to divide), PURE in bf16.
MPT_FSDP = dataclasses.replace(FSDP, attention_share=FLASH_1_SHARE, accumulation_bytes=18)
FSDP_PURE = dataclasses.replace(MPT_FSDP, name="PyTorch FSDP, 16-bit gradients", gradient_bytes=2, accumulation_bytes=8)
# XLA gathers each of a block's tensors, which its combiner joins, and reduces gradients in the type of the weights.
JAX_FSDP = dataclasses.replace(FSDP, name="JAX FSDP", gradient_bytes=2)

# Only routed tokens are sent, and a GPU has memory for those only.
MEGATRON_MOE = dataclasses.replace(NEMO_2024, name="Megatron-Core v0.9")
AUTOMODEL = dataclasses.replace(FSDP, name="NeMo AutoModel")

"""Training programs that published throughputs were measured with, by their names in software.toml."""

import dataclasses
import pathlib
import tomllib

__all__ = ["SOFTWARE", "Software"]


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
      recomputed: of a block's matmuls, the part that its full recomputation repeats.
      host_share: fraction of a step in which GPUs wait for data and for irregular work of the host.
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
    recomputed: float = 1.0
    host_share: float = 0.0


def _read() -> dict[str, Software]:
    """The programs of software.toml, each after the one that it is like."""
    found: dict[str, Software] = {}
    for key, fields in tomllib.loads(pathlib.Path(__file__).with_name("software.toml").read_text()).items():
        like = fields.pop("like", None)
        found[key] = dataclasses.replace(found[like], **fields) if like else Software(**fields)
    return found


SOFTWARE = _read()

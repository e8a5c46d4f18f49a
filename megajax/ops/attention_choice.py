"""Which attention a run gets on its devices, and why: XLA's, or one of the fused kernels of `megajax.ops.attention_kernels`.

With "auto", the first that the GPU, the model and the mask allow:

| GPUs | first | else | reason |
|---|---|---|---|
| Hopper (9.0) | cudnn | tokamax | both directions of causal attention at 450 TFLOP/s on an H200 (docs/gpus.md); tokamax's |
| | | | forward takes 1.02 to 1.2 times as long (tokamax 0.0.17's own measurements on an H100) |
| Blackwell (10.x) | tokamax | cudnn | cuDNN reached 0.88 of FlashAttention on another Blackwell card |
| | | | (huggingface/transformers#48163); nobody has compared the two for megajax on a B200 |
| others from Ampere on (8.x, 12.x) | cudnn | tokamax | tokamax has no backward there, megajax's has seven matmuls to |
| | | | cuDNN's five; tokamax's forward takes 0.94 to 0.98 of cuDNN's time (its own, on an A100) |

A sliding window of all layers is cuDNN's on all of them; masks of documents and of padding, chunks, and windows that differ
between layers, are tokamax's; sinks are added to either's results. Soft caps, and windows in both directions (ModernBERT),
are XLA's.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from megajax.config import ConfigError
from megajax.ops.tokamax_kernels import generation
from megajax.runtime.compat_kernels import cudnn_version, tokamax_installed

__all__ = [
    "AS_REQUESTED",
    "FUSED",
    "Choice",
    "FusableAttention",
    "choose_attention",
    "cudnn_installed",
    "has_head_sizes",
    "mask_of",
]

FUSED = ("cudnn", "tokamax")  # the values of --attention with a fused kernel
KERNEL_MASKS = ("documents", "padding", "windows")  # of `mask_of`, that some fused kernel has
AS_REQUESTED = "as requested"  # the reason of an implementation that `--attention` names
LARGEST_HEAD = 256  # of the fused kernels
UNEQUAL_HEADS = 192, 128  # of queries and keys, and of values: cuDNN's only pair, that of DeepSeek's latent attention
UNEQUAL_FROM = 91100  # the version of cuDNN that has both directions for them, on Hopper and on B200s
BLACKWELL = 10  # of the compute capability, as of B200s
NO_TOKAMAX = "tokamax is not installed: on Python 3.12 or later, pip install 'megajax[cuda12]' or 'megajax[cuda13]'"


class FusableAttention(NamedTuple):
    """Properties of blocks with `ModelContext.operations.attend`, which determine whether a fused kernel can run.

    Attributes:
      head_size, value_size: elements of a head of queries and keys, and of values (None: as many).
      dropout: probability of dropping an attention probability.
      window: latest tokens that a token attends to; None: all, or layers differ.
      causal: whether tokens attend to earlier tokens only; if not, samples may end with padding.
      differ, unfused: whether layers have different windows or chunks; a field of the model that no fused kernel has, or "".
    """

    head_size: int
    dropout: float = 0.0
    window: int | None = None
    causal: bool = True
    differ: bool = False
    unfused: str = ""
    value_size: int | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of a head of queries and keys, and of values."""
        return self.head_size, self.value_size or self.head_size


class Choice(NamedTuple):
    """The attention of a run.

    Attributes:
      name: "xla", "cudnn" or "tokamax".
      reason: why, as printed at the start.
      window: the sliding window, or None.
      interpreted: "tokamax" on a device that is not a GPU: XLA's forward, and megajax's backward in Pallas's interpreter.
    """

    name: str
    reason: str
    window: int | None = None
    interpreted: bool = False


def choose_attention(
    requested: str,
    *,
    head_sizes: tuple[int, int],
    dropout: float,
    precision: str,
    device: jax.Device,
    installed: Collection[str] | None = None,
    window: int | None = None,
    mask: str | None = None,
    context: int = 1,
) -> Choice:
    """The attention that runs: the requested one; for "auto" the first of the table that can, else XLA's.

    Args:
      requested: auto, xla, cudnn or tokamax.
      head_sizes: elements of a head of queries and keys, and of values.
      dropout: of the model; fused kernels draw no mask that is the same on every mesh, so dropout needs XLA's attention.
      precision: bf16, fp16 or fp32.
      device: one of the mesh's; it may belong to a topology that is only compiled for.
      installed: of FUSED, those whose library is installed; None: found out here.
      window: the model's sliding window, if it has one.
      mask: what else there is to the scores, see `mask_of`.
      context: ranks that share a sample.

    Raises:
      ConfigError: a fused kernel was requested and cannot run: why, and which option to pass.
    """
    if requested == "xla":
        return Choice("xla", AS_REQUESTED, window)
    neither = _kernel_problem(max(head_sizes), dropout, precision, device)
    unfused = mask is not None and mask not in KERNEL_MASKS
    if unfused and (neither is None or device.platform != "gpu"):
        both_ways = " in both directions" if mask == "sliding_window" else ""
        neither = f"fused kernels have no {mask}{both_ways}, which this model has"
    of_cudnn = neither or _cudnn_problem(head_sizes, device, installed) or _mask_problem(mask, window, context)
    of_tokamax = neither or _tokamax_problem(installed)
    if requested == "tokamax" and device.platform != "gpu" and dropout == 0 and not unfused:
        return Choice("tokamax", f"as requested; in Pallas's interpreter: {neither}", window, interpreted=True)
    if requested in FUSED:
        if problem := of_cudnn if requested == "cudnn" else of_tokamax:
            raise ConfigError(f"attention = {requested}, but {problem}: pass --attention xla or --attention auto.")
        return Choice(requested, AS_REQUESTED, window)
    if of_tokamax is None and generation(device) == BLACKWELL and window is None:
        return Choice("tokamax", "the fastest that these devices have, by what is known", window)
    if of_cudnn is None:
        return Choice("cudnn", "the fastest that these devices have", window)
    if of_tokamax is None:
        return Choice("tokamax", of_cudnn, window)
    return Choice("xla", of_tokamax if of_tokamax == of_cudnn else f"{of_cudnn}, and {of_tokamax}", window)


def has_head_sizes(attention: str, head_size: int, value_size: int) -> bool:
    """Whether an attention's kernel has these sizes of heads, of queries and keys and of values; else both get zeros."""
    unequal = attention == "xla" or attention == "cudnn" and (head_size, value_size) == UNEQUAL_HEADS
    return head_size == value_size or unequal


def mask_of(documents: bool, attention: Any) -> str | None:
    """What attention does to scores besides a causal mask and a window of all layers.

    Args:
      documents: whether tokens attend to their own document only.
      attention: a model's, with `unfused`, `causal` and `differ` (`FusableAttention`, `costs.Attention`).

    Returns:
      A field that no fused kernel has, "attention_softcap", or "sliding_window" in both directions; "documents"; "padding"
      at the end of samples; "windows" that differ between layers, or chunks; None: nothing that a kernel would have to know.
    """
    if attention.unfused:
        return attention.unfused
    if documents:
        return "documents"
    return "padding" if not attention.causal else "windows" if attention.differ else None


def _kernel_problem(head_size, dropout, precision, device) -> str | None:
    """Why no fused kernel can run; None if one can."""
    capability = getattr(device, "compute_capability", "")
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return f"{device.device_kind} is not an NVIDIA GPU"
    if generation(device) is None:
        return f"fused attention needs compute capability 8.0 or more, and {device.device_kind} has {capability}"
    if head_size > LARGEST_HEAD:
        return f"fused attention's head size is at most {LARGEST_HEAD}, and this is {head_size}"
    if dropout > 0:
        return f"fused attention cannot drop the same elements on every mesh, and dropout = {dropout}"
    if precision == "fp32":
        return "fused attention computes in bf16 or fp16, and precision = fp32"
    return None


def _cudnn_problem(head_sizes, device, installed) -> str | None:
    """Why cuDNN's attention cannot run where fused kernels can; None if it can.

    The sizes are those of its backward in NVIDIA's support matrix, of cuDNN 9.18.
    """
    name, size = device.device_kind, max(head_sizes)
    hopper, blackwell = (device.compute_capability.startswith(one) for one in ("9.", "10."))
    largest = LARGEST_HEAD if hopper else 128
    further = (UNEQUAL_HEADS, (LARGEST_HEAD, LARGEST_HEAD)) if blackwell else ()
    if size % 8 or size > largest and head_sizes not in further:
        also = f", or {LARGEST_HEAD}, or {UNEQUAL_HEADS[0]} with values of {UNEQUAL_HEADS[1]}" if blackwell else ""
        return f"cuDNN's head size is a multiple of 8 up to {largest}{also} on {name}, and this is {size}"
    if not (cudnn_installed() if installed is None else "cudnn" in installed):
        return "the cuDNN library is not installed (it comes with megajax[cuda12] and megajax[cuda13])"
    version = cudnn_version() if installed is None else UNEQUAL_FROM
    if blackwell and head_sizes == UNEQUAL_HEADS and version < UNEQUAL_FROM:  # zeros would make it a head of 192
        sizes = f"heads of {UNEQUAL_HEADS[0]} with values of {UNEQUAL_HEADS[1]}"
        return f"cuDNN has {sizes} on {name} from {_shown(UNEQUAL_FROM)} on, and cuDNN {_shown(version)} is installed"
    return None


def _shown(version: int) -> str:
    """A version as cuDNN's documentation has it: 91002 is 9.10.2, 91100 is 9.11."""
    *parts, last = version // 10000, version // 100 % 100, version % 100
    return ".".join(map(str, [*parts, last] if last else parts))


def _tokamax_problem(installed) -> str | None:
    """Why tokamax's attention cannot run where fused kernels can; None if it can."""
    return None if (tokamax_installed() if installed is None else "tokamax" in installed) else NO_TOKAMAX


def _mask_problem(mask, window, context) -> str | None:
    """Why cuDNN's kernel cannot hide the keys that this run hides; None if it can."""
    if mask == "documents":
        return "cuDNN's kernel has no document mask, which --reset-attention-mask needs"
    if mask == "padding":
        return "cuDNN's kernel is not used with a padding mask, which samples of this model need"
    if mask == "windows":
        return "cuDNN's kernel is not used where layers have different sliding windows, or chunks"
    if window is not None and context > 1:
        return f"cuDNN's kernel has no sliding window between the pieces of context = {context} ranks"
    return None


def cudnn_installed() -> bool:
    """Whether the cuDNN library is installed on this machine; needs no GPU."""
    return cudnn_version() is not None
